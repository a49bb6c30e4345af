"""The pieces in which a write lands."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.clock import Violation
from tests.simulation.storage.landing import LATE_SECONDS, MOST, STEP, Piece, is_whole, landing

SLOT = bytes(range(200))


def landed(pieces: list[Piece]) -> bytes:
    target = bytearray(len(SLOT))
    for _, start, end in pieces:
        target[start:end] = SLOT[start:end]
    return bytes(target)


@pytest.mark.parametrize("nbytes", [1, STEP, STEP + 1, 96, 199, 200])
def test_a_write_that_succeeds_is_all_there_in_its_time(nbytes: int) -> None:
    random, seen = Random(1), set[int]()
    for _ in range(500):
        pieces = landing(SLOT, bytearray(200), nbytes, random, seconds=0.5)
        seen.add(len(pieces))
        assert landed(pieces) == SLOT[:nbytes].ljust(200, b"\0")
        assert sum(end - start for _, start, end in pieces) == nbytes, "no byte comes twice"
        assert all(0 <= delay <= 0.5 for delay, _, _ in pieces) and pieces == sorted(pieces)
        assert is_whole(pieces, nbytes)
    assert 1 in seen and max(seen) == min(MOST, -(-nbytes // STEP))


def test_pieces_come_in_any_order() -> None:
    random = Random(2)
    torn = [pieces for _ in range(500) if len(pieces := landing(SLOT, SLOT, 200, random, seconds=1.0)) > 1]
    first = sum(pieces[0].start == 0 for pieces in torn)
    assert 0 < first < len(torn), "a header may be there before its payload, or behind it"


def test_of_a_write_that_fails_any_pieces_land() -> None:
    random, whole, nothing, part, late = Random(3), 0, 0, 0, 0
    for _ in range(500):
        pieces = landing(SLOT, SLOT, 200, random, seconds=0.01, fails=True)
        got = landed(pieces)
        assert all(got[start:end] == SLOT[start:end] for _, start, end in pieces)
        whole += is_whole(pieces, 200)
        nothing += not pieces
        part += bool(pieces) and not is_whole(pieces, 200)
        late += any(delay > 0.01 for delay, _, _ in pieces)
        assert all(delay <= 0.01 + LATE_SECONDS for delay, _, _ in pieces)
        assert is_whole(pieces, 200) == (got == SLOT)
    assert whole and nothing and part and late


def test_the_same_chance_gives_the_same_pieces() -> None:
    one, other = (landing(SLOT, SLOT, 200, Random(4), seconds=1.0, fails=True) for _ in range(2))
    assert one == other


@pytest.mark.parametrize(("source", "target", "nbytes"), [(10, 20, 11), (20, 10, 11), (20, 20, 0)])
def test_no_write_goes_past_a_slot(source: int, target: int, nbytes: int) -> None:
    with pytest.raises(Violation, match=f"a write of {nbytes} bytes between slots of {source} and {target}"):
        landing(bytes(source), bytes(target), nbytes, Random(5), seconds=1.0)
    Violation.first = None
