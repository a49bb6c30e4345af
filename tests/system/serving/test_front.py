"""Everything through the front end: synthetic workers that check every byte, one prefill and several decode servers."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from kvferry.front.chat import ByteTokenizer, ChatMessage
from kvferry.proto import cache_pb2
from kvferry.radix.digests import prompt_digests
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.synthetic import output_token
from tests.support.engines import settled, standing_still, stats, wait_until
from tests.support.stacks import running_stack

PAGE = 16
LOCAL_PREFILL = 32
PREFILL_US, DECODE_US = 500, 2000
MODEL = "synthetic"
TOKENIZER = ByteTokenizer()


@dataclass(frozen=True)
class Ends:
    """Of requests, summed over the prefill daemon and those of the three decode servers."""

    admitted: int
    finished: int
    aborted: int
    failed_as_aborted: int

    @property
    def over(self) -> int:
        return self.finished + self.aborted + self.failed_as_aborted

    def __sub__(self, before: Ends) -> Ends:
        return Ends(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Served:
    """Decode servers behind a front end; all use one prefill server."""

    stack: Stack
    prefill: Replica
    decodes: Sequence[Replica]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def front_stats(self) -> dict[str, Any]:
        report: dict[str, Any] = httpx.get(f"{self.url}/kvferry/stats").json()
        return report

    def finished(self) -> int:
        return sum(stats(decode).requests.finished for decode in self.decodes)

    def aborted(self) -> int:
        return sum(stats(decode).requests.aborted for decode in self.decodes)

    def running(self) -> int:
        """Requests that any daemon knows."""
        return sum(side.running + side.waiting for side in self._sides())

    def ends(self) -> Ends:
        sides = self._sides()
        as_aborted = sum(reason.count for side in sides for reason in side.failures if reason.reason == "aborted")
        return Ends(
            sum(side.admitted for side in sides),
            sum(side.finished for side in sides),
            sum(side.aborted for side in sides),
            as_aborted,
        )

    def _sides(self) -> list[cache_pb2.RequestStats]:
        return [stats(replica).requests for replica in (self.prefill, *self.decodes)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running_stack() as stack:
        yield serving(stack, decodes=3)


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    with running_stack() as stack:
        yield serving(stack, decodes=1)


def serving(stack: Stack, decodes: int) -> Served:
    spec = SystemSpec(
        page_size=PAGE,
        decodes=decodes,
        decode_pool_bytes=16 << 20,
        prefill_pool_bytes=16 << 20,
        worker_flags=[
            *("--synthetic-prefill-us", str(PREFILL_US), "--synthetic-decode-us", str(DECODE_US)),
            *("--chunk-tokens", "64"),
        ],
        decode_worker_flags=["--local-prefill-max-tokens", str(LOCAL_PREFILL)],
    )
    (prefill,), replicas = start_replicas(stack, spec)
    words = ["front", "--listen", "127.0.0.1:0", "--model-name", MODEL, "--load-slack", "1", "--lookup-seconds", "10"]
    words += ["--prefill", prefill.worker_address, "--decode", *(decode.worker_address for decode in replicas)]
    return Served(stack, prefill, replicas, f"http://{stack.ready(stack.start('front', words))}")


@pytest.fixture(autouse=True)
def nothing_is_held(served: Served) -> Iterator[None]:
    """After each test: no locks, all pages free or cached, all slots granted."""
    yield
    for replica in (served.prefill, *served.decodes):
        settled(replica)


def aligned(tokens: int) -> int:
    return tokens // PAGE * PAGE


def chat(*contents: str, system: str = "") -> list[Any]:
    """User and assistant in turn."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def prompt_tokens(messages: Sequence[Any]) -> list[int]:
    text = TOKENIZER.render_chat([ChatMessage(message["role"], message["content"]) for message in messages])
    return TOKENIZER.encode_piece(text)


def reply_tokens(prompt: list[int], count: int) -> list[int]:
    """What the synthetic model says."""
    tokens = np.array(prompt, dtype=np.uint32)
    digests = prompt_digests(tokens, page_size=PAGE)
    return [output_token(Prompt(tokens, digests.digests, digests.tail), index) for index in range(count)]


