"""Worker processes: what they do with their pages, how they crash, and how they go on writing when they do.

They behave as `kvferry.workers` does: a kernel that runs is not interrupted; Failed is answered with Abort, Retract
with Finish and, after Ended, another Admit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from kvferry.daemon.core.limits import Name
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import Clock, Pipe, Violation, expect
from tests.simulation.daemons import SimDecode, SimPrefill
from tests.simulation.loops import ProcessLoop
from tests.simulation.prompts import PAGE, PAGE_BYTES, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.daemon.sides.workers import Worker
    from tests.simulation.storage.blocks import EngineBlocks

STEP = (0.0002, 0.004)  # seconds of a kernel
DRAINS = "is shutting down"  # in the words by which a daemon that drains refuses
_PAGED = ("admitted", "begun", "grown")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker is told of a request."""

    prompt: Prompt
    output: Sequence[int] = ()
    deadline_ms: int = 0
    priority: int = 0
    warmup: bool = False
    held_tokens: int = 0  # of the prompt, with KV in memory of the decode worker's own
    hangs: float = 0.0  # seconds for which its copy of them does


class Leg(Protocol):
    """Who gave the request to the worker."""

    def on_ready(self) -> None: ...

    def on_filling(self) -> None:
        """A decode worker begins to fill pages with what it holds itself."""

    def on_computed(self) -> None:
        """A prefill worker has said its last word."""

    def on_failed(self, code: int, message: str) -> None:
        """The daemon failed it; `on_over` follows."""

    def on_over(self, done: bool) -> None:
        """It is over at the daemon; `done`: finished."""

    def on_lost(self) -> None:
        """The worker is gone."""


class SessionLock:
    """The lock of a worker's session file, as the daemon sees it: free as soon as its process has ended."""

    path = "/nowhere"

    def __init__(self, process: Process) -> None:
        self._process = process

    def try_acquire(self) -> bool:
        return not self._process.lives

    def close(self) -> None:
        pass

    def unlink(self) -> None:
        pass


