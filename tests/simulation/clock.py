"""Virtual time: what happens next, and the one source of chance."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random


class Violation(Exception):
    """What the oracle saw: a promise of the product is broken."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


class Clock:
    def __init__(self, seed: int) -> None:
        self.now = 1.0
        self.seed = seed
        self.random = Random(seed)
        self.events = 0
        self.under_way = 0  # events to come that are not background
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self._heap: list[tuple[float, int, bool, Callable[..., object], tuple[object, ...]]] = []
        self._next = 0

    def at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        self._next += 1
        self.under_way += 1
        heapq.heappush(self._heap, (when, self._next, True, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def background(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """An event for which nobody may have to wait: ticks and faults."""
        self._next += 1
        heapq.heappush(self._heap, (self.now + seconds, self._next, False, call, arguments))

    def between(self, least: float, most: float) -> float:
        """Seconds: mostly near `least`, with a tail."""
        chance = self.random.random()
        chance *= chance
        return least + (most - least) * chance * chance

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def step(self) -> None:
        self.now, _, foreground, call, arguments = heapq.heappop(self._heap)
        self.under_way -= foreground
        self.events += 1
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {getattr(call, '__qualname__', call)}")
        call(*arguments)

    def run(self) -> None:
        """Until nothing is under way."""
        while self.under_way:
            self.step()

    def run_until(self, when: float) -> None:
        while self._heap and self._heap[0][0] <= when:
            self.step()
        self.now = max(self.now, when)


class Pipe:
    """Messages of one stream: delayed, in order."""

    def __init__(self, clock: Clock, least: float, most: float) -> None:
        self._clock, self._least, self._most = clock, least, most
        self._last = 0.0

    def send(self, call: Callable[..., object], *arguments: object) -> None:
        clock = self._clock
        self._last = max(self._last, clock.now + clock.between(self._least, self._most))
        clock.at(self._last, call, *arguments)
