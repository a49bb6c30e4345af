"""The rows of a host tier come to be chunk by chunk, on a thread, while those before them are used; a chunk is made
while the one before it is pinned. Shell.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import mmap
import resource
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.daemon.memory.interface import Pinner
from kvferry.transfer.host_tier.index import DropReason, Recovered, RecoveryReport
from kvferry.transfer.host_tier.rows import NoRows, TierRows, wanted_in_memory
from kvferry.transfer.mapping import memory_room

log = logging.getLogger(__name__)

MAKING = threading.Lock()  # of one tier at a time: what is free for one is not for the other
CHUNK_BYTES = 1 << 30
HUGE_PAGE_BYTES = 2 << 20


class GrowingRows:
    """The rows of a tier, of which the first `pages` are there, and pinned where a pinner is given."""

    def __init__(
        self, rows: TierRows, asked: int, row_bytes: int, pinner: Pinner | None, near: Sequence[frozenset[int]]
    ) -> None:
        """`near`: CPUs beside each device; chunk by chunk it is the next one's turn."""
        self.asked = asked
        self.pages = 0
        self.row_bytes = row_bytes
        self._step = self._rows_of_a_chunk()
        self._rows = rows
        self.can_be_sent = True
        """Whether sessions can send from them: where a device is to read them, they are pinned."""
        self._pinner = pinner
        self._pins: list[object] = []
        self._near = near
        self._ahead = ThreadPoolExecutor(1, "kvferry-host-ahead")
        self._coming: tuple[Future[None], int, int] | None = None  # the chunk behind those that are there, and its rows

    @property
    def buffer(self) -> memoryview:
        """The rows that are there."""
        return self._rows.buffer[: self.pages * self.row_bytes]

    def warn(self) -> None:
        """Says what has no room for all of them, or for all of them pinned."""
        nbytes = self.asked * self.row_bytes
        if isinstance(self._rows, NoRows):
            return  # said as the first chunk fails
        if lack := self._rows.lacks(0, nbytes) or (self._lacks_pinned(0, nbytes) if self._pinner is not None else ""):
            log.warning("host tier of %d bytes: %s; it grows as far as that", nbytes, lack)
        locked = memory_room.to_lock() if self._pinner is not None else None
        if locked is not None and (lack := locked.lacks(nbytes)):
            log.warning(
                "host tier of %d bytes, which are to be pinned: %s; a driver that keeps to it pins no more (ulimit -l)",
                nbytes,
                lack,
            )

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The first row of each chunk, and that behind its last."""
        return ((start, min(start + self._step, self.asked)) for start in range(0, self.asked, self._step))

    def _rows_of_a_chunk(self) -> int:
        """The rows of about CHUNK_BYTES, which end where both a row and a page of memory do: what is pinned apart
        shares no page, and no row lies in two."""
        together = [math.lcm(self.row_bytes, size) for size in (HUGE_PAGE_BYTES, mmap.PAGESIZE)]
        unit = next((nbytes // self.row_bytes for nbytes in together if nbytes <= CHUNK_BYTES), self.asked)
        return max(unit, CHUNK_BYTES // self.row_bytes // unit * unit)

    def parts(self, rows: NDArray[np.int64]) -> list[slice]:
        """The copy of these rows in parts of which none has neighbours on both sides of a chunk's end: they would be
        copied as one, which drivers refuse where they were pinned apart."""
        cut = np.flatnonzero((rows[1:] % self._step == 0) & (rows[1:] == rows[:-1] + 1)) + 1
        ends = [0, *cut.tolist(), len(rows)]
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    def make(self, first: int, last: int) -> Held | None:
        """Has rows [first, last) be there: what they hold of an earlier run. OSError."""
        assert first == self.pages, f"rows from {first} on, {self.pages} are there"
        coming, self._coming = self._coming, None
        if coming is not None:
            coming[0].result()
        else:
            self._touch(first, last)
        pins = len(self._pins)
        try:
            if self._pinner is not None:
                if last < self.asked:
                    behind = min(last + self._step, self.asked)
                    self._coming = self._ahead.submit(self._touch, last, behind), last, behind
                self._pin(self._pinner, first * self.row_bytes, last * self.row_bytes)
            found = self._rows.recover(first, last)
        except Exception:
            self._let_coming_go()
            del self._pins[pins:]
            self._rows.unmake(first * self.row_bytes, last * self.row_bytes)
            raise
        self.pages = last
        return Held.of(found) if found is not None else None

    def _touch(self, first: int, last: int) -> None:
        """Has the memory of rows [first, last) be there. OSError."""
        start, end = first * self.row_bytes, last * self.row_bytes
        with MAKING:
            if lack := self._rows.lacks(start, end):
                raise OSError(errno.ENOMEM, f"rows {first} to {last - 1}: {lack}")
            near = self._near[first // self._step % len(self._near)] if self._near else ()
            try:
                self._rows.make(start, end, near)
            except Exception:  # threads that cannot be had, too
                self._rows.unmake(start, end)
                raise

    def _let_coming_go(self) -> None:
        """The chunk that comes, if it was made, is not to be."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        made, first, last = coming
        if made.exception() is None:
            self._rows.unmake(first * self.row_bytes, last * self.row_bytes)

    def _lacks_pinned(self, start: int, end: int) -> str:
        """Why these bytes may not be pinned. A disk's could be dropped from memory until then; for others it was asked
        as they were made."""
        return "" if self._rows.in_memory else memory_room.lacks(wanted_in_memory(start, end))

    def _pin(self, pinner: Pinner, start: int, end: int) -> None:
        try:
            if lack := self._lacks_pinned(start, end):
                raise OSError(errno.ENOMEM, lack)
            self._pins.append(pinner.pin(self._rows.buffer[start:end]))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            told = f"{error} (memlock limit: {'none' if limit == resource.RLIM_INFINITY else limit})"
            if self._pins:
                raise OSError(errno.ENOMEM, told) from error
            log.warning("the host tier is not pinned, its copies will be slow: %s", told)
            self._pinner = None
            self.can_be_sent = False

    def close(self) -> None:
        """Lets them go: no copy of them runs, and none is being pinned. What is pinned takes seconds, and so may the
        device's context, which goes with the last who holds it."""
        self._let_coming_go()
        self._ahead.shutdown()
        self._pins.clear()
        self._pinner = None
        self._rows.close()


