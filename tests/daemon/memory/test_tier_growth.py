"""A host tier that grows while its cache is used: what a file's rows hold is matched chunk by chunk, and a chunk that
cannot be had is the last."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.memory import growing_rows, host_tier
from kvferry.radix.pool import PageState
from kvferry.radix.tree import SPILL
from kvferry.transfer.host_tier.rows import AnonymousRows, TierRows
from tests.daemon.memory.file_tiers import (
    OTHER_SPACE,
    ROW_BYTES,
    ROWS,
    SPACE,
    DeviceMemory,
    Tier,
    digest,
    named_in,
    nothing,
    opened,
    put,
)

CHUNK = 2  # rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_rows, "CHUNK_BYTES", CHUNK * ROW_BYTES)


class Held:
    """The second chunk of these rows is not made before `go_on`."""

    def __init__(self, rows: TierRows) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        make = rows.make

        def held(start: int, end: int, cpus: Collection[int]) -> None:
            if start == CHUNK * ROW_BYTES:
                self.reached.set()
                assert self.go_on.wait(20)
            make(start, end, cpus)

        anything: Any = rows
        anything.make = held


async def at_second_chunk(rows: TierRows) -> tuple[Tier, Held, asyncio.Task[None]]:
    """A tier whose first chunk is there, and whose growth waits."""
    held, tier = Held(rows), Tier(rows, DeviceMemory())
    growth = asyncio.create_task(tier.grow())
    assert await asyncio.to_thread(held.reached.wait, 20)
    assert tier.host.pages == CHUNK
    return tier, held, growth


def cache_page(tier: Tier, *numbers: int) -> None:
    """They are on the device, one behind the other, as a request leaves them."""
    namespace, digests = tier.cache.namespace(SPACE), b"".join(map(digest, numbers))
    pages = tier.cache.take(namespace, len(numbers))
    assert pages is not None
    tier.cache.name(namespace, pages, digests)
    namespace.tree.insert(digests, pages)
    tier.cache.publish(namespace, len(pages))


def check(tier: Tier) -> None:
    tier.host.check()
    for namespace in tier.cache.namespaces.values():
        namespace.tree.check()


# -- a file's rows -------------------------------------------------------------------------------------------------


def test_what_a_chunk_holds_is_matched_once_it_is_there(tmp_path: Path) -> None:
    put(tmp_path, {0: 100, 3: 103, 7: 107})
    put(tmp_path, {5: 205}, OTHER_SPACE)

    async def story() -> None:
        tier, held, growth = await at_second_chunk(opened(tmp_path))
        assert tier.holds(100) and not tier.holds(103) and not tier.holds(107)
        assert tier.tier.reads_file and tier.tier.unverified == 1
        assert tier.host.free == CHUNK - 1
        held.go_on.set()
        await growth
        assert tier.holds(100) and tier.holds(103) and tier.holds(107) and tier.holds(205, OTHER_SPACE)
        assert not tier.tier.reads_file and tier.tier.unverified == 4
        assert (tier.host.pages, tier.host.free) == (ROWS, ROWS - 4)
        assert (tier.cache.tiers.recovered, tier.cache.tiers.discarded_entries) == (4, 0)
        check(tier)
        await tier.tier.close()

    asyncio.run(story())


def test_an_entry_of_a_later_chunk_whose_page_is_held_already_is_dropped(tmp_path: Path) -> None:
    """In the host tier, from an earlier chunk; or on the device, within a longer run."""
    put(tmp_path, {0: 100, 3: 100, 4: 104, 6: 106})

    async def story() -> None:
        tier, held, growth = await at_second_chunk(opened(tmp_path))
        cache_page(tier, 50, 104)
        held.go_on.set()
        await growth
        assert tier.holds(100) and tier.holds(106)
        assert tier.cache.tiers.discarded_entries == 2
        assert tier.host.free == ROWS - 2 and list(tier.host.states([3, 4])) == [PageState.FREE] * 2
        check(tier)
        await tier.tier.close()

    asyncio.run(story())
    assert named_in(tmp_path) == {0: digest(100), 6: digest(106)}


def test_an_entry_of_a_later_chunk_is_the_copy_of_what_is_on_the_device_alone(tmp_path: Path) -> None:
    put(tmp_path, {3: 103})

    async def story() -> None:
        tier, held, growth = await at_second_chunk(opened(tmp_path))
        cache_page(tier, 103)
        held.go_on.set()
        await growth
        assert tier.cache.tiers.discarded_entries == 0 and tier.host.state(3) is PageState.CACHED
        tree = tier.cache.namespace(SPACE).tree
        assert (tree.host_pages, tree.match(digest(103)).pages) == (1, 1)
        assert list(tree.evict(1).freed) and tier.holds(103), "no spill was needed"
        check(tier)
        await tier.tier.close()

    asyncio.run(story())


def test_rows_that_were_found_are_nobodys_before_they_are_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes every row that is free, whenever the event loop turns."""
    monkeypatch.setattr(host_tier, "TAKEN_AT_A_TIME", 1)
    found = {0: 100, 1: 101, 3: 103, 4: 104, 5: 105}
    put(tmp_path, found)

    async def story() -> None:
        tier, taken, turns = Tier(opened(tmp_path), DeviceMemory()), list[int](), 0
        growth = asyncio.create_task(tier.grow())
        while not growth.done():
            turns += sum(not tier.holds(number) for number in found.values())
            taken += tier.host.allocate(tier.host.free, PageState.SPILLING)
            await asyncio.sleep(0)
        await growth
        taken += tier.host.allocate(tier.host.free, PageState.SPILLING)
        assert turns, "nobody came between"
        assert sorted(taken) == [2, 6, 7]
        assert all(tier.holds(number) for number in found.values())
        check(tier)
        await tier.tier.close()

    asyncio.run(story())


