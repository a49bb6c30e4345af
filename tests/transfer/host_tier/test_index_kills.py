"""The host tier's index, were its process killed between any two stores: an entry is whole or not there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.transfer.host_tier.index import ENTRY, Header, RecoveryReport, RowIndex

ROWS = 4
WORD = np.dtype("<u4")  # one that is aligned is stored at once
LAYOUT, SPACE, FIRST = b"l" * 32, b"n" * 32, bytes(32)


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class Watched(np.ndarray[Any, Any]):
    """Entries, or a field of them, that keep what their memory was before each store, and behind the last."""

    states: list[bytes]

    def __array_finalize__(self, other: object) -> None:
        self.whole: NDArray[np.void] = getattr(other, "whole", self)
        self.states = getattr(other, "states", [])

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.states.append(self.whole.tobytes())


class Memory:
    """An index, and its entries' bytes behind each of its stores."""

    def __init__(self) -> None:
        self.entries = np.zeros(ROWS, ENTRY).view(Watched)
        self.headers = [Header(64, ROWS, LAYOUT)]
        self.index = RowIndex(self.entries, self.headers[0], self.headers.append)

    def write(self, rows: list[int], numbers: list[int]) -> None:
        digests = b"".join(map(digest, numbers))
        self.index.write(rows, SPACE, digests, FIRST * len(rows), np.array(numbers, np.uint64))

    def kills(self, start: bytes) -> Iterator[tuple[int, bytes]]:
        """What a kill can leave of each store: its words up to any, from any on, or one alone; with the number of the
        store."""
        before = np.frombuffer(start, WORD)
        for number, behind in enumerate(self.entries.states):
            after = np.frombuffer(behind, WORD)
            changed = np.flatnonzero(before != after)
            for cut in range(len(changed) + 1):
                for some in (changed[:cut], changed[cut:], changed[cut : cut + 1]):
                    torn = before.copy()
                    torn[some] = after[some]
                    yield number, torn.tobytes()
            before = after

    def found(self, entries: bytes) -> dict[int, bytes]:
        """row -> digest, as the next daemon finds them. None of the entries is one that it must drop."""
        memory = np.frombuffer(bytearray(entries), ENTRY)
        found = RowIndex(memory, self.headers[-1], lambda header: None).recover()
        assert found.report == RecoveryReport(len(found.rows), {}), "an entry that is in use is torn"
        return {int(row): found.digests[at].tobytes() for at, row in enumerate(found.rows)}


@pytest.mark.parametrize("before", ["fresh", "cleared"])
def test_an_entry_comes_whole(before: str) -> None:
    """Its state is stored last: until then there is none, and not one that its checksum alone keeps out."""
    memory = Memory()
    if before == "cleared":
        memory.write([0, 1, 2], [10, 11, 12])
        memory.index.clear([0, 2])
    kept = {1: digest(11)} if before == "cleared" else {}
    start = memory.entries.tobytes()
    memory.entries.states.clear()
    memory.write([2, 0], [20, 21])
    assert len(memory.entries.states) == 2
    seen = []
    for store, entries in memory.kills(start):
        found = memory.found(entries)
        assert found.items() <= {**kept, 2: digest(20), 0: digest(21)}.items()
        assert store == 1 or found == kept, "its other fields are there first"
        seen.append(len(found) - len(kept))
    assert set(seen) == {0, 1, 2}
    assert memory.found(memory.entries.states[-1]) == {**kept, 2: digest(20), 0: digest(21)}


def test_an_entry_goes_whole() -> None:
    memory = Memory()
    memory.write([0, 1, 2], [10, 11, 12])
    start = memory.entries.tobytes()
    memory.entries.states.clear()
    memory.index.clear([0, 2])
    for _, entries in memory.kills(start):
        assert memory.found(entries).items() <= {0: digest(10), 1: digest(11), 2: digest(12)}.items()
    assert memory.found(memory.entries.states[-1]) == {1: digest(11)}