@dataclass(frozen=True, slots=True)
class Held:
    """What rows hold of an earlier run, and the entries of each namespace: that which was written last comes first."""

    found: Recovered
    by_namespace: list[tuple[bytes, NDArray[np.int64]]]

    @staticmethod
    def of(found: Recovered) -> Held:
        entries: dict[bytes, list[int]] = {}
        for number, name in enumerate(found.namespace_ids.view("V32").ravel().tolist()):
            entries.setdefault(name, []).append(number)
        ordered = sorted(entries.items(), key=lambda each: -int(found.generations[each[1]].max()))
        return Held(found, [(name, np.array(numbers, np.int64)) for name, numbers in ordered])

    def rows(self) -> list[int]:
        rows: list[int] = self.found.rows.tolist()
        return rows


class Found:
    """What a file held, over all chunks."""

    def __init__(self) -> None:
        self._valid = 0
        self._dropped: Counter[str] = Counter()
        self._replaced: DropReason | None = None

    def count(self, report: RecoveryReport) -> None:
        self._valid += report.entries_valid
        self._dropped.update({reason.value: count for reason, count in report.dropped.items()})
        self._replaced = self._replaced or report.replaced

    def tell(self) -> int:
        """Logs it: how many entries were dropped; a file whose header is wrong cannot say, and counts as one."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self._dropped.items()) or "none"
        replaced = f"; the file was replaced ({self._replaced.value})" if self._replaced else ""
        level = logging.WARNING if self._dropped or self._replaced else logging.INFO
        log.log(level, "host tier: %d entries found again, dropped: %s%s", self._valid, dropped, replaced)
        return sum(self._dropped.values()) or int(self._replaced is not None)
