"""Memory in an engine's blocks: where a page's bytes lie, and which registrations of blocks are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.layouts import BlockStorage
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.transfer.geometry.registration import (
    MAX_TENSORS,
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)

GEOMETRY = KVGeometry(2, 1, 4, "float32", 16, Layout.ENGINE)
BLOCKS, TOKENS, PLACES = 6, 4, 4
PER_PAGE = 16 // TOKENS
SIZE = GEOMETRY.page_bytes // PLACES // PER_PAGE  # of a block, in each place
STRIDE = SIZE + 24
APART = BLOCKS * STRIDE


def registered(stride: int = STRIDE, places: int = PLACES) -> Registration:
    """One file, place behind place from byte 64 on."""
    tensors = tuple(RegisteredTensor(0, 64 + i * APART, stride, SIZE) for i in range(places))
    memory = RegisteredMemory(SharedFile("mine"), 64 + PLACES * APART)
    return Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (RegisteredRank((memory,), tensors),), TOKENS)


def read(message: wire.EnginePool, geometry: KVGeometry = GEOMETRY, ranks: int = 1) -> Registration:
    return Registration.from_proto(message, geometry, ranks)


def test_a_pages_row_is_its_blocks_place_by_place() -> None:
    registration = registered()
    assert read(registration.to_proto()) == registration
    storage = registration.storages(0, GEOMETRY, [1000])[0]
    assert isinstance(storage, BlockStorage)
    rows = storage.rows()
    assert (rows.in_blocks, rows.pieces, rows.pages, rows.fragments) == (True, PER_PAGE, BLOCKS, PLACES * PER_PAGE)
    assert rows.row_bytes == GEOMETRY.page_bytes
    pages = [[5, 0, 3, 1], [2, 4, 0, 5]]
    found = rows.fragments_of([block for page in pages for block in page])
    assert found.tolist() == [
        [1064 + place * APART + block * STRIDE for place in range(PLACES) for block in page] for page in pages
    ]
    assert rows.end == 1064 + (PLACES - 1) * APART + (BLOCKS - 1) * STRIDE + SIZE
    for bad in (BLOCKS, -1):
        with pytest.raises(ValueError, match="they must be 0 to 5"):
            rows.fragments_of([0, 1, 2, bad])


def test_places_of_several_allocations() -> None:
    memories = tuple(RegisteredMemory(GpuAllocation(bytes([i]) * 64, bytes(16)), APART) for i in range(PLACES))
    tensors = tuple(RegisteredTensor(i, 0, STRIDE, SIZE) for i in range(PLACES))
    registration = Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (RegisteredRank(memories, tensors),), TOKENS)
    assert read(registration.to_proto()) == registration and registration.on_gpus
    rows = registration.storages(0, GEOMETRY, [10_000, 70_000, 30_000, 50_000])[0].rows()
    assert rows.fragments_of([1, 0, 1, 2])[0, 4:8].tolist() == [70_000 + b * STRIDE for b in (1, 0, 1, 2)]


def test_interleaved_places_of_one_stride() -> None:
    """A block's parts lie beside each other, as in memory that is block by block."""
    tensors = tuple(RegisteredTensor(0, i * SIZE, PLACES * SIZE, SIZE) for i in range(PLACES))
    memory = RegisteredMemory(SharedFile("mine"), BLOCKS * PLACES * SIZE)
    registration = Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (RegisteredRank((memory,), tensors),), TOKENS)
    assert read(registration.to_proto()) == registration


def test_only_the_engine_knows_where_heads_lie_in_a_block() -> None:
    with pytest.raises(AssertionError, match="block"):
        registered().storages(0, replace(GEOMETRY, kv_heads=2), [0])[0].rows(first_head=1)


def test_a_pool_of_blocks_is_one_rank_of_its_rows() -> None:
    storage = registered().storages(0, GEOMETRY, [0])[0]
    shape = PoolShape(GEOMETRY, 1, StorageOrder.PAGE_MAJOR, BLOCKS, ((storage,),))
    assert [[rows.in_blocks for rows in rank] for rank in shape.whole_rows] == [[True]]
    assert shape.row_bytes == GEOMETRY.page_bytes


def changed(**fields: int) -> wire.EnginePool:
    """The second tensor's fields."""
    message = registered().to_proto()
    for field, value in fields.items():
        setattr(message.ranks[0].tensors[1], field, value)
    return message


