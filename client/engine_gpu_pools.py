"""Pools of a worker's own on GPUs, as engines have them: torch tensors, one for each layer, or one of whole pages.

torch hands out parts of its allocations, so a tensor is registered as a range of what the driver calls the allocation.
(torch's expandable segments are mapped piece by piece and have no handle: leave them off.)
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.client.engine_pools import EnginePools, PoolSpec
from kvferry.client.rank_pools import Bytes, Memory, RankPools, settle_each
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    tensors_of,
)
from kvferry.transfer.mapping.ipc_memory import Exporter

_kept: list[torch.Tensor] = []  # to the end of this process

_log = logging.getLogger(__name__)


class LayerTensors(RankPools):
    """A pool of one tensor for each rank and layer: `layers[rank][layer]` is a uint8 tensor of shape (pages, tensors,
    page size, heads, bytes of a head), a view."""

    def __init__(self, geometry: KVGeometry, order: StorageOrder, pages: int, layers: list[list[torch.Tensor]]) -> None:
        super().__init__(geometry, order, pages, [rank[0] for rank in layers])
        self._layers = layers

    def layer(self, rank: int, layer: int) -> Memory:
        return self._layers[rank][layer]

    def read(self, rank: int, page: int) -> Bytes:
        found: Bytes = torch.stack([layer[page] for layer in self._layers[rank]]).cpu().numpy()
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic]) -> None:
        device = self._layers[rank][0].device
        new = torch.from_numpy(np.ascontiguousarray(content)).to(device)
        for number, layer in enumerate(self._layers[rank]):
            layer[page] = new[number]
        torch.cuda.current_stream(device).synchronize()

    def settle(self) -> None:
        settle_each((rank[0].device for rank in self._layers), torch.cuda.synchronize)

    def release_mapped(self) -> None:
        """The tensors stay allocated to the end of this process: to free what another one has mapped is undefined."""
        for rank in self._layers:
            _kept.extend(rank)
            _log.warning("the daemon may still have the pool mapped: it stays on %s while this lives", rank[0].device)
        self.release()

    def _let_go(self) -> None:
        self._layers.clear()
        super()._let_go()


def make_tensors(spec: PoolSpec, geometry: KVGeometry) -> EnginePools:
    """A GPU for each rank. OSError where there is none, or it has too little memory."""
    pages = spec.pages
    own = rank_geometry(geometry, spec.ranks)
    layers: list[list[torch.Tensor]] = []
    ranks: list[RegisteredRank] = []
    for device in spec.devices:
        try:
            whole, starts, stride = _allocate(own, spec.order, pages, device)
            ranks.append(_registered(own, spec.order, pages, device, starts, stride))
        except RuntimeError as error:  # torch's: no such device, out of memory
            raise OSError(f"cuda:{device}: {error}") from error
        layers.append(whole)
    registration = Registration(pages, spec.order, tuple(ranks))
    return EnginePools(LayerTensors(geometry, spec.order, pages, layers), registration, [])


def _allocate(
    own: KVGeometry, order: StorageOrder, pages: int, device: int
) -> tuple[list[torch.Tensor], list[int], int]:
    """Each layer's view, the addresses of what is registered, and bytes from a page to the next."""
    where = torch.device("cuda", device)
    plane = own.page_bytes // (own.layers * own.tensors)  # of a page, of K or V
    head = own.head_dim * own.itemsize
    token, next_head = head * own.kv_heads, head
    if own.heads_first:
        token, next_head = head, head * own.page_size
    shape = (pages, own.tensors, own.page_size, own.kv_heads, head)

    def new(*sizes: int) -> torch.Tensor:
        return torch.zeros(math.prod(sizes), dtype=torch.uint8, device=where)

    if order is StorageOrder.PAGE_MAJOR:
        whole = new(pages, own.page_bytes)
        strides = (own.page_bytes, plane, token, next_head, 1)
        views = [whole[i * own.tensors * plane :].as_strided(shape, strides) for i in range(own.layers)]
        starts, stride = [whole.data_ptr()], own.page_bytes
    else:
        tensors = [new(pages, own.tensors, plane) for _ in range(own.layers)]
        apart = order is StorageOrder.LAYER_MAJOR  # all pages' K, then all pages' V
        stride = plane if apart else plane * own.tensors
        strides = (stride, plane * pages if apart else plane, token, next_head, 1)
        views = [tensor.as_strided(shape, strides) for tensor in tensors]
        inside = range(own.tensors) if apart else range(1)
        starts = [tensor.data_ptr() + i * plane * pages for tensor in tensors for i in inside]
    torch.cuda.synchronize(where)  # the zeros are there before another process looks
    return views, starts, stride


def _registered(
    own: KVGeometry, order: StorageOrder, pages: int, device: int, starts: list[int], stride: int
) -> RegisteredRank:
    exporter = Exporter(device)
    count, page_bytes = tensors_of(own, order)
    assert len(starts) == count
    memories: dict[bytes, RegisteredMemory] = {}
    tensors: list[RegisteredTensor] = []
    for start in starts:
        nbytes = (pages - 1) * stride + page_bytes
        handle, offset = exporter.export(start, nbytes)
        seen = memories.get(handle)
        end = max(offset + nbytes, seen.nbytes if seen is not None else 0)
        memories[handle] = RegisteredMemory(GpuAllocation(handle, exporter.device_uuid), end)
        tensors.append(RegisteredTensor(list(memories).index(handle), offset, stride, page_bytes))
    return RegisteredRank(tuple(memories.values()), tuple(tensors))
