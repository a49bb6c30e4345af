"""Registrations of an engine's own memory: places of pages, and what is refused before a byte is mapped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage, rank_storages
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
    tensors_of,
)

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_size=4)
PAGES = 5
SIZE = GEOMETRY.page_bytes // 6  # of a page, of K or V


def registered(order: StorageOrder, start: int = 0) -> Registration:
    """One file, without gaps from byte `start` on."""
    count, page_bytes = tensors_of(GEOMETRY, order)
    tensors = tuple(RegisteredTensor(0, start + i * PAGES * page_bytes, page_bytes, page_bytes) for i in range(count))
    nbytes = start + PAGES * GEOMETRY.page_bytes
    return Registration(PAGES, order, (RegisteredRank((RegisteredMemory(SharedFile("mine"), nbytes),), tensors),))


def read(registration: Registration) -> Registration:
    return Registration.from_proto(registration.to_proto(), GEOMETRY, len(registration.ranks))


@pytest.mark.parametrize("order", StorageOrder)
def test_places_without_gaps_are_those_of_a_pool_of_the_daemons(order: StorageOrder) -> None:
    registration = registered(order, start=64)
    assert read(registration) == registration
    found = registration.storages(0, GEOMETRY, [1000])[0]
    plain = RankStorage.make(GEOMETRY, order, PAGES)
    assert np.array_equal(found.bases, plain.bases + 1064)
    assert np.array_equal(found.page_strides, plain.page_strides)


def test_tensors_of_several_allocations_may_be_interleaved_and_padded() -> None:
    """A page's K and V in turn, with 100 bytes between pages; each layer in memory of its own."""
    stride = 2 * SIZE + 100
    memories = tuple(
        RegisteredMemory(GpuAllocation(bytes([i]) * 64, bytes(16)), 512 + (i + 1) * PAGES * stride) for i in range(3)
    )
    tensors = tuple(
        RegisteredTensor(layer, 512 + tensor * SIZE, stride, SIZE) for layer in range(3) for tensor in range(2)
    )
    registration = Registration(PAGES, StorageOrder.LAYER_MAJOR, (RegisteredRank(memories, tensors),))
    assert read(registration) == registration
    assert registration.on_gpus
    found = registration.storages(0, GEOMETRY, [10_000, 20_000, 30_000])[0]
    assert found.bases.tolist() == [
        base + 512 + tensor * SIZE for base in (10_000, 20_000, 30_000) for tensor in (0, 1)
    ]
    assert set(found.page_strides.tolist()) == {stride}
    rows = found.rows()
    assert rows.row_bytes == GEOMETRY.page_bytes
    assert rows.end == 30_000 + 512 + (PAGES - 1) * stride + 2 * SIZE


