"""Conversations against a server: closed loop (so many clients) or open loop (conversations start at given times)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.loadgen.client import Client
from kvferry.loadgen.dialogue import Dialogue, ReplyError

MAX_OPEN = 100_000  # conversations of an open loop at a time; more start late, and their latency says so


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One request. Times in seconds. Latencies count from when the request was meant to start."""

    conversation: int
    turn: int
    start_s: float  # when it was meant to start, since the run's start
    late_s: float  # from then to its sending; 0 in a closed loop
    latency_s: float
    first_s: float | None  # to the first content; None when none came
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None

    @property
    def end_s(self) -> float:
        return self.start_s + self.latency_s

    @property
    def token_s(self) -> float | None:
        """Mean time of an output token behind the first; None without one."""
        if self.first_s is None or self.output_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RunRecord:
    turns: tuple[TurnRecord, ...]
    skipped: int  # turns never sent: an earlier one of their conversation failed, or they were meant after the time
    duration_s: float  # where its time cut it short: that time, or to the end of the last reply
    stopped: bool = False  # before its end: what was in flight or to come then is in none of the numbers


class Conversation(NamedTuple):
    number: int
    turns: int
    begin: Callable[[], Dialogue]  # called when it begins: of one that never does, nothing is made
    start_s: float  # open loop only


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: `clients` requests at a time, of `active` conversations that are open at a time."""

    clients: int
    active: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"clients must be >= 1, got {self.clients}")
        if self.active < self.clients:
            raise ValueError(f"active must be >= clients ({self.clients}), got {self.active}")


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop: conversations start at their times; at most `in_flight` requests at a time."""

    in_flight: int

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ValueError(f"in_flight must be >= 1, got {self.in_flight}")


OnTurn = Callable[[TurnRecord], None]


async def run(
    client: Client,
    conversations: Iterable[Conversation],
    loop: Closed | Open,
    *,
    on_turn: OnTurn,
    seconds: float = float("inf"),
    stop: asyncio.Event | None = None,
) -> RunRecord:
    """Runs the conversations. `on_turn` hears of every request that is over. What is meant to start after `seconds` is
    not sent and not waited for. An open loop sends all that was meant to start before, however late; in a closed one
    that which waits for a client is meant to start when it has one. `stop` ends those that run.
    """
    run = _Run(client, on_turn, seconds, loop)
    waiting = iter(conversations)
    work = asyncio.create_task(
        run.users(waiting, loop.active) if isinstance(loop, Closed) else run.arrivals(waiting), name="conversations"
    )
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.wait({work, stopping})
    if work.cancelled():
        return RunRecord(tuple(run.records), run.skipped, run.now(), stopped=True)
    work.result()
    duration_s = run.now()
    if run.cut:  # all of the time counts: that nothing was meant to start in the rest of it is seen, too
        duration_s = max(seconds, max((record.end_s for record in run.records), default=0.0))
        run.skipped += sum(conversation.turns for conversation in waiting)
    return RunRecord(tuple(run.records), run.skipped, duration_s)


class _Run:
    def __init__(self, client: Client, on_turn: OnTurn, seconds: float, loop: Closed | Open) -> None:
        self._client = client
        self._on_turn = on_turn
        self._closed = isinstance(loop, Closed)
        self._places = asyncio.Semaphore(loop.clients if isinstance(loop, Closed) else loop.in_flight)
        self._start = time.perf_counter()
        self._end_s = seconds
        self.records: list[TurnRecord] = []
        self.skipped = 0
        self.cut = False  # by the time: some turns were never sent

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def users(self, waiting: Iterator[Conversation], number: int) -> None:
        await asyncio.gather(*(self.user(waiting) for _ in range(number)))

    async def user(self, waiting: Iterator[Conversation]) -> None:
        """Takes one conversation after the other. Who thinks until the time is over takes none in the meantime."""
        for conversation in waiting:
            if self.now() >= self._end_s:
                self._cut(conversation.turns)
                return
            if not await self._converse(conversation, conversation.begin(), self.now()):
                return

    async def arrivals(self, waiting: Iterator[Conversation]) -> None:
        room = asyncio.Semaphore(MAX_OPEN)
        running: set[asyncio.Task[bool]] = set()

        def ended(task: asyncio.Task[bool]) -> None:
            running.discard(task)
            room.release()
            if not task.cancelled() and task.exception() is not None:
                broken.append(task)

        broken: list[asyncio.Task[bool]] = []
        try:
            for conversation in waiting:
                if conversation.start_s >= self._end_s:
                    self._cut(conversation.turns)
                    await self._sleep_until(0.0)
                    continue
                dialogue = conversation.begin()
                await self._sleep_until(conversation.start_s)
                await room.acquire()
                task = asyncio.create_task(self._converse(conversation, dialogue, conversation.start_s))
                running.add(task)
                task.add_done_callback(ended)
            if running:
                await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*running, return_exceptions=True)
        for task in broken:
            task.result()

    async def _converse(self, conversation: Conversation, dialogue: Dialogue, start_s: float) -> bool:
        """Whether the time was enough for it."""
        for turn in range(dialogue.turns):
            start_s += dialogue.think_s(turn)
            record = None
            if start_s < self._end_s:
                await self._sleep_until(start_s)
                async with self._places:
                    # Those of an open loop that waited longest are not left out: its latencies would look better.
                    if not self._closed or self.now() < self._end_s:
                        record = await self._turn(conversation.number, dialogue, turn, start_s)
            if record is None:
                self._cut(dialogue.turns - turn)
                return False
            self.records.append(record)
            self._on_turn(record)
            if record.error is not None:
                self.skipped += dialogue.turns - turn - 1
                return True
            start_s = record.end_s
        return True

    def _cut(self, turns: int) -> None:
        self.cut = True
        self.skipped += turns

    async def _turn(self, conversation: int, dialogue: Dialogue, turn: int, start_s: float) -> TurnRecord:
        body = dialogue.request(turn)
        meant_s = self.now() if self._closed else start_s
        late_s = max(0.0, self.now() - meant_s)
        outcome = await self._client.send(dialogue.path, body)
        error = outcome.error
        if error is None and turn + 1 < dialogue.turns:
            try:
                dialogue.append(outcome.reply())
            except ReplyError as failure:
                error = str(failure)
        timing = outcome.timing
        return TurnRecord(
            conversation=conversation,
            turn=turn,
            start_s=meant_s,
            late_s=late_s,
            latency_s=timing.latency_s + late_s,
            first_s=None if timing.first_s is None else timing.first_s + late_s,
            gaps_s=tuple(timing.gaps_s),
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
            error=error,
        )

    async def _sleep_until(self, at_s: float) -> None:
        """Lets others run, also where it is late: many that start at once must not hold up the replies that come."""
        await asyncio.sleep(max(0.0, at_s - self.now()))
