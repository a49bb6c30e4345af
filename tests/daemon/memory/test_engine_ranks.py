"""Pages in an engine's own layout over several ranks, in a daemon's pool and in an engine's blocks: what lanes and the
host tier's rows take of them, against whole arrays that were transposed."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.client.engine_blocks import make_block_files
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import lanes_of, rank_geometry
from kvferry.transfer.geometry.registration import Registration
from tests.daemon.memory.shared_pools import PAGES, move, pool
from tests.support.reshard import Bytes, heads_of_rank, random_pages, rank_memories, rows

NHD = KVGeometry(3, 4, 6, "bfloat16", 8, Layout.ENGINE)
HND, HND_APART = replace(NHD, head_runs=1), replace(NHD, head_runs=2)
GEOMETRIES = {
    "a head's K and V together": HND,
    "a head's K and V apart": HND_APART,
    "grouped queries": replace(HND, kv_heads=2),
}
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (8, 8)]
FROM, TO = [4, 0, 3], [1, 5, 2]


def places_of(own: KVGeometry) -> int:
    """A rank's places of one cache."""
    return own.layers * (own.head_runs * own.kv_heads or own.tensors)


@dataclass
class Ranks:
    """A pool of the daemon's; or of blocks of `block_tokens`, which lie anywhere."""

    memory: SharedPoolMemory
    geometry: KVGeometry
    mapped: list[Bytes]  # of each rank
    block_tokens: int

    @staticmethod
    def make(path: Path, name: str, geometry: KVGeometry, ranks: int, block_tokens: int) -> Ranks:
        if not block_tokens:
            memory, mapped = pool(path, name, geometry, ranks, StorageOrder.PAGE_MAJOR)
            return Ranks(memory, geometry, mapped, 0)
        places = [places_of(cache) for cache in rank_geometry(geometry, ranks).caches]
        blocks = PAGES * geometry.page_size // block_tokens
        made = make_block_files(geometry, block_tokens, blocks, places, str(path), ranks)
        registration = Registration.from_proto(made.message, geometry, ranks)
        memory = SharedPoolMemory.map(registration, geometry, str(path), 2)
        found = Ranks(memory, geometry, [np.asarray(each) for each in made.pools.memories], block_tokens)
        assert memory.block_table is not None
        memory.block_table.bind(range(PAGES), found.blocks.ravel().tolist())
        return found

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """(pages, blocks of each)."""
        per_page = self.geometry.page_size // self.block_tokens
        return np.random.default_rng(5).permutation(PAGES * per_page).reshape(PAGES, per_page)

    def expected(self, caches: list[Bytes]) -> list[Bytes]:
        """The memory of each rank with these pages, cache by cache."""
        ranks, own = len(self.mapped), rank_geometry(self.geometry, len(self.mapped)).caches
        pairs = zip(self.geometry.caches, caches, strict=True)
        found = [rank_memories(cache, pages, ranks, StorageOrder.PAGE_MAJOR) for cache, pages in pairs]
        by_rank = list(zip(*found, strict=True))
        if self.block_tokens:
            return [np.concatenate(list(map(self._in_blocks, own, rank))) for rank in by_rank]
        whole = [[memory.reshape(PAGES, -1) for memory in rank] for rank in by_rank]
        return [np.concatenate(rank, axis=1).reshape(-1) for rank in whole]

    def _in_blocks(self, own: KVGeometry, memory: Bytes) -> Bytes:
        per_page = self.geometry.page_size // self.block_tokens
        places = places_of(own)
        parts = memory.reshape(PAGES, places, per_page, -1)
        out = np.empty((places, PAGES * per_page, parts.shape[-1]), np.uint8)
        out[:, self.blocks] = parts.transpose(1, 0, 2, 3)
        return out.reshape(-1)

    def fill(self, caches: list[Bytes]) -> None:
        for memory, content in zip(self.mapped, self.expected(caches), strict=True):
            memory[:] = content

    def hold(self, caches: list[Bytes]) -> bool:
        return all(map(np.array_equal, self.mapped, self.expected(caches)))


def go(path: Path, geometry: KVGeometry, senders: int, receivers: int, tokens: tuple[int, int]) -> None:
    """Pages FROM of one pool to pages TO of another; tokens: of each one's blocks."""
    source = Ranks.make(path, "a", geometry, senders, tokens[0])
    target = Ranks.make(path, "b", geometry, receivers, tokens[1])
    before, poison = ([random_pages(cache, PAGES, seed) for cache in geometry.caches] for seed in (1, 2))
    source.fill(before)
    target.fill(poison)
    asyncio.run(move(source.memory, target.memory, FROM, TO))
    for new, old in zip(poison, before, strict=True):
        new[TO] = old[FROM]
    assert target.hold(poison) and source.hold(before)
    source.memory.close()
    target.memory.close()


@pytest.mark.parametrize("tokens", [(0, 0), (4, 2), (8, 0), (0, 4)])
@pytest.mark.parametrize(("senders", "receivers"), PAIRS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_heads_that_lie_apart_go_between_any_ranks(
    tmp_path: Path, name: str, senders: int, receivers: int, tokens: tuple[int, int]
) -> None:
    """In the pool of either side or in its blocks, of any sizes."""
    go(tmp_path, GEOMETRIES[name], senders, receivers, tokens)


@pytest.mark.parametrize("tokens", [(0, 0), (4, 4), (4, 0)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pages_go_whole_between_as_many_ranks(tmp_path: Path, ranks: int, tokens: tuple[int, int]) -> None:
    """Each to the rank of its number."""
    assert [(lane.sender, lane.receiver) for lane in lanes_of(NHD, ranks, ranks)] == [(i, i) for i in range(ranks)]
    go(tmp_path, NHD, ranks, ranks, tokens)


def test_pages_that_only_the_engine_can_cut_are_refused_to_unlike_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks is 2 of prefill and 4 of decode, and geometry\.head_runs is 0"):
        go(tmp_path, NHD, 2, 4, (0, 0))


@pytest.mark.parametrize("block_tokens", [0, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("geometry", [NHD, HND, HND_APART])
def test_the_host_tiers_rows(tmp_path: Path, geometry: KVGeometry, ranks: int, block_tokens: int) -> None:
    """Each head once, rank by rank; restored to all ranks that have it."""
    found = Ranks.make(tmp_path, "a", geometry, ranks, block_tokens)
    pages = random_pages(geometry, PAGES, 1)
    found.fill([pages])
    host = bytearray(b"\xaa" * (4 * geometry.page_bytes))
    found.memory.attach_rows(memoryview(host))
    found.memory.spill(np.array([5, 2]), np.array([3, 0]))
    kept = np.frombuffer(host, np.uint8).reshape(4, -1).copy()
    assert (kept[1:3] == 0xAA).all()
    slices = sorted({(s.start, s.stop) for s in (heads_of_rank(geometry, ranks, rank) for rank in range(ranks))})
    for page, row in ((5, 3), (2, 0)):
        expected = [rows(pages[[page]][..., first:end, :], geometry)[0] for first, end in slices]
        assert np.array_equal(kept[row], np.concatenate(expected))
    poison = random_pages(geometry, PAGES, 2)
    found.fill([poison])
    found.memory.restore(np.array([1, 4]), np.array([3, 0]))
    poison[[1, 4]] = pages[[5, 2]]
    assert found.hold([poison])
    found.memory.detach_rows()
    found.memory.close()
