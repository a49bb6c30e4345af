"""A pool that is an engine's blocks on a GPU, over the fake driver."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.tier_lanes import TierLanes
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
)
from tests.csrc.engine_allocations import handle_of

NONE = -1


def is_sent_from_the_tier(
    fake: ctypes.CDLL,
    memory: GpuPoolMemory,
    geometry: KVGeometry,
    kept: NDArray[np.uint8],
    rows: NDArray[np.uint8],
) -> None:
    """Rows are read where they are, with nothing behind a prompt's end; more of them are seen when they are there."""
    assert memory.block_table is not None
    lanes = lanes_of(geometry, 1, 1)
    tier = TierLanes(memory.shape, lanes, lambda: memory._rows, memory._of_tier)
    memory.block_table.bind([30, 31], [3, 4, 6, 10])
    memory.block_table.cut(31, 5)
    memory.spill(np.array([30, 31]), np.array([2, 1]))
    tokens = kept.reshape(3, 4, geometry.page_size, -1)
    assert tokens[1][:, :5].any(axis=-1).all() and not tokens[1][:, 5:].any(), "what is behind the end is there"
    slot = int(fake.fake_foreign(2 * geometry.page_bytes))
    engine = memory._ranks[0].parts
    engine.gather_part(tier.of(0), np.array([2, 1]), 0, 2 * geometry.page_bytes, slot).wait()
    sent = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * geometry.page_bytes)).from_address(slot))
    assert (sent == np.concatenate([kept[2].ravel(), kept[1].ravel()])).all() and sent.any()
    assert tier.of(0) is tier.of(0) and tier.of(0).pages == 3
    memory.attach_rows(memoryview(rows)[: 2 * geometry.page_bytes])
    assert tier.of(0).pages == 2
    memory.attach_rows(memoryview(rows))
    fake.fake_foreign_ends(slot)


def test_a_pool_of_an_engines_blocks(fake: ctypes.CDLL, on_the_fake: None) -> None:
    """Its places lie in two allocations: pages are loaded and stored by the blocks that they are bound to."""
    geometry = KVGeometry(2, 1, 4, "float32", 16, Layout.ENGINE)
    blocks, places, per_page = 12, 4, 2
    size = geometry.page_bytes // places // per_page
    stride, start = size + 32, 4096
    apart = blocks * stride
    addresses = [int(fake.fake_foreign(start + 2 * apart)) for _ in range(2)]
    memories = tuple(
        RegisteredMemory(GpuAllocation(handle_of(address), bytes(16)), start + 2 * apart) for address in addresses
    )
    tensors = tuple(RegisteredTensor(i // 2, start + i % 2 * apart, stride, size) for i in range(places))
    rank = RegisteredRank(memories, tensors)
    memory = GpuPoolMemory.map(Registration(blocks, StorageOrder.PAGE_MAJOR, (rank,), 8), geometry, [0])
    assert memory.block_table is not None and memory.rank_pools() == []
    views = [
        np.ctypeslib.as_array((ctypes.c_uint8 * (2 * apart)).from_address(address + start)).reshape(2, blocks, stride)
        for address in addresses
    ]
    for seed, view in enumerate(views):
        view[:] = np.random.default_rng(seed).integers(0, 256, view.shape, np.uint8)
    before = np.concatenate(views)
    rows = np.frombuffer(mmap.mmap(-1, 3 * geometry.page_bytes), np.uint8)
    memory.attach_rows(memoryview(rows))
    pinned = memory.pinner().pin(memoryview(rows))
    kept = rows.reshape(3, places, per_page, size)
    memory.block_table.bind([20, 3], [5, 0, 7, 11])
    memory.spill(np.array([3, 20]), np.array([0, 2]))
    assert (kept[0] == before[:, [7, 11], :size]).all() and (kept[2] == before[:, [5, 0], :size]).all()
    assert not kept[1].any()
    memory.block_table.bind([20, 1], [NONE, 8, 9, 2])
    memory.restore(np.array([20, 1]), np.array([0, 2]))
    want = before.copy()
    want[:, 8, :size] = kept[0][:, 1]
    want[:, [9, 2], :size] = kept[2]
    assert (np.concatenate(views) == want).all(), "what is no block of the page's was written, or one was not"
    is_sent_from_the_tier(fake, memory, geometry, kept, rows)
    with pytest.raises(OSError, match=r"page_ids\[0\]: -1"):
        memory.spill(np.array([20]), np.array([1]))
    with pytest.raises(AssertionError, match="an engine's blocks were to be cleared"):
        memory._ranks[0].zero_pages(np.array([1]))
    memory.detach_rows()
    del pinned
    memory.close()
    for address in addresses:
        fake.fake_foreign_ends(address)
