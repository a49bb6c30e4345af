"""A process's steps and the CPU time of the hooks in them: written by `timed_connector`, read by its users."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TextIO

TIMED_CONNECTOR = "timed_connector:TimedConnector"
BLOCK_STEPS = 50
IDLE_SECONDS = 0.05  # behind a step's last hook: an engine that waits longer has nothing to do


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
    makes as many as it has time for. Off each hook goes what the clock counts between two looks right behind it: that
    differs by what the caches hold just then, and what the engine itself does within it (`left_out`)."""

    file: TextIO
    always: bool  # the hooks of every step run; else of every other block of steps
    spent: float = 0.0
    clock: Callable[[], float] = time.thread_time
    steps: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _ended: float = field(default=0.0, init=False)
    _tokens: int = field(default=0, init=False)
    _worked: bool = field(default=False, init=False)  # since the step under way, with or without tokens, began
    _others: float = field(default=0.0, init=False)  # of what was left out so far
    _counted: float = field(default=0.0, init=False)  # of the step under way and those without tokens behind it

    @property
    def runs(self) -> bool:
        return self.always or self.steps // BLOCK_STEPS % 2 == 0

    def timed(
        self, hook: Callable[..., Any], worked: Callable[[Any], bool] = lambda result: True
    ) -> Callable[..., Any]:
        """A hook whose time counts, once where it is called within another. `worked` says by its result whether it had
        anything to do."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.clock()  # caches may have nothing of it: an empty hook behind emptied ones counts 6 us so, else 12
            before, others, began = self.spent, self._others, self.clock()
            result = hook(*args, **kwargs)
            ended = self.clock()
            took = ended - began - (self.clock() - ended) - (self._others - others)
            self.spent = before + max(0.0, took)
            self._worked = self._worked or worked(result)
            return result

        return timed

    def left_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Work of the engine's own, which is not counted where a hook calls it; hooks within it are."""

        def left_out(*args: Any, **kwargs: Any) -> Any:
            spent, began = self.spent, self.clock()
            result = call(*args, **kwargs)
            self._others += self.clock() - began - (self.spent - spent)
            return result

        return left_out

    def begin(self, now: float, tokens: int) -> None:
        if self._worked:
            self._counted += self.spent
        self.spent, self._worked = 0.0, tokens > 0
        if tokens:
            self._add_step(now, tokens)

    def _add_step(self, now: float, tokens: int) -> None:
        if self._tokens:
            idle = self._ended > self._began and now - self._ended > IDLE_SECONDS
            wall = (self._ended if idle else now) - self._began
            print(self.steps, f"{wall:.6f} {self._counted:.7f}", int(self.runs), self._tokens, file=self.file)
            self.steps += 1
        self._began, self._tokens, self._counted = now, tokens, 0.0

    def last_hook(self, now: float) -> None:
        """The step under way is over, as far as the hooks see it."""
        if self._ended <= self._began:  # later ones are of steps without tokens
            self._ended = now


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