def test_few_entries_of_a_file_are_taken_in_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows at random 64 take 0.4 ms, at most some: 512 were up to 22, and the event loop had no other turn."""
    entries, took, turns = np.random.default_rng(1).permutation(300), list[int](), list[int]()

    async def story() -> None:
        tier = Tier(AnonymousRows(ROWS, ROW_BYTES), DeviceMemory())
        monkeypatch.setattr(tier.tier, "_take", lambda cache, first, name, found, at: took.extend(at))
        found: Any = SimpleNamespace(by_namespace=[(SPACE, entries)], found=None)
        taking = asyncio.create_task(tier.tier._take_in(tier.cache, SPACE, found, nothing))
        while not taking.done():
            turns.append(len(took))
            await asyncio.sleep(0)
        await tier.tier.close()

    asyncio.run(story())
    assert took == entries.tolist()
    assert max(np.diff([*turns, len(took)])) <= 64


@pytest.mark.parametrize("breaks", [False, True])
def test_what_pages_of_a_file_are_found_by_goes_when_all_are_there(tmp_path: Path, breaks: bool) -> None:
    put(tmp_path, {0: 100, 3: 103})
    rows = opened(tmp_path)
    if breaks:
        lacking(rows)

    async def story() -> None:
        tier = Tier(rows, DeviceMemory())
        tier.cache.begin_recovery()
        tree = tier.cache.namespace(SPACE).tree
        during = tree.index_bytes
        await tier.grow()
        after, later = tree.index_bytes, tier.cache.namespace(OTHER_SPACE).tree.index_bytes
        assert max(after, later) < during - (8 << 10)
        await tier.tier.close()

    asyncio.run(story())


def test_a_tier_that_is_all_there_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.daemon.memory.host_tier")

    async def story() -> None:
        tier, held, growth = await at_second_chunk(AnonymousRows(ROWS, ROW_BYTES))
        assert caplog.messages == []
        held.go_on.set()
        await growth
        await tier.tier.close()

    asyncio.run(story())
    (said,) = caplog.messages
    assert re.fullmatch(rf"host tier: {ROWS} of {ROWS} pages are there, after \d+\.\d s", said), said


# -- chunks that cannot be had -------------------------------------------------------------------------------------


def failing(rows: TierRows) -> None:
    make = rows.make

    def fail(start: int, end: int, cpus: Collection[int]) -> None:
        if start > 0:
            raise OSError(errno.ENOMEM, "injected")
        make(start, end, cpus)

    anything: Any = rows
    anything.make = fail


def without_threads(rows: TierRows) -> None:
    """As `populate` where a process may start no more."""
    make = rows.make

    def fail(start: int, end: int, cpus: Collection[int]) -> None:
        if start > 0:
            raise RuntimeError("injected")
        make(start, end, cpus)

    anything: Any = rows
    anything.make = fail


def lacking(rows: TierRows) -> None:
    anything: Any = rows
    anything.lacks = lambda start, end: "injected" if start > 0 else ""


@pytest.mark.parametrize("breaks", [failing, without_threads, lacking])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_chunk_that_cannot_be_had_is_the_last(
    tmp_path: Path, breaks: Callable[[TierRows], None], in_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if in_file:
        put(tmp_path, {0: 100, 3: 103})
    rows = opened(tmp_path) if in_file else AnonymousRows(ROWS, ROW_BYTES)
    breaks(rows)

    async def story() -> None:
        tier = Tier(rows, DeviceMemory())
        await tier.grow()
        assert (tier.host.pages, tier.tier.reads_file) == (CHUNK, False)
        (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert error.startswith(f"the host tier stays at {CHUNK} of {ROWS} pages: ") and "injected" in error
        assert tier.holds(100) == in_file and not tier.holds(103)
        assert await tier.copy(SPILL, 4, 1) == (4, [], 0)
        await tier.tier.close()

    asyncio.run(story())
    if in_file:
        assert named_in(tmp_path) == {0: digest(100), 1: digest(4), 3: digest(103)}, "what was not read is kept"


def test_a_chunk_for_which_the_disk_fills_up_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its rows had room before the last: that of the page which is kept there stays."""
    put(tmp_path, {0: 100, 3: 103})
    rows, allocate = opened(tmp_path), os.posix_fallocate
    blocks = [(tmp_path / "kvferry-host-decode.rows").stat().st_blocks]

    def fills_up(fd: int, offset: int, nbytes: int) -> None:
        allocate(fd, offset, nbytes)
        if offset > 0:
            raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "posix_fallocate", fills_up)

    async def story() -> None:
        tier = Tier(rows, DeviceMemory())
        await tier.grow()
        assert (tier.host.pages, tier.holds(100)) == (CHUNK, True)
        assert await tier.copy(SPILL, 4, 1) == (4, [], 0)
        blocks.append((tmp_path / "kvferry-host-decode.rows").stat().st_blocks)
        await tier.tier.close()

    asyncio.run(story())
    assert (blocks[1] - blocks[0]) * 512 == ROW_BYTES, "of row 1 alone"
    monkeypatch.undo()
    assert named_in(tmp_path) == {0: digest(100), 1: digest(4), 3: digest(103)}


