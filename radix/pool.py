"""The pages of one tier: states, generations, and free runs from which neighbours are given out together."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedList


class PageState(enum.IntEnum):
    """Every page is in exactly one."""

    FREE = 0
    LEASED = 1  # a request's own
    ARRIVING = 2  # in the tree, its bytes are on their way
    CACHED = 3  # in the tree, readable
    SPILLING = 4  # being copied to the tier below
    RESTORING = 5  # being copied from the tier below
    ORPHANED = 6  # of a lost worker that may still write


# FREE is entered by free_pages only, from any state, and left by allocate only.
_ALLOWED = {
    (PageState.FREE, PageState.LEASED),
    (PageState.FREE, PageState.ARRIVING),
    (PageState.FREE, PageState.RESTORING),
    (PageState.LEASED, PageState.ARRIVING),
    (PageState.LEASED, PageState.CACHED),
    (PageState.LEASED, PageState.ORPHANED),
    (PageState.LEASED, PageState.RESTORING),
    (PageState.ARRIVING, PageState.CACHED),
    (PageState.CACHED, PageState.SPILLING),
    (PageState.SPILLING, PageState.CACHED),
    (PageState.RESTORING, PageState.CACHED),
}
_STATES = tuple(PageState)
_FREE = int(PageState.FREE)  # plain integers are quicker than members of the enumeration
_BYTE = tuple(bytes([state]) for state in PageState)
# A free run is one integer, so that runs sort by length, then start: length << 32 | start.
_START_BITS = 32
_START_MASK = (1 << _START_BITS) - 1


class PoolExhausted(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state; they sum to the pool's size."""

    free: int
    leased: int
    arriving: int
    cached: int
    spilling: int
    restoring: int
    orphaned: int

    @property
    def total(self) -> int:
        return self.free + self.leased + self.arriving + self.cached + self.spilling + self.restoring + self.orphaned


