"""A host tier whose rows are pinned chunk by chunk: a copy of neighbours on both sides of a chunk's end, over the fake
driver, and on a GPU, whose driver refuses one copy of what was pinned apart."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry._core import GpuCopyEngine
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory import growing_rows
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.host_tier.copy_strategies import AUTO, ENVIRONMENT, STRATEGIES
from kvferry.transfer.host_tier.rows import AnonymousRows

GEOMETRY = KVGeometry(layers=4, kv_heads=2, head_dim=64, dtype="float16", page_size=16)
PAGES, CHUNK = 12, 4  # as many rows, and of a chunk
COPIED = [7, 0, 11, 3, 4, 10, 1, 8, 2, 5]  # pages, to the rows from 1 on: over the ends of two chunks
ROWS = list(range(1, 1 + len(COPIED)))
POISON = 0xA5
Bytes = NDArray[np.uint8]


def nothing() -> None: ...


class DevicePages:
    """The bytes of pages, (pages, row_bytes), by copies of their own."""

    def __init__(self, memory: GpuPoolMemory) -> None:
        rank, rows = memory._ranks[0], memory.shape.storages[0].rows()
        self._engine = rank.parts
        self._at = rank._base + rows.fragments_of(range(PAGES)).ravel()
        self._sizes = np.full(len(self._at), rows.fragment_bytes)
        self.shape = PAGES, memory.shape.row_bytes

    def _of(self, pages: Bytes) -> NDArray[np.int64]:
        return pages.ctypes.data + np.arange(len(self._at)) * self._sizes

    def write(self, pages: Bytes) -> None:
        self._engine.copy_list_from_host(self._at, self._of(pages), self._sizes, strategy="loop").wait()

    def read(self) -> Bytes:
        pages: Bytes = np.zeros(self.shape, np.uint8)
        self._engine.copy_list_to_host(self._of(pages), self._at, self._sizes, strategy="loop").wait()
        return pages


async def copied(tier: HostTier, kind: int) -> None:
    copy: Any = SimpleNamespace(kind=kind, device=COPIED, host=ROWS)
    ended: asyncio.Future[tuple[list[int], int]] = asyncio.get_running_loop().create_future()

    def done(number: int, failed: Any, mismatched: int, seconds: float) -> None:
        ended.set_result((list(failed), mismatched))

    tier.start(CopyStarted(1, bytes(32), copy), done)
    assert await asyncio.wait_for(ended, 60) == ([], 0)


async def check(memory: GpuPoolMemory) -> None:
    """A spill and a restore; nothing but the pages that were copied is written."""
    device, size = DevicePages(memory), memory.shape.row_bytes
    rows = AnonymousRows(PAGES, size)
    tier, cache = HostTier(memory, rows, PAGES, checksums=True), Cache(PAGES, 16, host_pages=PAGES, host_there=0)
    await tier.grow(cache, bytes(32), nothing)
    assert cache.host is not None and cache.host.pages == PAGES
    assert len(tier._there._pins) == PAGES // CHUNK, "each chunk is pinned apart"
    before: Bytes = np.random.default_rng(1).integers(0, 256, device.shape, np.uint8)
    device.write(before)
    np.frombuffer(rows.buffer, np.uint8)[:] = POISON
    await copied(tier, SPILL)
    kept = np.frombuffer(bytes(rows.buffer), np.uint8).reshape(device.shape)
    assert (kept[ROWS] == before[COPIED]).all()
    assert (np.delete(kept, ROWS, axis=0) == POISON).all()
    device.write(np.full(device.shape, POISON, np.uint8))
    await copied(tier, RESTORE)
    found = device.read()
    assert (found[COPIED] == before[COPIED]).all()
    assert (np.delete(found, COPIED, axis=0) == POISON).all()
    await tier.close()


@pytest.fixture(params=[AUTO, *STRATEGIES])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows, which are copied by one strategy."""
    monkeypatch.setattr(growing_rows, "CHUNK_BYTES", CHUNK * GEOMETRY.page_bytes)
    monkeypatch.setenv(ENVIRONMENT, request.param)


def over_chunk_ends() -> None:
    memory = GpuPoolMemory.create(PoolShape(GEOMETRY, 1, StorageOrder.LAYER_MAJOR, PAGES), [0])
    try:
        asyncio.run(check(memory))
    finally:
        memory.close()


def test_neighbours_over_chunk_ends_on_the_fake(fake: ctypes.CDLL, on_the_fake: None, small_chunks: None) -> None:
    over_chunk_ends()


@pytest.mark.gpu
def test_small_neighbours_over_chunk_ends_on_a_gpu(
    gpu_engine: Callable[..., GpuCopyEngine], small_chunks: None
) -> None:
    gpu_engine()
    over_chunk_ends()
