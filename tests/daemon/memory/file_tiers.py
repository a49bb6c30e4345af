"""A host tier over a file, for a pool that a test is, and what its file says."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.memory.interface import WHOLE
from kvferry.radix.pool import PagePool
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.host_tier.rows import FileRows, TierRows, checksum_rows

ROWS, ROW_BYTES, PAGES = 8, 4096, 8
SPACE, OTHER_SPACE, THIRD_SPACE = b"n" * 32, b"m" * 32, b"o" * 32
Ended = tuple[int, list[int], int]


def nothing() -> None: ...


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content(number: int) -> bytes:
    return digest(number) * (ROW_BYTES // 32)


def opened(folder: Path) -> FileRows:
    return FileRows.open(str(folder), pages=ROWS, page_bytes=ROW_BYTES, layout=b"l" * 32, role="decode")


def put(folder: Path, numbers: dict[int, int], space: bytes = SPACE) -> None:
    """row -> number of the page that a daemon before left there."""
    rows = opened(folder)
    for row, number in numbers.items():
        rows.buffer[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content(number)
        sums = checksum_rows(rows.buffer, [row], ROW_BYTES)
        rows.write([row], space, digest(number), bytes(32), sums)
    rows.close()


def named_after_a_kill(folder: Path, copy: Path) -> dict[int, bytes]:
    """row -> digest of the entries that a daemon finds, were this one killed now."""
    shutil.copytree(folder, copy)
    return named_in(copy)


def named_in(folder: Path) -> dict[int, bytes]:
    """row -> digest of the entries, each of which names the bytes in its row."""
    rows = opened(folder)
    found = rows.recover()
    assert found.report.dropped == {}, "an entry is torn"
    assert found.checksums.tolist() == checksum_rows(rows.buffer, found.rows, ROW_BYTES).tolist()
    rows.close()
    return {int(row): found.digests[at].tobytes() for at, row in enumerate(found.rows)}


class DeviceMemory:
    """A pool whose page i holds page number i; `during` runs in the middle of each copy."""

    tier_copies = 1
    shape = SimpleNamespace(row_bytes=ROW_BYTES)

    def __init__(self, during: Callable[[], object] = nothing) -> None:
        self.during = during
        self.pages = {page: content(page) for page in range(PAGES)}
        self.rows = memoryview(b"")

    def pinner(self) -> None: ...

    def attach_rows(self, rows: memoryview) -> None:
        self.rows = rows

    def detach_rows(self) -> None:
        self.rows = memoryview(b"")

    def spill(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
            half = ROW_BYTES // 2
            self.rows[row * ROW_BYTES : row * ROW_BYTES + half] = self.pages[page][:half]
            self.during()
            self.rows[row * ROW_BYTES + half : (row + 1) * ROW_BYTES] = self.pages[page][half:]

    def restore(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
            self.pages[page] = bytes(self.rows[row * ROW_BYTES : (row + 1) * ROW_BYTES])
        self.during()


class Tier:
    """A host tier with a cache, and the copies that it is asked for."""

    def __init__(self, rows: TierRows, memory: DeviceMemory, *, checksums: bool = False) -> None:
        anything: Any = memory
        self.memory = memory
        self.tier = HostTier(anything, rows, ROWS, checksums=checksums)
        self.cache = Cache(PAGES, 4, host_pages=ROWS, host_there=0)
        self.host.log_frees = True
        self.ended: list[Ended] = []

    @property
    def host(self) -> PagePool:
        assert self.cache.host is not None
        return self.cache.host

    async def grow(self, first: bytes = SPACE) -> None:
        await self.tier.grow(self.cache, first, self.forget)

    def forget(self) -> None:
        """As a side does, of what was freed."""
        self.tier.forget(self.cache.take_forgotten())

    def holds(self, number: int, space: bytes = SPACE) -> bool:
        """Whether that page is matched."""
        return space in self.cache.namespaces and self.cache.namespace(space).tree.match(digest(number)).pages == 1

    def start(self, kind: int, page: int, row: int) -> asyncio.Event:
        """Its end is told in `ended` as (number of the page, pages that failed, how many by checksum)."""
        copy: Any = SimpleNamespace(
            kind=kind, device=[page], host=[row], digests=digest(page), parents=bytes(32), outputs=b"\0"
        )
        ended = asyncio.Event()

        def done(number: int, failed: Any, mismatched: int, seconds: float) -> None:
            self.ended.append((number, list(failed), mismatched))
            ended.set()

        self.tier.start(CopyStarted(page, SPACE, copy), done)
        return ended

    async def copy(self, kind: int, page: int, row: int) -> Ended:
        await asyncio.wait_for(self.start(kind, page, row).wait(), 20)
        return self.ended[-1]


def damage(memory: DeviceMemory, row: int) -> None:
    memory.rows[row * ROW_BYTES + 7] ^= 1
