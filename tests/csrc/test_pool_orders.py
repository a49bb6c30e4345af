"""A pool on GPUs as a daemon uses it, over the fake driver, whose copies end late: what one of them touches is in order
with what others touch, on other streams, in the worker's process and in the courier's."""

from __future__ import annotations

import asyncio
import ctypes
import gc

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine, GpuError
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
)
from tests.csrc.gpu_orders import Orders
from tests.csrc.gpu_pool import GEOMETRY, PAGES, RANKS, WORKER, Daemon, Pool


@pytest.mark.parametrize("seed", range(4))
def test_requests_at_random_are_in_order(pool: Pool, seed: int) -> None:
    daemon = Daemon(pool, seed)
    asyncio.run(daemon.run(300))
    pool.orders.check()
    assert set(daemon.done) == {"clearing", "gather", "scatter", "spill", "restore", "tail"}
    assert min(daemon.done.values()) > 30


@pytest.mark.parametrize(
    ("hasty", "found"),
    [("clearing", "zero_pages"), ("tail", "zero_pages"), ("gather", "copy_part"), ("scatter", "copy_part")],
)
def test_a_daemon_that_does_not_wait_is_found(pool: Pool, hasty: str, found: str) -> None:
    """On a loaded machine the loop may come so late that what it does not wait for is over: other seeds are tried."""
    messages: list[str] = []
    for seed in range(1, 6):
        asyncio.run(Daemon(pool, seed, hasty).run(100))
        messages += pool.orders.take()
        if any(f"which {found}" in message for message in messages):
            return
    pytest.fail(f"nothing which {found}: {messages}")


def test_an_engines_memory_is_let_go_when_no_copy_runs(
    fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None
) -> None:
    size = GEOMETRY.page_bytes // 4  # of a page, of K or V of a layer
    tensors = tuple(RegisteredTensor(0, i * PAGES * size, size, size) for i in range(4))
    nbytes = PAGES * GEOMETRY.page_bytes
    address = int(fake.fake_foreign(nbytes))
    source = GpuAllocation(address.to_bytes(8, "little") + bytes([0x5A] * 56), bytes(16))
    rank = RegisteredRank((RegisteredMemory(source, nbytes),), tensors)
    memory = GpuPoolMemory.map(Registration(PAGES, StorageOrder.LAYER_MAJOR, (rank,)), GEOMETRY, [0])

    async def story() -> None:
        orders.lag(1000)
        for page in range(3):
            memory.zero_pages(np.array([page]), lambda problem: None)
        memory.zero_tail(5, 3, lambda problem: None)
        memory.close()
        orders.tells(WORKER)
        orders.writes(WORKER, address, nbytes)

    asyncio.run(story())


@pytest.mark.parametrize("told", [True, False], ids=["workers have it", "nobody was told of it"])
def test_the_daemons_own_pool_stays_to_its_end(
    fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None, told: bool
) -> None:
    """Since workers have it mapped; also its context, and whatever becomes of the object that holds it."""
    gc.collect()
    fake.fake_reset()
    pool = Pool(fake, library, orders)
    if told:
        pool.memory.rank_pools()
        orders.tells(WORKER)
        pool.of_pages(orders.writes, WORKER, [3])
    places = [rank._base for rank in pool.memory._ranks]
    pool.close()
    del pool
    gc.collect()
    contexts = fake.fake_calls(b"context_retain") - fake.fake_calls(b"context_release")
    assert contexts == (RANKS if told else 0), "whose end would be the memory's"
    engine = GpuCopyEngine(0, library)
    if told:
        assert [engine.address_range(place)[0] for place in places] == places
    else:
        with pytest.raises(GpuError, match="is in no allocation"):
            engine.address_range(places[0])


# -- a page whose tail is being cleared


def test_who_restores_into_it_is_found(pool: Pool) -> None:
    async def story() -> None:
        pool.memory.zero_tail(3, 5, lambda problem: None)
        pool.memory.restore(np.array([3]), np.array([0]))

    asyncio.run(story())
    assert any("which zero_pages" in message for message in pool.orders.take())


def test_another_worker_that_has_it_is_found(pool: Pool) -> None:
    async def story() -> None:
        pool.memory.zero_tail(3, 5, lambda problem: None)
        pool.orders.tells(WORKER)
        pool.of_pages(pool.orders.writes, WORKER, [3])
        pool.orders.told_by(WORKER)

    asyncio.run(story())
    assert any("which zero_pages" in message for message in pool.orders.take())
