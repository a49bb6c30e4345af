"""A process's steps and the CPU time of the hooks in them: written by `timed_connector`, read by its users."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TextIO

BLOCK_STEPS = 50
IDLE_SECONDS = 0.05  # behind a step's last hook: an engine that waits longer has nothing to do
NOTHINGS = 101  # the last calls of nothing, whose median is told from the others


class Step(NamedTuple):
    number: int
    wall: float  # seconds
    hooks: float  # CPU seconds
    runs: bool  # the hooks did their work


@dataclass(slots=True)
class StepClock:
    """Lines: steps so far, wall seconds, CPU seconds of the hooks, whether they ran, tokens scheduled. A step lasts
    until the next one begins, or until its last hook where the engine waits for requests behind it. What hooks take in
    a step without tokens counts for the one before where any had something to do: of those that only wait an engine
    makes as many as it has time for. Off each call goes what the clock counts for a call that does nothing, the median
    of one at each step: behind a forward pass it is several times what it is in a loop."""

    file: TextIO
    always: bool  # the hooks of every step run; else of every other block of steps
    spent: float = 0.0
    steps: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _ended: float = field(default=0.0, init=False)
    _tokens: int = field(default=0, init=False)
    _calls: int = field(default=0, init=False)  # whose times are in `spent`
    _worked: bool = field(default=False, init=False)  # since the step under way, with or without tokens, began
    _counted: float = field(default=0.0, init=False)  # of the step under way and those without tokens behind it
    _nothings: deque[float] = field(default_factory=lambda: deque(maxlen=NOTHINGS), init=False)

    @property
    def runs(self) -> bool:
        return self.always or self.steps // BLOCK_STEPS % 2 == 0

    def timed(
        self, hook: Callable[..., Any], worked: Callable[[Any], bool] = lambda result: True
    ) -> Callable[..., Any]:
        """A hook whose time counts, once where it is called within another. `worked` says by its result whether it had
        anything to do."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = self.spent, time.thread_time()
            result = hook(*args, **kwargs)
            self.spent = before + time.thread_time() - began
            self._calls += 1
            self._worked = self._worked or worked(result)
            return result

        return timed

    def begin(self, now: float, tokens: int) -> None:
        if self._worked:
            self._counted += self.spent - self._calls * statistics.median(self._nothings or (0.0,))
        self._worked = tokens > 0
        if self._worked:
            self._add_step(now, tokens)
            self.spent = 0.0
            self.timed(_nothing)(self)
            self._nothings.append(self.spent)
        self.spent, self._calls = 0.0, 0

    def _add_step(self, now: float, tokens: int) -> None:
        if self._tokens:
            idle = self._ended > self._began and now - self._ended > IDLE_SECONDS
            wall = (self._ended if idle else now) - self._began
            spent = max(0.0, self._counted)
            print(self.steps, f"{wall:.6f} {spent:.7f}", int(self.runs), self._tokens, file=self.file)
            self.steps += 1
        self._began, self._tokens, self._counted = now, tokens, 0.0

    def last_hook(self, now: float) -> None:
        """The step under way is over, as far as the hooks see it."""
        if self._ended <= self._began:  # later ones are of steps without tokens
            self._ended = now


def _nothing(given: object) -> None:
    """A hook that returns at once."""


def read_steps(path: Path) -> list[Step]:
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines():
        fields = line.split()
        if len(fields) == 5:
            steps.append(Step(int(fields[0]), float(fields[1]), float(fields[2]), fields[3] == "1"))
    return steps


def blocks_of(steps: list[Step], runs: bool) -> list[list[Step]]:
    blocks = groupby(steps, key=lambda step: (step.number // BLOCK_STEPS, step.runs))
    return [list(block) for (_, does), block in blocks if does is runs]
