"""Rows and fragments of a rank's memory, against whole arrays that were transposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry._core import HostPages
from kvferry.daemon.memory.shared import host_pages
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage, RowMap, rank_storages
from tests.support.reshard import random_pages, rows, stored

PAGES = 5
GEOMETRY = KVGeometry(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", page_size=16)
HEAD = 16  # bytes of GEOMETRY's
TOKEN = 4 * HEAD
TENSOR = 16 * TOKEN


def in_runs(geometry: KVGeometry, each: int) -> KVGeometry:
    """An engine's with that many runs of a head in a layer, or as many as there may be."""
    return replace(geometry, head_runs=min(each, geometry.tensors)) if geometry.layout is Layout.ENGINE else geometry


plain = st.builds(
    KVGeometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int8", "float64"]),
    page_size=st.sampled_from([1, 2, 3, 7, 16]),
    layout=st.sampled_from(Layout),
    tensors=st.integers(1, 2),
)
geometries = st.builds(in_runs, plain, st.sampled_from([0, 1, 2]))
viewed = st.builds(in_runs, plain, st.sampled_from([0, 2]))
orders = st.sampled_from(StorageOrder)


def gathered(memory: np.ndarray, rows: RowMap, ids: list[int], byte_offset: int, nbytes: int) -> bytes:
    runs = rows.part(ids, byte_offset, nbytes)
    out = np.full(nbytes, 0xAA, np.uint8)
    for at, to, size in zip(runs.memory.tolist(), runs.stream.tolist(), runs.sizes.tolist(), strict=True):
        assert size > 0
        out[to : to + size] = memory[at : at + size]
    assert int(runs.sizes.sum()) == nbytes
    return out.tobytes()


@settings(deadline=None, max_examples=150)
@given(geometries, orders, st.sampled_from([1, 2, PAGES]), st.data())
def test_any_part_of_any_heads_is_the_canonical_bytes(
    geometry: KVGeometry, order: StorageOrder, count: int, data: st.DataObject
) -> None:
    assume(order is not StorageOrder.LAYER_MAJOR or geometry.head_runs in (0, geometry.tensors))  # else refused
    pages = random_pages(geometry, count, seed=1)
    memory = stored(pages, geometry, order)
    first = data.draw(st.integers(0, geometry.kv_heads - 1))
    heads = data.draw(st.integers(1, geometry.kv_heads - first))
    storage = RankStorage.make(geometry, order, count)
    assert storage.rows().end == len(memory)
    found = storage.rows(first, heads)
    assert found.end <= len(memory)
    ids = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    expected = rows(pages[ids][..., first : first + heads, :], geometry).tobytes()
    assert found.row_bytes * len(ids) == len(expected)
    start = data.draw(st.integers(0, len(expected) - 1))
    nbytes = data.draw(st.integers(1, len(expected) - start))
    assert gathered(memory, found, ids, start, nbytes) == expected[start : start + nbytes]
    whole = b"".join(
        memory[at : at + found.fragment_bytes].tobytes() for at in found.fragments_of(ids).ravel().tolist()
    )
    assert whole == expected
    host = HostPages(
        memory, found.offsets, found.strides, found.pieces, found.piece_stride, found.fragment_bytes, count
    )
    slot = np.full(nbytes, 0xAA, np.uint8)
    first_page, begin = divmod(start, found.row_bytes)
    last_page = (start + nbytes - 1) // found.row_bytes
    host.gather_part(np.array(ids[first_page : last_page + 1]), begin, nbytes, slot)
    assert slot.tobytes() == expected[start : start + nbytes]


@settings(deadline=None, max_examples=100)
@given(viewed, orders, st.data())
def test_views_and_planes(geometry: KVGeometry, order: StorageOrder, data: st.DataObject) -> None:
    pages = random_pages(geometry, PAGES, seed=2)
    memory = stored(pages, geometry, order)
    storage = RankStorage.make(geometry, order, PAGES)
    assert np.array_equal(storage.view(memory), pages)
    tokens = data.draw(st.integers(0, geometry.page_size - 1))
    planes = storage.planes()
    assert planes.row_bytes == storage.rows().row_bytes
    for at in planes.fragments_of([3]).ravel().tolist():
        memory[at + tokens * geometry.fragment_token_bytes : at + planes.fragment_bytes] = 0
    pages[3, :, :, tokens:] = 0
    assert np.array_equal(memory, stored(pages, geometry, order))


