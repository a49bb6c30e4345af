"""Conversations, and a front end that gives each turn to a prefill and a decode worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.daemon.core.limits import Name
from kvferry.proto import common_pb2 as common
from tests.simulation.clock import expect
from tests.simulation.daemons import ROOT
from tests.simulation.prompts import PAGE, Prompt
from tests.simulation.workers import DecodeJob, Job, PrefillJob, Process

if TYPE_CHECKING:
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


class Conversation:
    """Turns, one after the other; each prompt is all that was said before."""

    def __init__(self, simulation: Simulation, tenant: int) -> None:
        self.simulation, self.tenant = simulation, tenant
        self.clock = simulation.clock
        self.tokens: list[int] = []
        self.clock.after(self.clock.between(0.0, 0.05), self.next_turn)

    def next_turn(self) -> None:
        simulation, random = self.simulation, self.clock.random
        if simulation.requests_left == 0:
            return
        simulation.request_made()
        if not self.tokens or len(self.tokens) > MAX_TOKENS:
            start = random.randrange(3)  # a system prompt that others have, too
            self.tokens = [1000 + start] * (PAGE * (1 + 2 * start))
        said = [random.randrange(1 << 16) for _ in range(random.randint(1, 3 * PAGE))]
        output = [random.randrange(1 << 16) for _ in range(random.randint(1, 3 * PAGE))]
        request = Request(self, [*self.tokens, *said], output)
        simulation.open.add(request)
        request.begin()

    def over(self, request: Request) -> None:
        self.simulation.open.remove(request)
        if request.answered:
            self.tokens = [*request.tokens, *request.output]
        elif self.clock.chance(0.3):
            self.tokens = []
        self.clock.after(self.clock.between(0.0, 0.02), self.next_turn)


class DecodeLeg:
    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def on_ready(self) -> None:
        self.attempt.ready = True

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

    def begin(self, decode: Process, prefill: Process | None) -> None:
        clock = self.request.clock
        self.legs = {"decode", "prefill"} if prefill is not None else {"decode"}
        clock.after(clock.between(0.0, 0.01), self._begin_decode, decode, prefill)
        if prefill is not None:
            clock.after(clock.between(0.0, 0.01), self._begin_prefill, prefill)

    def _begin_decode(self, process: Process, prefill: Process | None) -> None:
        if self.bad or not process.connected:
            self.lost("decode")
            return
        request = self.request
        self.jobs["decode"] = DecodeJob(
            process,
            self.name,
            request.prompt,
            DecodeLeg(self),
            prefill=prefill.side.config.name if prefill is not None else "",
            output=request.output,
            deadline_ms=request.deadline_ms,
            priority=request.priority,
        )

    def _begin_prefill(self, process: Process) -> None:
        if self.bad or not process.connected:
            self.lost("prefill")
            return
        request = self.request
        self.jobs["prefill"] = PrefillJob(
            process,
            self.name,
            request.prompt,
            PrefillLeg(self),
            deadline_ms=request.deadline_ms,
            priority=request.priority,
        )

    def cancel(self) -> None:
        """Both legs, as far as they are there."""
        self.bad = True
        for leg, job in self.jobs.items():
            if leg in self.legs and job.process.connected:
                job.cancel()

    def failed(self, leg: str, code: int, message: str) -> None:
        request = self.request
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
    def __init__(self, conversation: Conversation, tokens: list[int], output: list[int]) -> None:
        self.conversation, self.tokens, self.output = conversation, tokens, output
        self.simulation, self.clock = conversation.simulation, conversation.clock
        faults, random = self.simulation.faults, self.clock.random
        self.id = random.randbytes(16)
        self.prompt = Prompt(tokens, ROOT)
        self.simulation.prompts[conversation.tenant].append(Prompt([*tokens, *output], ROOT))
        self.priority = random.choice((0, 0, 0, -1, 1))
        self.deadline_ms = SHORT_DEADLINE_MS if self.clock.chance(faults.short_deadlines) else 0
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
        self.attempts.append(attempt)
        self._open += 1
        tenant, simulation = self.conversation.tenant, self.simulation
        decode = simulation.pick_decode(tenant)
        prefill = simulation.pick_prefill(tenant) if self.clock.chance(0.92) else None
        attempt.begin(decode, prefill)

    def wants_another(self, attempt: Attempt) -> None:
        """It failed: once more, at once or when it is over."""
        if not self.aborted and len(self.attempts) < ATTEMPTS and self.clock.chance(0.5):
            self.simulation.counts["tried again"] += 1
            self._try()

    def attempt_over(self, attempt: Attempt) -> None:
        self._open -= 1
        if self._open:
            return
        if attempt.bad and not self.aborted and not self.answered and len(self.attempts) < ATTEMPTS:
            self.simulation.counts["tried again"] += 1
            self._try()
            return
        counts = self.simulation.counts
        counts["requests"] += 1
        counts["answered" if self.answered else "aborted" if self.aborted else "failed"] += 1
        expect(
            self.answered or self.aborted or any(attempt.bad for attempt in self.attempts),
            f"request {self.id.hex()} ended without an answer or a reason",
        )
        self.conversation.over(self)

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


__all__ = ["SHORT_DEADLINE_MS", "_ALWAYS_WRONG", "Attempt", "Conversation", "Request"]