class Process:
    """A worker and its stream."""

    def __init__(self, clock: Clock, side: SimDecode | SimPrefill, tenant: int) -> None:
        self.clock, self.side, self.tenant = clock, side, tenant
        self.connected = self._here = False  # as it knows, and as its daemon does
        self.lives = True
        self.writes_until = math.inf  # what it has queued on a device may end a while behind it
        self.jobs: dict[Name, Job] = {}
        self.blocks: EngineBlocks | None = None  # of its own, where it names them
        self.loop = ProcessLoop(clock, f"a worker of {side.config.name}")
        self._up = Pipe(clock, 0.00003, 0.003, side.process.deliver)
        self._down = Pipe(clock, 0.00003, 0.003, self.loop.deliver)
        self.come()

    def come(self) -> None:
        side = self.side
        self.is_here(cast("Worker", side.process.here(side.enter, self.tenant, self, SessionLock(self))))

    def is_here(self, worker: Worker) -> None:
        self.worker = worker
        self.memory = self.side.pages_memory
        self.blocks = self.memory.blocks
        self.connected = self._here = True

    @property
    def writing(self) -> bool:
        """Whether a kernel that it launched may still write."""
        return self.clock.now < self.writes_until

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Something that it does."""
        self.loop.call_later(seconds, call, *arguments)

    def send(self, kind: str, message: wire.WorkerMessage) -> None:
        if self.connected:
            self._up.send(self._handle, kind, message)

    def _handle(self, kind: str, message: wire.WorkerMessage) -> None:
        if self._here:
            self.side.handle(self.worker, kind, message)

    def put_nowait(self, event: wire.WorkerEvent) -> None:
        """(the daemon's queue of events)"""
        kind = event.WhichOneof("kind")
        body = getattr(event, kind)
        generations = []
        if kind in _PAGED:
            generations = self.memory.generations(body.pages)
            matched = 0 if kind == "grown" else body.matched_tokens // PAGE
            self.memory.check_clean(body.pages[matched:], f"a worker is given pages by {kind}")
        if (job := self.jobs.get(Name(body.name.request_id, body.name.attempt))) is not None:
            job.daemon_says(kind, body)
        self._down.send(self._hear, kind, body, generations)

    def _hear(self, kind: str, body: object, generations: list[int]) -> None:
        if not self.connected:
            return
        name = Name(body.name.request_id, body.name.attempt)  # type: ignore[attr-defined]
        job = self.jobs.get(name)
        if job is None:
            expect(kind in ("ended", "failed"), f"{kind} for {name}, which has ended")
            return
        job.hear(kind, body, generations)

    # -- ends ------------------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """It leaves, and says that it writes no more."""
        self.lives = self.connected = False
        self.writes_until = self.clock.now
        self._up.send(self.leaves, True)
        self._jobs_are_lost()

    def crash(self, lives: float) -> None:
        """Its stream breaks; the process lives on for so long and finishes what it had begun to compute."""
        self.connected = False
        if self.clock.chance(0.5):  # what it said before is lost
            self._here = False
        self._up.send(self.leaves, False)
        behind = 0.5 * self.clock.random.random() if self.clock.chance(0.5) else 0.0
        if self.clock.chance(0.5):  # a kernel of it hangs that long
            self.loop.stand_still(lives + behind * 0.9)
        self.clock.after(lives, self._dies, behind)
        self._jobs_are_lost()

    def leaves(self, quiesced: bool) -> None:
        """Its stream has ended."""
        self._here = False
        self.worker.quiesced = quiesced
        if self.worker.number in self.side.workers.here:  # its daemon has not ended meanwhile
            self.side.workers.leave(self.worker)

    def daemon_leaves(self) -> None:
        """It ends in order, and so has ended its streams."""
        self._here = False
        self.side.workers.leave(self.worker)

    def daemon_is_gone(self) -> None:
        self.connected = self._here = False
        self._jobs_are_lost()

    def _jobs_are_lost(self) -> None:
        for job in list(self.jobs.values()):
            self.clock.after(self.clock.between(0.0001, 0.02), job.leg.on_lost)

    def _dies(self, behind: float) -> None:
        """What it has queued on a device may end so many seconds behind it; the lock is free at once."""
        self.lives = False
        self.writes_until = self.clock.now + behind


class Job:
    """One request at a worker."""

    KIND: ClassVar[str]

    def __init__(self, process: Process, name: Name, wanted: Wanted, leg: Leg) -> None:
        self.process, self.name, self.wanted, self.leg = process, name, wanted, leg
        self.prompt = wanted.prompt
        self.clock = process.clock
        self.pages: list[int] = []
        self.generations: list[int] = []
        self.computing = False
        self.stopped = False  # it computes no more; its last word is said or will be
        self.said_last = False
        self.cancelled = False
        self.fetchable = True  # its worker waits for what is fetched for it
        process.jobs[name] = self

    def message(self, kind: str) -> wire.WorkerMessage:
        message = wire.WorkerMessage()
        body = getattr(message, kind)
        body.name.request_id, body.name.attempt = self.name.request_id, self.name.attempt
        return message

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "ended":
            expect(self.said_last or self.KIND == "prefill", f"{self.name} has ended, but its worker has not let go")
            self.on_ended()
        elif kind == "failed":
            self.stopped = True
            error = body.error  # type: ignore[attr-defined]
            refused = DRAINS in error.message and not error.of_prefill
            expect(not (refused and self.pages), f"{self.name} has its pages, and is refused by a daemon that drains")
            self.leg.on_failed(error.code, error.message)
            self.abort_soon()
        else:
            getattr(self, f"on_{kind}")(body, generations)

    def on_ended(self) -> None:
        self.stopped = True
        del self.process.jobs[self.name]
        self.leg.on_over(not self.cancelled)

    def daemon_says(self, kind: str, body: object) -> None:
        """Its daemon has just said that: what it may touch is another from now on."""
        if kind == "proceed":
            self.fetchable = body.fetch_tokens > 0  # type: ignore[attr-defined]

    def take(self, pages: Sequence[int], generations: list[int]) -> None:
        self.pages += pages
        self.generations += generations

    def may_keep(self, digests: bytes) -> None:
        """From now on the daemon may come to hold these pages by it."""
        forgotten = self.process.side.forgotten
        if forgotten is not None and not self.wanted.warmup:
            forgotten.may_keep(self.process.tenant, self.name, digests)

    def check_matched(self, tokens: int, *, resumed: bool = False) -> None:
        """What the daemon says to hold of the prompt."""
        expect(not tokens or not self.wanted.warmup, f"{self.name} is a warm-up, and {tokens} tokens of it matched")
        forgotten = self.process.side.forgotten
        if forgotten is not None and not resumed:
            forgotten.check(self.process.tenant, self.name, self.prompt.digests[: tokens // PAGE * 32])

    def compute(self, least: float, most: float) -> None:
        """The next kernel, unless there is a reason to stop."""
        if self.stopped or self.computing:
            return
        self.computing = True
        self.process.after(self.clock.between(least, most), self._computed)

    def _computed(self) -> None:
        self.computing = False
        if self.process.writing:
            self.kernel()  # also a zombie's: it was launched

    def kernel(self) -> None:
        raise NotImplementedError

    def write(self, index: int, data: bytes) -> None:
        self.process.memory.write_owned(self.pages[index], self.generations[index], data)

    def cancel(self) -> None:
        """Whoever asked wants no more."""
        if self.stopped:
            return
        self.cancelled = self.stopped = True
        self.abort_soon()

    def abort_soon(self) -> None:
        """When no kernel of it runs."""
        self.process.after(self.clock.between(0.00005, 0.002), self._abort)

    def _abort(self) -> None:
        if self.computing:
            self.abort_soon()
        elif not self.said_last:
            self.said_last = True
            self.process.send("abort", self.message("abort"))


__all__ = ["DRAINS", "PAGE_BYTES", "STEP", "Job", "Leg", "Process", "Violation", "Wanted"]
