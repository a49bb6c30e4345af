"""The host tier's memory: page-major rows (row i is bytes i * page_bytes and on), gone with the daemon or in a file.

A file is one of two, `kvferry-host-<role>.rows` with the rows alone and `kvferry-host-<role>.index`. Who has them open
holds an exclusive flock on both. They are never unlinked or renamed, only cut and refilled: a lock on a file that has
lost its name would keep nobody out. Errors of the disk under a mapping (SIGBUS) are out of scope.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.transfer.host_tier.index import (
    ENTRY,
    ENTRY_BYTES,
    HEADER_BYTES,
    DropReason,
    Header,
    Recovered,
    RecoveryReport,
    RowIndex,
    Rows,
    as_rows,
)
from kvferry.transfer.mapping.memory_room import MemoryRoom, is_memory, lacks
from kvferry.transfer.mapping.populate import POPULATE_READ, let_go, populate, reserve
from kvferry.transfer.mapping.segment import FileLock, Segment

_ROLE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
SPARED = 16  # a part of what the tier takes that is left free besides: all would have the system end a process
_COUNTED_AT_A_TIME = 1 << 13  # entries
BETWEEN_SECONDS = 0.05  # in which another may let go of a file


def wanted_in_memory(start: int, end: int) -> int:
    """Bytes that must be free in memory for bytes [start, end) of a tier to be made: with a part of all up to there
    that is left free."""
    return end - start + end // SPARED


def stem_of(directory: str, role: str) -> str:
    """The path of both files of a role's tier, less ".rows" and ".index"."""
    return os.path.join(directory, f"kvferry-host-{role}")


