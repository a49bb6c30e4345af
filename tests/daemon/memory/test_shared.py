"""A pool in shared memory over several ranks: parts to and from slots, tails, rows of the host tier; bytes against
whole arrays that were transposed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvferry._core import part_checksum
from kvferry.daemon.memory.shared import INLINE_BYTES, SharedPoolMemory
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
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
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader
from tests.support.reshard import heads_of_rank, random_pages, rank_memories, rows, stored

PAGES = 6
GEOMETRIES = {
    "MHA": KVGeometry(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", page_size=5),
    "HND": KVGeometry(layers=3, kv_heads=4, head_dim=3, dtype="int8", page_size=7, layout=Layout.PAGE_HND),
    "GQA": KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float32", page_size=4),
    "MLA": KVGeometry(layers=2, kv_heads=1, head_dim=36, dtype="bfloat16", page_size=3, tensors=1),
}
LARGE = KVGeometry(layers=2, kv_heads=4, head_dim=64, dtype="float32", page_size=320)  # parts go to copy threads
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4)]


class Slots:
    """A link's slots in this process."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = [bytearray(slot_bytes) for _ in range(slots)]
        self.host_slots = self

    def send_slot(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    receive_slot = send_slot


def pool(
    path: Path, name: str, geometry: KVGeometry, ranks: int, order: StorageOrder
) -> tuple[SharedPoolMemory, list[np.ndarray]]:
    """And its ranks' memory as another process maps it."""
    memory = SharedPoolMemory.create(PoolShape(geometry, ranks, order, PAGES), str(path), name, 2)
    segments = [Segment.open(found.segment, found.nbytes) for found in memory.rank_pools()]
    return memory, [np.frombuffer(segment.buffer, np.uint8) for segment in segments]


async def ended(start: Callable[[Callable[[str], None]], None]) -> str:
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    start(done.set_result)
    assert not done.done(), "it ends after the call"
    return await asyncio.wait_for(done, 10)


async def scattered(start: Callable[[Callable[[str, int | None], None]], None]) -> tuple[str, int | None]:
    done: asyncio.Future[tuple[str, int | None]] = asyncio.get_running_loop().create_future()
    start(lambda problem, payload_sum: done.set_result((problem, payload_sum)))
    assert not done.done(), "it ends after the call"
    return await asyncio.wait_for(done, 10)


async def ended_of_tail(memory: SharedPoolMemory, page: int, tokens: int) -> str:
    return await ended(lambda done: memory.zero_tail(page, tokens, done))


async def move(source: SharedPoolMemory, target: SharedPoolMemory, pages: list[int], to: list[int]) -> None:
    """All rows of these pages, lane by lane, in parts of any size."""
    geometry = source.shape.geometry
    lanes = lanes_of(geometry, source.shape.ranks, target.shape.ranks)
    part = max(1, 2 * max(lane.row_bytes for lane in lanes) // 3)
    slots = cast(CourierLink, Slots(1, HEADER_BYTES + part))
    sending, receiving = source.sending(slots, lanes), target.receiving(slots, lanes)
    summing, checking = source.sending(slots, lanes), target.receiving(slots, lanes)
    summing.begin_sums()
    checking.begin_sums()
    for number, lane in enumerate(lanes):
        total = lane.row_bytes * len(pages)
        for start in range(0, total, part):
            nbytes = min(part, total - start)
            first, offset = divmod(start, lane.row_bytes)
            last = (start + nbytes - 1) // lane.row_bytes
            header = PartHeader(7, 1, 0, 1, number, first, offset, nbytes)
            gather = Gather(1, 0, Credit(0, 1), pages[first : last + 1], first, offset, nbytes, header, number)
            assert await ended(lambda done, gather=gather: sending.gather(gather, done)) == ""
            assert receiving.read_header(0) == header.pack()
            scatter = Scatter(0, 1, to[first : last + 1], first, offset, nbytes, number)
            assert await scattered(lambda done, scatter=scatter: receiving.scatter(scatter, done)) == ("", None)
            payload = bytes(slots.send_slot(0)[HEADER_BYTES : HEADER_BYTES + nbytes])
            payload_sum = part_checksum(payload)
            assert await ended(lambda done, gather=gather: summing.gather(gather, done)) == ""
            assert receiving.read_header(0) == header.with_sum(payload_sum).pack()
            found = await scattered(lambda done, scatter=scatter: checking.scatter(scatter, done))
            assert found == ("", payload_sum)
            assert slots.send_slot(0)[HEADER_BYTES : HEADER_BYTES + nbytes] == payload
    for parts in (sending, receiving, summing, checking):
        parts.close()


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
    source_memory[0][:] = stored(pages, LARGE.layout, StorageOrder.LAYER_MAJOR)
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
        expected = [rows(pages[[page]][..., first:end, :], geometry.layout)[0] for first, end in slices]
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
