"""The two files of a host tier, which outlive its daemons: every store is known in its order, and may be lost or torn
when one ends.

The rows' bytes and the index's are the product's: `FileRows` and `RowIndex` work on them, and `_prepare` opens them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.host_tier.index import ENTRY, ENTRY_BYTES, HEADER_BYTES, Header, RowIndex
from kvferry.transfer.host_tier.rows import FileRows, RowsOpened, _prepare

End = Literal["killed", "power", "closed"]

KEPT = 256  # stores, of which any may be lost with the power: those before are on the disk
SYNCED = 0.01  # of a store: the kernel writes all back behind it
KILLED_BEFORE = 6  # stores at most: whoever looks behind a kill may take it to be that much earlier
WORD = 4  # bytes that are stored at once
BLOCK = 4096  # bytes of the index that are written back at once; of the rows, a row


@dataclass(frozen=True, slots=True)
class Store:
    """Cells that one store overwrote, in their order, and what they held."""

    memory: bytearray
    cells: list[tuple[int, bytes]]
    whole: bool = False  # a kill does not tear it


class StoreLog:
    """What one daemon stored, and no disk has for sure."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.stores: deque[Store] = deque(maxlen=KEPT)

    def note(self, memory: bytearray, cells: list[tuple[int, int]], *, whole: bool = False) -> None:
        """Before the store of these (first byte, bytes)."""
        if self._random.random() < SYNCED:
            self.sync()
        self.stores.append(Store(memory, [(at, bytes(memory[at : at + size])) for at, size in cells], whole))

    def sync(self) -> None:
        self.stores.clear()


class LoggedEntries(np.ndarray[Any, Any]):
    """The index's entries, or a field of them: an assignment is noted before it is made."""

    log: StoreLog
    memory: bytearray
    first: int  # byte of the file where row 0 has it
    size_each: int

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        if not isinstance(key, str):
            return found
        assert self.dtype.fields is not None
        return logged(found, self.log, self.memory, self.first + self.dtype.fields[key][1])

    def __setitem__(self, key: Any, value: Any) -> None:
        rows = (key if isinstance(key, np.ndarray) else np.arange(len(self))[key]).ravel().tolist()
        if rows:
            self.log.note(self.memory, [(self.first + row * ENTRY_BYTES, self.size_each) for row in rows])
        np.asarray(self)[key] = value


def logged(entries: NDArray[Any], log: StoreLog, memory: bytearray, first: int) -> LoggedEntries:
    made = entries.view(LoggedEntries)
    made.log, made.memory, made.first = log, memory, first
    made.size_each = made.itemsize * math.prod(made.shape[1:])
    return made


class SimRows(FileRows):
    """The files as one daemon has them open: `FileRows`, over bytes in place of mappings."""

    in_memory = True

    def __init__(self, disk: SimDisk, log: StoreLog, opened: RowsOpened) -> None:
        self._disk, self._log, self._opened = disk, log, opened
        self._rows, self._header = disk.rows, disk.index
        self.buffer = memoryview(disk.rows).toreadonly()  # `put` alone writes there
        self._segments, self._fds = [], []
        entries = np.frombuffer(disk.index, ENTRY, opened.header.pages, HEADER_BYTES)
        watched = logged(entries, log, disk.index, HEADER_BYTES)
        self._index = RowIndex(watched, opened.header, self._store)

    @property
    def disk(self) -> SimDisk:
        return self._disk

    def lacks(self, start: int, end: int) -> str:
        return ""

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        """They are there."""

    def unmake(self, start: int, end: int) -> None:
        """They stay."""

    def of_first(self, nbytes: int) -> NDArray[np.uint8]:
        """From which sessions send."""
        return np.frombuffer(self.disk.rows, np.uint8)[:nbytes]

    def put(self, at: int, data: bytes) -> None:
        """Bytes of rows, by a copy."""
        self._log.note(self._rows, [(at, len(data))])
        self._rows[at : at + len(data)] = data

    def damage(self, row: int, byte: int) -> None:
        """The medium lost a bit of it."""
        self._rows[row * self._opened.header.page_bytes + byte] ^= 0x10
        self._disk.note_damage(row)

    def close(self) -> None:
        super().close()
        self._disk.closed(self._log)

    def _store(self, header: Header) -> None:
        data = header.encode()
        self._log.note(self._header, [(0, len(data))], whole=True)
        self._header[: len(data)] = data


