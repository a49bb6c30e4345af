"""When the pieces of a copy are copied: at any moment between its issue and its end, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from tests.simulation.clock import Clock

T = TypeVar("T")

MOST = 4  # pieces of a copy
AT_ONCE, AT_THE_END = 0.3, 0.6  # up to these draws a copy is one piece


def cut(random: Random, nbytes: int, step: int) -> list[tuple[int, int]]:
    """Byte ranges of a part, most often one; cut at multiples of `step`."""
    most = min(MOST, -(-nbytes // step))
    if most < 2 or random.random() < AT_THE_END:
        return [(0, nbytes)]
    cuts = sorted(random.sample(range(step, nbytes, step), random.randint(1, most - 1)))
    return list(zip([0, *cuts], [*cuts, nbytes], strict=True))


def batches(random: Random, items: Sequence[T]) -> list[list[T]]:
    """All of them in any order, in a few batches, most often one."""
    if len(items) < 2 or random.random() < AT_THE_END:
        return [list(items)]
    shuffled = random.sample(items, len(items))
    ends = sorted(random.sample(range(1, len(items)), random.randint(1, min(MOST, len(items)) - 1)))
    return [shuffled[start:end] for start, end in zip([0, *ends], [*ends, len(items)], strict=True)]


def strew(clock: Clock, begins: float, ends: float, copy: Callable[[T], object], pieces: Sequence[T]) -> list[T]:
    """Copies the pieces until `ends`, and gives those that are left for that moment itself."""
    random = clock.random
    if len(pieces) == 1:
        chance = random.random()
        if chance < AT_ONCE and begins <= clock.now:
            copy(pieces[0])
            return []
        if chance < AT_THE_END:
            return [pieces[0]]
    elif pieces:
        clock.counts["copies in pieces"] += 1
    for piece in pieces:
        clock.at(begins + (ends - begins) * random.random(), copy, piece)
    return []