class TierRows(Protocol):
    """Memory of a host tier: addresses from the start, bytes as they are made."""

    @property
    def buffer(self) -> memoryview:
        """pages * page_bytes bytes, writable once they are made."""

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory from when they are made, for which `lacks` asks; else on a disk, and what is read
        of them can be dropped from memory as long as it is not pinned."""

    def lacks(self, start: int, end: int) -> str:
        """Why these bytes cannot be made; "" where they may."""

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        """Has these bytes be there, near those CPUs. On a thread. OSError, and then they are not to be used."""

    def unmake(self, start: int, end: int) -> None:
        """Lets go of what there is of these bytes, as far as it can; nobody uses them."""

    def recover(self, first: int, last: int) -> Recovered | None:
        """What rows [first, last), which are made, hold of an earlier run; None where they can hold nothing. Call it
        once for each, on a thread, before anything is written to them."""

    def close(self) -> None:
        """Unmaps. The memory stays while a view of `buffer` is alive. Idempotent."""


class AnonymousRows:
    """Rows in memory of this process, with which they end."""

    in_memory = True

    def __init__(self, pages: int, page_bytes: int) -> None:
        """OSError where a process cannot have so many addresses."""
        self._memory = reserve(pages * page_bytes)
        self.buffer = memoryview(self._memory)

    def lacks(self, start: int, end: int) -> str:
        return lacks(wanted_in_memory(start, end))

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        populate(self.buffer[start:end], cpus)

    def unmake(self, start: int, end: int) -> None:
        let_go(self.buffer[start:end])

    def recover(self, first: int, last: int) -> Recovered | None:
        return None

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._memory.close()


class NoRows:
    """Rows that cannot be had, and why."""

    in_memory = True

    def __init__(self, why: str, *, of_file: bool) -> None:
        """`of_file`: there may be a file with what an earlier run had."""
        self.buffer = memoryview(b"")
        self.of_file = of_file
        self._why = why

    def lacks(self, start: int, end: int) -> str:
        return self._why

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        raise OSError(errno.ENOMEM, self._why)

    def unmake(self, start: int, end: int) -> None:
        """There is nothing."""

    def recover(self, first: int, last: int) -> Recovered | None:
        return None

    def close(self) -> None:
        """There is nothing."""


class FileRows:
    """Rows in a named file, with the index by which the next daemon finds what is in them.

    Copy threads may write to rows and read them, and write entries, one at a time; of one row's entry one thread at a
    time does anything.
    """

    def __init__(self, stem: str, rows: Segment, index: Segment, fds: list[int], opened: RowsOpened) -> None:
        """Use `open`."""
        self.buffer = rows.buffer
        self.in_memory = is_memory(fds[0])
        self._stem = stem
        self._segments = [rows, index]
        self._fds = fds
        self._opened = opened
        entries = np.frombuffer(index.buffer, ENTRY, opened.header.pages, HEADER_BYTES)
        index_fd = fds[1]
        self._index = RowIndex(entries, opened.header, lambda header: _store(index_fd, header))

    @staticmethod
    def open(
        directory: str, *, pages: int, page_bytes: int, layout: bytes, role: str, patience_s: float = 0.0
    ) -> FileRows:
        """Opens, makes, resizes or replaces the two files, 0600; makes the directory, 0700, where it is missing.

        A file that is damaged, or of another layout, is one without entries then; `recover` tells why. Where the
        number of pages changed, the rows that are still there keep their entries. `patience_s`: so long it waits for
        another that holds it, on this thread.

        ValueError for an argument out of bounds. OSError names the file: BlockingIOError where another holds it,
        ELOOP for a symbolic link, EINVAL for what is no regular file, PermissionError where it is not ours; ENOSPC
        or EFBIG where the disk has no room for the index, and then files that can be used keep what they had.
        """
        wanted = Header(page_bytes, pages, layout)
        if _ROLE.fullmatch(role) is None:
            raise ValueError(f"role is {role[:64]!r}; it must match {_ROLE.pattern}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        stem = stem_of(directory, role)
        with contextlib.ExitStack() as undo:
            fds: list[int] = []
            for path in (f"{stem}.rows", f"{stem}.index"):
                fds.append(_open_locked(path, patience_s))
                undo.callback(os.close, fds[-1])
            opened = _prepare(stem, fds[0], fds[1], wanted)
            rows = Segment(f"{stem}.rows", opened.header.rows_bytes, fds[0])
            undo.callback(rows.close)
            index = Segment(f"{stem}.index", opened.header.index_bytes, fds[1])
            undo.callback(index.close)
            made = FileRows(stem, rows, index, fds, opened)
            undo.pop_all()
            return made

    def clear(self, rows: Rows) -> None:
        """See `RowIndex.clear`."""
        self._index.clear(rows)

    def named(self, namespace_id: bytes, first: int) -> NDArray[np.int64]:
        """See `RowIndex.named`."""
        return self._index.named(namespace_id, first)

    def write(
        self,
        rows: Rows,
        namespace_id: bytes,
        digests: bytes,
        parents: bytes,
        checksums: NDArray[np.uint64],
        flags: int | NDArray[np.uint32] = 0,
    ) -> None:
        """See `RowIndex.write`."""
        self._index.write(rows, namespace_id, digests, parents, checksums, flags)

    def lacks(self, start: int, end: int) -> str:
        fd = self._fds[0]
        if self.in_memory:  # where too much ends processes: rows that an earlier run let go of may lie before others
            already = _bytes_there(fd, start, end)
            if already < end - start and (lack := lacks(wanted_in_memory(start + already, end))):
                return lack
        there = os.fstat(fd).st_blocks * 512  # its first rows, as they are made in their order
        wanted, free = end - max(start, there), disk_room(fd)
        return "" if free is None else MemoryRoom(f"the disk of {self._stem}.rows", free).lacks(wanted)

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        """A hole (of files that are new, or were copied) would be a bus error once the disk is full."""
        path, fd = f"{self._stem}.rows", self._fds[0]
        if self.in_memory:  # a hole that is read is made; to allocate it would do so on this thread, and anywhere
            with contextlib.suppress(OSError):  # what cannot be had is said by the file's name
                populate(self.buffer[start:end], cpus, how=POPULATE_READ)
            _allocate(path, fd, start, end - start)
        else:
            _allocate(path, fd, start, end - start)
            populate(self.buffer[start:end], cpus, how=POPULATE_READ)
        # Else each entry that the event loop clears would wait for its page: 10 us and more.
        size = self._opened.header.page_bytes
        first, last = (HEADER_BYTES + at // size * ENTRY_BYTES for at in (start, end))
        populate(self._segments[1].buffer[first:last])

    def unmake(self, start: int, end: int) -> None:
        """The disk has its room again, but for rows that entries name: a later daemon may come to those."""
        size = self._opened.header.page_bytes
        with contextlib.suppress(OSError):  # a disk that cannot
            for first, behind in self._index.unused(start // size, -(-end // size)):
                let_go(self.buffer[first * size : behind * size], mmap.MADV_REMOVE)

    def recover(self, first: int = 0, last: int | None = None) -> Recovered:
        """All valid entries of these rows, or of all; what became of the others, here and, with row 0, at `open`."""
        found = self._index.recover(first, last)
        if first > 0:
            return found
        dropped = {**self._opened.dropped, **found.report.dropped}
        report = RecoveryReport(found.report.entries_valid, dropped, self._opened.replaced)
        return dataclasses.replace(found, report=report)

    def close(self) -> None:
        """Unmaps and lets the locks go. Views of `buffer` keep the memory, and with it the locks. Idempotent."""
        self._index.close()
        while self._segments:
            self._segments.pop().close()  # a mapping has its own duplicate of the descriptor: the lock ends with both
        while self._fds:
            os.close(self._fds.pop())


@dataclasses.dataclass(frozen=True, slots=True)
class RowsOpened:
    """The outcome of opening the files."""

    header: Header
    dropped: dict[DropReason, int]
    replaced: DropReason | None


def checksum_rows(buffer: memoryview, rows: Rows, page_bytes: int) -> NDArray[np.uint64]:
    """(n,): XXH3 of the rows' bytes. For copy threads. ValueError for a row that is not there."""
    at = as_rows(rows, len(buffer) // page_bytes)
    starts = (at * page_bytes).tolist()
    # The object and not the function: before xxhash 4 only the object lets the GIL go while it reads.
    found = [xxhash.xxh3_64(buffer[start : start + page_bytes]).intdigest() for start in starts]
    return np.array(found, np.uint64)


def verify_rows(buffer: memoryview, rows: Rows, page_bytes: int, expected: NDArray[np.uint64]) -> list[int]:
    """The rows whose bytes do not have the expected checksum. For copy threads. ValueError as for `checksum_rows`."""
    if expected.shape != (len(rows),):
        raise ValueError(f"expected has shape {expected.shape}; it must be ({len(rows)},)")
    differs = checksum_rows(buffer, rows, page_bytes) != expected
    return [int(row) for row in np.asarray(rows, np.int64)[differs]]


def _open_locked(path: str, patience_s: float) -> int:
    """A descriptor that holds the lock, which another may have for so long; the file is made where it is missing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link; it must be a regular file", path) from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", path)
        if status.st_nlink != 1:  # to replace its contents would destroy the other file, too
            raise OSError(errno.EMLINK, f"has {status.st_nlink} names; it must have 1", path)
        end = time.monotonic() + patience_s
        while not FileLock(path, fd).try_acquire():
            if time.monotonic() >= end:
                raise BlockingIOError(errno.EWOULDBLOCK, "is in use: another has it locked", path)
            time.sleep(BETWEEN_SECONDS)
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _prepare(stem: str, rows_fd: int, index_fd: int, wanted: Header) -> RowsOpened:
    """Brings both files to the wanted size. Killed half-way, it leaves files that the next `open` understands."""
    old = Header.decode(os.pread(index_fd, HEADER_BYTES, 0))
    replaced = _unusable(rows_fd, index_fd, old, wanted)
    _check_space(stem, index_fd, wanted)
    dropped: dict[DropReason, int] = {}
    if old is None or replaced is not None:
        if old is not None and replaced is not None:
            dropped[replaced] = _entries_in_use(index_fd, 0, old.pages)
        kept_index = 0
        header = wanted if old is None else dataclasses.replace(wanted, generations=old.generations)
    else:
        kept = dataclasses.replace(old, pages=min(old.pages, wanted.pages))
        lost = _entries_in_use(index_fd, kept.pages, old.pages)
        if lost:
            dropped[DropReason.PAGES_DIFFER] = lost
        _store(index_fd, kept)
        kept_index = kept.index_bytes
        header = dataclasses.replace(old, pages=wanted.pages)
    # Cut first: what is added then is zeros, and no entry of an earlier size comes back.
    os.ftruncate(index_fd, kept_index)
    # On a tmpfs rows keep their bytes, of other pages, too: to let go of 6 GiB takes a second (on a disk they would be
    # read for nothing as rows are made). Nobody reads a row as a page but by an entry, of which none is left here, or
    # once it was written anew: as a row that was freed.
    if replaced is not None and not is_memory(rows_fd):
        os.ftruncate(rows_fd, 0)
    kept_rows = min(os.fstat(rows_fd).st_size, header.rows_bytes)
    try:
        _resize(f"{stem}.rows", rows_fd, header.rows_bytes)  # `FileRows.make` has their bytes be there
        _allocate(f"{stem}.index", index_fd, 0, header.index_bytes)
    except OSError:
        os.ftruncate(index_fd, kept_index)
        os.ftruncate(rows_fd, kept_rows)
        raise
    _store(index_fd, header)
    return RowsOpened(header, {reason: count for reason, count in dropped.items() if count}, replaced)


def _unusable(rows_fd: int, index_fd: int, old: Header | None, wanted: Header) -> DropReason | None:
    """Why the files must be replaced; None where they are fine, or new."""
    rows_size, index_size = os.fstat(rows_fd).st_size, os.fstat(index_fd).st_size
    if old is None:
        if index_size >= HEADER_BYTES:
            return DropReason.BAD_HEADER
        return DropReason.TRUNCATED if rows_size or index_size else None
    if old.page_bytes != wanted.page_bytes:
        return DropReason.PAGE_BYTES_DIFFERS
    if old.layout != wanted.layout:
        return DropReason.LAYOUT_DIFFERS
    if rows_size < old.rows_bytes or index_size < old.index_bytes:
        return DropReason.TRUNCATED
    return None


def _entries_in_use(index_fd: int, first: int, last: int) -> int:
    """The number of entries of [first, last) in use, as far as the file goes."""
    count = 0
    for start in range(first, last, _COUNTED_AT_A_TIME):
        entries = min(_COUNTED_AT_A_TIME, last - start)
        data = os.pread(index_fd, entries * ENTRY_BYTES, HEADER_BYTES + start * ENTRY_BYTES)
        found = np.frombuffer(data, ENTRY, len(data) // ENTRY_BYTES)
        count += int(np.count_nonzero(found["state"]))
        if len(found) < entries:
            break
    return count


def _check_space(stem: str, index_fd: int, wanted: Header) -> None:
    """OSError before anything is touched: an allocation that fails may fill the disk for a while."""
    free = disk_room(index_fd)
    more = wanted.index_bytes - os.fstat(index_fd).st_blocks * 512
    if free is not None and more > free:
        raise OSError(errno.ENOSPC, f"needs {more} bytes more; the disk has {free}", f"{stem}.index")


def _bytes_there(fd: int, start: int, end: int) -> int:
    """The bytes of [start, end) that are no hole, in a file of a tmpfs: what was written or read once."""
    there, at = 0, start
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole to its end
                break
            raise
        behind = min(os.lseek(fd, at, os.SEEK_HOLE), end)
        there, at = there + max(0, behind - at), behind
    return there


def disk_room(file: int | os.PathLike[str]) -> int | None:
    """Bytes that the disk of an open file, or of a folder, has left; None: it has no limit."""
    disk = os.statvfs(file)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def _resize(path: str, fd: int, nbytes: int) -> None:
    with _named(path, nbytes):
        os.ftruncate(fd, nbytes)


def _allocate(path: str, fd: int, start: int, nbytes: int) -> None:
    with _named(path, nbytes):
        os.posix_fallocate(fd, start, nbytes)


@contextlib.contextmanager
def _named(path: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot have {nbytes} bytes: {error.strerror}", path) from None


def _store(index_fd: int, header: Header) -> None:
    """One write within one page of memory: a killed process has done all of it or nothing."""
    os.pwrite(index_fd, header.encode(), 0)
