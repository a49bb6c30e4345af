"""Pages of several caches, in a daemon's pool, an engine's pool and its blocks over several ranks: parts, tails,
clearing and rows of the host tier, against each cache by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.client.engine_pools import PoolSpec, make_files
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.geometry.registration import Registration
from tests.daemon.memory.shared_pools import PAGES, ended, ended_of_tail, move, pool
from tests.daemon.memory.test_engine_ranks import Ranks, go
from tests.support.reshard import Bytes, heads_of_rank, random_pages, rank_memories, rows

INDEXER = CacheShape(2, 1, 132, "uint8", 1)
SMALL = CacheShape(3, 2, 6, "int8")
GEOMETRIES = {
    "latents and an indexer": KVGeometry(2, 1, 36, "bfloat16", 3, tensors=1, further=(INDEXER,)),
    "heads and an indexer": KVGeometry(3, 4, 8, "bfloat16", 5, further=(INDEXER,)),
    "layers of unlike bytes": KVGeometry(2, 4, 8, "float32", 4, Layout.PAGE_HND, further=(SMALL,)),
}
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)]


def random_caches(geometry: KVGeometry, seed: int) -> list[Bytes]:
    return [random_pages(cache, PAGES, seed + 10 * number) for number, cache in enumerate(geometry.caches)]


def memories(geometry: KVGeometry, caches: list[Bytes], ranks: int, order: StorageOrder) -> list[Bytes]:
    """The memory of each rank: of each cache its own, a page's behind the other's where pages are whole."""
    pairs = zip(geometry.caches, caches, strict=True)
    each = [rank_memories(cache, pages, ranks, order) for cache, pages in pairs]
    if order is StorageOrder.PAGE_MAJOR:
        each = [[memory.reshape(PAGES, -1) for memory in cache] for cache in each]
        return [np.concatenate(rank, axis=1).ravel() for rank in zip(*each, strict=True)]
    return [np.concatenate(rank) for rank in zip(*each, strict=True)]


def fill(mapped: list[Bytes], content: list[Bytes]) -> None:
    for memory, new in zip(mapped, content, strict=True):
        memory[:] = new


def hold(mapped: list[Bytes], content: list[Bytes]) -> bool:
    return all(map(np.array_equal, mapped, content))


@pytest.mark.parametrize(("senders", "receivers"), PAIRS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_caches_of_pages_go_between_ranks(tmp_path: Path, name: str, senders: int, receivers: int) -> None:
    geometry = GEOMETRIES[name]
    for number, (source_order, target_order) in enumerate((a, b) for a in StorageOrder for b in StorageOrder):
        source, source_memory = pool(tmp_path, f"a{number}", geometry, senders, source_order)
        target, target_memory = pool(tmp_path, f"b{number}", geometry, receivers, target_order)
        before, poison = random_caches(geometry, 1), random_caches(geometry, 2)
        fill(source_memory, memories(geometry, before, senders, source_order))
        fill(target_memory, memories(geometry, poison, receivers, target_order))
        asyncio.run(move(source, target, [4, 0, 3], [1, 5, 2]))
        for cache, old in zip(poison, before, strict=True):
            cache[[1, 5, 2]] = old[[4, 0, 3]]
        assert hold(target_memory, memories(geometry, poison, receivers, target_order))
        source.close()
        target.close()


@pytest.mark.parametrize("order", list(StorageOrder))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_rows_of_the_host_tier_have_each_cache_and_head_once(
    tmp_path: Path, name: str, ranks: int, order: StorageOrder
) -> None:
    geometry = GEOMETRIES[name]
    memory, mapped = pool(tmp_path, "a", geometry, ranks, order)
    caches = random_caches(geometry, 1)
    fill(mapped, memories(geometry, caches, ranks, order))
    host = bytearray(b"\xaa" * (4 * geometry.page_bytes))
    memory.attach_rows(memoryview(host))
    memory.spill(np.array([5, 2]), np.array([3, 0]))
    kept = np.frombuffer(host, np.uint8).reshape(4, -1).copy()
    assert (kept[1:3] == 0xAA).all()
    for page, row in ((5, 3), (2, 0)):
        expected: list[Bytes] = []
        for cache, pages in zip(geometry.caches, caches, strict=True):
            slices = sorted({(s.start, s.stop) for s in (heads_of_rank(cache, ranks, rank) for rank in range(ranks))})
            expected += [rows(pages[[page]][..., first:end, :], cache)[0] for first, end in slices]
        assert np.array_equal(kept[row], np.concatenate(expected))
    for each in mapped:
        each[:] = 0x55
    memory.restore(np.array([1, 4]), np.array([3, 0]))
    poison = [np.full_like(pages, 0x55) for pages in caches]
    for cache, pages in zip(poison, caches, strict=True):
        cache[[1, 4]] = pages[[5, 2]]
    assert asyncio.run(ended_of_tail(memory, 4, 2)) == ""
    for cache in poison:
        cache[4, :, :, 2:] = 0
    assert hold(mapped, memories(geometry, poison, ranks, order))
    ids = np.array([1], np.int64)
    assert asyncio.run(ended(lambda done: memory.zero_pages(ids, done))) == ""
    for cache in poison:
        cache[1] = 0
    assert hold(mapped, memories(geometry, poison, ranks, order))
    memory.detach_rows()
    host.clear()
    memory.close()


@pytest.mark.parametrize("order", list(StorageOrder))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_an_engines_pool_lies_as_the_daemons(tmp_path: Path, name: str, order: StorageOrder) -> None:
    geometry, ranks = GEOMETRIES[name], 2
    made = make_files(PoolSpec(PAGES, geometry.page_size, order, (), ranks, str(tmp_path)), geometry)
    registration = Registration.from_proto(made.message, geometry, ranks)
    source = SharedPoolMemory.map(registration, geometry, str(tmp_path), 2)
    target, mapped = pool(tmp_path, "b", geometry, 1, StorageOrder.PAGE_MAJOR)
    caches = random_caches(geometry, 1)
    fill([np.asarray(each) for each in made.pools.memories], memories(geometry, caches, ranks, order))
    asyncio.run(move(source, target, list(range(PAGES)), list(range(PAGES))))
    assert hold(mapped, memories(geometry, caches, 1, StorageOrder.PAGE_MAJOR))
    page = np.concatenate([rows(pages[[2]], cache)[0] for cache, pages in zip(geometry.caches, caches, strict=True)])
    assert not len(made.pools.wrong_bytes(2, page))
    wrong = page.copy()
    wrong[-1] ^= 1
    assert made.pools.wrong_bytes(2, wrong).tolist() == [len(page) - 1]
    made.pools.store(3, page)
    assert not len(made.pools.wrong_bytes(3, page)) and len(made.pools.wrong_bytes(4, page))
    source.close()
    target.close()
    made.close()


HND = KVGeometry(3, 4, 6, "bfloat16", 8, Layout.ENGINE, head_runs=1, further=(replace(INDEXER, layers=3),))
LATENTS = KVGeometry(3, 1, 36, "bfloat16", 8, Layout.ENGINE, tensors=1, further=(INDEXER,))
DRAFTED = replace(LATENTS, head_runs=1, further=(CacheShape(2, 4, 6, "bfloat16"), INDEXER))


@pytest.mark.parametrize("tokens", [(0, 0), (4, 2), (8, 0), (0, 4)])
@pytest.mark.parametrize(("senders", "receivers"), PAIRS)
@pytest.mark.parametrize("geometry", [HND, LATENTS, DRAFTED])
def test_an_engines_own_pages_and_blocks(
    tmp_path: Path, geometry: KVGeometry, senders: int, receivers: int, tokens: tuple[int, int]
) -> None:
    go(tmp_path, geometry, senders, receivers, tokens)


def test_one_cache_that_only_the_engine_can_cut_holds_the_others() -> None:
    nobody_says = replace(HND, head_runs=0)
    assert len(lanes_of(nobody_says, 2, 2)) == 4
    with pytest.raises(ValueError, match=r"ranks is 2 of prefill and 4 of decode, and geometry\.head_runs is 0"):
        lanes_of(nobody_says, 2, 4)
    assert len(lanes_of(replace(LATENTS, head_runs=0), 2, 4)) == 8, "every rank has all of it"


@pytest.mark.parametrize("geometry", [HND, LATENTS, DRAFTED])
def test_behind_a_prompts_end_no_cache_of_a_block_is_given_away(tmp_path: Path, geometry: KVGeometry) -> None:
    """Its blocks stay as they are."""
    source, target = (Ranks.make(tmp_path, name, geometry, 2, 4) for name in ("a", "b"))
    before, poison = random_caches(geometry, 1), random_caches(geometry, 2)
    source.fill(before)
    target.fill(poison)
    assert asyncio.run(ended_of_tail(source.memory, 3, 5)) == ""
    asyncio.run(move(source.memory, target.memory, [4, 3], [1, 2]))
    for new, old in zip(poison, before, strict=True):
        new[[1, 2]] = old[[4, 3]]
        new[2, :, :, 5:] = 0
    assert target.hold(poison) and source.hold(before)
    source.memory.close()
    target.memory.close()
