"""Pools of a worker's own on GPUs, as engines have them: torch tensors, one for each layer, or one of whole pages.

torch hands out parts of its allocations, so a tensor is registered as a range of what the driver calls the allocation.
(torch's expandable segments are mapped piece by piece and have no handle: leave them off.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.client.engine_pools import EnginePools, PoolSpec
from kvferry.client.rank_pools import Bytes, Memory, RankPools, settle_each
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import rank_storages
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
    """A pool of one tensor for each rank, cache and layer: `layers[rank][cache][layer]` is a uint8 tensor of shape
    (pages, tensors, page size, heads, bytes of a head), a view."""

    def __init__(
        self, geometry: KVGeometry, order: StorageOrder, pages: int, layers: list[list[list[torch.Tensor]]]
    ) -> None:
        super().__init__(geometry, order, pages, [rank[0][0] for rank in layers])
        self._layers = layers

    def layer(self, rank: int, layer: int, cache: int = 0) -> Memory:
        return self._layers[rank][cache][layer]

    def read(self, rank: int, page: int, cache: int = 0) -> Bytes:
        found: Bytes = torch.stack([layer[page] for layer in self._layers[rank][cache]]).cpu().numpy()
        return found

    def write(self, rank: int, page: int, content: NDArray[np.generic], cache: int = 0) -> None:
        layers = self._layers[rank][cache]
        new = torch.from_numpy(np.ascontiguousarray(content)).to(layers[0].device)
        for number, layer in enumerate(layers):
            layer[page] = new[number]
        torch.cuda.current_stream(layers[0].device).synchronize()

    def settle(self) -> None:
        settle_each((rank[0][0].device for rank in self._layers), torch.cuda.synchronize)

    def release_mapped(self) -> None:
        """The tensors stay allocated to the end of this process: to free what another one has mapped is undefined."""
        for rank in self._layers:
            _kept.extend(layer for layers in rank for layer in layers)
            _log.warning(
                "the daemon may still have the pool mapped: it stays on %s while this lives", rank[0][0].device
            )
        self.release()

    def _let_go(self) -> None:
        self._layers.clear()
        super()._let_go()


def make_tensors(spec: PoolSpec, geometry: KVGeometry) -> EnginePools:
    """A GPU for each rank. OSError where there is none, or it has too little memory."""
    pages = spec.pages
    own = rank_geometry(geometry, spec.ranks)
    layers: list[list[list[torch.Tensor]]] = []
    ranks: list[RegisteredRank] = []
    for device in spec.devices:
        try:
            caches = _allocate(own, spec.order, pages, device)
            ranks.append(_registered(caches, spec.order, pages, device))
        except RuntimeError as error:  # torch's: no such device, out of memory
            raise OSError(f"cuda:{device}: {error}") from error
        layers.append([cache.views for cache in caches])
    registration = Registration(pages, spec.order, tuple(ranks))
    return EnginePools(LayerTensors(geometry, spec.order, pages, layers), registration, [])


class Allocated(NamedTuple):
    """One cache of a rank: each layer's view, the addresses of what is registered, bytes from a page to the next."""

    geometry: KVGeometry
    views: list[torch.Tensor]
    starts: list[int]
    stride: int


def _allocate(own: KVGeometry, order: StorageOrder, pages: int, device: int) -> list[Allocated]:
    where = torch.device("cuda", device)
    if order is StorageOrder.PAGE_MAJOR:
        whole = torch.zeros(pages * own.page_bytes, dtype=torch.uint8, device=where)
        caches = [
            _in_pages(whole, int(storage.bases[0]), storage.geometry, own.page_bytes)
            for storage in rank_storages(own, order, pages)
        ]
    else:
        caches = [_in_layers(cache, order, pages, where) for cache in own.caches]
    torch.cuda.synchronize(where)  # the zeros are there before another process looks
    return caches


def _in_pages(whole: torch.Tensor, start: int, cache: KVGeometry, stride: int) -> Allocated:
    """A cache of pages that lie one behind the other in one tensor, from byte `start` of each page on."""
    plane, shape, token, head = _page_of(cache)
    pages = len(whole) // stride
    strides = (stride, plane, token, head, 1)
    layers = (whole[start + i * cache.tensors * plane :] for i in range(cache.layers))
    return Allocated(
        cache, [layer.as_strided((pages, *shape), strides) for layer in layers], [whole.data_ptr() + start], stride
    )


def _in_layers(cache: KVGeometry, order: StorageOrder, pages: int, where: torch.device) -> Allocated:
    """A cache of a tensor for each layer."""
    plane, shape, token, head = _page_of(cache)
    size = pages * cache.tensors * plane
    tensors = [torch.zeros(size, dtype=torch.uint8, device=where) for _ in range(cache.layers)]
    apart = order is StorageOrder.LAYER_MAJOR  # all pages' K, then all pages' V
    stride = plane if apart else plane * cache.tensors
    strides = (stride, plane * pages if apart else plane, token, head, 1)
    inside = range(cache.tensors) if apart else range(1)
    starts = [tensor.data_ptr() + i * plane * pages for tensor in tensors for i in inside]
    return Allocated(cache, [tensor.as_strided((pages, *shape), strides) for tensor in tensors], starts, stride)


def _page_of(cache: KVGeometry) -> tuple[int, tuple[int, int, int, int], int, int]:
    """Bytes of a page of K or V of a layer; (tensors, page size, heads, bytes of a head); bytes from a token to the
    next, and from a head."""
    size = cache.head_dim * cache.itemsize
    token, head = (size, size * cache.page_size) if cache.heads_first else (size * cache.kv_heads, size)
    shape = (cache.tensors, cache.page_size, cache.kv_heads, size)
    return cache.page_bytes // (cache.layers * cache.tensors), shape, token, head


def _registered(caches: Sequence[Allocated], order: StorageOrder, pages: int, device: int) -> RegisteredRank:
    exporter = Exporter(device)
    memories: dict[bytes, RegisteredMemory] = {}
    tensors: list[RegisteredTensor] = []
    for number, cache in enumerate(caches):
        count, page_bytes = tensors_of(cache.geometry, order)
        assert len(cache.starts) == count
        for start in cache.starts:
            nbytes = (pages - 1) * cache.stride + page_bytes
            handle, offset = exporter.export(start, nbytes)
            seen = memories.get(handle)
            end = max(offset + nbytes, seen.nbytes if seen is not None else 0)
            memories[handle] = RegisteredMemory(GpuAllocation(handle, exporter.device_uuid), end)
            tensors.append(RegisteredTensor(list(memories).index(handle), offset, cache.stride, page_bytes, number))
    return RegisteredRank(tuple(memories.values()), tuple(tensors))
