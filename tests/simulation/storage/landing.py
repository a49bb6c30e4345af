"""How a write lands in a slot: in pieces, in any order.

A notification follows all pieces of a write that succeeds. Of one that fails any pieces may land, also long after its
failure was reported; nobody announces them unless they are all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from kvferry.transfer.protocol.slots import Buffer
from tests.simulation.clock import expect

STEP = 8  # bytes: no smaller run is torn
MOST = 4  # pieces
WHOLE = 0.6  # of the writes land in one piece
LATE_SECONDS = 0.05  # that a piece of a failed write may come behind its report


class Piece(NamedTuple):
    """Bytes [start, end) of the slot, as they are in the source so many seconds after the write was posted."""

    delay: float
    start: int
    end: int


def landing(
    source: Buffer, target: Buffer, nbytes: int, random: Random, *, seconds: float, fails: bool = False
) -> list[Piece]:
    """The pieces of a write of the first `nbytes` of `source` to `target`, by their delays. All are there within
    `seconds`, and the notification comes behind that; of a write that `fails` some are, and some of them later."""
    room = min(len(source), len(target))
    expect(0 < nbytes <= room, f"a write of {nbytes} bytes between slots of {len(source)} and {len(target)}")
    cuts: list[int] = []
    if nbytes > STEP and random.random() >= WHOLE:
        places = range(STEP, nbytes, STEP)
        cuts = sorted(random.sample(places, min(len(places), random.randint(1, MOST - 1))))
    ranges = list(zip([0, *cuts], [*cuts, nbytes], strict=True))
    last = seconds + LATE_SECONDS if fails else seconds
    if fails:
        ranges = random.sample(ranges, random.randint(0, len(ranges)))
    return sorted(Piece(random.random() * last, start, end) for start, end in ranges)


def is_whole(pieces: Iterable[Piece], nbytes: int) -> bool:
    """Whether a write of so many bytes has landed with these pieces: else nobody may announce it."""
    at = 0
    for _, start, end in sorted(pieces, key=lambda piece: piece.start):
        if start > at:
            return False
        at = max(at, end)
    return at >= nbytes
