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
        storage = RankStorage.make(rank_geometry(geometry, len(pools)), order, pages)
        self._mappings: list[IpcMemory] = []
        tensors: list[torch.Tensor] = []
        try:
            for pool in pools:
                mapping = IpcMemory(pool.device_uuid, pool.ipc_handle, pool.offset + storage.nbytes)
                self._mappings.append(mapping)
                whole: torch.Tensor = torch.as_tensor(mapping, device=f"cuda:{mapping.device}")
                tensors.append(whole[pool.offset :])
        except BaseException:
            self._unmap()
            raise
        super().__init__(geometry, order, pages, tensors)
        rank = storage.geometry
        shape = (pages, rank.layers, rank.tensors, rank.page_size, rank.kv_heads, rank.head_dim * rank.itemsize)
        first = int(storage.bases[0])
        self._tensors = [tensor[first:].as_strided(shape, (*storage.view_strides, 1)) for tensor in tensors]

    def layer(self, rank: int, layer: int) -> Memory:
        return self._tensors[rank][:, layer]

    def read(self, rank: int, page: int) -> Bytes:
        found: Bytes = self._tensors[rank][page].cpu().numpy()
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic]) -> None:
        tensor = self._tensors[rank]
        tensor[page] = torch.from_numpy(np.ascontiguousarray(content)).to(tensor.device)
        torch.cuda.current_stream(tensor.device).synchronize()

    def settle(self) -> None:
        settle_each((tensor.device for tensor in self._tensors), torch.cuda.synchronize)

    def _let_go(self) -> None:
        self._tensors.clear()
        super()._let_go()
        self._unmap()

    def _unmap(self) -> None:
        while self._mappings:
            self._mappings.pop().close()