@pytest.mark.parametrize(("space", "left"), [(b"", {0, 1}), (SPACE, {0, 1, 4}), (b"o" * 32, {0, 1, 3, 4})])
def test_a_flush_is_of_what_a_tier_did_not_come_to(tmp_path: Path, space: bytes, left: set[int]) -> None:
    put(tmp_path, {0: 100, 3: 103})
    put(tmp_path, {1: 101, 4: 104}, OTHER_SPACE)
    rows = opened(tmp_path)
    lacking(rows)

    async def story() -> None:
        tier = Tier(rows, DeviceMemory())
        await tier.grow()
        tier.tier.forget_unread(space)
        await tier.tier.close()

    asyncio.run(story())
    assert named_in(tmp_path) == {row: digest(100 + row) for row in left}


def test_the_times_of_copies_that_run_together_add_up_to_that_in_which_any_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(host_tier.time, "perf_counter", lambda: clock[0])
    tier = Tier(AnonymousRows(ROWS, ROW_BYTES), DeviceMemory()).tier
    seconds: list[float] = []
    for clock[0], begins in [(1.0, True), (4.0, True), (5.0, False), (9.0, False), (20.0, True), (21.0, False)]:
        if begins:
            tier._begins(False)
        else:
            seconds.append(tier._busy_seconds(False))
    assert seconds == [4.0, 4.0, 1.0]
    tier.discard()


def test_growth_that_stands_still_is_said_as_long_as_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_tier, "STILL_SECONDS", 0.05)

    async def story() -> None:
        tier, held, growth = await at_second_chunk(AnonymousRows(ROWS, ROW_BYTES))
        for _ in range(1000):
            if tier.tier.stays:
                break
            await asyncio.sleep(0.01)
        assert tier.tier.stays == f"no chunk has come for 0.05 s, at {CHUNK} of {ROWS} pages"
        assert await tier.copy(SPILL, 4, 1) == (4, [], 0), "what is there is used"
        held.go_on.set()
        await growth
        assert (tier.tier.stays, tier.host.pages) == ("", ROWS)
        await tier.tier.close()

    asyncio.run(story())
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        f"the growth of the host tier stands still: no chunk has come for 0.05 s, at {CHUNK} of {ROWS} pages" in warned
    )


# -- its end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [True, False])
def test_growth_that_is_cancelled_ends_with_its_chunk(tmp_path: Path, in_file: bool) -> None:
    async def story() -> None:
        tier, held, growth = await at_second_chunk(opened(tmp_path) if in_file else AnonymousRows(ROWS, ROW_BYTES))
        growth.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not growth.done(), "a thread still makes memory"
        held.go_on.set()
        await asyncio.wait([growth])
        assert growth.cancelled()
        assert tier.host.pages == CHUNK
        assert await tier.copy(SPILL, 4, 1) == (4, [], 0)
        await asyncio.wait_for(tier.tier.close(), 20)

    asyncio.run(story())


@pytest.mark.parametrize("end", ["close", "halt"])
def test_growth_ends_with_its_tier(tmp_path: Path, end: str) -> None:
    put(tmp_path, {0: 100, 3: 103})

    async def story() -> None:
        tier, held, growth = await at_second_chunk(opened(tmp_path))
        if end == "halt":
            tier.tier.halt()
        closing = asyncio.create_task(tier.tier.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done() and not growth.done()
        held.go_on.set()
        await asyncio.wait_for(asyncio.gather(closing, growth), 20)
        assert tier.host.pages == CHUNK and not tier.holds(103)

    asyncio.run(story())
    assert named_in(tmp_path) == {0: digest(100), 3: digest(103)}


def test_a_pool_that_comes_again_has_the_rows_that_came_meanwhile() -> None:
    async def story() -> None:
        tier, held, growth = await at_second_chunk(AnonymousRows(ROWS, ROW_BYTES))
        tier.tier.detach()
        assert len(tier.memory.rows) == 0
        held.go_on.set()
        await growth
        assert len(tier.memory.rows) == 0, "it is not this tier's any more"
        anything: Any = tier.memory
        tier.tier.attach(anything)
        assert len(tier.memory.rows) == ROWS * ROW_BYTES
        assert await tier.copy(SPILL, 4, ROWS - 1) == (4, [], 0)
        await tier.tier.close()

    asyncio.run(story())
