"""Replies that begin with the prefill server's first token, against those of one vLLM: token for token, for each way of
sampling, streamed and not.

python bench/vllm/first_tokens.py [--ways WAY ...] [--requests N] [--aborts N] [--restarts N]
    [--output bench/results/vllm-first-tokens.txt]

Without a GPU the servers run Model Runner V2 with interpreted kernels (`v2_on_cpu.py`). `begun`: replies that decode
began behind a token of prefill's; of others decode has sampled every token. Ways in which the one vLLM itself fails a
request are named and not judged. `--aborts`, `--restarts`: all is asked once more while other clients leave and daemons
die; then nothing is held. A difference is allowed only where the reference's two best logits are within VLLM_TIE, which
is asked for once more; it is counted. The one vLLM is asked all twice: what differs then is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from chaos import LEAVE_SECONDS, Faults, Run, leaks, restart_loop
from chat import CHAT, MODEL_NAME, TIE, events, new_client, user_text
from cluster import DEVICES, PROGRAMS, SCHEDULER, Cluster, Log, Spec

MANY = 4  # requests at a time

Fields = Mapping[str, object]
WAYS: dict[str, Callable[[int], Fields]] = {
    "greedy": lambda number: {"temperature": 0},
    "seeded": lambda number: {"temperature": 0.9, "seed": 1000 + number},
    "penalties": lambda number: {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": lambda number: {"temperature": 0.7, "seed": number, "repetition_penalty": 1.3},
    "bias": lambda number: {"temperature": 0, "logit_bias": {"28": 4.0, "30": 4.0, "339": -9.0}},
    "1 token": lambda number: {"temperature": 0, "max_tokens": 1},
    "2 tokens": lambda number: {"temperature": 0, "max_tokens": 2},
    "at least 6": lambda number: {"temperature": 0, "min_tokens": 6, "stop": [" ", "e"]},
    "stop at once": lambda number: {"temperature": 0, "stop": ["e", "a", "I", "T"]},
    "stop tokens": lambda number: {"temperature": 0, "stop_token_ids": [28, 30, 42, 314, 2]},
    "until its end": lambda number: {"temperature": 0, "ignore_eos": False, "max_tokens": 40},
    "ends at once": lambda number: {"temperature": 0, "ignore_eos": False, "logit_bias": {"2": 100.0}},
    "logprobs": lambda number: {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "text alone": lambda number: {"temperature": 0, "return_token_ids": False},
    "prompt of ids": lambda number: {"temperature": 0},
    "prompt of text": lambda number: {"temperature": 0.9, "seed": 50 + number},
}
if DEVICES:  # whose kernels cannot be interpreted
    WAYS["top p"] = lambda number: {"temperature": 0.9, "top_p": 0.9, "seed": number}
    WAYS["a choice"] = lambda number: {
        "temperature": 0,
        "structured_outputs": {"choice": ["river", "harbour", "north"]},
    }
    WAYS["a pattern"] = lambda number: {"temperature": 0, "structured_outputs": {"regex": "[a-z]{3} [0-9]{2}"}}


@dataclass(slots=True)
class Said:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    stopped_by: object = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    chunks: list[object] = field(default_factory=list, compare=False)  # of a stream, but for their ids and times


Replies = dict[tuple[str, int], Said]
"""What is said, by way and number. Even numbers are streamed. One that failed has no tokens; its `reason` says why."""


def request_of(way: str, number: int) -> dict[str, object]:
    text = user_text(number, len(way), 40 + number % 50)
    prompts: dict[str, dict[str, object]] = {
        "prompt of ids": {"prompt": [1000 + ord(letter) for letter in text]},
        "prompt of text": {"prompt": text},
    }
    asked: dict[str, object] = {"model": MODEL_NAME}
    asked |= prompts.get(way) or {"messages": [{"role": "user", "content": text}]}
    asked |= {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True, **WAYS[way](number)}
    return asked


def path_of(asked: Mapping[str, object]) -> str:
    return CHAT if "messages" in asked else "/v1/completions"


def ids_of(text: str, ids: list[int]) -> list[int]:
    """Those of the tokens; where they are not told, the text in their place."""
    return ids or list(text.encode())


async def whole(client: httpx.AsyncClient, url: str, asked: dict[str, object]) -> Said:
    answer = await client.post(url + path_of(asked), json=asked)
    if answer.status_code != 200:
        raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    reply = answer.json()
    choice, usage = reply["choices"][0], reply["usage"]
    text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    said = Said(ids_of(text, choice["token_ids"] or []), text, choice["finish_reason"])
    said.stopped_by, said.prompt_tokens = choice.get("stop_reason"), usage["prompt_tokens"]
    said.reply_tokens = usage["completion_tokens"]
    return said


async def streamed(client: httpx.AsyncClient, url: str, asked: dict[str, object]) -> Said:
    said = Said()
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async for event in events(client, url + path_of(asked), json.dumps(body).encode()):
        said.chunks.append({name: value for name, value in event.items() if name not in ("id", "created")})
        if usage := event.get("usage"):
            said.prompt_tokens, said.reply_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            said.tokens += choice.get("token_ids") or []
            said.text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            said.reason = choice.get("finish_reason") or said.reason
            said.stopped_by = choice.get("stop_reason") or said.stopped_by
    said.tokens = ids_of(said.text, said.tokens)
    return said


async def ask_all(url: str, ways: Sequence[str], count: int) -> Replies:
    turn = asyncio.Semaphore(MANY)
    got: Replies = {}

    async def one(client: httpx.AsyncClient, way: str, number: int) -> None:
        async with turn:
            ask = whole if number % 2 else streamed
            try:
                got[way, number] = await ask(client, url, request_of(way, number))
            except (RuntimeError, httpx.HTTPError) as error:
                got[way, number] = Said(reason=f"{type(error).__name__} {error}")

    async with new_client() as client:
        await asyncio.gather(*(one(client, way, number) for way in ways for number in range(count)))
    return got


async def leave(url: str, ways: Sequence[str], aborts: int) -> None:
    """Clients that go while their replies come, or before."""
    async with new_client() as client:
        for number in range(aborts):
            chosen = random.Random(number)
            asked = request_of(chosen.choice(ways), 1000 + number)
            asking = asyncio.create_task(streamed(client, url, asked))
            await asyncio.wait({asking}, timeout=chosen.uniform(0.0, LEAVE_SECONDS))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def ask_all_in_a_storm(cluster: Cluster, ways: Sequence[str], count: int, aborts: int, restarts: int) -> Replies:
    storm = Run(Faults(aborts, restarts))
    asking = ask_all(cluster.front, ways, count)
    got, *_ = await asyncio.gather(asking, leave(cluster.front, ways, aborts), restart_loop(storm, cluster))
    return got


def at_once(front: str) -> list[str]:
    """What the front end counts of replies that prefill's answer began."""
    told = httpx.get(front + "/metrics", trust_env=False).text.splitlines()
    return [line for line in told if line.startswith("kvferry_front_prefill_first_tokens_total") and line[-3:] != "0.0"]


