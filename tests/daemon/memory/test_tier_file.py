"""A host tier over a file: what the file says at each moment of a copy, and which rows are believed when they come
back."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory import host_tier
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.host_tier.rows import AnonymousRows
from tests.daemon.memory.file_tiers import (
    OTHER_SPACE,
    ROW_BYTES,
    ROWS,
    SPACE,
    THIRD_SPACE,
    DeviceMemory,
    Tier,
    content,
    damage,
    digest,
    named_after_a_kill,
    named_in,
    opened,
    put,
)
from tests.system.serving.test_tiers import DAMAGES, damage_files


def test_an_entry_is_gone_while_its_row_is_overwritten_and_there_behind_it(tmp_path: Path) -> None:
    folder, kill = tmp_path / "tier", tmp_path / "kill"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory(lambda: shutil.copytree(folder, kill)))
        await tier.grow()
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
        await tier.grow()
        assert await tier.copy(SPILL, 1, 3) == (1, [1], 0)
        assert named_after_a_kill(folder, tmp_path / "then") == {}
        await tier.tier.close()

    asyncio.run(story())


def test_entries_of_a_long_copy_are_written_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts; none behind the one during which an invariant is found broken."""
    monkeypatch.setattr(host_tier, "WRITTEN_AT_A_TIME", 2)
    folder, rows = tmp_path / "tier", [2, 3, 4, 5, 6]
    digests = b"".join(map(digest, rows))
    copy: Any = SimpleNamespace(
        kind=SPILL, device=rows, host=rows, digests=digests, parents=bytes(len(digests)), outputs=bytes(len(rows))
    )

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        await tier.grow()
        file, threads, sizes, ended = tier.tier._file, set[int](), list[int](), asyncio.Event()
        assert file is not None
        write = file.write

        def seen(some: Any, *given: Any) -> None:
            threads.add(threading.get_ident())
            sizes.append(len(some))
            write(some, *given)

        monkeypatch.setattr(file, "write", seen)
        tier.tier.start(CopyStarted(1, SPACE, copy), lambda *_: ended.set())
        await asyncio.wait_for(ended.wait(), 20)
        assert sizes == [2, 2, 1] and threading.get_ident() not in threads
        assert named_after_a_kill(folder, tmp_path / "then") == {row: digest(row) for row in rows}

        halted = threading.Event()
        monkeypatch.setattr(host_tier.time, "sleep", lambda seconds: (tier.tier.halt(), halted.set()))
        tier.tier.start(CopyStarted(2, SPACE, copy), lambda *_: None)
        assert await asyncio.to_thread(halted.wait, 20)
        await asyncio.wait_for(tier.tier.close(), 20)
        assert sizes[3:] == [2]

    asyncio.run(story())
    assert named_in(folder) == {row: digest(row) for row in rows[:2]}


def test_rows_that_were_freed_have_no_entry(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        await tier.grow()
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
        await tier.grow()
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


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    """As `tests/system/serving/test_tiers.py` has it of whole daemons: no wrong byte comes back."""
    numbers = {row: 100 + row for row in range(ROWS)}
    put(tmp_path, numbers)
    damage_files(damage, tmp_path, ROW_BYTES)

    async def story() -> None:
        tier = Tier(opened(tmp_path), DeviceMemory())
        await tier.grow()
        held = [row for row in range(ROWS) if tier.holds(numbers[row])]
        wrong = 0
        for row in held:
            number, failed, mismatched = await tier.copy(RESTORE, 1, row)
            assert failed == [number] * mismatched
            assert mismatched or tier.memory.pages[1] == content(numbers[row])
            wrong += mismatched
        lost = ROWS - len(held)
        assert (wrong, lost) == ((ROWS, 0) if damage == "flipped rows" else (0, lost))
        assert (lost > 0) == (tier.cache.tiers.discarded_entries > 0) == (damage != "flipped rows")
        await tier.tier.close()

    asyncio.run(story())


class Gate:
    """Spills wait there."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def spill(self, *_: object) -> None:
        self.reached.set()
        assert self.go_on.wait(20)


def test_a_restore_is_not_behind_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which as many run as there are threads for, and more wait."""

    async def story() -> None:
        tier, gate = Tier(AnonymousRows(ROWS, ROW_BYTES), DeviceMemory()), Gate()
        await tier.grow()
        await tier.copy(SPILL, 4, 6)
        monkeypatch.setattr(tier.memory, "spill", gate.spill)
        spills = [tier.start(SPILL, page, row) for page, row in ((1, 1), (2, 2), (3, 3))]
        assert await asyncio.to_thread(gate.reached.wait, 20)
        assert await tier.copy(RESTORE, 5, 6) == (5, [], 0) and tier.memory.pages[5] == content(4)
        assert not any(spill.is_set() for spill in spills)
        gate.go_on.set()
        await asyncio.gather(*(asyncio.wait_for(spill.wait(), 20) for spill in spills))
        await tier.tier.close()

    asyncio.run(story())


@pytest.mark.parametrize("checksums", [True, False])
def test_with_checksums_each_restore_is_verified(checksums: bool) -> None:
    async def story() -> None:
        tier = Tier(AnonymousRows(ROWS, ROW_BYTES), DeviceMemory(), checksums=checksums)
        await tier.grow()
        await tier.copy(SPILL, 4, 6)
        for _ in range(2):
            assert await tier.copy(RESTORE, 2, 6) == (2, [], 0)
        damage(tier.memory, 6)
        assert await tier.copy(RESTORE, 2, 6) == (2, [2] if checksums else [], int(checksums))
        await tier.copy(SPILL, 5, 6)
        assert await tier.copy(RESTORE, 3, 6) == (3, [], 0), "the checksum is of what is there now"
        await tier.tier.close()

    asyncio.run(story())


@pytest.mark.parametrize("checksums", [True, False])
def test_rows_that_are_to_be_sent_are_verified_as_for_a_restore(tmp_path: Path, checksums: bool) -> None:
    folder = tmp_path / "tier"
    put(folder, {3: 103, 5: 105})

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory(), checksums=checksums)
        await tier.grow()
        await tier.copy(SPILL, 4, 6)

        async def wrong(*rows: int) -> list[int]:
            told = asyncio.get_running_loop().create_future()
            tier.tier.verify(rows, told.set_result)
            return list(await asyncio.wait_for(told, 20))

        assert await wrong(3, 6) == []
        damage(tier.memory, 5)
        assert await wrong(3, 5, 6) == [5] and tier.tier.unverified == 0
        damage(tier.memory, 6)
        assert await wrong(6) == ([6] if checksums else [])
        await tier.tier.close()
        tier.tier.verify((3,), lambda rows: pytest.fail("the tier has ended"))
        await asyncio.sleep(0)

    asyncio.run(story())


def test_namespaces_too_many_are_discarded_in_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the model that is served stays, however old, and of the others that written last."""
    monkeypatch.setattr(host_tier, "MAX_NAMESPACES", 2)
    folder = tmp_path / "tier"
    put(folder, {0: 100})
    put(folder, {1: 101, 2: 102}, OTHER_SPACE)
    put(folder, {3: 103}, THIRD_SPACE)

    async def story() -> None:
        tier = Tier(opened(folder), DeviceMemory())
        await tier.grow()
        assert tier.cache.namespaces.keys() == {SPACE, THIRD_SPACE}
        assert tier.holds(100) and tier.holds(103, THIRD_SPACE)
        assert (tier.cache.tiers.discarded_entries, tier.tier.unverified) == (2, 2)
        assert tier.host.free == ROWS - 2, "others may have their rows"
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
        await tier.grow()
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
