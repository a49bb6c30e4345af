"""A pool in shared memory over several ranks: parts to and from slots, tails, rows of the host tier; bytes against
whole arrays that were transposed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvferry.daemon.memory.shared import INLINE_BYTES, SharedPoolMemory
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)
from kvferry.transfer.mapping.segment import Segment
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.slots import HEADER_BYTES
from tests.daemon.memory.shared_pools import PAGES, Slots, ended, ended_of_tail, move, pool, scattered
from tests.support.reshard import heads_of_rank, random_pages, rank_memories, rows, stored

GEOMETRIES = {
    "MHA": KVGeometry(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", page_size=5),
    "HND": KVGeometry(layers=3, kv_heads=4, head_dim=3, dtype="int8", page_size=7, layout=Layout.PAGE_HND),
    "GQA": KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float32", page_size=4),
    "MLA": KVGeometry(layers=2, kv_heads=1, head_dim=36, dtype="bfloat16", page_size=3, tensors=1),
}
LARGE = KVGeometry(layers=2, kv_heads=4, head_dim=64, dtype="float32", page_size=320)  # parts go to copy threads
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4)]


@pytest.mark.parametrize(("senders", "receivers"), PAIRS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pages_between_ranks(tmp_path: Path, name: str, senders: int, receivers: int) -> None:
    geometry = GEOMETRIES[name]
    for number, (source_order, target_order) in enumerate((a, b) for a in StorageOrder for b in StorageOrder):
        source, source_memory = pool(tmp_path, f"a{number}", geometry, senders, source_order)
        target, target_memory = pool(tmp_path, f"b{number}", geometry, receivers, target_order)
        before, poison = random_pages(geometry, PAGES, 1), random_pages(geometry, PAGES, 2)
        for memory, content in zip(source_memory, rank_memories(geometry, before, senders, source_order), strict=True):
            memory[:] = content
        for memory, content in zip(
            target_memory, rank_memories(geometry, poison, receivers, target_order), strict=True
        ):
            memory[:] = content
        asyncio.run(move(source, target, [4, 0, 3], [1, 5, 2]))
        poison[[1, 5, 2]] = before[[4, 0, 3]]
        for memory, content in zip(
            target_memory, rank_memories(geometry, poison, receivers, target_order), strict=True
        ):
            assert np.array_equal(memory, content)
        source.close()
        target.close()


def test_large_parts_on_the_copy_threads(tmp_path: Path) -> None:
    assert LARGE.page_bytes // 2 > 2 * INLINE_BYTES
    source, source_memory = pool(tmp_path, "a", LARGE, 1, StorageOrder.LAYER_MAJOR)
    target, target_memory = pool(tmp_path, "b", LARGE, 2, StorageOrder.PAGE_MAJOR)
    pages = random_pages(LARGE, PAGES, 1)
    source_memory[0][:] = stored(pages, LARGE, StorageOrder.LAYER_MAJOR)
    asyncio.run(move(source, target, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]))
    for memory, content in zip(target_memory, rank_memories(LARGE, pages, 2, StorageOrder.PAGE_MAJOR), strict=True):
        assert np.array_equal(memory, content)
    source.close()
    target.close()


@pytest.mark.parametrize("order", list(StorageOrder))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_host_rows_and_tails(tmp_path: Path, name: str, ranks: int, order: StorageOrder) -> None:
    geometry = GEOMETRIES[name]
    memory, mapped = pool(tmp_path, "a", geometry, ranks, order)
    pages = random_pages(geometry, PAGES, 1)
    for each, content in zip(mapped, rank_memories(geometry, pages, ranks, order), strict=True):
        each[:] = content
    host = bytearray(b"\xaa" * (4 * geometry.page_bytes))
    memory.attach_rows(memoryview(host))
    memory.spill(np.array([5, 2]), np.array([3, 0]))
    kept = np.frombuffer(host, np.uint8).reshape(4, -1).copy()
    assert (kept[1:3] == 0xAA).all()
    slices = sorted({(s.start, s.stop) for s in (heads_of_rank(geometry, ranks, rank) for rank in range(ranks))})
    for page, row in ((5, 3), (2, 0)):
        expected = [rows(pages[[page]][..., first:end, :], geometry)[0] for first, end in slices]
        assert np.array_equal(kept[row], np.concatenate(expected)), "each head once, rank by rank"
    for each in mapped:
        each[:] = 0x55
    memory.restore(np.array([1, 4]), np.array([3, 0]))
    moved = memory.copy_statistics()
    of_ranks = memory.shape.rank_geometry.page_bytes * ranks
    assert moved.strategies["memcpy"].bytes == 2 * geometry.page_bytes + 2 * of_ranks
    assert moved.strategies["memcpy"].copies == len(memory.shape.row_shards) + ranks
    assert (list(moved.strategies), moved.fallbacks, moved.forced) == (["memcpy"], {}, "auto")
    poison = np.full_like(pages, 0x55)
    poison[[1, 4]] = pages[[5, 2]]
    assert asyncio.run(ended_of_tail(memory, 4, 2)) == ""
    poison[4, :, :, 2:] = 0
    for each, content in zip(mapped, rank_memories(geometry, poison, ranks, order), strict=True):
        assert np.array_equal(each, content)
    with pytest.raises(ValueError, match="page ids are 6 to 6; they must be 0 to 5"):
        memory.spill(np.array([6]), np.array([0]))
    with pytest.raises(ValueError, match="rows are 4 to 4; they must be 0 to 3"):
        memory.restore(np.array([0]), np.array([4]))
    memory.detach_rows()
    host.clear()  # nobody holds it
    memory.close()


def test_a_part_that_does_not_fit_is_an_error_of_its_copy(tmp_path: Path) -> None:
    geometry = GEOMETRIES["MHA"]
    memory, _ = pool(tmp_path, "a", geometry, 2, StorageOrder.LAYER_MAJOR)

    async def scenario() -> None:
        lanes = lanes_of(geometry, 1, 2)
        slots = cast(CourierLink, Slots(1, HEADER_BYTES + 10))
        receiving, checking = memory.receiving(slots, lanes), memory.receiving(slots, lanes)
        checking.begin_sums()
        for scatter in (Scatter(0, 1, [0], 0, 0, 11, 1), Scatter(0, 1, [PAGES], 0, 0, 1, 0)):
            problem, payload_sum = await scattered(lambda done, scatter=scatter: receiving.scatter(scatter, done))
            assert problem.startswith(("ValueError", "IndexError")) and payload_sum is None
            assert await scattered(lambda done, s=scatter: checking.scatter(s, done)) == (problem, None)
        receiving.close()
        checking.close()

    asyncio.run(scenario())
    memory.close()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_cleared_pages_are_whole_and_the_others_untouched(tmp_path: Path, name: str) -> None:
    geometry = GEOMETRIES[name]
    ranks = 2 if geometry.kv_heads > 1 else 1
    for order in StorageOrder:
        memory, ranks_memory = pool(tmp_path, f"a{order}", geometry, ranks, order)
        content = random_pages(geometry, PAGES, 3)
        for found, before in zip(ranks_memory, rank_memories(geometry, content, ranks, order), strict=True):
            found[:] = before
        for cleared in ([4], [0, 5, 2]):
            ids = np.array(cleared, np.int64)
            assert asyncio.run(ended(lambda done, ids=ids, memory=memory: memory.zero_pages(ids, done))) == ""
            content[cleared] = 0
            for found, after in zip(ranks_memory, rank_memories(geometry, content, ranks, order), strict=True):
                assert np.array_equal(found, after)
        memory.close()


def test_without_room_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Segment.create

    def full(directory: str, name: str, nbytes: int) -> Segment:
        if name.endswith("-1"):
            raise OSError("no room")
        return create(directory, name, nbytes)

    monkeypatch.setattr(Segment, "create", full)
    with pytest.raises(OSError, match="no room"):
        pool(tmp_path, "a", GEOMETRIES["MHA"], 2, StorageOrder.PAGE_MAJOR)
    assert list(tmp_path.iterdir()) == []


def test_an_engines_file_keeps_its_name_and_the_daemons_own_does_not(tmp_path: Path) -> None:
    geometry = GEOMETRIES["MHA"]
    nbytes = PAGES * geometry.page_bytes
    (tmp_path / "engine").write_bytes(bytes(nbytes))
    place = RegisteredTensor(0, 0, geometry.page_bytes, geometry.page_bytes)
    rank = RegisteredRank((RegisteredMemory(SharedFile("engine"), nbytes),), (place,))
    registration = Registration(PAGES, StorageOrder.PAGE_MAJOR, (rank,))
    engines = SharedPoolMemory.map(registration, geometry, str(tmp_path), 1)
    own, _ = pool(tmp_path, "own", geometry, 1, StorageOrder.PAGE_MAJOR)
    assert engines.rank_pools() == [] and len(own.rank_pools()) == 1
    engines.close()
    own.close()
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
