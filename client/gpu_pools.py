"""The daemon's pool on GPUs, mapped by CUDA IPC, as a worker sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.client.rank_pools import Bytes, Memory, RankPools, settle_each
from kvferry.proto import worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.transfer.mapping.ipc_memory import IpcMemory


class GpuRankPools(RankPools):
    """The daemon's pool on GPUs: `memories` are tensors, uint8, on the rank's device."""

    def __init__(
        self, geometry: KVGeometry, order: StorageOrder, pages: int, pools: Sequence[worker_pb2.RankPool]
    ) -> None:
        """Maps them. OSError where this process cannot; ValueError as RankPools."""
        nbytes = rank_geometry(geometry, len(pools)).page_bytes * pages
        self._mappings: list[IpcMemory] = []
        tensors: list[torch.Tensor] = []
        try:
            for pool in pools:
                mapping = IpcMemory(pool.device_uuid, pool.ipc_handle, pool.offset + nbytes)
                self._mappings.append(mapping)
                whole: torch.Tensor = torch.as_tensor(mapping, device=f"cuda:{mapping.device}")
                tensors.append(whole[pool.offset :])
        except BaseException:
            self._unmap()
            raise
        super().__init__(geometry, order, pages, tensors)
        self._tensors = [[_view(tensor, storage) for storage in self.storages] for tensor in tensors]  # as `_views`

    def layer(self, rank: int, layer: int, cache: int = 0) -> Memory:
        return self._tensors[rank][cache][:, layer]

    def read(self, rank: int, page: int, cache: int = 0) -> Bytes:
        found: Bytes = self._tensors[rank][cache][page].cpu().numpy()
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic], cache: int = 0) -> None:
        tensor = self._tensors[rank][cache]
        tensor[page] = torch.from_numpy(np.ascontiguousarray(content)).to(tensor.device)
        torch.cuda.current_stream(tensor.device).synchronize()

    def settle(self) -> None:
        settle_each((caches[0].device for caches in self._tensors), torch.cuda.synchronize)

    def _let_go(self) -> None:
        self._tensors.clear()
        super()._let_go()
        self._unmap()

    def _unmap(self) -> None:
        while self._mappings:
            self._mappings.pop().close()


def _view(memory: torch.Tensor, storage: RankStorage) -> torch.Tensor:
    """A cache's bytes, (pages, layers, tensors, page size, heads, bytes of a head)."""
    cache = storage.geometry
    shape = (storage.pages, cache.layers, cache.tensors, cache.page_size, cache.kv_heads)
    return memory[int(storage.bases[0]) :].as_strided(
        (*shape, cache.head_dim * cache.itemsize), (*storage.view_strides, 1)
    )
