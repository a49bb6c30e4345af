"""The coming together of an engine whose ranks are processes of their own: all of them are taken in, or none. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from google.protobuf.message import Message

from kvferry.daemon.core.errors import RequestError, exhausted, invalid, precondition, unavailable
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.workers import SideWorkers, Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.waiting import within

GATHER_SECONDS = 30.0  # for which the first rank waits for the last

Welcomes: TypeAlias = list[tuple[Worker, wire.Welcome]]
TakeIn: TypeAlias = Callable[[Sequence[wire.WorkerHello]], Coroutine[Any, Any, Welcomes]]


@dataclass(slots=True, eq=False)
class _Engine:
    hellos: dict[int, wire.WorkerHello] = field(default_factory=dict)  # by rank
    welcomes: asyncio.Future[Welcomes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gathering:
    """The engines of which some ranks have come, and not all. `take_in`: all of one, in the order of ranks."""

    def __init__(self, ranks: int, most: int, workers: SideWorkers, take_in: TakeIn, tasks: SideTasks) -> None:
        """`most`: engines that may wait."""
        self._ranks = ranks
        self._most = most
        self._workers = workers
        self._take_in = take_in
        self._tasks = tasks
        self._engines: dict[str, _Engine] = {}

    async def join(self, hello: wire.WorkerHello) -> tuple[Worker, wire.Welcome]:
        """Waits for the other ranks, and is taken in with them. RequestError where they do not fit together, or do not
        come within GATHER_SECONDS."""
        rank = hello.rank
        check_rank(rank, self._ranks)
        engine = self._engines.get(rank.engine)
        if engine is None:
            if len(self._engines) >= self._most:
                raise exhausted(f"{self._most} engines wait for their ranks already; --max-workers is that")
            engine = self._engines[rank.engine] = _Engine()
        if rank.rank in engine.hellos:  # its process has come again: the one before is gone, or will be
            self._disband(rank.engine, unavailable(f"rank {rank.rank} of the engine has come again"))
            return await self.join(hello)
        engine.hellos[rank.rank] = hello
        if len(engine.hellos) == self._ranks:
            del self._engines[rank.engine]
            self._tasks.start(self._all_in(engine))
        try:
            return (await self._all_come(rank.engine, engine))[rank.rank]
        except asyncio.CancelledError:
            self._leaves_early(rank.rank, rank.engine, engine)
            raise

    async def _all_come(self, name: str, engine: _Engine) -> Welcomes:
        try:
            return await within(GATHER_SECONDS, asyncio.shield(engine.welcomes))
        except asyncio.TimeoutError:
            if self._engines.get(name) is engine:
                missing = sorted(set(range(self._ranks)) - engine.hellos.keys())
                error = unavailable(f"ranks {missing} of the engine have not come within {GATHER_SECONDS:g} s")
                self._disband(name, error)
            return await asyncio.shield(engine.welcomes)

    async def _all_in(self, engine: _Engine) -> None:
        try:
            hellos = [engine.hellos[rank] for rank in range(self._ranks)]
            check_alike(hellos)
            engine.welcomes.set_result(await self._take_in(hellos))
        except BaseException as error:
            _refuse(engine, error)
            if not isinstance(error, RequestError | OSError):
                raise

    def _leaves_early(self, rank: int, name: str, engine: _Engine) -> None:
        if self._engines.get(name) is engine:
            self._disband(name, unavailable(f"rank {rank} of the engine has left before all had come"))
        else:  # they are being taken in, or were: this one leaves as soon as it is there, and the others with it
            engine.welcomes.add_done_callback(lambda welcomes: self._leaves(rank, welcomes))

    def _leaves(self, rank: int, welcomes: asyncio.Future[Welcomes]) -> None:
        if welcomes.exception() is None:
            self._workers.leave(welcomes.result()[rank][0])

    def _disband(self, name: str, error: RequestError) -> None:
        _refuse(self._engines.pop(name), error)


def check_rank(rank: wire.OneRank, ranks: int) -> None:
    """RequestError where a daemon of that many `ranks` cannot have it."""
    if rank.ranks != ranks:
        raise precondition(f"rank.ranks is {rank.ranks}; this daemon's --ranks is {ranks}: give it the engine's number")
    if rank.rank >= rank.ranks:
        raise invalid(f"rank.rank is {rank.rank}; it must be below rank.ranks = {rank.ranks}")
    if not 1 <= len(rank.engine) <= MAX_NAME_CHARS:
        raise invalid(f"rank.engine has {len(rank.engine)} characters; it must have 1 to {MAX_NAME_CHARS}")


def check_alike(hellos: Sequence[wire.WorkerHello]) -> None:
    """RequestError where the ranks of one engine do not say the same of it."""
    first = hellos[0]
    for rank, hello in enumerate(hellos[1:], 1):
        if hello.facts != first.facts:
            unlike = ", ".join(_unlike(hello.facts, first.facts)) or "what this daemon does not know"
            raise invalid(f"facts: those of rank {rank} are not those of rank 0: {unlike}")
        for name in ("pages", "storage", "block_tokens", "stows"):
            own, other = getattr(hello.pool, name), getattr(first.pool, name)
            if own != other:
                raise invalid(f"pool.{name} is {own} of rank {rank}, {other} of rank 0")
        if hello.HasField("pool") != first.HasField("pool"):
            raise invalid(f"pool: of ranks 0 and {rank} one alone registers memory")


def _unlike(facts: Message, others: Message) -> list[str]:
    """The fields in which the two differ; those of a message in it, where it is one of them that does."""
    found: list[str] = []
    for part in facts.DESCRIPTOR.fields:
        own, other = getattr(facts, part.name), getattr(others, part.name)
        if own != other:
            inner = _unlike(own, other) if isinstance(own, Message) else []
            found += [f"{part.name}.{name}" for name in inner] or [part.name]
    return found


def together(hellos: Sequence[wire.WorkerHello]) -> wire.WorkerHello:
    """What the ranks would say as one worker."""
    whole = wire.WorkerHello()
    whole.CopyFrom(hellos[0])
    whole.ClearField("rank")
    for hello in hellos[1:]:
        if hello.HasField("pool"):
            whole.pool.ranks.extend(hello.pool.ranks)
    return whole


def _refuse(engine: _Engine, error: BaseException) -> None:
    if not engine.welcomes.done():
        engine.welcomes.set_exception(error)
        engine.welcomes.exception()  # marked as seen: perhaps nobody waits any more
