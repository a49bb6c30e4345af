"""Virtual time: what happens next, and the one source of chance."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random


class Violation(Exception):
    """What the oracle saw: a promise of the product is broken. It is raised wherever that is seen, also in a task of
    the product's; the clock raises it again."""

    first: Violation | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        Violation.first = Violation.first or self


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


class Clock:
    def __init__(self, seed: int) -> None:
        self.now = 1.0
        self.seed = seed
        self.random = Random(seed)
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._next = 0
        Violation.first = None

    def at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        self._next += 1
        heapq.heappush(self._heap, (when, self._next, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def between(self, least: float, most: float) -> float:
        """Seconds: mostly near `least`, with a tail."""
        chance = self.random.random()
        chance *= chance
        return least + (most - least) * chance * chance

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def step(self) -> None:
        self.now, _, call, arguments = heapq.heappop(self._heap)
        self.events += 1
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {getattr(call, '__qualname__', call)}")
        call(*arguments)
        if Violation.first is not None:
            raise Violation.first

    def run_until(self, when: float) -> None:
        while self._heap and self._heap[0][0] <= when:
            self.step()
        self.now = max(self.now, when)


class Pipe:
    """Messages of one stream: delayed, in order. `at`: who has them called at what time."""

    def __init__(self, clock: Clock, least: float, most: float, at: Callable[..., None]) -> None:
        self._clock, self._least, self._most, self._at = clock, least, most, at
        self._last = 0.0

    def send(self, call: Callable[..., object], *arguments: object) -> None:
        clock = self._clock
        self._last = max(self._last, clock.now + clock.between(self._least, self._most))
        self._at(self._last, call, *arguments)
