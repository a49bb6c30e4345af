"""The table of the blocks that pages are: what is bound, and where a prompt ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.daemon.memory.block_table import SHARING, BlockTable, PlainPages, page_ids_of, table_of
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)

GEOMETRY = KVGeometry(2, 1, 4, "float32", 16, Layout.ENGINE)
BLOCKS, PER_PAGE, PLACES = 12, 4, 4
SIZE = GEOMETRY.page_bytes // PLACES // PER_PAGE  # of a block, in each place
TOKEN = SIZE // 4


def registered(block_tokens: int = 4, name: str = "mine") -> Registration:
    tensors = tuple(RegisteredTensor(0, i * BLOCKS * SIZE, SIZE, SIZE) for i in range(PLACES))
    rank = RegisteredRank((RegisteredMemory(SharedFile(name), PLACES * BLOCKS * SIZE),), tensors)
    return Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (rank,), block_tokens)


def test_a_page_is_the_blocks_that_it_was_bound_to_last() -> None:
    table = BlockTable(4, 2, [10, 3])
    assert table.of([0, 3]).tolist() == [-1] * 4
    table.bind([3, 1], [5, 6, 7, -1])
    assert table.of([1, 3, 0]).tolist() == [7, -1, 5, 6, -1, -1]
    table.bind([1], [2, 9])
    assert table.of(np.array([1, 3])).tolist() == [2, 9, 5, 6]


def test_nothing_behind_a_prompts_end_is_sent_until_the_page_is_bound_again() -> None:
    table = BlockTable(4, 2, [10, 3])
    table.bind([0, 1], [0, 1, 2, 3])
    assert table.last_bytes([0, 1], 0) is None
    table.cut(1, 3)
    assert [table.last_bytes([0, 1], cache) for cache in (0, 1)] == [30, 9]
    assert table.last_bytes([1, 0], 0) is None, "of the last page"
    table.bind([0], [4, 5])
    assert table.last_bytes([1], 0) == 30, "another page was bound"
    table.bind([1], [2, 3])
    assert table.last_bytes([1], 0) is None


def test_pages_that_are_no_blocks_are_found_by_their_ids() -> None:
    assert PlainPages().of([3, 1]).tolist() == [3, 1]
    assert PlainPages().of([3]).dtype == np.int64
    assert table_of(registered(0), GEOMETRY) is None
    assert page_ids_of(registered(0), GEOMETRY.page_size) == BLOCKS


def test_requests_may_name_the_same_blocks() -> None:
    registration = registered()
    assert page_ids_of(registration, GEOMETRY.page_size) == SHARING * BLOCKS // PER_PAGE
    table = table_of(registration, GEOMETRY)
    assert table is not None
    last = SHARING * BLOCKS // PER_PAGE - 1
    table.bind([0, last], [1, 2, 3, 4] * 2)
    assert table.of([last]).tolist() == table.of([0]).tolist() == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        table.bind([last + 1], [1, 2, 3, 4])
    table.cut(last, 7)
    assert table.last_bytes([last], 0) == 7 * TOKEN


def test_the_host_tier_and_blocks_that_are_not_there(tmp_path: Path) -> None:
    """A page whose first block is the engine's own is loaded into the others alone; none is stored without all of
    its blocks."""
    (tmp_path / "mine").write_bytes(np.random.default_rng(1).integers(0, 256, PLACES * BLOCKS * SIZE, np.uint8))
    memory = SharedPoolMemory.map(registered(), GEOMETRY, str(tmp_path), 2)
    assert memory.block_table is not None
    there = np.memmap(tmp_path / "mine", np.uint8, "r+").reshape(PLACES, BLOCKS, SIZE)
    before = there.copy()
    host = bytearray(3 * GEOMETRY.page_bytes)
    memory.attach_rows(memoryview(host))
    memory.block_table.bind([20, 3], [5, 1, 7, 0, 2, 3, 4, 6])
    memory.spill(np.array([3, 20]), np.array([0, 2]))
    kept = np.frombuffer(host, np.uint8).reshape(3, PLACES, PER_PAGE, SIZE).copy()
    assert (kept[0] == before[:, [2, 3, 4, 6]]).all() and (kept[2] == before[:, [5, 1, 7, 0]]).all()
    assert not kept[1].any() and (there == before).all()

    memory.block_table.bind([20, 1], [-1, 8, -1, 11, 9, -1, 10, 2])
    memory.restore(np.array([20, 1]), np.array([0, 2]))
    want = before.copy()
    want[:, [8, 11]] = kept[0][:, [1, 3]]
    want[:, [9, 10, 2]] = kept[2][:, [0, 2, 3]]
    assert (there == want).all(), "what is no block of the page's was written, or one was not"
    with pytest.raises(AssertionError, match="not there"):
        memory.spill(np.array([20]), np.array([1]))
    moved = memory.copy_statistics().strategies["memcpy"].bytes
    assert moved == 2 * GEOMETRY.page_bytes + 5 * PLACES * SIZE
    memory.detach_rows()
    memory.close()
