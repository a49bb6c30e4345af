"""An engine's allocations as a daemon maps them, over the fake driver: what is checked, copied, and closed."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.observe.health import HealthWatch
from kvferry.transfer.host_tier.copy_strategies import STRATEGIES
from tests.csrc.engine_allocations import GEOMETRY, NBYTES, PAGES, SIZE, START, STRIDE, registered
from tests.csrc.gpu.driver import calls


def test_pages_of_several_allocations_are_spilled_and_restored(fake: ctypes.CDLL, on_the_fake: None) -> None:
    addresses = [int(fake.fake_foreign(NBYTES + 100)) for _ in range(2)]
    views = [np.ctypeslib.as_array((ctypes.c_uint8 * (NBYTES + 100)).from_address(address)) for address in addresses]
    rng = np.random.default_rng(1)
    for view in views:
        view[:] = rng.integers(0, 256, len(view), np.uint8)

    def row(page: int) -> bytes:
        starts = [START + tensor * PAGES * STRIDE + page * STRIDE for tensor in range(2)]
        return b"".join(bytes(view[start : start + SIZE]) for view in views for start in starts)

    opened = calls(fake, "ipc_close")
    memory = GpuPoolMemory.map(registered(addresses, NBYTES), GEOMETRY, [0])
    assert memory.rank_pools() == []
    rows = mmap.mmap(-1, 4 * memory.shape.row_bytes)
    memory.attach_rows(memoryview(rows))
    pinned = memory.pinner().pin(memoryview(rows))
    memory.spill(np.array([4, 1]), np.array([0, 3]))
    kept = {page: row(page) for page in range(PAGES)}
    size = memory.shape.row_bytes
    assert (rows[:size], rows[3 * size : 4 * size]) == (kept[4], kept[1])
    memory.restore(np.array([5, 0]), np.array([3, 0]))
    assert (row(5), row(0)) == (kept[1], kept[4])
    assert [row(page) for page in (1, 2, 3, 4)] == [kept[page] for page in (1, 2, 3, 4)], "no neighbour has changed"
    moved = memory.copy_statistics()
    assert set(moved.strategies) == set(STRATEGIES)
    assert sum(counts.copies for counts in moved.strategies.values()) == 2
    assert sum(counts.bytes for counts in moved.strategies.values()) == 4 * size

    async def let_go_while_a_tail_is_cleared() -> None:
        told: list[str] = []
        memory.zero_tail(2, 10, told.append)
        memory.close()
        await asyncio.sleep(0.01)
        assert told == []

    del pinned
    asyncio.run(let_go_while_a_tail_is_cleared())
    assert calls(fake, "ipc_close") == opened + 2
    assert row(2) != kept[2], "the tail was cleared before the memory was let go"


def test_a_range_outside_of_its_allocation_is_refused_and_all_is_closed(fake: ctypes.CDLL, on_the_fake: None) -> None:
    addresses = [int(fake.fake_foreign(NBYTES)), int(fake.fake_foreign(NBYTES - 1))]
    opened, closed = calls(fake, "ipc_open"), calls(fake, "ipc_close")
    with pytest.raises(
        ValueError, match=rf"pool\.ranks\[0\]\.memories\[1\]\.gpu\.ipc_handle: nbytes: {NBYTES}, but .* "
    ):
        GpuPoolMemory.map(registered(addresses, NBYTES), GEOMETRY, [0])
    assert calls(fake, "ipc_open") - opened == calls(fake, "ipc_close") - closed == 2
    fake.fake_foreign_ends(addresses[1])
    with pytest.raises(ValueError, match=r"memories\[1\]\.gpu\.ipc_handle: handle: cannot be opened"):
        GpuPoolMemory.map(registered(addresses, NBYTES), GEOMETRY, [0])
    with pytest.raises(ValueError, match=r"memories\[0\]\.gpu\.device_uuid is cuda:3's; this rank's is cuda:0"):
        GpuPoolMemory.map(registered(addresses, NBYTES, bytes([3]) + bytes(15)), GEOMETRY, [0])


def test_a_copy_that_does_not_end_is_named(fake: ctypes.CDLL, on_the_fake: None) -> None:
    """Copies that end before it do not count, and behind it none ends."""
    addresses = [int(fake.fake_foreign(NBYTES + 100)) for _ in range(2)]
    said: list[bool] = []

    def announce(serving: bool) -> None:
        said.append(serving)

    async def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "it did not come to pass"
            await asyncio.sleep(0.01)

    async def story() -> None:
        memory = GpuPoolMemory.map(registered(addresses, NBYTES), GEOMETRY, [0])
        tiers = SimpleNamespace(copy_workers=dict, late_copies=memory.late_copies)
        side = SimpleNamespace(role="decode", tiers=tiers)
        watch = HealthWatch({"decode": cast(Any, side)}, 0.3, announce)
        task = asyncio.create_task(watch.run())
        ended: list[str] = []
        for count in range(1, 41):
            memory.zero_pages(np.array([1]), ended.append)
            await until(lambda: len(ended) == count)  # noqa: B023
            await asyncio.sleep(0.02)
        assert said == [True]
        fake.fake_answer(b"event_query", 600)
        memory.zero_pages(np.array([2]), ended.append)
        memory.zero_pages(np.array([3]), ended.append)
        await until(lambda: said == [True, False])
        assert [part.partition(" for ")[0] for part in watch.stalled] == ["decode oldest copy on its GPUs"]
        fake.fake_answer(b"event_query", 0)
        await until(lambda: said == [True, False, True])
        assert ended == [""] * 42
        assert memory.late_copies(time.monotonic()) == {"oldest copy on its GPUs": 0.0}
        assert memory.tier_copies == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        memory.close()

    asyncio.run(story())
    for address in addresses:
        fake.fake_foreign_ends(address)