class PagePool:
    """`pages` pages, named 0 to pages - 1. A page's generation grows each time it is freed.

    A page id outside the pool is an IndexError; a page in the wrong state, or named twice, an AssertionError. Neither
    changes anything. Several trees may share a pool. Not thread-safe.
    """

    def __init__(self, pages: int, *, tier: str = "device") -> None:
        if not 1 <= pages < 1 << 31:
            raise ValueError(f"pages is {pages}; it must be 1 to 2^31 - 1")
        self.pages = pages
        self.tier = tier
        self._states = bytearray(pages)
        self._generations = array("Q", bytes(8 * pages))
        self._counts = [0] * len(PageState)
        # Free runs, no two of them adjacent: by start, by end, and by size.
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._by_size: SortedList[int] = SortedList()
        self._counts[PageState.FREE] = pages
        self._add_run(0, pages)

    @property
    def free(self) -> int:
        """Pages in state FREE."""
        return self._counts[_FREE]

    def counts(self) -> PoolCounts:
        return PoolCounts(*self._counts)

    def state(self, page: int) -> PageState:
        self._check_ids((page,))
        return _STATES[self._states[page]]

    def states(self, pages: Sequence[int]) -> bytes:
        """The PageState of each page, one byte each."""
        self._check_ids(pages)
        return bytes(map(self._states.__getitem__, pages))

    def generation(self, page: int) -> int:
        self._check_ids((page,))
        return self._generations[page]

    def allocate(self, n: int, state: PageState = PageState.LEASED) -> list[int]:
        """`n` page ids, ascending: the smallest run that holds them all, else as few runs as can be.

        PoolExhausted if fewer are free.
        """
        if n < 0:
            raise ValueError(f"n is {n}; it must not be negative")
        if n > self.free:
            raise PoolExhausted(f"{n} {self.tier} pages are wanted, {self.free} of {self.pages} are free")
        assert (PageState.FREE, state) in _ALLOWED, f"a page does not go from FREE to {state.name}"
        taken: list[int] = []
        want, runs, fill = n, self._by_size, _BYTE[state]
        while want > 0:
            run = runs[-1]
            if run >= want << _START_BITS:
                run = next(runs.irange(want << _START_BITS))
            start, length = run & _START_MASK, run >> _START_BITS
            self._remove_run(start, length)
            if length > want:
                self._add_run(start + want, length - want)
                length = want
            self._states[start : start + length] = fill * length
            taken.extend(range(start, start + length))
            want -= length
        taken.sort()
        self._counts[_FREE] -= n
        self._counts[state] += n
        return taken

    def free_pages(self, pages: Iterable[int]) -> None:
        """Any state but FREE -> FREE, with a new generation."""
        runs = self._runs(pages)
        states, counts, generations = self._states, self._counts, self._generations
        for start, length in runs:
            free = states.find(_FREE, start, start + length)
            assert free < 0, f"page {free} is freed twice"
        for start, length in runs:
            end = start + length
            before = states[start:end]
            for state in set(before):
                counts[state] -= before.count(state)
            counts[_FREE] += length
            states[start:end] = bytes(length)
            for page in range(start, end):
                generations[page] += 1
            self._merge_run(start, length)

    def move(self, pages: Iterable[int], source: PageState, target: PageState) -> None:
        """Each page must be in `source`, and the change one that the life of a page has; use free_pages for FREE."""
        assert source != PageState.FREE and (source, target) in _ALLOWED, f"no page goes {source.name} -> {target.name}"
        runs = self._runs(pages)
        states, moved, value = self._states, 0, int(source)
        for start, length in runs:
            moved += length
            if states.count(value, start, start + length) != length:
                wrong = next(page for page in range(start, start + length) if states[page] != source)
                raise AssertionError(f"page {wrong} is {self.state(wrong).name}, must be {source.name}")
        for start, length in runs:
            states[start : start + length] = _BYTE[target] * length
        self._counts[source] -= moved
        self._counts[target] += moved

    def check(self) -> None:
        """Recounts everything; for tests."""
        for state in PageState:
            assert self._counts[state] == self._states.count(state), f"count of {state.name} is wrong"
        in_runs: list[int] = []
        end = -1
        for start, length in sorted(self._length_at.items()):
            assert length > 0 and start > end, "free runs touch or overlap"
            end = start + length
            in_runs.extend(range(start, end))
        assert in_runs == [page for page in range(self.pages) if self._states[page] == PageState.FREE]
        assert {start + length: start for start, length in self._length_at.items()} == self._start_before
        sizes = [length << _START_BITS | start for start, length in self._length_at.items()]
        assert sorted(sizes) == list(self._by_size)

    def _check_ids(self, pages: Sequence[int]) -> None:
        # A negative index would silently name a page from the end.
        if pages and (min(pages) < 0 or max(pages) >= self.pages):
            wrong = next(page for page in pages if not 0 <= page < self.pages)
            raise IndexError(f"page is {wrong}; it must be 0 to {self.pages - 1}")

    def _runs(self, pages: Iterable[int]) -> list[tuple[int, int]]:
        """(start, length) of the runs of neighbours among `pages`, which need no order; each is checked."""
        ordered = sorted(pages)
        if not ordered:
            return []
        self._check_ids((ordered[0], ordered[-1]))
        start = ordered[0]
        if ordered == list(range(start, start + len(ordered))):
            return [(start, len(ordered))]
        runs: list[tuple[int, int]] = []
        last = start - 1
        for page in ordered:
            if page != last + 1:
                assert page != last, f"page {page} is named twice"
                runs.append((start, last + 1 - start))
                start = page
            last = page
        runs.append((start, last + 1 - start))
        return runs

    def _merge_run(self, start: int, length: int) -> None:
        after = self._length_at.get(start + length)
        if after is not None:
            self._remove_run(start + length, after)
            length += after
        before = self._start_before.get(start)
        if before is not None:
            self._remove_run(before, start - before)
            length += start - before
            start = before
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._by_size.add(length << _START_BITS | start)

    def _remove_run(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        self._by_size.remove(length << _START_BITS | start)
