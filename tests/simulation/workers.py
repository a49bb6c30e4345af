"""Worker processes: what they do with their pages, how they crash, and how they go on writing when they do.

They behave as `kvferry.workers` does: a kernel that runs is not interrupted; Failed is answered with Abort, Retract
with Finish and, after Ended, another Admit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvferry.daemon.core.limits import Name, pages_for
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import Clock, Pipe, Violation, expect
from tests.simulation.daemons import ROOT, SimDecode, SimPrefill
from tests.simulation.loops import ProcessLoop
from tests.simulation.memory import Memory
from tests.simulation.prompts import GARBAGE, PAGE, PAGE_BYTES, Prompt, partial_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.daemon.sides.workers import Worker

STEP = (0.0002, 0.004)  # seconds of a kernel
_PAGED = ("admitted", "begun", "grown")


class Leg(Protocol):
    """Who gave the request to the worker."""

    def on_ready(self) -> None: ...

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
        self.memory: Memory = side.pages_memory
        self.connected = True
        self.lives = True
        self.writes_until = math.inf  # what it has queued on a device may end a while behind it
        self.jobs: dict[Name, Job] = {}
        self.worker: Worker = side.process.here(side.enter, tenant, self, SessionLock(self))  # type: ignore[assignment]
        self.loop = ProcessLoop(clock, f"{side.config.name}'s {self.worker.name}")
        self._up = Pipe(clock, 0.00003, 0.003, side.process.deliver)
        self._down = Pipe(clock, 0.00003, 0.003, self.loop.deliver)
        self._here = True  # as its daemon knows

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
        self._up.send(self._leaves, True)
        self._jobs_are_lost()

    def crash(self, lives: float) -> None:
        """Its stream breaks; the process lives on for so long and finishes what it had begun to compute."""
        self.connected = False
        if self.clock.chance(0.5):  # what it said before is lost
            self._here = False
        self._up.send(self._leaves, False)
        self.clock.after(lives, self._dies)
        self._jobs_are_lost()

    def _leaves(self, quiesced: bool) -> None:
        self._here = False
        self.worker.quiesced = quiesced
        self.side.workers.leave(self.worker)

    def daemon_is_gone(self) -> None:
        self.connected = self._here = False
        self._jobs_are_lost()

    def _jobs_are_lost(self) -> None:
        for job in list(self.jobs.values()):
            self.clock.after(self.clock.between(0.0001, 0.02), job.leg.on_lost)

    def _dies(self) -> None:
        """What it has queued on a device may end a while behind it; the lock is free at once."""
        self.lives = False
        self.writes_until = self.clock.now + (self.clock.between(0.0, 0.5) if self.clock.chance(0.3) else 0.0)


class Job:
    """One request at a worker."""

    KIND: ClassVar[str]

    def __init__(self, process: Process, name: Name, prompt: Prompt, leg: Leg) -> None:
        self.process, self.name, self.prompt, self.leg = process, name, prompt, leg
        self.clock = process.clock
        self.pages: list[int] = []
        self.generations: list[int] = []
        self.computing = False
        self.stopped = False  # it computes no more; its last word is said or will be
        self.said_last = False
        self.cancelled = False
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
            self.leg.on_failed(error.code, error.message)
            self.abort_soon()
        else:
            getattr(self, f"on_{kind}")(body, generations)

    def on_ended(self) -> None:
        self.stopped = True
        del self.process.jobs[self.name]
        self.leg.on_over(not self.cancelled)

    def take(self, pages: Sequence[int], generations: list[int]) -> None:
        self.pages += pages
        self.generations += generations

    def compute(self) -> None:
        """The next kernel, unless there is a reason to stop."""
        if self.stopped or self.computing:
            return
        self.computing = True
        self.process.after(self.clock.between(*STEP), self._computed)

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


class DecodeJob(Job):
    KIND = "decode"

    def __init__(
        self,
        process: Process,
        name: Name,
        prompt: Prompt,
        leg: Leg,
        *,
        prefill: str,
        output: Sequence[int],
        deadline_ms: int,
        priority: int,
    ) -> None:
        super().__init__(process, name, prompt, leg)
        self.asked = prompt
        self.output = list(output)
        self.total = len(prompt.tokens) + len(output) - 1  # tokens with KV at the end
        self.whole = Prompt([*prompt.tokens, *output[:-1]], ROOT)
        self.deadline_ms, self.priority = deadline_ms, priority
        self.ready = self.growing = self.retracted = False
        if prefill:
            process.side.prompts[name] = prompt  # type: ignore[union-attr]
        self._admit(prefill)

    def _admit(self, prefill: str) -> None:
        prompt = self.prompt
        self.prefill = prefill
        self.position = self.computed = 0
        self.pages, self.generations = [], []
        self.ready = self.retracted = self.stopped = self.said_last = self.growing = False
        message = self.message("admit")
        body = message.admit
        body.digests, body.tokens, body.tail_digest = prompt.digests, len(prompt.tokens), prompt.tail
        body.prefill, body.deadline_ms, body.priority = prefill, self.deadline_ms, self.priority
        body.max_new_tokens = self.total + 1 - len(prompt.tokens)
        self.process.send("admit", message)

    # -- the daemon's words ----------------------------------------------------------------------------------------

    def on_admitted(self, body: wire.Admitted, generations: list[int]) -> None:
        self.take(body.pages, generations)
        expect(len(self.pages) == pages_for(len(self.prompt.tokens), PAGE), f"{self.name}: pages of the prompt")
        self.computed = body.local_tokens if not self.prefill else len(self.prompt.tokens)

    def on_ready(self, body: wire.Ready, generations: list[int]) -> None:
        if self.stopped:
            return
        self.ready = True
        readable = len(self.pages) if self.prefill else self.computed // PAGE
        self.process.memory.check(
            self.pages[:readable], self.prompt.contents, f"{self.process.worker.name} reads its ready prompt"
        )
        if self.prefill:
            expect(body.aux == self.prompt.blob, f"{self.name}: the aux blob is {body.aux!r}")
            self.process.clock.counts["pages that travelled"] += body.delta_pages
        self.position = len(self.prompt.tokens)
        self.leg.on_ready()
        self.compute_or_end()

    def on_grown(self, body: wire.Grown, generations: list[int]) -> None:
        if self.stopped or self.retracted:
            return
        expect(body.first_page == len(self.pages), f"{self.name}: grown at {body.first_page}, not {len(self.pages)}")
        self.take(body.pages, generations)
        self.growing = False
        self.compute_or_end()

    def on_retract(self, body: wire.Retract, generations: list[int]) -> None:
        self.clock.counts["retracted"] += 1
        if self.stopped:
            return
        self.retracted = True
        self.growing = False
        if not self.computing:
            self.compute_or_end()

    # -- computing -------------------------------------------------------------------------------------------------

    def compute_or_end(self) -> None:
        if self.stopped:
            return
        if self.computed < len(self.prompt.tokens):
            self.compute()
        elif self.position >= self.total or self.retracted:
            self._finish()
        elif self.position // PAGE < len(self.pages):
            self.compute()
        elif not self.growing:
            self.growing = True
            ahead = PAGE * self.clock.random.randint(1, 2)
            message = self.message("grow")
            message.grow.tokens = min(self.total, self.position + ahead)
            self.process.send("grow", message)

    def kernel(self) -> None:
        if self.computed < len(self.prompt.tokens):  # a missing part of the prompt
            index = self.computed // PAGE
            self.write(index, self.prompt.contents[index])
            self.computed = min(self.computed + PAGE, len(self.prompt.tokens))
        else:
            index = self.position // PAGE
            self.position = min(self.total, (index + 1) * PAGE)
            full = self.position % PAGE == 0
            self.write(index, self.whole.contents[index] if full else GARBAGE)
        if self.process.connected:
            self.compute_or_end()
        elif self.position < self.total and self.position // PAGE < len(self.pages):
            self.compute()  # it has not noticed that its daemon is gone

    def _finish(self) -> None:
        self.stopped = self.said_last = True
        tokens = self.position
        full = tokens // PAGE
        self.process.memory.check(
            self.pages[:full], self.whole.contents, f"{self.process.worker.name} has decoded {self.name}"
        )
        self.process.memory.check_kept(self.pages, self.generations, f"{self.name} was decoded")
        message = self.message("finish")
        body = message.finish
        body.tokens, body.continues = tokens, self.position < self.total
        body.digests = self.whole.digests[self.prompt.full * 32 : full * 32]
        self.process.send("finish", message)

    def on_ended(self) -> None:
        if self.retracted and self.position < self.total and not self.cancelled:
            done = self.position + 1  # one more token is known than has its KV
            self.prompt = Prompt((self.asked.tokens + self.output)[:done], ROOT)
            self._admit("")
            return
        super().on_ended()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed":
            self.retracted = False  # it does not come back
        super().hear(kind, body, generations)


class PrefillJob(Job):
    KIND = "prefill"

    def __init__(
        self, process: Process, name: Name, prompt: Prompt, leg: Leg, *, deadline_ms: int, priority: int
    ) -> None:
        super().__init__(process, name, prompt, leg)
        self.computed = 0
        message = self.message("begin")
        body = message.begin
        body.digests, body.tokens, body.tail_digest = prompt.digests, len(prompt.tokens), prompt.tail
        body.deadline_ms, body.priority = deadline_ms, priority
        process.send("begin", message)

    def on_begun(self, body: wire.Begun, generations: list[int]) -> None:
        if self.stopped:
            return
        self.take(body.pages, generations)
        self.computed = body.matched_tokens
        self.process.memory.check(
            self.pages[: self.computed // PAGE], self.prompt.contents, f"{self.process.worker.name} reads what matched"
        )
        self.compute()

    def kernel(self) -> None:
        tokens = len(self.prompt.tokens)
        for _ in range(self.clock.random.randint(1, 3)):
            index = self.computed // PAGE
            left = tokens - index * PAGE
            data = self.prompt.contents[index]
            if left < PAGE:  # what lies behind the last token is whatever it was
                data = partial_content(self.prompt.tail, left, GARBAGE[:1])
            self.write(index, data)
            self.computed = min(tokens, (index + 1) * PAGE)
            if self.computed == tokens:
                break
        if not self.process.connected and self.computed < tokens:
            self.compute()  # it has not noticed that its daemon is gone
        if self.stopped or not self.process.connected:
            return
        message = self.message("progress")
        message.progress.tokens = self.computed
        self.process.send("progress", message)
        if self.computed < tokens:
            self.compute()
            return
        self.stopped = self.said_last = True
        message = self.message("aux")
        message.aux.blob = self.prompt.blob
        self.process.send("aux", message)

    def cancel(self) -> None:
        """Also behind aux: who waits for the other half no more says so."""
        self.stopped = self.said_last and self.cancelled
        self.said_last = self.said_last and self.cancelled
        super().cancel()

    def hear(self, kind: str, body: object, generations: list[int]) -> None:
        if kind == "failed" and self.said_last and not self.cancelled:
            self.said_last = False  # Failed came behind aux, and awaits its Abort all the same
        super().hear(kind, body, generations)


__all__ = ["PAGE_BYTES", "DecodeJob", "Leg", "PrefillJob", "Process", "Violation"]
