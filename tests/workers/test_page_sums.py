"""Sums over pages, and the record in which both workers write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.client.rank_pools import Bytes, RankPools
from kvferry.client.requests import RequestName
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.workers.models.interface import Prompt
from kvferry.workers.page_sums import FileRecord, PageSums
from kvferry.workers.record import Recorded, read_record

PAGE = 4
GEOMETRY = KVGeometry(2, 4, 8, "bfloat16", PAGE, Layout.PAGE_NHD)
NAME = RequestName(b"0123456789abcdef", 2)


def pools(rows: Bytes, ranks: int = 1, order: StorageOrder = StorageOrder.PAGE_MAJOR) -> RankPools:
    memories = [np.zeros(rows.size // ranks, dtype=np.uint8) for _ in range(ranks)]
    made = RankPools(GEOMETRY, order, len(rows), memories)
    for page, row in enumerate(rows):
        made.store(page, row)
    return made


@pytest.fixture
def rows() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, (6, GEOMETRY.page_bytes), dtype=np.uint8)


def test_the_same_bytes_have_the_same_sums_wherever_they_lie(rows: Bytes) -> None:
    sums = PageSums(pools(rows)).of([3, 1, 5], 2 * PAGE + 1, 0)
    assert len(set(sums)) == 3
    for ranks, order in ((2, StorageOrder.PAGE_MAJOR), (4, StorageOrder.LAYER_MAJOR)):
        assert PageSums(pools(rows[::-1].copy(), ranks, order)).of([2, 4, 0], 2 * PAGE + 1, 0) == sums
    assert PageSums(pools(rows)).of([3, 1, 5], 2 * PAGE + 1, 1) == sums[1:]
    assert PageSums(pools(rows)).of([3, 1, 5], 2 * PAGE, 2) == []


def test_every_byte_counts_and_those_behind_the_tail_do_not(rows: Bytes) -> None:
    whole = PageSums(pools(rows[:1])).of([0], PAGE, 0)
    tail = PageSums(pools(rows[:1])).of([0], 1, 0)
    counted = 0
    for byte in range(0, GEOMETRY.page_bytes, 7):
        changed = rows[:1].copy()
        changed[0, byte] ^= 1
        assert PageSums(pools(changed)).of([0], PAGE, 0) != whole
        counted += PageSums(pools(changed)).of([0], 1, 0) != tail
    assert 0.15 < counted / len(range(0, GEOMETRY.page_bytes, 7)) < 0.35  # one token of four
    swapped = rows[:1].copy()
    swapped[0, :8], swapped[0, 8:16] = rows[0, 8:16], rows[0, :8]
    assert PageSums(pools(swapped)).of([0], PAGE, 0) != whole


def test_both_sides_write_the_same_sums_down(rows: Bytes, tmp_path: Path) -> None:
    prompt = Prompt(np.arange(10, dtype=np.uint32), b"", b"")
    prefill, decode = FileRecord(tmp_path / "p", pools(rows)), FileRecord(tmp_path / "d", pools(rows[::-1].copy()))
    prefill.prefilled(NAME, prompt, [0, 4, 2], 4, [8, 10])
    decode.decoded(NAME, prompt, [5, 1, 3], 4, [7, 8])
    (first,), (second,) = read_record(tmp_path / "p"), read_record(tmp_path / "d")
    name = f"{NAME.request_id.hex()}-2"
    assert first == Recorded(name, 4, [], [], [8, 10], 0, first.sums)
    assert second == Recorded(name, 4, list(range(10)), [7, 8], [], 1, first.sums[1:])


def test_each_cache_of_a_page_counts() -> None:
    """Also where ranks each have all of it: latents with an indexer's keys beside them."""
    further = (CacheShape(3, 1, 8, "uint8", 1),)
    geometry = KVGeometry(2, 1, 12, "float32", PAGE, Layout.PAGE_NHD, tensors=1, further=further)
    content = np.random.default_rng(3).integers(0, 256, geometry.page_bytes, dtype=np.uint8)

    def sum_of(row: Bytes, ranks: int = 1) -> int:
        memories = [np.zeros(geometry.page_bytes, dtype=np.uint8) for _ in range(ranks)]
        made = RankPools(geometry, StorageOrder.PAGE_MAJOR, 1, memories)
        made.store(0, row)
        (found,) = PageSums(made).of([0], PAGE, 0)
        return found

    whole = sum_of(content)
    assert sum_of(content, 2) == whole
    for byte in range(0, geometry.page_bytes, 5):
        changed = content.copy()
        changed[byte] ^= 1
        assert sum_of(changed) != whole, byte


def test_heads_of_no_whole_words_are_refused(tmp_path: Path) -> None:
    geometry = KVGeometry(1, 1, 2, "bfloat16", PAGE, Layout.PAGE_NHD)
    odd = RankPools.single(np.zeros((1, geometry.page_bytes), dtype=np.uint8), geometry)
    with pytest.raises(ValueError, match="a head has 4 bytes"):
        FileRecord(tmp_path / "p", odd)
    beside = KVGeometry(1, 1, 8, "bfloat16", PAGE, Layout.PAGE_NHD, further=(CacheShape(1, 1, 4, "uint8", 1),))
    with pytest.raises(ValueError, match=r"geometry\.further\[0\]: a head has 4 bytes"):
        PageSums(RankPools.single(np.zeros((1, beside.page_bytes), dtype=np.uint8), beside))
