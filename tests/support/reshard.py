"""The reference of re-sharding: what each rank's memory must hold, made by transposing whole arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder

Bytes = NDArray[np.uint8]
# Axes of (page, layer, K or V, token, head, bytes of a head) in the order in which a rank stores them.
AXES = {
    StorageOrder.PAGE_MAJOR: (0, 1, 2, 3, 4, 5),
    StorageOrder.LAYER_MAJOR: (1, 2, 0, 3, 4, 5),
    StorageOrder.LAYER_BLOCKS: (1, 0, 2, 3, 4, 5),
}


def random_pages(geometry: KVGeometry, pages: int, seed: int) -> Bytes:
    """(pages, layers, tensors, page size, heads, bytes of a head)."""
    head_bytes = geometry.head_dim * geometry.itemsize
    shape = (pages, geometry.layers, geometry.tensors, geometry.page_size, geometry.kv_heads, head_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def heads_of_rank(geometry: KVGeometry, ranks: int, rank: int) -> slice:
    """As vLLM shares them out: evenly, each to several ranks where there are more of these; all of MLA to each."""
    if geometry.tensors == 1:
        return slice(0, geometry.kv_heads)
    if ranks > geometry.kv_heads:
        head = rank // (ranks // geometry.kv_heads)
        return slice(head, head + 1)
    count = geometry.kv_heads // ranks
    return slice(rank * count, (rank + 1) * count)


def stored(pages: Bytes, geometry: KVGeometry, order: StorageOrder) -> Bytes:
    """These heads as a rank stores them, one-dimensional. A run of K and V is (token, K or V)."""
    axes = AXES[order]
    if geometry.heads_first:
        axes = (*axes[:3], 4, 3, 5)
    elif geometry.head_runs:
        assert order is not StorageOrder.LAYER_MAJOR, "K and V lie apart"
        axes = (*axes[:2], 4, 3, 2, 5)
    return np.ascontiguousarray(pages.transpose(axes)).reshape(-1)


def rows(pages: Bytes, geometry: KVGeometry) -> Bytes:
    """The canonical rows of these heads: (pages, bytes)."""
    return stored(pages, geometry, StorageOrder.PAGE_MAJOR).reshape(len(pages), -1)


def rank_memories(geometry: KVGeometry, pages: Bytes, ranks: int, order: StorageOrder) -> list[Bytes]:
    """Every rank's memory."""
    return [stored(pages[..., heads_of_rank(geometry, ranks, rank), :], geometry, order) for rank in range(ranks)]