def shape(rows: RowMap) -> tuple[list[int], list[int], int, int, int]:
    return rows.offsets.tolist(), rows.strides.tolist(), rows.pieces, rows.piece_stride, rows.fragment_bytes


def test_fragments_are_as_few_as_can_be() -> None:
    page, layer = (RankStorage.make(GEOMETRY, order, PAGES) for order in list(StorageOrder)[:2])
    assert shape(page.rows()) == ([0], [4 * TENSOR], 1, 0, 4 * TENSOR)
    starts = [i * PAGES * TENSOR for i in range(4)]
    assert shape(layer.rows()) == (starts, [TENSOR] * 4, 1, 0, TENSOR)
    half = layer.rows(2, 2)
    assert shape(half) == ([start + 2 * HEAD for start in starts], [TENSOR] * 4, 16, TOKEN, 2 * HEAD)
    blocks = RankStorage.make(GEOMETRY, StorageOrder.LAYER_BLOCKS, PAGES)
    assert shape(blocks.rows()) == (
        [0, TENSOR, 2 * PAGES * TENSOR, (2 * PAGES + 1) * TENSOR],
        [2 * TENSOR] * 4,
        1,
        0,
        TENSOR,
    )
    heads_first = KVGeometry(2, 4, 8, "bfloat16", 16, Layout.PAGE_HND)
    half = RankStorage.make(heads_first, StorageOrder.PAGE_MAJOR, PAGES).rows(2, 2)
    assert shape(half) == ([i * TENSOR + TENSOR // 2 for i in range(4)], [4 * TENSOR] * 4, 1, 0, TENSOR // 2)


def test_a_pool_of_one_page_is_one_fragment() -> None:
    for order in StorageOrder:
        storage = RankStorage.make(GEOMETRY, order, 1)
        assert shape(storage.rows()) == ([0], [4 * TENSOR], 1, 0, 4 * TENSOR)
        assert storage.rows().end == 4 * TENSOR


def blocks_of(offsets: list[int], pieces: int, size: int, blocks: int) -> RowMap:
    strides = np.full(len(offsets), 2 * size, np.int64)
    return RowMap(np.array(offsets, np.int64), strides, pieces, 0, size, blocks, in_blocks=True)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_rows_of_blocks(tensors: int, pieces: int, count: int, data: st.DataObject) -> None:
    size, blocks = 8, 12
    rows = blocks_of([i * 2 * size * blocks for i in range(tensors)], pieces, size, blocks)
    memory = np.random.default_rng(0).integers(0, 256, rows.end, dtype=np.uint8)
    ids = data.draw(st.permutations(range(blocks)))[: count * pieces]
    expected = b"".join(
        memory[at + block * 2 * size :][:size].tobytes()
        for row in range(count)
        for at in rows.offsets.tolist()
        for block in ids[row * pieces : (row + 1) * pieces]
    )
    found = rows.fragments_of(ids)
    assert found.shape == (count, rows.fragments) and rows.ids_a_page == pieces
    assert b"".join(memory[at : at + size].tobytes() for at in found.ravel().tolist()) == expected
    start = data.draw(st.integers(0, len(expected) - 1))
    nbytes = data.draw(st.integers(1, len(expected) - start))
    assert gathered(memory, rows, ids, start, nbytes) == expected[start : start + nbytes]
    slot = np.full(len(expected), 0xAA, np.uint8)
    host_pages(memoryview(memory), rows).gather_part(np.array(ids), 0, len(slot), slot)
    assert slot.tobytes() == expected


def test_blocks_stay_apart() -> None:
    apart = blocks_of([0, 8], 2, 8, 3)
    assert apart.compact() is apart
    one = blocks_of([0, 8], 1, 8, 3).compact()
    assert shape(one) == ([0], [16], 1, 0, 16) and one.in_blocks and one.ids_a_page == 1
    with pytest.raises(ValueError, match="there are 3 page ids; they must be a multiple of 2"):
        apart.check_ids([0, 1, 2])
    for use in (apart.fragments_of, lambda ids: apart.part(ids, 0, 1)):
        with pytest.raises(ValueError, match="page ids are -1 to 1; they must be 0 to 2"):
            use([1, -1])
    with pytest.raises(ValueError, match="end within the 64 bytes of 2 rows"):
        apart.part([0, 1, 2, 0], 0, 65)


def test_an_engines_own_tensors() -> None:
    """One allocation a layer, of shape (2, blocks, ...), wherever it lies."""
    blocks, gap = 3, 1000
    layers = np.array([5000, 100], np.int64)
    bases = (layers[:, None] + np.array([0, blocks * TENSOR])).ravel()
    storage = RankStorage(GEOMETRY, bases, np.full(4, TENSOR, np.int64), blocks)
    memory = np.random.default_rng(0).integers(0, 256, 5000 + 2 * blocks * TENSOR + gap, dtype=np.uint8)
    tensors = [memory[at : at + 2 * blocks * TENSOR].reshape(2, blocks, 16, 4, HEAD) for at in layers]
    expected = b"".join(tensor[kv, 2][:, 1:3].tobytes() for tensor in tensors for kv in range(2))
    found = storage.rows(1, 2)
    assert gathered(memory, found, [2], 0, found.row_bytes) == expected


def test_what_cannot_be_is_refused() -> None:
    storage = RankStorage.make(GEOMETRY, StorageOrder.LAYER_MAJOR, PAGES)
    rows = storage.rows()
    with pytest.raises(ValueError, match="pages is 0; it must be at least 1"):
        RankStorage.make(GEOMETRY, StorageOrder.PAGE_MAJOR, 0)
    with pytest.raises(ValueError, match="heads 3 to 4; the rank has heads 0 to 3"):
        storage.rows(3, 2)
    with pytest.raises(ValueError, match="page ids are 0 to 5; they must be 0 to 4"):
        rows.fragments_of([0, 5])
    with pytest.raises(ValueError, match="page ids are -1 to 0"):
        rows.part([0, -1], 0, 1)
    for byte_offset, nbytes in ((-1, 2), (0, 0), (rows.row_bytes, 1), (0, rows.row_bytes + 1)):
        with pytest.raises(ValueError, match=f"part of {nbytes} bytes at byte {byte_offset}"):
            rows.part([1], byte_offset, nbytes)
    with pytest.raises(ValueError, match="must be contiguous and of"):
        storage.view(np.zeros(10, np.uint8))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_run_of_k_and_v_is_not_read_where_they_lie_apart(layers: int) -> None:
    """A page's K would be taken with the next page's."""
    together = replace(GEOMETRY, layers=layers, layout=Layout.ENGINE, head_runs=1)
    beside = KVGeometry(
        1, 1, 8, "int8", 16, Layout.ENGINE, tensors=1, head_runs=1, further=(CacheShape(1, 1, 8, "int8"),)
    )
    said = r"geometry\.head_runs is 1: .* lie apart here, as in storage LAYER_MAJOR; it takes PAGE_MAJOR"
    for geometry in (together, beside):
        with pytest.raises(ValueError, match=said):
            rank_storages(geometry, StorageOrder.LAYER_MAJOR, PAGES)
        for order in (StorageOrder.PAGE_MAJOR, StorageOrder.LAYER_BLOCKS):
            rank_storages(geometry, order, PAGES)
    rank_storages(replace(together, head_runs=2), StorageOrder.LAYER_MAJOR, PAGES)
    made = RankStorage.make(together, StorageOrder.LAYER_BLOCKS, PAGES)
    with pytest.raises(ValueError, match=said):
        RankStorage(together, made.bases, made.page_strides + np.arange(2 * layers), PAGES)
