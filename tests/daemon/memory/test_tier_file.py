"""A host tier over a file: what the file says at each moment of a copy, and which rows are believed when they come
back."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.host_tier.rows import AnonymousRows, FileRows, TierRows, checksum_rows

ROWS, ROW_BYTES, PAGES = 8, 512, 8
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

    def attach_rows(self, rows: memoryview) -> None:
        self.rows = rows

    def detach_rows(self) -> None:
        self.rows = memoryview(b"")

    def spill(self, pages: Int64s, rows: Int64s) -> None:
        for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
            half = ROW_BYTES // 2
            self.rows[row * ROW_BYTES : row * ROW_BYTES + half] = self.pages[page][:half]
            self.during()
            self.rows[row * ROW_BYTES + half : (row + 1) * ROW_BYTES] = self.pages[page][half:]

    def restore(self, pages: Int64s, rows: Int64s) -> None:
        for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
            self.pages[page] = bytes(self.rows[row * ROW_BYTES : (row + 1) * ROW_BYTES])
        self.during()


class Tier:
    """A host tier, and the copies that it is asked for."""

    def __init__(self, rows: TierRows, memory: DeviceMemory, *, checksums: bool = False) -> None:
        anything: Any = memory
        self.memory = memory
        self.tier = HostTier(anything, rows, ROWS, checksums=checksums)
        self.ended: list[Ended] = []
        self.discarded = 0
        self.recovered: dict[bytes, list[int]] = {}

    def recover(self, first: bytes = SPACE, max_namespaces: int = 4) -> None:
        def recover(space: bytes, digests: bytes, parents: bytes, rows: list[int], outputs: bytes) -> None:
            self.recovered[space] = rows

        tiers = SimpleNamespace(discarded_entries=0)
        cache: Any = SimpleNamespace(tiers=tiers, namespace=lambda space: space, recover=recover)
        self.tier.recover(cache, first, max_namespaces)
        self.discarded = tiers.discarded_entries

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


def test_an_entry_is_gone_while_its_row_is_overwritten_and_there_behind_it(tmp_path: Path) -> None:
    folder, kill = tmp_path / "tier", tmp_path / "kill"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory(lambda: shutil.copytree(folder, kill)))
        outcome = await tier.copy(SPILL, 1, 3)
        assert named_in(kill) == {5: digest(105)}, "half of a row is no page"
        assert outcome == (1, [], 0)
        assert named_after_a_kill(folder, tmp_path / "then") == {3: digest(1), 5: digest(105)}
        await tier.tier.close()

    asyncio.run(story())


def test_a_spill_that_failed_leaves_no_entry(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    put(folder, {3: 103})

    def fail() -> None:
        raise OSError("injected")

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory(fail))
        assert await tier.copy(SPILL, 1, 3) == (1, [1], 0)
        assert named_after_a_kill(folder, tmp_path / "then") == {}
        await tier.tier.close()

    asyncio.run(story())


def test_rows_that_were_freed_have_no_entry(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        tier.recover()
        tier.tier.forget([3])
        assert tier.tier.unverified == 1
        assert named_after_a_kill(folder, tmp_path / "then") == {5: digest(105)}
        await tier.tier.close()

    asyncio.run(story())


def test_a_row_of_the_file_is_believed_once_its_checksum_was_right(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        tier.recover()
        assert tier.tier.unverified == 2
        damage(tier.memory, 5)
        for _ in range(2):  # it stays wrong
            assert await tier.copy(RESTORE, 2, 5) == (2, [2], 1)
        assert await tier.copy(RESTORE, 1, 3) == (1, [], 0)
        assert tier.memory.pages[1] == content(103)
        assert tier.tier.unverified == 0
        damage(tier.memory, 3)  # nobody asks again
        assert await tier.copy(RESTORE, 1, 3) == (1, [], 0)
        await tier.tier.close()

    asyncio.run(story())


@pytest.mark.parametrize("checksums", [True, False])
def test_with_checksums_each_restore_is_verified(tmp_path: Path, checksums: bool) -> None:
    async def story() -> None:
        rows = AnonymousRows(str(tmp_path), "rows", ROWS, ROW_BYTES)
        tier = Tier(rows, DeviceMemory(), checksums=checksums)
        await tier.copy(SPILL, 4, 6)
        for _ in range(2):
            assert await tier.copy(RESTORE, 2, 6) == (2, [], 0)
        damage(tier.memory, 6)
        assert await tier.copy(RESTORE, 2, 6) == (2, [2] if checksums else [], int(checksums))
        await tier.copy(SPILL, 5, 6)
        assert await tier.copy(RESTORE, 3, 6) == (3, [], 0), "the checksum is of what is there now"
        await tier.tier.close()

    asyncio.run(story())


def test_namespaces_too_many_are_discarded_in_the_file_too(tmp_path: Path) -> None:
    """That of the model that is served stays, however old, and of the others that written last."""
    folder = tmp_path / "tier"
    put(folder, {0: 100})
    put(folder, {1: 101, 2: 102}, OTHER_SPACE)
    put(folder, {3: 103}, THIRD_SPACE)

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        tier.recover(SPACE, 2)
        assert tier.recovered == {SPACE: [0], THIRD_SPACE: [3]}
        assert (tier.discarded, tier.tier.unverified) == (2, 2)
        assert named_after_a_kill(folder, tmp_path / "then") == {0: digest(100), 3: digest(103)}
        await tier.tier.close()

    asyncio.run(story())


@pytest.mark.parametrize("end", ["halt", "close"])
def test_a_spill_that_runs_at_the_end(tmp_path: Path, end: str) -> None:
    """A daemon that ends in order finds its page again; one whose invariant is broken writes no entry. Neither starts a
    copy more, nor tells of an end."""
    folder = tmp_path / "tier"
    put(folder, {5: 105})
    reached, go_on = threading.Event(), threading.Event()

    def during() -> None:
        reached.set()
        assert go_on.wait(20)

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory(during))
        tier.start(SPILL, 1, 3)
        tier.start(SPILL, 2, 4)  # behind it, on the one thread
        assert await asyncio.to_thread(reached.wait, 20)
        if end == "halt":
            tier.tier.halt()
        closing = asyncio.create_task(tier.tier.close())
        await asyncio.sleep(0)
        tier.start(SPILL, 6, 5)
        go_on.set()
        await asyncio.wait_for(closing, 20)
        assert tier.ended == []

    asyncio.run(story())
    written = {3: digest(1)} if end == "close" else {}
    assert named_after_a_kill(folder, tmp_path / "then") == written, "and row 5 is not what it was"
