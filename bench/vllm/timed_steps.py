"""A process's steps and the CPU time of the hooks in them: written by `timed_connector`, read by `hooks`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

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
    a step without tokens counts for the one before."""

    file: TextIO
    always: bool  # the hooks of every step run; else of every other block of steps
    spent: float = 0.0
    steps: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _ended: float = field(default=0.0, init=False)
    _tokens: int = field(default=0, init=False)

    @property
    def runs(self) -> bool:
        return self.always or self.steps // BLOCK_STEPS % 2 == 0

    def begin(self, now: float, tokens: int) -> None:
        if not tokens:
            return
        if self._tokens:
            idle = self._ended > self._began and now - self._ended > IDLE_SECONDS
            wall = (self._ended if idle else now) - self._began
            print(self.steps, f"{wall:.6f} {self.spent:.7f}", int(self.runs), self._tokens, file=self.file)
            self.steps += 1
            if self.steps % BLOCK_STEPS == 0:
                self.file.flush()
        self._began, self._tokens, self.spent = now, tokens, 0.0

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