def test_two_ranks_each_with_a_file() -> None:
    one = registered(StorageOrder.LAYER_BLOCKS)
    half = tuple(
        RegisteredTensor(0, tensor.offset // 2, tensor.page_stride // 2, tensor.page_bytes // 2)
        for tensor in one.ranks[0].tensors
    )
    ranks = tuple(
        RegisteredRank((RegisteredMemory(SharedFile(name), PAGES * GEOMETRY.page_bytes // 2),), half)
        for name in ("a", "b")
    )
    both = Registration(PAGES, StorageOrder.LAYER_BLOCKS, ranks)
    assert read(both) == both
    with pytest.raises(ValueError, match=r"ranks\[1\]\.memories\[0\] names the same memory as pool\.ranks\[0\]"):
        read(Registration(PAGES, StorageOrder.LAYER_BLOCKS, (ranks[0], ranks[0])))


def changed(**first: int) -> wire.EnginePool:
    """Of layer-major tensors, the second's fields."""
    message = registered(StorageOrder.LAYER_MAJOR).to_proto()
    for field, value in first.items():
        setattr(message.ranks[0].tensors[1], field, value)
    return message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            changed(page_stride=SIZE + 1),
            rf"tensors\[2\]\.page_stride is {SIZE}; its pages overlap the range of tensor 1",
        ),
        (changed(offset=1), rf"tensors\[0\] with page_bytes {SIZE} and page_stride {SIZE} overlaps tensors\[1\]"),
        (
            changed(offset=1 << 60),
            rf"tensors\[1\] ends at byte {(1 << 60) + PAGES * SIZE} .* has {PAGES * 6 * SIZE} bytes",
        ),
        (
            changed(page_bytes=2 * SIZE),
            rf"page_bytes is {2 * SIZE}; a page of 4 tokens, 2 heads of 8 bfloat16 has {SIZE}",
        ),
        (changed(page_stride=1 << 50), rf"page_stride is {1 << 50}; it must be {SIZE} to {1 << 48}"),
        (changed(memory=7), r"tensors\[1\]\.memory is 7; it must be 0 to 0"),
        (wire.EnginePool(pages=1, storage=9), r"pool\.storage is 9; it must be one of \[1, 2, 3\]"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(message: wire.EnginePool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Registration.from_proto(message, GEOMETRY, 1)


def test_memory_that_no_tensor_lies_in_is_refused() -> None:
    good = registered(StorageOrder.LAYER_MAJOR)
    rank = RegisteredRank((*good.ranks[0].memories, RegisteredMemory(SharedFile("more"), 8)), good.ranks[0].tensors)
    with pytest.raises(ValueError, match=r"memories\[1\] has no tensor in it"):
        read(Registration(PAGES, StorageOrder.LAYER_MAJOR, (rank,)))


def of_memories(*memories: RegisteredMemory, ranks: int = 1) -> Registration:
    """Layer-major; the memories, each long enough for all of them, have the tensors in turn."""
    tensors = tuple(RegisteredTensor(i % len(memories), i * PAGES * SIZE, SIZE, SIZE) for i in range(6))
    return Registration(PAGES, StorageOrder.LAYER_MAJOR, (RegisteredRank(memories, tensors),) * ranks)


def file(name: str) -> RegisteredMemory:
    return RegisteredMemory(SharedFile(name), PAGES * 6 * SIZE)


def gpu(number: int, *, handle_bytes: int = 64, device: bytes = bytes(16)) -> RegisteredMemory:
    return RegisteredMemory(GpuAllocation(bytes([number]) * handle_bytes, device), PAGES * 6 * SIZE)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../other", "a/b", "/dev/shm/a", "a\0b", "a\n", "-a", "x" * 129, f"kvferry-{'0' * 32}-pool"]
)
def test_a_file_is_one_of_the_engines_in_the_folder_itself(name: str) -> None:
    with pytest.raises(ValueError, match=r"memories\[0\]\.file\.name is .*; it must be 1 to 128 letters"):
        read(of_memories(file(name)))


def test_a_name_like_a_daemons_is_an_engines() -> None:
    assert read(of_memories(file("kvferry-mine"))).ranks[0].memories[0].source == SharedFile("kvferry-mine")


@pytest.mark.parametrize(
    ("memories", "words"),
    [
        ((gpu(1), file("a")), r"memories\[1\]: some memories are files and some a GPU's"),
        ((gpu(1), gpu(2, device=b"x" * 16)), r"memories\[\]\.gpu\.device_uuid: a rank's memories lie on one GPU"),
        ((gpu(1), gpu(1)), r"memories\[1\] names the same memory as pool\.ranks\[0\]\.memories\[0\]"),
        ((file("a"), file("b")), "memories has 2 files; shared memory is one file a rank"),
        ((gpu(1, handle_bytes=63),), r"gpu\.ipc_handle has 63 bytes; it must have 64"),
        ((gpu(1, device=b"x" * 17),), r"gpu\.device_uuid has 17 bytes; it must have 16"),
    ],
)
def test_memories_that_cannot_be_are_refused(memories: tuple[RegisteredMemory, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(of_memories(*memories))


def test_a_tensor_ends_in_its_memory() -> None:
    """Though it begins there."""
    message = of_memories(file("a")).to_proto()
    message.ranks[0].memories[0].nbytes -= 1
    with pytest.raises(ValueError, match=rf"tensors\[5\] ends at byte {PAGES * 6 * SIZE} "):
        Registration.from_proto(message, GEOMETRY, 1)


def test_a_stride_is_no_shorter_than_the_page() -> None:
    with pytest.raises(ValueError, match=rf"page_stride is {SIZE - 1}; it must be {SIZE} to"):
        Registration.from_proto(changed(page_stride=SIZE - 1), GEOMETRY, 1)


def test_interleaved_tensors_stay_within_their_stride() -> None:
    """The last one's end is the first one's next page."""
    stride = 6 * SIZE
    for short in (0, 1):
        memory = RegisteredMemory(SharedFile("a"), PAGES * stride)
        tensors = tuple(RegisteredTensor(0, i * SIZE, stride - short, SIZE) for i in range(6))
        registration = Registration(PAGES, StorageOrder.LAYER_MAJOR, (RegisteredRank((memory,), tensors),))
        if not short:
            assert read(registration) == registration
            continue
        with pytest.raises(ValueError, match=r"tensors\[5\] with page_bytes .* overlaps tensors\[0\]"):
            read(registration)


INDEXED = replace(GEOMETRY, further=(CacheShape(2, 1, 132, "uint8", 1),))


def with_indexer(order: StorageOrder) -> Registration:
    """All caches one behind the other in a file, as a pool of the daemon's has them."""
    tensors: list[RegisteredTensor] = []
    for number, storage in enumerate(rank_storages(INDEXED, order, PAGES)):
        count, size = tensors_of(storage.geometry, order)
        each = len(storage.bases) // count
        places = zip(storage.bases[::each].tolist(), storage.page_strides[::each].tolist(), strict=True)
        tensors += [RegisteredTensor(0, base, stride, size, number) for base, stride in places]
    memory = RegisteredMemory(SharedFile("mine"), PAGES * INDEXED.page_bytes)
    return Registration(PAGES, order, (RegisteredRank((memory,), tuple(tensors)),))


@pytest.mark.parametrize("order", StorageOrder)
def test_each_cache_has_tensors_of_its_own(order: StorageOrder) -> None:
    registration = with_indexer(order)
    assert Registration.from_proto(registration.to_proto(), INDEXED, 1) == registration
    for found, plain in zip(
        registration.storages(0, INDEXED, [1000]), rank_storages(INDEXED, order, PAGES), strict=True
    ):
        assert np.array_equal(found.bases, plain.bases + 1000)
        assert np.array_equal(found.page_strides, plain.page_strides)


@pytest.mark.parametrize(
    ("cache", "size", "words"),
    [
        (0, 0, r"tensors has 4 entries; 3 layers of 2 tensors in storage LAYER_BLOCKS have 3"),
        (2, 0, r"tensors of cache 1 has 1 entries; 2 layers of 1 tensors in storage LAYER_BLOCKS have 2"),
        (1, 131, r"tensors\[4\]\.page_bytes is 131; a page of 4 tokens, 1 heads of 132 uint8 has 528 there"),
    ],
)
def test_a_tensor_of_another_cache_is_named(cache: int, size: int, words: str) -> None:
    message = with_indexer(StorageOrder.LAYER_BLOCKS).to_proto()
    last = message.ranks[0].tensors[-1]
    last.cache, last.page_bytes = cache, size or last.page_bytes
    with pytest.raises(ValueError, match=words):
        Registration.from_proto(message, INDEXED, 1)


def test_a_tensor_of_no_cache_is_named() -> None:
    message = with_indexer(StorageOrder.LAYER_BLOCKS).to_proto()
    message.ranks[0].tensors.add(page_stride=1, page_bytes=1, cache=7)
    with pytest.raises(ValueError, match=r"ranks\[0\]\.tensors\[\]\.cache is 7; it must be 0 to 1"):
        Registration.from_proto(message, INDEXED, 1)
