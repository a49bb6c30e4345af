"""What `timed_connector` wrote."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    number: int
    wall: float  # seconds
    hooks: float  # CPU seconds
    runs: bool  # the hooks did their work


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
    return [list(block) for does, block in groupby(steps, key=lambda step: step.runs) if does is runs]