async def gap_at(url: str, way: str, number: int, place: int) -> float:
    """Between the two best log probabilities of this token, as one engine has them."""
    async with new_client() as client:
        asked = {**request_of(way, number), "logprobs": True, "top_logprobs": 2}
        answer = await client.post(url + CHAT, json=asked)
    listed = answer.json()["choices"][0]["logprobs"]["content"]
    best = sorted((each["logprob"] for each in listed[place]["top_logprobs"]), reverse=True)
    return float(best[0] - best[1])


def judge(log: Log, url: str, wants: Sequence[Replies], got: Replies) -> int:
    """How many are wrong, or failed: each is to be as in one of `wants`, the first of which says where it is not. What
    the one vLLM itself fails is not judged."""
    wrong = 0
    log.add(f"{'':16}{'judged':>9}{'equal':>7}{'ties':>6}{'wrong':>7}{'chunk for chunk':>17}")
    for way in dict.fromkeys(way for way, _ in got):
        ours = [key for key in got if key[0] == way and all(want[key].tokens for want in wants)]
        if failed := [want[key].reason for want in wants for key in want if key[0] == way and not want[key].tokens]:
            log.add(f"{way:16} the one vLLM fails {len(failed)}: {failed[0]}")
        unlike = [key for key in ours if all(want[key] != got[key] for want in wants)]
        ties = sum(is_tie(log, url, key, wants[0][key], got[key]) for key in unlike)
        wrong += len(unlike) - ties
        streams = [key for key in ours if got[key].chunks]
        alike = sum(any(want[key].chunks == got[key].chunks for want in wants) for key in streams)
        told = f"{len(ours):9}{len(ours) - len(unlike):7}{ties:6}{len(unlike) - ties:7}{alike:10} of {len(streams)}"
        log.add(f"{way:16}{told}")
    return wrong


