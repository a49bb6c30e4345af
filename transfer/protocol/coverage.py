"""The bytes of a transfer that were announced on a lane, those that were written, and the rows that this completes.

Bytes are numbered from 0 at the start of the transfer's run of rows, pages from 0 likewise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class IntervalSet:
    """A set of integers as sorted disjoint half-open intervals; neighbours are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def intervals(self) -> list[tuple[int, int]]:
        """The intervals (start, end), ascending."""
        return list(zip(self._starts, self._ends, strict=True))

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any integer of [start, end) is in the set."""
        if start >= end:
            return False
        i = bisect_right(self._ends, start)  # the first interval that ends behind start
        return i < len(self._starts) and self._starts[i] < end

    def contains(self, start: int, end: int) -> bool:
        """Whether every integer of [start, end) is in the set."""
        if start >= end:
            return True
        i = bisect_right(self._ends, start)
        return i < len(self._starts) and self._starts[i] <= start and end <= self._ends[i]

    def around(self, value: int) -> tuple[int, int]:
        """The interval that has `value`, which is in the set."""
        i = bisect_right(self._ends, value)
        assert i < len(self._starts) and self._starts[i] <= value, f"{value} is in no interval"
        return self._starts[i], self._ends[i]

    def count_with(self, start: int, end: int) -> int:
        """The number of intervals there would be with [start, end) added."""
        if start >= end:
            return len(self)
        low, high = self._melting(start, end)
        return len(self) - (high - low) + 1

    def add(self, start: int, end: int) -> None:
        """Adds [start, end)."""
        if start >= end:
            return
        low, high = self._melting(start, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def _melting(self, start: int, end: int) -> tuple[int, int]:
        """low, high: intervals low..high-1 touch or overlap [start, end) and would melt into it."""
        return bisect_left(self._ends, start), bisect_right(self._starts, end)


class Coverage:
    """The coverage of one transfer on one lane. A range is claimed when its notification is believed, written when it
    is copied."""

    def __init__(self, *, pages: int, page_bytes: int) -> None:
        if pages < 1:
            raise ValueError(f"pages is {pages}, must be at least 1")
        if page_bytes < 1:
            raise ValueError(f"page_bytes is {page_bytes}, must be at least 1")
        self._pages = pages
        self._page_bytes = page_bytes
        self._claimed = IntervalSet()
        self._written = IntervalSet()
        self._reported = bytearray(pages)
        self._reported_pages = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole transfer."""
        return self._pages * self._page_bytes

    @property
    def complete(self) -> bool:
        """Whether every page was reported."""
        return self._reported_pages == self._pages

    def overlaps(self, start: int, nbytes: int) -> bool:
        """Guard: whether some of these bytes were claimed before."""
        return self._claimed.overlaps(start, start + nbytes)

    def ranges_with(self, start: int, nbytes: int) -> int:
        """Guard: how many separate ranges would be claimed if these bytes were, too."""
        return self._claimed.count_with(start, start + nbytes)

    def covered(self, start: int, nbytes: int) -> range:
        """Guard: of the pages in which these written bytes lie, those whose every byte was written."""
        low, high = self._written.around(start)
        touched = self.touched(start, nbytes)
        return range(max(touched.start, -(-low // self._page_bytes)), min(touched.stop, high // self._page_bytes))

    def claim(self, start: int, nbytes: int) -> None:
        """Announces a range that lies in the transfer and overlaps none claimed before."""
        assert nbytes > 0
        assert start >= 0
        assert start + nbytes <= self.nbytes
        self._claimed.add(start, start + nbytes)

    def written(self, start: int, nbytes: int) -> list[int]:
        """A claimed range now lies in its pages: the pages which that completes, ascending, each reported once."""
        assert self._claimed.contains(start, start + nbytes)
        self._written.add(start, start + nbytes)
        pages = self.covered(start, nbytes)
        reported = slice(pages.start, pages.start + len(pages))
        before = self._reported[reported]
        done = [page for page, was in zip(pages, before, strict=True) if not was] if any(before) else list(pages)
        self._reported[reported] = bytes([1]) * len(pages)
        self._reported_pages += len(done)
        return done

    def touched(self, start: int, nbytes: int) -> range:
        """The pages in which these bytes lie."""
        return range(start // self._page_bytes, (start + nbytes - 1) // self._page_bytes + 1)
