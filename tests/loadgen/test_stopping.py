"""Runs that end early: stopped, or because their time is over."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.loadgen import runner
from kvferry.loadgen.client import Client
from kvferry.loadgen.dialogue import Dialogue
from kvferry.loadgen.runner import Closed, Conversation, Open, RunRecord, TurnRecord, run


class Hangs:
    """A server's client that answers `answers` requests and no more."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.ended = 0

    async def send(self, path: str, body: bytes) -> SimpleNamespace:
        self.answers -= 1
        if self.answers < 0:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1
        timing = SimpleNamespace(latency_s=0.001, first_s=0.001, gaps_s=[])
        return SimpleNamespace(
            error=None, timing=timing, prompt_tokens=1, cached_tokens=0, output_tokens=1, reply=lambda: None
        )


def conversation(number: int, *, start_s: float = 0.0, turns: int = 1, think_s: float = 0.0) -> Conversation:
    """`think_s` before every turn but the first."""
    dialogue = SimpleNamespace(
        path="/",
        turns=turns,
        think_s=lambda turn: think_s if turn else 0.0,
        request=lambda turn: b"",
        append=lambda reply: None,
    )
    return Conversation(number, turns, lambda: cast(Dialogue, dialogue), start_s)


@pytest.mark.parametrize("loop", [Closed(2, 2), Open(2)])
def test_what_was_over_is_kept_and_what_runs_is_ended(loop: Closed | Open) -> None:
    async def scenario() -> None:
        client, stop = Hangs(3), asyncio.Event()
        conversations = [conversation(number) for number in range(9)]
        seen: list[TurnRecord] = []

        def on_turn(turn: TurnRecord) -> None:
            seen.append(turn)
            if len(seen) == 3:
                asyncio.get_running_loop().call_later(0.1, stop.set)

        record = await asyncio.wait_for(
            run(cast(Client, client), conversations, loop, on_turn=on_turn, stop=stop), timeout=5
        )
        assert (len(record.turns), record.stopped, client.ended) == (3, True, 2)

    asyncio.run(scenario())


class Answers(Hangs):
    """The same, where each answer takes `latency_s`."""

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__(1 << 30)
        self.latency_s = latency_s

    async def send(self, path: str, body: bytes) -> SimpleNamespace:
        await asyncio.sleep(self.latency_s)
        outcome = await super().send(path, body)
        outcome.timing.latency_s = self.latency_s
        return outcome


def timed(client: Hangs, conversations: list[Conversation], loop: Closed | Open, seconds: float) -> RunRecord:
    """Fails where the run waits for what starts after its time."""

    async def scenario() -> RunRecord:
        running = run(cast(Client, client), conversations, loop, on_turn=lambda turn: None, seconds=seconds)
        return await asyncio.wait_for(running, timeout=seconds + 5)

    return asyncio.run(scenario())


@pytest.mark.parametrize("think_s", [0.0, 60.0])
def test_an_open_loop_waits_for_no_start_after_its_time(think_s: float) -> None:
    """Two start at once, three after the end; with think time their second turns are meant after the end, too."""
    starts = (0.0, 0.0, 60.0, 600.0, 0.5)  # the last one: traces need not be in order
    conversations = [conversation(k, start_s=at, turns=2, think_s=think_s) for k, at in enumerate(starts)]
    record = timed(Answers(), conversations, Open(8), 0.5)
    sent = 2 if think_s else 4
    assert (len(record.turns), record.skipped, record.stopped) == (sent, 10 - sent, False)
    assert record.duration_s == 0.5


def test_a_closed_loop_waits_for_no_turn_after_its_time() -> None:
    """Each user thinks longer than the time: none takes another conversation instead."""
    conversations = [conversation(number, turns=3, think_s=60.0) for number in range(6)]
    record = timed(Answers(), conversations, Closed(2, 2), 0.5)
    assert (len(record.turns), record.skipped, record.duration_s) == (2, 16, 0.5)


def noted(made: Conversation, began: list[int]) -> Conversation:
    """`began` has the numbers of those that have begun."""

    def begin() -> Dialogue:
        began.append(made.number)
        return made.begin()

    return made._replace(begin=begin)


def test_what_is_in_flight_when_the_time_is_over_runs_to_its_end() -> None:
    """Of those that wait for a client of a closed loop none starts, and nothing is made of those that never begin."""
    began: list[int] = []
    start = time.perf_counter()
    conversations = [noted(conversation(number), began) for number in range(3000)]
    record = timed(Answers(latency_s=0.5), conversations, Closed(2, 2), 0.3)
    wall_s = time.perf_counter() - start
    assert (len(record.turns), record.skipped) == (2, 2998)
    assert 0.5 <= record.duration_s == max(turn.end_s for turn in record.turns) <= wall_s
    assert began == [0, 1]


@pytest.mark.parametrize("most_open", [1, 100])
def test_an_open_loop_sends_late_what_was_meant_before_its_time(
    monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    """Four are meant at once, there is one place, and a reply takes longer than the time. All four are in the
    latencies, which count from the intended start; their second turns and who was meant later are not sent."""
    monkeypatch.setattr(runner, "MAX_OPEN", most_open)
    began: list[int] = []
    starts = (0.0, 0.0, 0.0, 0.0, 0.3)
    conversations = [noted(conversation(k, start_s=at, turns=2), began) for k, at in enumerate(starts)]
    record = timed(Answers(latency_s=0.25), conversations, Open(1), 0.2)
    assert [(turn.conversation, turn.turn, turn.start_s) for turn in record.turns] == [(k, 0, 0.0) for k in range(4)]
    assert record.skipped == 4 + 2
    assert began == [0, 1, 2, 3]
    for k, turn in enumerate(record.turns):
        assert turn.late_s >= 0.24 * k
        assert turn.latency_s == turn.late_s + 0.25
    assert record.duration_s == record.turns[-1].end_s


def test_a_workload_that_is_over_before_its_time() -> None:
    record = timed(Answers(), [conversation(0, turns=2)], Closed(1, 1), 60.0)
    assert (len(record.turns), record.skipped) == (2, 0)
    assert 0 < record.duration_s < 5
