"""Workloads, dialogues and reports alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kvferry.loadgen.client import Client, ServerError
from kvferry.loadgen.daemon_stats import DaemonCounts
from kvferry.loadgen.dialogue import ChatDialogue, Generation, Reply, ReplyError, TokenDialogue
from kvferry.loadgen.report import distribution, make_report
from kvferry.loadgen.runner import RunRecord, TurnRecord
from kvferry.loadgen.workload import Workload, text_script, token_script

GENERATION = Generation("m", max_tokens=4, temperature=0.0, seed=1, ignore_eos=True)


def test_a_conversation_depends_on_the_seed_and_its_number_alone() -> None:
    few = Workload(conversations=2, turns=3, user_words=5, system_words=7, seed=4)
    many = Workload(conversations=200, turns=3, user_words=5, system_words=7, seed=4)
    assert text_script(few, 1) == text_script(many, 1)
    assert text_script(few, 0).system == text_script(few, 1).system
    assert text_script(few, 0).turns != text_script(few, 1).turns
    assert [len(turn.split()) for turn in text_script(few, 0).turns] == [5, 5, 5]
    tokens = token_script(few, 1, 300)
    assert tokens == token_script(many, 1, 300)
    assert (len(tokens.system), [len(turn) for turn in tokens.turns]) == (7, [5, 5, 5])
    assert all(32 <= token < 300 for turn in tokens.turns for token in turn)


def test_bounds_of_a_workload() -> None:
    with pytest.raises(ValueError, match="turns must be >= 1, got 0"):
        Workload(conversations=1, turns=0, user_words=1)
    with pytest.raises(ValueError, match="vocabulary must be > 32, got 32"):
        token_script(Workload(conversations=1, turns=1, user_words=1), 0, 32)


def test_a_dialogue_carries_its_history() -> None:
    workload = Workload(conversations=1, turns=2, user_words=2, system_words=2)
    script = text_script(workload, 0)
    chat = ChatDialogue(script, GENERATION)
    chat.request(0)
    chat.append(Reply("yes", []))
    assert chat.request(1)["messages"] == [
        {"role": "system", "content": script.system},
        {"role": "user", "content": script.turns[0]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": script.turns[1]},
    ]
    assert chat.request(1)["ignore_eos"] is True
    ids = token_script(workload, 0, 100)
    tokens = TokenDialogue(ids, GENERATION)
    tokens.request(0)
    with pytest.raises(ReplyError, match="gave no token ids"):
        tokens.append(Reply("yes", []))
    tokens.append(Reply("yes", [7, 8]))
    assert tokens.request(1)["prompt"] == [*ids.system, *ids.turns[0], 7, 8, *ids.turns[1]]


def test_distribution() -> None:
    values = distribution(i / 1000 for i in range(1, 101))
    assert (values.count, values.mean, values.p50) == (100, pytest.approx(50.5), pytest.approx(50.5))
    assert (values.p90, values.p99) == (pytest.approx(90.1), pytest.approx(99.01))
    assert distribution([]).count == 0


def test_report_counts_only_what_did_not_fail() -> None:
    good = TurnRecord(0, 0, 0.0, 0.5, 0.1, (0.2, 0.2), 10, 4, 3, None)
    bad = TurnRecord(1, 0, 0.0, 9.0, None, (), 0, 0, 0, "broken")
    before, after = DaemonCounts(moved_bytes=5, saved_bytes=1), DaemonCounts(moved_bytes=25, saved_bytes=2)
    report = make_report(RunRecord((good, bad), 2, 2.0), after.since(before))
    assert (report.requests, report.failed, report.skipped, report.ok) == (2, 1, 2, False)
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.5, 1.5)
    assert report.latency_ms.p99 == pytest.approx(500)
    assert report.errors[0].message == "broken"
    assert json.loads(report.json())["daemons"]["moved_bytes"] == 20
    assert not make_report(RunRecord((), 0, 1.0), None).ok


class Script(httpx.AsyncByteStream):
    def __init__(self, *parts: str) -> None:
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part.encode()


@pytest.mark.parametrize(
    ("parts", "text", "error"),
    [
        (
            ('data: {"choices": [{"text": "a"}]}\n\nda', 'ta: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n'),
            "ab",
            None,
        ),
        (('data: {"choices": [{"delta": {"content": "a"}}]}\n\n',), "a", r"ended without \[DONE\]"),
        (("data: [DONE]\n\n",), "", "the reply has no content"),
        ((": a comment\n\ndata: nonsense\n\n",), "", "not a chunk: nonsense"),
        (('data: {"error": {"message": "full"}}\n\n',), "", "full"),
        (('data: {"choices": [], "usage": {"prompt_tokens": "x"}}\n\n',), "", "not a chunk"),
    ],
)
def test_streams(parts: tuple[str, ...], text: str, error: str | None) -> None:
    async def send() -> None:
        async with Client("http://x", connections=1, timeout_s=1) as client:
            await client._http.aclose()
            transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Script(*parts)))
            client._http = httpx.AsyncClient(base_url="http://x", transport=transport)
            outcome = await client.send("/v1/completions", {})
            assert outcome.reply().text == text
            if error is None:
                assert outcome.error is None
            else:
                assert outcome.error is not None
                assert error.replace("\\", "") in outcome.error

    asyncio.run(send())


def test_a_server_that_lists_no_models() -> None:
    async def ask() -> None:
        async with Client("http://x", connections=1, timeout_s=1) as client:
            await client._http.aclose()
            transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
            client._http = httpx.AsyncClient(base_url="http://x", transport=transport)
            with pytest.raises(ServerError, match="not a list of models"):
                await client.model()

    asyncio.run(ask())
