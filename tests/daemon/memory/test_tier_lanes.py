"""A prompt that is sent from the host tier travels as the same bytes as one that is sent from its engine's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry._core import HostPages
from kvferry.daemon.memory.shared import SharedPoolMemory, host_pages
from kvferry.daemon.memory.tier_lanes import TierLanes
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.rank_lanes import Lane, lanes_of
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)

PAGE, BLOCK, BLOCKS = 16, 4, 24
PER_PAGE = PAGE // BLOCK
HEADS, RUNS = 4, 2
# Heads outermost, so that ranks of the other side may have some of them.
GEOMETRY = KVGeometry(2, HEADS, 8, "float16", PAGE, Layout.ENGINE, head_runs=RUNS)
PAGES, ROWS = [11, 3, 40], [5, 0, 2]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedPoolMemory]:
    places = GEOMETRY.layers * RUNS * HEADS
    size = GEOMETRY.page_bytes // places // PER_PAGE
    content = np.random.default_rng(5).integers(0, 256, places * BLOCKS * size, np.uint8)
    (tmp_path / "engine").write_bytes(content)
    tensors = tuple(RegisteredTensor(0, i * BLOCKS * size, size, size) for i in range(places))
    rank = RegisteredRank((RegisteredMemory(SharedFile("engine"), len(content)),), tensors)
    registration = Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (rank,), BLOCK)
    made = SharedPoolMemory.map(registration, GEOMETRY, str(tmp_path), 1)
    assert made.block_table is not None
    made.block_table.bind(PAGES, np.random.default_rng(6).permutation(BLOCKS)[: 3 * PER_PAGE].tolist())
    made.block_table.cut(PAGES[-1], 6)
    yield made
    made.detach_rows()
    made.close()


def tier_lanes(memory: SharedPoolMemory, lanes: list[Lane]) -> TierLanes[HostPages]:
    return TierLanes(memory.shape, lanes, lambda: memory._tier_rows, lambda _, tier, rows: host_pages(tier.data, rows))


def from_blocks(memory: SharedPoolMemory, lane: Lane) -> NDArray[np.uint8]:
    (rows,), table = memory.shape.sending_rows([lane]), memory.block_table
    assert table is not None
    slot = np.zeros(len(PAGES) * lane.row_bytes, np.uint8)
    pages = host_pages(memory._segments[0].buffer, rows)
    pages.gather_part(table.of(PAGES), 0, len(slot), slot, 0, 1, table.last_bytes(PAGES, 0))
    pages.close()
    return slot


@pytest.mark.parametrize("receivers", [1, 2, 4])
def test_bytes_are_the_same_for_ranks_of_any_number(memory: SharedPoolMemory, receivers: int) -> None:
    tier = bytearray(b"\xee" * (6 * GEOMETRY.page_bytes))
    memory.attach_rows(memoryview(tier))
    memory.spill(np.array(PAGES), np.array(ROWS))
    lanes = lanes_of(GEOMETRY, 1, receivers)
    assert len(lanes) == receivers
    tier_side = tier_lanes(memory, lanes)
    for number, lane in enumerate(lanes):
        slot = np.zeros(len(PAGES) * lane.row_bytes, np.uint8)
        tier_side.of(number).gather_part(np.array(ROWS), 0, len(slot), slot)
        assert (slot == from_blocks(memory, lane)).all()
        assert slot.any()
    for pages in tier_side.made:
        pages.close()


def test_nothing_behind_a_prompts_end_is_in_the_tier(memory: SharedPoolMemory) -> None:
    tier = bytearray(b"\xee" * (6 * GEOMETRY.page_bytes))
    memory.attach_rows(memoryview(tier))
    memory.spill(np.array(PAGES), np.array(ROWS))
    rows = np.frombuffer(tier, np.uint8).reshape(6, GEOMETRY.layers * RUNS * HEADS, PAGE, -1)
    assert not rows[ROWS[-1]][:, 6:].any() and rows[ROWS[-1]][:, :6].any(axis=-1).all()
    assert rows[ROWS[0]].any(axis=-1).all(), "another page was cut"
    assert (rows[[1, 3, 4]] == 0xEE).all()


def test_a_tier_that_has_grown(memory: SharedPoolMemory) -> None:
    """Rows that came later are sent, too, and copies of those before go on."""
    lanes = lanes_of(GEOMETRY, 1, 1)
    tier_side = tier_lanes(memory, lanes)
    with pytest.raises(ValueError, match="host tier that is not there"):
        tier_side.of(0)
    tier = bytearray(6 * GEOMETRY.page_bytes)
    memory.attach_rows(memoryview(tier)[: 3 * GEOMETRY.page_bytes])
    few = tier_side.of(0)
    assert tier_side.of(0) is few and few.pages == 3
    memory.attach_rows(memoryview(tier))
    memory.spill(np.array(PAGES), np.array(ROWS))
    more = tier_side.of(0)
    assert more.pages == 6 and tier_side.made == [few, more]
    slot = np.zeros(lanes[0].row_bytes, np.uint8)
    more.gather_part(np.array([5]), 0, len(slot), slot)
    again = np.zeros(lanes[0].row_bytes, np.uint8)
    few.gather_part(np.array([0]), 0, len(again), again)
    assert (np.concatenate([slot, again]) == from_blocks(memory, lanes[0])[: 2 * len(slot)]).all()
    for pages in tier_side.made:
        pages.close()
