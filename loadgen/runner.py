"""Closed loop: so many conversations at a time, each sending its next turn when the last one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvferry.loadgen.client import Client
from kvferry.loadgen.dialogue import Dialogue, ReplyError


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One request. Times in seconds."""

    conversation: int
    turn: int
    start_s: float  # since the run's start
    latency_s: float
    first_s: float | None  # to the first content; None when none came
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    turns: tuple[TurnRecord, ...]
    skipped: int  # turns never sent, because an earlier one of their conversation failed
    duration_s: float


async def run(
    client: Client, dialogues: Iterable[Dialogue], *, concurrency: int, on_turn: Callable[[TurnRecord], None]
) -> RunRecord:
    """`on_turn` hears of every request that is over."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be >= 1, got {concurrency}")
    start = time.perf_counter()
    records: list[TurnRecord] = []
    waiting = iter(enumerate(dialogues))
    skipped = await asyncio.gather(*(_user(client, waiting, start, records, on_turn) for _ in range(concurrency)))
    return RunRecord(tuple(records), sum(skipped), time.perf_counter() - start)


async def _user(
    client: Client,
    waiting: Iterator[tuple[int, Dialogue]],
    start: float,
    records: list[TurnRecord],
    on_turn: Callable[[TurnRecord], None],
) -> int:
    """Takes one conversation after the other; returns the number of turns that were never sent."""
    skipped = 0
    for number, dialogue in waiting:
        for turn in range(dialogue.turns):
            record = await _turn(client, dialogue, number, turn, start)
            records.append(record)
            on_turn(record)
            if record.error is not None:
                skipped += dialogue.turns - turn - 1
                break
    return skipped


async def _turn(client: Client, dialogue: Dialogue, number: int, turn: int, start: float) -> TurnRecord:
    sent = time.perf_counter() - start
    outcome = await client.send(dialogue.path, dialogue.request(turn))
    error = outcome.error
    if error is None:
        try:
            dialogue.append(outcome.reply())
        except ReplyError as failure:
            error = str(failure)
    return TurnRecord(
        conversation=number,
        turn=turn,
        start_s=sent,
        latency_s=outcome.timing.latency_s,
        first_s=outcome.timing.first_s,
        gaps_s=tuple(outcome.timing.gaps_s),
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        error=error,
    )