class SimDisk:
    def __init__(self, random: Random, page_bytes: int) -> None:
        self._random = random
        self._page_bytes = page_bytes
        self.rows, self.index = bytearray(), bytearray()
        self._damaged: dict[int, set[bytes]] = {}  # row -> what it held, once, in place of what was written to it
        self.ended: End = "closed"  # how its last daemon did
        self.left: dict[int, bytes] = {}  # rows that the next one must find, and what they hold
        self.tenants: dict[bytes, bytes] = {}  # of all that was ever written
        self._log = StoreLog(random)

    def open(self, pages: int, layout: bytes) -> SimRows:
        """What the daemon before left, brought to this size, or replaced, by the product."""
        with _file(self.rows) as rows, _file(self.index) as index:
            opened = _prepare("simulated", rows, index, Header(self._page_bytes, pages, layout))
            self.rows, self.index = _content(rows), _content(index)
        self._log = StoreLog(self._random)
        return SimRows(self, self._log, opened)

    def flush(self, namespace_id: bytes, first: int) -> None:
        """Rows from `first` on need not be found again, of this tenant or of all."""
        for row, kept in list(self.left.items()):
            if row >= first and namespace_id in (b"", self.tenants[kept]):
                del self.left[row]

    def closed(self, log: StoreLog) -> None:
        """A daemon let go of them in order, if it still had them."""
        if log is self._log:
            self.ended = "closed"

    def note_damage(self, row: int) -> None:
        """What the row holds now is known to be wrong."""
        self._damaged.setdefault(row, set()).add(self._row(row))

    def is_damaged(self, row: int) -> bool:
        return self._row(row) in self._damaged.get(row, ())

    def _row(self, row: int) -> bytes:
        return bytes(self.rows[row * self._page_bytes : (row + 1) * self._page_bytes])

    def crash(self, how: Literal["killed", "power"]) -> int:
        """The daemon ends at once; what it still believes to store is lost. Returns how many stores were lost, or torn.

        Killed: the last store may be torn, between words, or the kill was some stores earlier than anybody knows.
        Power: of all stores that were not written back those behind any are lost, which is itself torn between any
        bytes; or each block was written back at a moment of its own.
        """
        random, stores = self._random, list(self._log.stores)
        self.ended, self._log = how, StoreLog(random)
        if how == "killed":
            lost = random.choice((0, 0, 1, random.randint(0, KILLED_BEFORE)))
            lost = min(lost, len(stores))
            self._cut(stores, len(stores) - lost, WORD)
        elif random.random() < 0.5:
            lost = random.randint(0, len(stores))
            self._cut(stores, len(stores) - lost, 1)
        else:
            lost = len(stores)
            self._cut_blocks(stores)
        # The dead daemon's views are of the old ones.
        self.rows, self.index = bytearray(self.rows), bytearray(self.index)
        return lost

    def _cut(self, stores: list[Store], first: int, step: int) -> None:
        """Takes back the stores from `first` on, but perhaps for the first bytes of that one."""
        torn = stores[first] if first < len(stores) else None
        for store in reversed(stores[first + 1 :]):
            for at, before in reversed(store.cells):
                store.memory[at : at + len(before)] = before
        if torn is None:
            return
        size = sum(len(before) for _, before in torn.cells)
        left = self._random.randrange(0, size, step) if step == 1 or not torn.whole else 0
        for at, before in torn.cells:
            done = min(left, len(before))
            torn.memory[at + done : at + len(before)] = before[done:]
            left -= done

    def _cut_blocks(self, stores: list[Store]) -> None:
        """Takes back, in each block, what was stored there from some store on."""
        cuts: dict[tuple[bool, int], int] = {}
        for number in reversed(range(len(stores))):
            store = stores[number]
            rows = store.memory is self.rows
            size = self._page_bytes if rows else BLOCK
            for at, before in reversed(store.cells):
                for start in _blocks(at, len(before), size):
                    block = (rows, start // size)
                    if block not in cuts:
                        cuts[block] = self._random.randint(0, len(stores))
                    if number >= cuts[block]:
                        part = before[start - at :][: size - start % size]
                        store.memory[start : start + len(part)] = part


def _blocks(at: int, length: int, size: int) -> Iterator[int]:
    """The first byte of these in each block."""
    yield at
    yield from range((at // size + 1) * size, at + length, size)


@contextlib.contextmanager
def _file(content: bytearray) -> Iterator[int]:
    fd = os.memfd_create("simulated")
    try:
        os.pwrite(fd, content, 0)
        yield fd
    finally:
        os.close(fd)


def _content(fd: int) -> bytearray:
    return bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
