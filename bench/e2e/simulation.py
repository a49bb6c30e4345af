"""Closed-loop requests of shared prefixes through one decode and several prefill workers, as events: what the synthetic
engine does, without bytes and without waiting. It fits an engine's parameters in seconds and says what a run should
give; the run itself is published.py's.

Mirrored from the system: the front end's choice of a prefill worker, prompts in order of arrival and matched in their
turn, admission in order while pages last, single flight of a prefix, one link into the decode worker, batched steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry.loadgen.shared_prefix import Sizes
from kvferry.workers.models.engine_model import EngineModel

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class System:
    prefills: int
    pool_pages: int  # of the decode worker
    reuse: str  # "on" or "off"
    max_running: int = 0  # 0: any number


class Outcome(NamedTuple):
    requests_per_s: float
    ttft_p50_s: float
    ttft_mean_s: float
    inter_token_ms: float  # mean over requests of their mean
    mean_batch: float


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    prefix: int
    began: float
    worker: int = -1
    computed: float | None = None
    own_pages: int = 0
    delta_tokens: int = 0
    admitted: bool = False
    first: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class _Prefill:
    free_at: float = 0.0
    outstanding: int = 0
    assigned: int = 0
    prefixes: set[int] = field(default_factory=set)
    queue: deque[_Request] = field(default_factory=deque)
    busy: bool = False


class Simulation:
    def __init__(self, model: EngineModel, sizes: Sizes, system: System, prefix_of: Sequence[int]) -> None:
        self._model, self._sizes, self._system, self._prefix_of = model, sizes, system, prefix_of
        self._prompt = sizes.prefix + sizes.suffix
        self._pages = -(-(self._prompt + sizes.output - 1) // PAGE_TOKENS)
        self._shared = sizes.prefix // PAGE_TOKENS
        self._events: list[tuple[float, int, str, object]] = []
        self._order = 0
        self._prefill = [_Prefill() for _ in range(system.prefills)]
        self._waiting: deque[_Request] = deque()  # for pages
        self._running = 0
        self._used = 0  # pages held by running requests, shared prefixes once
        self._locks = [0] * sizes.prefixes
        self._held = [False] * sizes.prefixes  # in the tree, or arriving
        self._arrived_at: dict[int, float] = {}  # of a prefix that is on its way: not before
        self._link_free = 0.0
        self._joining: list[_Request] = []
        self._batch: list[tuple[int, int, _Request]] = []  # (step at which it ends, number, request)
        self._step = 0
        self._stepping = False
        self._batch_tokens = 0
        self._sequences = 0
        self._done: list[_Request] = []
        self._next = 0
        self._clock = 0.0

    def run(self) -> Outcome:
        for _ in range(min(self._sizes.concurrency, self._sizes.requests)):
            self._start(0.0)
        while self._events:
            self._clock, _, what, about = heapq.heappop(self._events)
            getattr(self, "_on_" + what)(about)
        firsts = np.array([request.first - request.began for request in self._done])
        gaps = [(request.ended - request.first) / (self._sizes.output - 1) for request in self._done]
        return Outcome(
            len(self._done) / self._clock,
            float(np.median(firsts)),
            float(firsts.mean()),
            1000 * float(np.mean(gaps)),
            self._sequences / max(1, self._step),
        )

    def _at(self, time: float, what: str, about: object = None) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, what, about))

    def _start(self, now: float) -> None:
        if self._next == self._sizes.requests:
            return
        request = _Request(self._next, self._prefix_of[self._next], now)
        self._next += 1
        workers = range(len(self._prefill))
        request.worker = min(workers, key=lambda i: (self._prefill[i].outstanding, self._prefill[i].assigned, i))
        worker = self._prefill[request.worker]
        worker.outstanding += 1
        worker.assigned += 1
        worker.queue.append(request)
        self._compute(worker)
        self._waiting.append(request)
        self._admit()

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _compute(self, worker: _Prefill) -> None:
        if worker.busy or not worker.queue:
            return
        worker.busy = True
        request = worker.queue.popleft()
        matched = self._shared * PAGE_TOKENS if request.prefix in worker.prefixes else 0
        self._at(self._clock + self._model.prompt_s(matched, self._prompt), "computed", request)

    def _on_computed(self, request: _Request) -> None:
        worker = self._prefill[request.worker]
        worker.busy = False
        worker.outstanding -= 1
        worker.prefixes.add(request.prefix)
        request.computed = self._clock
        self._compute(worker)
        self._move(request)

    # -- admission and transfer ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if self._system.max_running and self._running >= self._system.max_running:
                return
            own, lock = self._pages, 0
            if self._system.reuse == "on":
                own = self._pages - self._shared
                lock = 0 if self._locks[request.prefix] else self._shared
            if self._used + own + lock > self._system.pool_pages:
                return
            self._waiting.popleft()
            self._running += 1
            self._used += own + lock
            request.own_pages = own
            held = False
            if self._system.reuse == "on":
                held = self._held[request.prefix]
                self._locks[request.prefix] += 1
                self._held[request.prefix] = True
            request.delta_tokens = self._prompt - (self._shared * PAGE_TOKENS if held else 0)
            request.admitted = True
            self._move(request)

    def _move(self, request: _Request) -> None:
        """Over the link, when it is admitted and computed, and the prefix that it follows has gone before."""
        if not request.admitted or request.computed is None:
            return
        leads = request.delta_tokens == self._prompt
        since = self._clock if leads else max(self._clock, self._arrived_at.get(request.prefix, 0.0))
        end = max(self._link_free, since) + self._model.transfer_s(request.delta_tokens)
        self._link_free = end
        if leads:
            self._arrived_at[request.prefix] = end
        self._at(end, "ready", request)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _on_ready(self, request: _Request) -> None:
        request.first = self._clock
        self._joining.append(request)
        if not self._stepping:
            self._begin_step()

    def _begin_step(self) -> None:
        for request in self._joining:
            heapq.heappush(self._batch, (self._step + self._sizes.output - 1, request.number, request))
            self._batch_tokens += self._prompt + 1
        self._joining.clear()
        self._stepping = bool(self._batch)
        if self._stepping:
            self._sequences += len(self._batch)
            self._at(self._clock + self._model.step_s(len(self._batch), self._batch_tokens), "stepped")

    def _on_stepped(self, _: object) -> None:
        self._step += 1
        self._batch_tokens += len(self._batch)
        while self._batch and self._batch[0][0] == self._step:
            _, _, request = heapq.heappop(self._batch)
            self._batch_tokens -= self._prompt + self._sizes.output
            self._finish(request)
        self._begin_step()

    def _finish(self, request: _Request) -> None:
        request.ended = self._clock
        self._done.append(request)
        self._running -= 1
        self._used -= request.own_pages
        if self._system.reuse == "on":
            self._locks[request.prefix] -= 1
            if not self._locks[request.prefix]:
                self._used -= self._shared
        self._admit()
        self._start(self._clock)


def simulate(model: EngineModel, sizes: Sizes, system: System, prefix_of: Sequence[int]) -> Outcome:
    return Simulation(model, sizes, system, prefix_of).run()