def of_tokens(tokens: int) -> wire.EnginePool:
    return replace(registered(), block_tokens=tokens).to_proto()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (of_tokens(5), r"pool\.block_tokens is 5; a page of 16 tokens is no whole number of such blocks"),
        (of_tokens(32), r"pool\.block_tokens is 32; a page of 16 tokens is no whole number"),
        (registered(places=0).to_proto(), rf"tensors, the number of entries, is 0; it must be 1 to {MAX_TENSORS}"),
        (registered(places=3).to_proto(), "tensors has 3 entries; a page of 1024 bytes in 4 blocks of 4 tokens cannot"),
        (
            changed(page_bytes=SIZE - 1),
            rf"tensors\[1\]\.page_bytes is {SIZE - 1}; a block of 4 tokens in 4 tensors has",
        ),
        (changed(page_bytes=2 * SIZE), rf"tensors\[1\]\.page_bytes is {2 * SIZE}; a block of 4 tokens"),
        (changed(page_stride=SIZE - 1), rf"page_stride is {SIZE - 1}; it must be {SIZE} to"),
        (changed(page_stride=STRIDE + 8), r"tensors\[2\]\.page_stride is .*; its pages overlap the range of tensor 1"),
        (changed(offset=65), r"tensors\[0\] with page_bytes .* overlaps tensors\[1\]"),
        (changed(offset=64 + PLACES * APART), r"tensors\[1\] ends at byte .*; pool\.ranks\[0\]\.memories\[0\] has"),
        (changed(memory=1), r"tensors\[1\]\.memory is 1; it must be 0 to 0"),
    ],
)
def test_what_is_not_of_blocks_is_refused(message: wire.EnginePool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(message)


def test_blocks_are_in_the_engines_own_layout() -> None:
    message = registered().to_proto()
    with pytest.raises(ValueError, match="in layout PAGE_NHD and storage PAGE_MAJOR; blocks take layout ENGINE"):
        read(message, replace(GEOMETRY, layout=Layout.PAGE_NHD))
    layers = replace(registered(), order=StorageOrder.LAYER_MAJOR).to_proto()
    with pytest.raises(ValueError, match="in layout ENGINE and storage LAYER_MAJOR; blocks take layout"):
        read(layers)


def over_ranks(places: list[int], geometry: KVGeometry) -> wire.EnginePool:
    """A file for each rank, with that many places in it."""
    ranks = []
    for number, count in enumerate(places):
        size = rank_geometry(geometry, len(places)).page_bytes // count // PER_PAGE
        tensors = tuple(RegisteredTensor(0, i * BLOCKS * size, size, size) for i in range(count))
        ranks.append(RegisteredRank((RegisteredMemory(SharedFile(f"r{number}"), count * BLOCKS * size),), tensors))
    return Registration(BLOCKS, StorageOrder.PAGE_MAJOR, tuple(ranks), TOKENS).to_proto()


def test_ranks_have_as_many_places_each() -> None:
    two = replace(GEOMETRY, kv_heads=2)
    assert read(over_ranks([4, 4], two), two, 2).to_proto() == over_ranks([4, 4], two)
    with pytest.raises(ValueError, match=r"ranks\[1\]\.tensors has 2 entries; those of pool\.ranks\[0\] have 4"):
        read(over_ranks([4, 2], two), two, 2)


def test_heads_that_lie_apart_have_places_of_their_own() -> None:
    for runs in (1, 2):
        six = replace(GEOMETRY, kv_heads=6, head_runs=runs)
        places = 2 * runs * 3
        assert read(over_ranks([places] * 2, six), six, 2).to_proto() == over_ranks([places] * 2, six)
        for wrong in (2, places // 3, 2 * places):
            said = rf"tensors has {wrong} entries; 2 layers of 3 heads with geometry\.head_runs {runs} have {places}"
            with pytest.raises(ValueError, match=said):
                read(over_ranks([wrong] * 2, six), six, 2)


def test_rows_of_heads_are_their_places_of_each_layer_and_run() -> None:
    three = replace(GEOMETRY, kv_heads=3, head_runs=1)
    bases, strides = np.arange(6) * 1000, np.full(6, SIZE)
    rows = BlockStorage(three, bases, strides, SIZE, BLOCKS, PER_PAGE).rows(1, 2)
    assert rows.offsets.tolist() == [1000, 2000, 4000, 5000], "heads 1 and 2 of the first layer, then of the second"
    assert (rows.pieces, rows.fragment_bytes, rows.in_blocks) == (PER_PAGE, SIZE, True)
    with pytest.raises(ValueError, match="heads 2 to 3; the rank has heads 0 to 2"):
        BlockStorage(three, bases, strides, SIZE, BLOCKS, PER_PAGE).rows(2, 2)


def test_a_page_is_of_no_more_blocks_than_a_launch_names() -> None:
    """Copies name a page by all of its blocks."""

    def of_pages(page_size: int) -> wire.EnginePool:
        geometry = replace(GEOMETRY, page_size=page_size)
        size = geometry.page_bytes // page_size
        tensor = RegisteredTensor(0, 0, size, size)
        rank = RegisteredRank((RegisteredMemory(SharedFile("mine"), BLOCKS * size),), (tensor,))
        message = Registration(BLOCKS, StorageOrder.PAGE_MAJOR, (rank,), 1).to_proto()
        assert read(message, geometry).block_tokens == 1
        return message

    of_pages(256)
    with pytest.raises(ValueError, match=r"pool\.block_tokens is 1; a page of 512 tokens has at most 256 blocks"):
        of_pages(512)
