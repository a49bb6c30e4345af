"""Conversations, and a front end that gives each turn to a prefill and a decode worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvferry.daemon.core.limits import Name
from kvferry.proto import common_pb2 as common
from tests.simulation.clients.block_jobs import BlockDecodeJob
from tests.simulation.clients.block_prefill_jobs import BlockPrefillJob
from tests.simulation.clients.decode_jobs import DecodeJob
from tests.simulation.clients.prefill_jobs import PrefillJob
from tests.simulation.clock import expect
from tests.simulation.daemons import ROOT
from tests.simulation.prompts import PAGE, Prompt
from tests.simulation.workers import DRAINS, Job, Process, Wanted

if TYPE_CHECKING:
    from tests.simulation.clock import Clock
    from tests.simulation.simulator import Simulation

MAX_TOKENS = 14 * PAGE
ATTEMPTS = 2
REQUESTS = 200  # of a seed, at least
SHORT_DEADLINE_MS = 30
_ALWAYS_WRONG = (
    common.ERROR_INVALID_ARGUMENT,
    common.ERROR_NOT_FOUND,
    common.ERROR_FAILED_PRECONDITION,
    common.ERROR_INTERNAL,
    common.ERROR_OUT_OF_RANGE,
)


class Asker(Protocol):
    """Whoever makes requests."""

    simulation: Simulation
    clock: Clock
    tenant: int
    remote: float  # of the prompts, computed by a prefill worker
    side: str | None  # the decode daemon that it asks; None: any

    def over(self, request: Request) -> None: ...


class Conversation:
    """Turns, one after the other; each prompt is all that was said before."""

    remote = 0.92
    side = None

    def __init__(self, simulation: Simulation, tenant: int) -> None:
        self.simulation, self.tenant = simulation, tenant
        self.clock = simulation.clock
        self.tokens: list[int] = []
        self.clock.after(self.clock.between(0.0, 0.05), self.next_turn)

    def next_turn(self) -> None:
        simulation, random = self.simulation, self.clock.random
        if simulation.requests_left == 0:
            return
        if not simulation.serves(self.tenant):
            self.clock.after(0.1, self.next_turn)
            return
        simulation.request_made()
        if not self.tokens or len(self.tokens) > MAX_TOKENS:
            start = random.randrange(3)  # a system prompt that others have, too
            self.tokens = [1000 + start] * (PAGE * (1 + 2 * start))
        said = [random.randrange(1 << 16) for _ in range(random.randint(1, 3 * PAGE))]
        output = simulation.draw_output(3)
        shared = len(self.tokens)
        if self.clock.chance(simulation.faults.warmups):
            shared = random.choice((shared, 0))
            request: Request = WarmUp(self, [*self.tokens[:shared], *said], output, shared)
        else:
            request = Request(self, *self._held(said, output))
        simulation.open.add(request)
        request.begin()

    def _held(self, said: list[int], output: list[int]) -> tuple[list[int], list[int], int]:
        """Tokens, output, and of how many tokens the decode worker has KV itself. Some workers only hand in what they
        have."""
        tokens, random = [*self.tokens, *said], self.clock.random
        full = len(tokens) // PAGE
        if not full or not self.clock.chance(self.simulation.faults.held):
            return tokens, output, 0
        self.simulation.counts["requests with KV at their decode worker"] += 1
        if self.clock.chance(0.25):
            return tokens[: full * PAGE], output[:1], full * PAGE
        return tokens, output, random.randint(1, full) * PAGE

    def over(self, request: Request) -> None:
        self.simulation.open.remove(request)
        if request.answered and not request.warmup:
            self.tokens = [*request.tokens, *request.output]
        elif self.clock.chance(0.3):
            self.tokens = []
        self.clock.after(self.clock.between(0.0, 0.02), self.next_turn)


class DecodeLeg:
    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def on_ready(self) -> None:
        self.attempt.ready = True

    def on_filling(self) -> None:
        attempt = self.attempt
        attempt.request.simulation.worker_fills(attempt.jobs["decode"].process)

    def on_computed(self) -> None:
        raise AssertionError("a decode worker's last word is Finish")

    def on_failed(self, code: int, message: str) -> None:
        self.attempt.failed("decode", code, message)

    def on_over(self, done: bool) -> None:
        attempt = self.attempt
        attempt.request.answered |= done and not attempt.bad
        attempt.leg_over("decode")

    def on_lost(self) -> None:
        self.attempt.lost("decode")


class PrefillLeg:
    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def on_ready(self) -> None:
        raise AssertionError("a prefill worker has no Ready")

    def on_filling(self) -> None:
        raise AssertionError("a prefill worker holds nothing itself")

    def on_computed(self) -> None:
        self.attempt.request.prompt_computed()

    def on_failed(self, code: int, message: str) -> None:
        self.attempt.failed("prefill", code, message)

    def on_over(self, done: bool) -> None:
        self.attempt.leg_over("prefill")

    def on_lost(self) -> None:
        self.attempt.lost("prefill")


class Attempt:
    """Both legs of one try."""

    def __init__(self, request: Request, number: int) -> None:
        self.request, self.number = request, number
        self.name = Name(request.id, number)
        self.jobs: dict[str, Job] = {}
        self.legs: set[str] = set()  # that are not over
        self.bad = False
        self.ready = False
        self.refused = False  # by a daemon that drains

    def begin(self, decode: Process, prefill: Process | None) -> None:
        clock = self.request.clock
        self.legs = {"decode", "prefill"} if prefill is not None else {"decode"}
        late = clock.chance(self.request.simulation.faults.stows / 2)  # so that computed prompts wait
        clock.after(clock.between(0.0, 0.2 if late else 0.01), self._begin_decode, decode, prefill)
        if prefill is not None:
            clock.after(clock.between(0.0, 0.01), self._begin_prefill, prefill)

    def _begin_decode(self, process: Process, prefill: Process | None) -> None:
        if self.bad or not process.connected:
            self.lost("decode")
            return
        name = prefill.side.config.name if prefill is not None else ""
        job = DecodeJob if process.blocks is None else BlockDecodeJob
        self.jobs["decode"] = job(process, self.name, self.request.wanted, DecodeLeg(self), name)

    def _begin_prefill(self, process: Process) -> None:
        if self.bad or not process.connected:
            self.lost("prefill")
            return
        job = PrefillJob if process.blocks is None else BlockPrefillJob
        self.jobs["prefill"] = job(process, self.name, self.request.wanted, PrefillLeg(self))

    def cancel(self) -> None:
        """Both legs, as far as they are there."""
        self.bad = True
        for leg, job in self.jobs.items():
            if leg in self.legs and job.process.connected:
                job.cancel()

    def failed(self, leg: str, code: int, message: str) -> None:
        request = self.request
        self.refused |= DRAINS in message
        request.simulation.judge_failure(request, self, leg, code, message)
        self._turns_bad(leg)

    def lost(self, leg: str) -> None:
        self._turns_bad(leg)
        self.leg_over(leg)

    def _turns_bad(self, leg: str) -> None:
        if leg == "prefill" and self.ready:
            return  # nothing more is needed of it
        if not self.bad:
            self.request.clock.after(self.request.clock.between(0.0001, 0.01), self.cancel)
            self.bad = True
            self.request.wants_another(self)

    def leg_over(self, leg: str) -> None:
        if leg in self.legs:
            self.legs.remove(leg)
            if not self.legs:
                self.request.attempt_over(self)


class Request:
    warmup = False

    def __init__(self, conversation: Asker, tokens: list[int], output: list[int], held_tokens: int = 0) -> None:
        self.conversation, self.tokens, self.output = conversation, tokens, output
        self.simulation, self.clock = conversation.simulation, conversation.clock
        faults, random = self.simulation.faults, self.clock.random
        self.id = random.randbytes(16)
        self.prompt = Prompt(tokens, ROOT)
        self.whole = Prompt([*tokens, *output], ROOT)
        if not self.warmup:
            self.simulation.prompts[conversation.tenant].append(self.whole)
        priority = random.choice((0, 0, 0, -1, 1))
        deadline_ms = SHORT_DEADLINE_MS if self.clock.chance(faults.short_deadlines) else 0
        hangs = 0.0
        if held_tokens and self.clock.chance(faults.hangs):  # it hangs past its deadline, or nearly
            self.simulation.counts["copies of a worker's own that hang"] += 1
            deadline_ms, hangs = random.randint(50, 400), random.uniform(0.05, 1.0)
        self.deadline_ms = deadline_ms
        self.hands_in = held_tokens == len(tokens) and len(output) == 1
        self.wanted = Wanted(self.prompt, output, deadline_ms, priority, self.warmup, held_tokens, hangs)
        self.began = self.clock.now
        self.answered = self.aborted = False
        self.attempts: list[Attempt] = []
        self._open = 0

    def begin(self) -> None:
        aborts = self.simulation.faults.aborts
        late = self.simulation.requests_left < REQUESTS // 2 and not self.simulation.counts["aborts"]
        if self.clock.chance(aborts) or (aborts and late):  # a seed with aborts meets one
            self.clock.after(self.clock.between(0.0, 0.15), self._abort)
        self._try()

    def _try(self) -> None:
        attempt = Attempt(self, len(self.attempts) + 1)
        drains = any(before.refused for before in self.attempts)  # it goes elsewhere, where there is another one
        self.attempts.append(attempt)
        self._open += 1
        conversation, simulation = self.conversation, self.simulation
        tenant = conversation.tenant
        decode = simulation.pick_decode(tenant, conversation.side, drains)
        remote = not self.hands_in and self.clock.chance(conversation.remote)
        attempt.begin(decode, simulation.pick_prefill(tenant, drains) if remote else None)

    @property
    def _may_try(self) -> bool:
        """Whom a daemon that drains has refused did not count."""
        return not self.aborted and sum(not attempt.refused for attempt in self.attempts) < ATTEMPTS

    def wants_another(self, attempt: Attempt) -> None:
        """It failed: once more, at once or when it is over."""
        if self._may_try and self.clock.chance(0.5):
            self.simulation.counts["tried again"] += 1
            self._try()

    def attempt_over(self, attempt: Attempt) -> None:
        self._open -= 1
        if self._open:
            return
        if attempt.bad and not self.answered and self._may_try:
            self.simulation.counts["tried again"] += 1
            if attempt.refused:  # later
                self._open += 1
                self.clock.after(self.clock.between(0.01, 0.1), self._try_later)
            else:
                self._try()
            return
        self._over()

    def _try_later(self) -> None:
        self._open -= 1
        if self._may_try:
            self._try()
        else:
            self._over()

    def _over(self) -> None:
        counts = self.simulation.counts
        counts["requests"] += 1
        counts["answered" if self.answered else "aborted" if self.aborted else "failed"] += 1
        if self.answered and any(attempt.refused for attempt in self.attempts):
            counts["answered though a daemon drained"] += 1
        expect(
            self.answered or self.aborted or any(attempt.bad for attempt in self.attempts),
            f"request {self.id.hex()} ended without an answer or a reason",
        )
        self.conversation.over(self)

    def prompt_computed(self) -> None:
        """A prefill worker has said its last word on it."""

    def _abort(self) -> None:
        if self not in self.simulation.open:
            return
        self.aborted = True
        self.simulation.counts["aborts"] += 1
        for attempt in self.attempts:
            attempt.cancel()

    @property
    def errors_allowed(self) -> bool:
        """Of its own making."""
        return self.aborted or any(attempt.bad for attempt in self.attempts)

    def where(self) -> str:
        """For messages: where its legs are."""
        legs = [
            f"attempt {attempt.number}: {leg} {type(job).__name__ if job else 'not begun'} "
            f"stopped={job.stopped if job else ''} last={job.said_last if job else ''}"
            for attempt in self.attempts
            for leg in attempt.legs
            for job in [attempt.jobs.get(leg)]
        ]
        return f"request {self.id.hex()} ({'; '.join(legs)})"


class WarmUp(Request):
    """Neither matched nor kept. Behind its first `shared` tokens nobody else has its prompt."""

    warmup = True

    def __init__(self, conversation: Asker, tokens: list[int], output: list[int], shared: int) -> None:
        self._shared = shared
        super().__init__(conversation, tokens, output)
        self.simulation.counts["warm-ups"] += 1
        self._leaves = self.clock.chance(0.4)  # as soon as its prompt is computed

    def prompt_computed(self) -> None:
        if self._leaves and not self.aborted:
            self.simulation.counts["warm-ups left as their prompt was computed"] += 1
            self.clock.after(self.clock.between(0.0, 0.002), self._abort)

    def _over(self) -> None:
        for side in (*self.simulation.decodes, *self.simulation.prefills):
            tree = side.cache.namespaces[side.tenants[self.conversation.tenant].id].tree
            held = tree.match(self.whole.digests).pages
            expect(held <= self._shared // PAGE, f"{side.config.name}: {held} pages of a warm-up are held")
        super()._over()


__all__ = ["SHORT_DEADLINE_MS", "_ALWAYS_WRONG", "Asker", "Attempt", "Conversation", "Request"]