def is_tie(log: Log, url: str, key: tuple[str, int], want: Said, got: Said) -> bool:
    """Whether the two differ first where the two best logits are as good as one. Logs what is not."""
    told = WAYS[key[0]](key[1]).get("return_token_ids", True) and "prompt" not in request_of(*key)
    pairs = zip(want.tokens, got.tokens, strict=False) if told else ()
    place = next((i for i, (left, right) in enumerate(pairs) if left != right), -1)
    gap = asyncio.run(gap_at(url, *key, place)) if place >= 0 else math.inf
    if gap >= TIE:
        log.add(f"  {key}, {gap:.3f} between the two best of token {place}: {want}\n  got {got}")
    return gap < TIE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=6, help="of each way of sampling")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of sampling; default: all")
    parser.add_argument("--aborts", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon")
    parser.add_argument("--first-token", choices=("prefill", "decode"), default="decode", help="of the front end")
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    log = Log(Path(args.output) if args.output else None)
    spec = Spec(decode_flags=SCHEDULER, pool=args.pool, first_token=args.first_token, extra={"deadline_seconds": 240.0})
    if not DEVICES:
        spec = replace(spec, program=(str(PROGRAMS / "v2_on_cpu.py"),))
    with Cluster(spec) as one, Cluster(spec) as cluster:
        alone = one.alone().url
        log.add(f"vLLM {httpx.get(alone + '/version', trust_env=False).json()['version']}, pool {args.pool}")
        want, again = (asyncio.run(ask_all(alone, args.ways, args.requests)) for _ in range(2))
        log.add("the one vLLM, asked again:")
        judge(log, alone, [want], again)
        log.add("the pair, against both:")
        cluster.kvferry()
        got = asyncio.run(ask_all(cluster.front, args.ways, args.requests))
        wrong = judge(log, alone, [want, again], got)
        begun = cluster.metric("decode", "vllm:kvferry_first_tokens_total")
        log.add(f"begun behind prefill's token: {begun:.0f} of {len(got)}", *at_once(cluster.front))
        if args.aborts or args.restarts:
            log.add(f"beside {args.aborts} clients that leave and {args.restarts} daemons that die:")
            got = asyncio.run(ask_all_in_a_storm(cluster, args.ways, args.requests, args.aborts, args.restarts))
            wrong += judge(log, alone, [want, again], got)
            begun = cluster.metric("decode", "vllm:kvferry_first_tokens_total") - begun
            held = leaks(cluster)
            log.add(f"begun behind prefill's token: {begun:.0f} of {len(got) + args.aborts}; {len(held)} leaks", *held)
            wrong += len(held)
    log.add("0 wrong" if not wrong else f"{wrong} WRONG")
    return 1 if wrong or not begun else 0


if __name__ == "__main__":
    sys.exit(main())
