"""Which bytes a GPU's mover names, without a GPU: its tables are read as the kernel reads them, in host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.gpu_mover import GpuMover
from kvferry.connectors.movers import HostMover

BLOCKS, PAGES, TOKENS = 9, 5, 4


@dataclass(frozen=True)
class Table:
    bases: NDArray[np.int64]
    strides: NDArray[np.int64]
    nbytes: int
    count: int

    def at(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        assert len(ids) and ids.min() >= 0 and ids.max() < self.count, "no such page of the table"
        assert self.strides.min() >= self.nbytes, "the kernel takes none that overlap"
        return (self.bases[:, None] + ids * self.strides[:, None]).ravel()


class Engine:
    pages = staticmethod(Table)


def map_of(memory: NDArray[np.uint8], start: int, places: int, token_bytes: int, per_page: int) -> BlockMap:
    size = TOKENS * token_bytes
    begin = memory.__array_interface__["data"][0] + start
    bases = begin + np.arange(places, dtype=np.int64) * BLOCKS * size
    order = np.arange(TOKENS, dtype=np.int32).repeat(token_bytes)
    return BlockMap(bases, np.full(places, size, np.int64), size, BLOCKS, TOKENS, per_page, order)


def maps(memory: NDArray[np.uint8], sizes: list[tuple[int, int]], per_page: int) -> BlockMap:
    found: list[BlockMap] = []
    start = 0
    for places, token_bytes in sizes:
        found.append(map_of(memory, start, places, token_bytes, per_page))
        start += places * BLOCKS * TOKENS * token_bytes
    return replace(found[0], further=tuple(found[1:]))


@pytest.mark.parametrize("per_page", [1, 3])
@pytest.mark.parametrize("sizes", [[(2, 24)], [(3, 36), (3, 128), (3, 4)], [(1, 8), (2, 4)]])
def test_its_tables_name_the_bytes_that_the_hosts_mover_copies(sizes: list[tuple[int, int]], per_page: int) -> None:
    """Of one cache, and of several whose blocks a page is no multiple of."""
    total = sum(places * BLOCKS * TOKENS * token_bytes for places, token_bytes in sizes)
    memory = np.random.default_rng(1).integers(0, 256, total, np.uint8)
    blocks = maps(memory, sizes, per_page)
    mover = GpuMover.__new__(GpuMover)
    mover._map, mover._engine, mover._pool = blocks, cast(Any, Engine()), None
    mover._blocks = [
        cast(Any, Table(cache.bases, cache.strides, cache.block_bytes, cache.blocks)) for cache in blocks.caches
    ]
    pools = [np.full(PAGES * blocks.page_bytes, 0xEE, np.uint8) for _ in range(2)]
    pages, ids, end = [3, 0], [4, 1, 7, 2, 8, 0][: 2 * per_page], 2 * per_page * TOKENS
    pool = PoolPages.of(pools[0], PAGES)
    HostMover(blocks).to_pages(pool, blocks.places(pool, pages, ids, 0, end), None)
    pool = PoolPages.of(pools[1], PAGES)
    moves = mover._moves(pool, blocks.places(pool, pages, ids, 0, end))
    for move in moves:
        (source, own), (target, there) = cast(Any, move)
        for to, at in zip(target.at(there).tolist(), source.at(own).tolist(), strict=True):
            ctypes.memmove(to, at, source.nbytes)
    assert np.array_equal(*pools)
    assert mover._moves(pool, blocks.places(pool, pages, [], 0, 0)) == []
    if len(sizes) == 1:
        assert len(moves) == 1, "one launch"


def test_caches_of_unlike_blocks_are_refused() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    first, other = map_of(memory, 0, 2, 24, 2), map_of(memory, 0, 2, 4, 1)
    with pytest.raises(ValueError, match=r"further\[0\]\.blocks_per_page is 1; it must be 2, as of the first cache"):
        replace(first, further=(other,))
    nested = replace(first, further=(first,))
    with pytest.raises(ValueError, match=r"further\[0\]\.further has 1 entries; it must have none"):
        replace(first, further=(nested,))