def cached_tokens(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def load(url: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvferry", "loadgen", "--url", url, "--format", "json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def hit_rate(replicas: Sequence[Replica], run: Callable[[], dict[str, Any]]) -> float:
    before = [stats(replica).requests for replica in replicas]
    report = run()
    after = [stats(replica).requests for replica in replicas]
    hits = sum(new.hit_tokens - old.hit_tokens for old, new in zip(before, after, strict=True))
    queried = sum(new.queried_tokens - old.queried_tokens for old, new in zip(before, after, strict=True))
    assert (report["cached_tokens"], report["prompt_tokens"]) == (hits, queried)
    return hits / queried


@pytest.mark.nightly
@pytest.mark.parametrize("system_tokens", [0, pytest.param(48, marks=pytest.mark.nightly)])
def test_hit_rate_with_three_decode_servers(served: Served, alone: Served, system_tokens: int) -> None:
    """At least 0.9 of what one server with the same load has."""
    words = ["--api", "completions-tokens", "--conversations", "8", "--turns", "4", "--concurrency", "5"]
    words += ["--user-words", "45", "--max-tokens", "12", "--system-words", str(system_tokens)]
    words += ["--seed", str(system_tokens)]
    assigned = [server["assigned"] for server in served.front_stats()["decode"]]
    three = hit_rate(served.decodes, lambda: load(served.url, *words))
    one = hit_rate(alone.decodes, lambda: load(alone.url, *words))
    shares = [server["assigned"] - old for server, old in zip(served.front_stats()["decode"], assigned, strict=True)]
    print(f"hit rate {three:.3f} with three decode servers (requests: {shares}), {one:.3f} with one")
    assert sum(shares) == 32
    if not system_tokens:  # nothing in common: spread evenly
        assert min(shares) >= 4
    assert one > 0.5
    assert three >= 0.9 * one


def test_chat_turns_match_all_that_the_last_turn_left(served: Served) -> None:
    contents, cached = ["Tell me about the ferries of the north sea. " * 3], [0]
    for turn in range(4):
        reply: Any = served.client.chat.completions.create(
            model=MODEL, messages=chat(*contents), max_tokens=24, extra_body={"return_token_ids": True}
        )
        assert cached_tokens(reply) == cached[-1]
        assert reply.choices[0].token_ids == reply_tokens(reply.prompt_token_ids, 24)
        cached.append(aligned(reply.usage.total_tokens - 1))
        contents += [reply.choices[0].message.content, f"And then? {turn}"]
    assert cached == sorted(set(cached))  # it grows
    assert served.front_stats()["replies"]["lost_tokens"] == 0


def test_conversations_share_the_pages_of_a_system_prompt(served: Served) -> None:
    system = "You are the harbour master. Answer briefly, and name the ship. " * 4
    first, second = (chat(f"{who} asks: which ship leaves next?", system=system) for who in ("Anna", "Ben"))
    pairs = zip(prompt_tokens(first), prompt_tokens(second), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert shared > len(system)
    for messages, expected in ((first, 0), (second, aligned(shared))):
        reply: Any = served.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=4, extra_body={"return_token_ids": True}
        )
        assert cached_tokens(reply) == expected
        assert reply.kvferry["delta_pages"] == -(-len(prompt_tokens(messages)) // PAGE) - expected // PAGE


def test_a_short_unmatched_part_uses_no_prefill_server(served: Served) -> None:
    history = list(range(300, 300 + 7 * PAGE + 5))
    reply: Any = served.client.completions.create(
        model=MODEL, prompt=history, max_tokens=9, extra_body={"return_token_ids": True}
    )
    history += reply.choices[0].token_ids
    left = aligned(len(history) - 1)
    settled(served.prefill)
    before, local = stats(served.prefill).requests, served.front_stats()["local_prefill"]
    history += range(700, 700 + left + LOCAL_PREFILL - len(history))
    short: Any = served.client.completions.create(
        model=MODEL, prompt=history, max_tokens=40, extra_body={"return_token_ids": True}
    )
    assert len(history) - cached_tokens(short) == LOCAL_PREFILL
    assert short.choices[0].token_ids == reply_tokens(history, 40)
    assert short.kvferry["delta_pages"] == 0
    assert stats(served.prefill).requests == before
    assert served.front_stats()["local_prefill"] == local + 1
    longer = [*history, *short.choices[0].token_ids, *range(900, 900 + LOCAL_PREFILL + PAGE)]
    served.client.completions.create(model=MODEL, prompt=longer, max_tokens=1)
    assert served.front_stats()["local_prefill"] == local + 1
    assert stats(served.prefill).requests.admitted == before.admitted + 1


def test_a_client_that_leaves_in_the_middle_of_a_reply(served: Served) -> None:
    """Both halves end, and what was computed serves the next turn."""
    prompt = list(range(1000, 1000 + 6 * PAGE + 3))
    body = {"prompt": prompt, "max_tokens": 5000, "stream": True, "return_token_ids": True}
    finished, aborted = served.finished(), served.aborted()
    read: list[int] = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                read += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(read) >= 3 * PAGE:
                assert served.running() >= 1
                break
    wait_until(lambda: served.running() == 0, 8.0, "both halves have ended")
    assert (served.finished(), served.aborted()) == (finished + 1, aborted)
    assert read == reply_tokens(prompt, len(read))
    again = [*prompt, *read, 5, 6, 7]
    reply = served.client.completions.create(model=MODEL, prompt=again, max_tokens=1)
    assert cached_tokens(reply) >= aligned(len(prompt) + len(read) - 1)


FIRST = ("either", "prefill", "decode")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_a_client_that_leaves_while_the_prompt_is_computed(served: Served, first: str, stream: bool) -> None:
    """Both halves end long before it would be computed; nothing of the request is left. A daemon counts it as failed,
    for the reason "aborted", where it hears of it from the other daemon before its own worker: `first` is the side
    whose worker is heard, as the other side's stand still meanwhile.
    """
    seconds = 20
    salt = 2 * FIRST.index(first) + stream
    prompt = [2000 + salt + i % 1000 for i in range(seconds * 1_000_000 // PREFILL_US)]
    decodes = [decode.worker.popen.pid for decode in served.decodes]
    late = {"either": [], "prefill": decodes, "decode": [served.prefill.worker.popen.pid]}[first]
    before = served.ends()
    address = httpx.URL(served.url)
    body = json.dumps({"prompt": prompt, "max_tokens": 5, "stream": stream})
    with closing(http.client.HTTPConnection(address.host, address.port, timeout=30)) as client:
        client.request("POST", "/v1/completions", body)
        wait_until(lambda: (served.ends() - before).admitted == 2, 8.0, "both daemons have admitted it")
        wait_until(lambda: stats(served.prefill).transfers.active == 1, 8.0, "its pages are asked for")
        with standing_still(late):
            client.close()
            if late:
                wait_until(lambda: (served.ends() - before).over == 2, 8.0, "both daemons have ended it")
    wait_until(lambda: served.running() == 0, 8.0, "both halves have ended")
    ends = served.ends() - before
    assert (ends.admitted, ends.finished, ends.over) == (2, 0, 2)
    if late:
        assert (ends.aborted, ends.failed_as_aborted) == (1, 1)


def test_a_stop_string_keeps_the_reply_for_the_next_turn(served: Served) -> None:
    """It is seen in the front end only: the decode server is told to stop, and keeps what it computed."""
    messages = chat("Count the waves, please, one after the other, until I tell you to stop.")
    prompt = prompt_tokens(messages)
    expected = reply_tokens(prompt, 3 * PAGE)
    stop = TOKENIZER.decode(expected[-1:])
    assert stop not in TOKENIZER.decode(expected[:-1])
    finished, aborted = served.finished(), served.aborted()
    reply = served.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2000, stop=[stop])
    answer = reply.choices[0].message.content or ""
    assert answer == TOKENIZER.decode(expected[:-1])
    assert reply.choices[0].finish_reason == "stop"
    wait_until(lambda: served.running() == 0, 8.0, "both halves have ended")
    assert (served.finished(), served.aborted()) == (finished + 1, aborted)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "How many were they?"}]
    again = served.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert cached_tokens(again) == aligned(len(prompt) + len(expected) - 1)
