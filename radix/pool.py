"""The pages of one tier: states, generations, and free runs from which neighbours are given out together."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedList


class PageState(enum.IntEnum):
    """Every page is in exactly one."""

    FREE = 0
    LEASED = 1  # a request's own
    ARRIVING = 2  # in the tree, its bytes are on their way
    CACHED = 3  # in the tree, readable
    SPILLING = 4  # being copied to the tier below
    RESTORING = 5  # being copied from the tier below
    ORPHANED = 6  # of a lost worker that may still write


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
    """`pages` pages, named 0 to pages - 1. A page's generation grows each time it is freed."""

    def __init__(self, pages: int, *, tier: str = "device") -> None:
        if not 1 <= pages < 1 << 31:
            raise ValueError(f"pages is {pages}; it must be 1 to 2^31 - 1")
        self.pages = pages
        self.tier = tier
        self._states = bytearray(pages)
        self._generations = array("Q", bytes(8 * pages))
        self._counts = [0] * len(PageState)
        self._counts[PageState.FREE] = pages
        self._runs: SortedDict[int, int] = SortedDict({0: pages})  # start -> length, no two adjacent
        self._sizes: SortedList[tuple[int, int]] = SortedList([(pages, 0)])  # (length, start) of the same runs

    @property
    def free(self) -> int:
        """Pages in state FREE."""
        return self._counts[PageState.FREE]

    def counts(self) -> PoolCounts:
        return PoolCounts(*self._counts)

    def state(self, page: int) -> PageState:
        return PageState(self._states[page])

    def generation(self, page: int) -> int:
        return self._generations[page]

    def allocate(self, n: int, state: PageState = PageState.LEASED) -> list[int]:
        """`n` page ids, ascending: the smallest run that holds them all, else as few runs as can be. PoolExhausted."""
        if n < 0:
            raise ValueError(f"n is {n}; it must not be negative")
        if n > self.free:
            raise PoolExhausted(f"{n} pages are wanted, {self.free} of {self.pages} are free")
        assert (PageState.FREE, state) in _ALLOWED, f"a page does not go from FREE to {state.name}"
        taken: list[int] = []
        while len(taken) < n:
            want = n - len(taken)
            index = self._sizes.bisect_left((want, -1))
            length, start = self._sizes[index] if index < len(self._sizes) else self._sizes[-1]
            self._remove_run(start, length)
            if length > want:
                self._add_run(start + want, length - want)
                length = want
            taken.extend(range(start, start + length))
        taken.sort()
        self._set(taken, PageState.FREE, state)
        return taken

    def free_pages(self, pages: Iterable[int]) -> None:
        """Any state but FREE -> FREE, with a new generation."""
        ordered = sorted(pages)
        for page in ordered:
            state = self._states[page]
            assert state != PageState.FREE, f"page {page} is freed twice"
            self._states[page] = PageState.FREE
            self._counts[state] -= 1
            self._generations[page] += 1
        self._counts[PageState.FREE] += len(ordered)
        start = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self._merge_run(ordered[start], i - start)
                start = i

    def move(self, pages: Sequence[int], source: PageState, target: PageState) -> None:
        """Each page must be in `source`, and the change one that the life of a page has; use free_pages for FREE."""
        assert (source, target) in _ALLOWED and source != PageState.FREE, f"no page goes {source.name} -> {target.name}"
        self._set(pages, source, target)

    def check(self) -> None:
        """Recounts everything; for tests."""
        for state in PageState:
            assert self._counts[state] == self._states.count(state), f"count of {state.name} is wrong"
        in_runs: list[int] = []
        end = -1
        for start, length in self._runs.items():
            assert length > 0 and start > end, "free runs touch or overlap"
            end = start + length
            in_runs.extend(range(start, end))
        assert in_runs == [page for page in range(self.pages) if self._states[page] == PageState.FREE]
        assert sorted((length, start) for start, length in self._runs.items()) == list(self._sizes)

    def _set(self, pages: Sequence[int], source: PageState, target: PageState) -> None:
        for page in pages:
            assert self._states[page] == source, f"page {page} is {self.state(page).name}, must be {source.name}"
            self._states[page] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)

    def _merge_run(self, start: int, length: int) -> None:
        index = self._runs.bisect_left(start)
        if index < len(self._runs):
            after, after_length = self._runs.peekitem(index)
            if after == start + length:
                self._remove_run(after, after_length)
                length += after_length
        if index > 0:
            before, before_length = self._runs.peekitem(index - 1)
            if before + before_length == start:
                self._remove_run(before, before_length)
                start, length = before, before_length + length
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._runs[start] = length
        self._sizes.add((length, start))

    def _remove_run(self, start: int, length: int) -> None:
        del self._runs[start]
        self._sizes.remove((length, start))
