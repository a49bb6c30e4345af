"""The pool as a worker sees it, the daemon's or its own: the ranks' memories share out a page's heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage
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
        self.storage = RankStorage.make(rank_geometry(geometry, ranks), order, pages)
        """Of each rank."""
        self.memories = list(memories)
        self.heads: list[Heads] = [heads_of(geometry, ranks, rank) for rank in range(ranks)]
        """Of each rank."""

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

    def layer(self, rank: int, layer: int) -> Memory:
        """All pages' KV of one layer, (pages, tensors, page size, heads, bytes of a head), writable."""
        return self._views[rank][:, layer]

    def read(self, rank: int, page: int) -> Bytes:
        """A page's bytes on one rank, (layers, tensors, page size, heads, bytes of a head)."""
        found: Bytes = self._views[rank][page]
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic]) -> None:
        """Writes what `read` reads. It is there when this returns."""
        self._views[rank][page] = content

    def store(self, page: int, row: Bytes) -> None:
        """Writes a page's row, uint8 (page_bytes,) in canonical order, to all ranks."""
        content = self._by_head(row)
        for rank, heads in enumerate(self.heads):
            self.write(rank, page, content[:, :, :, heads.first : heads.end])

    def wrong_bytes(self, page: int, row: Bytes) -> NDArray[np.int64]:
        """Indexes into `row`, ascending, of the bytes that the page does not hold on every rank."""
        content = self._by_head(row)
        differs = np.zeros(0, np.int64)
        for rank, heads in enumerate(self.heads):
            expected, held = content[:, :, :, heads.first : heads.end], self.read(rank, page)
            if not np.array_equal(held, expected):
                indexes = self._by_head(np.arange(len(row), dtype=np.int64))[:, :, :, heads.first : heads.end]
                differs = np.union1d(differs, indexes[held != expected])
        return differs

    @cached_property
    def _views(self) -> list[Bytes]:
        return [self.storage.view(memory) for memory in self.memories if isinstance(memory, np.ndarray)]

    def _by_head(self, row: NDArray[np.generic]) -> NDArray[np.generic]:
        """(layers, tensors, page size, heads, bytes of a head); a view."""
        geometry = self.geometry
        shaped = row.reshape(*geometry.page_shape[:4], geometry.head_dim * geometry.itemsize)
        return shaped.transpose(0, 1, 3, 2, 4) if geometry.heads_first else shaped


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
