"""The pool as a worker sees it, the daemon's or its own: the ranks' memories share out a page's heads.

Where a page has several caches, each is read and written by itself; `cache` is its number in the geometry's `caches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import rank_storages
from kvferry.transfer.geometry.rank_lanes import Heads, heads_of, rank_geometry

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
Memory: TypeAlias = "Bytes | torch.Tensor"
"""uint8, one-dimensional: an array in the machine's memory, or a tensor on any device."""


class RankPools:
    """The ranks' memories of pages 0..pages-1 of `geometry`. Only pages of the worker's living requests may be
    touched."""

    in_blocks = False
    """Whether the pages are blocks that the worker names to the daemon."""

    def __init__(self, geometry: KVGeometry, order: StorageOrder, pages: int, memories: Sequence[Memory]) -> None:
        """`memories`: of each rank. ValueError where so many ranks cannot share the heads."""
        ranks = len(memories)
        self.geometry = geometry
        self.pages = pages
        self.storages = rank_storages(rank_geometry(geometry, ranks), order, pages)
        """The places of the caches in each rank's memory."""
        self.memories = list(memories)
        self.heads: list[list[Heads]] = [
            [heads_of(cache, ranks, rank) for rank in range(ranks)] for cache in geometry.caches
        ]
        """Of each cache the heads of each rank."""

    @staticmethod
    def single(pool: Memory, geometry: KVGeometry) -> RankPools:
        """One rank over `pool`, contiguous, of shape (pages, page_bytes)."""
        return RankPools(geometry, StorageOrder.PAGE_MAJOR, len(pool), [pool.reshape(-1)])

    def settle(self) -> None:
        """Waits until nothing that this process has queued on a device touches a page. Raises what the device says."""

    def release(self) -> None:
        """Lets the memory go behind `settle`, and also where that fails, which is raised. No page is touched any more.
        Idempotent."""
        try:
            self.settle()
        finally:  # else a daemon that is gone keeps its memory
            self._let_go()

    def release_mapped(self) -> None:
        """Releases like `release`, where a daemon may still have memory mapped that is this process's."""
        self.release()

    def _let_go(self) -> None:
        self.memories.clear()
        self.heads.clear()
        self.__dict__.pop("_views", None)

    def layer(self, rank: int, layer: int, cache: int = 0) -> Memory:
        """All pages' KV of one layer, (pages, tensors, page size, heads, bytes of a head), writable."""
        return self._views[rank][cache][:, layer]

    def read(self, rank: int, page: int, cache: int = 0) -> Bytes:
        """A page's bytes on one rank, (layers, tensors, page size, heads, bytes of a head)."""
        found: Bytes = self._views[rank][cache][page]
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic], cache: int = 0) -> None:
        """Writes what `read` reads. It is there when this returns."""
        self._views[rank][cache][page] = content

    def store(self, page: int, row: Bytes) -> None:
        """Writes a page's bytes, uint8 (page_bytes,), to all ranks: its caches' rows in canonical order."""
        for cache, content in enumerate(self._by_head(row)):
            for rank, heads in enumerate(self.heads[cache]):
                self.write(rank, page, content[:, :, :, heads.first : heads.end], cache)

    def wrong_bytes(self, page: int, row: Bytes) -> NDArray[np.int64]:
        """Indexes into `row`, ascending, of the bytes that the page does not hold on every rank."""
        differs = np.zeros(0, np.int64)
        for cache, content in enumerate(self._by_head(row)):
            for rank, heads in enumerate(self.heads[cache]):
                expected, held = content[:, :, :, heads.first : heads.end], self.read(rank, page, cache)
                if not np.array_equal(held, expected):
                    every = self._by_head(np.arange(len(row), dtype=np.int64))[cache]
                    differs = np.union1d(differs, every[:, :, :, heads.first : heads.end][held != expected])
        return differs

    @cached_property
    def _views(self) -> list[list[Bytes]]:
        """Views of each rank's caches."""
        memories = (memory for memory in self.memories if isinstance(memory, np.ndarray))
        return [[storage.view(memory) for storage in self.storages] for memory in memories]

    def _by_head(self, row: NDArray[np.generic]) -> list[NDArray[np.generic]]:
        """Each cache of it, (layers, tensors, page size, heads, bytes of a head); views."""
        found: list[NDArray[np.generic]] = []
        start = 0
        for cache in self.geometry.caches:
            own = row[start : start + cache.page_bytes]
            shaped = own.reshape(*cache.page_shape[:4], cache.head_dim * cache.itemsize)
            found.append(shaped.transpose(0, 1, 3, 2, 4) if cache.heads_first else shaped)
            start += cache.page_bytes
        return found


def settle_each(devices: Iterable[torch.device], settle: Callable[[torch.device], object]) -> None:
    """Waits for each of them by `settle`, also behind one that fails; then raises the first error."""
    errors: list[Exception] = []
    for device in dict.fromkeys(devices):
        try:
            settle(device)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
