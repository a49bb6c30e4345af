"""Parts of pages of any layout in host memory: every byte that should move moves, no other changes."""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import HostPages

POISON = 0xA5
Bytes = NDArray[np.uint8]
KEY, LENGTH, MASK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 2**64 - 1


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def poisoned(nbytes: int) -> Bytes:
    return np.full(nbytes, POISON, np.uint8)


def checksum(part: bytes) -> int:
    """As csrc/copies/part_sum.h says."""
    padded = part + bytes(-len(part) % 8)
    total = len(part) * LENGTH
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little") ^ ((index + 1) * KEY & MASK)
        low, high = word & 0xFFFFFFFF, word >> 32
        total += low * high + (low << 32 | high)
    return total & MASK


@dataclass(frozen=True)
class Case:
    tensors: int
    pieces: int
    fragment_bytes: int
    padding: int
    pages: int
    ids: tuple[int, ...]
    byte_offset: int
    nbytes: int
    slot_offset: int
    in_blocks: bool = False
    last_bytes: int | None = None

    @property
    def ids_a_page(self) -> int:
        return self.pieces if self.in_blocks else 1

    @property
    def piece_stride(self) -> int:
        return 0 if self.in_blocks else self.fragment_bytes + self.padding

    @property
    def stride(self) -> int:
        return (self.fragment_bytes if self.in_blocks else self.pieces * self.piece_stride) + self.padding

    @property
    def row_bytes(self) -> int:
        return self.tensors * self.pieces * self.fragment_bytes

    @property
    def size(self) -> int:
        return self.tensors * self.pages * self.stride + 11

    def offsets(self) -> NDArray[np.int64]:
        return 3 * self.padding + np.arange(self.tensors, dtype=np.int64)[::-1].copy() * self.pages * self.stride

    def host_pages(self, memory: Any) -> HostPages:
        strides = np.full(self.tensors, self.stride, np.int64)
        return HostPages(
            memory,
            self.offsets(),
            strides,
            self.pieces,
            self.piece_stride,
            self.fragment_bytes,
            self.pages,
            self.in_blocks,
        )

    def part(self, last_bytes: int | None = None) -> NDArray[np.int64]:
        """Where in the buffer the part's bytes lie, one index a byte; -1: nowhere. last_bytes: of the last page's
        tensors, if not all."""
        row = (
            self.offsets()[:, None, None]
            + np.arange(self.pieces)[None, :, None] * self.piece_stride
            + np.arange(self.fragment_bytes)[None, None, :]
        )
        ids = np.array(self.ids, np.int64).reshape(-1, 1, self.ids_a_page, 1)
        where: NDArray[np.int64] = np.where(ids < 0, -1, ids * self.stride + row)
        where.reshape(len(ids), self.tensors, -1)[-1, :, last_bytes or self.row_bytes :] = -1
        return where.reshape(-1)[self.byte_offset : self.byte_offset + self.nbytes]

    def given(self, memory: Bytes) -> Bytes:
        """What a gather of this memory puts into the slot."""
        where = self.part(self.last_bytes)
        return np.where(where < 0, 0, memory[where]).astype(np.uint8)


@st.composite
def block_ids(draw: st.DrawFn, count: int) -> tuple[int, tuple[int, ...]]:
    """How many blocks there are, and ids of `count` different ones, of which some are none."""
    there = draw(st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count))
    blocks = max(1, sum(there) + draw(st.integers(0, 2)))
    ids = iter(draw(st.permutations(range(blocks))))
    return blocks, tuple(next(ids) if each else -1 for each in there)


@st.composite
def cases(draw: st.DrawFn, in_blocks: bool = False) -> Case:
    tensors, pieces = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    fragment_bytes = draw(st.sampled_from([1, 3, 8, 16, 24, 64, 100]))
    pages = draw(st.integers(1, 7))
    ids = tuple(draw(st.permutations(range(pages)))[: draw(st.integers(1, pages))])
    count = len(ids)
    if in_blocks:
        pages, ids = draw(block_ids(count * pieces))
    row_bytes = tensors * pieces * fragment_bytes
    byte_offset = draw(st.integers(0, row_bytes - 1))
    least = max((count - 1) * row_bytes - byte_offset + 1, 1)
    nbytes = draw(st.integers(least, count * row_bytes - byte_offset))
    padding, slot_offset = draw(st.sampled_from([0, 0, 1, 16])), draw(st.sampled_from([0, 1, 64]))
    last_bytes = draw(st.none() | st.integers(1, pieces * fragment_bytes))
    return Case(
        tensors,
        pieces,
        fragment_bytes,
        padding,
        pages,
        ids,
        byte_offset,
        nbytes,
        slot_offset,
        in_blocks,
        last_bytes,
    )


@settings(max_examples=400, deadline=None)
@given(st.booleans().flatmap(cases), st.booleans())
def test_a_part(case: Case, summed: bool) -> None:
    ids = np.array(case.ids, np.int64)
    memory = np.zeros(case.size + 3 * case.padding, np.uint8)
    memory[:] = pattern(len(memory))
    before = memory.copy()
    pages = case.host_pages(memory)
    assert (pages.row_bytes, pages.fragments) == (case.row_bytes, case.tensors * case.pieces)
    assert pages.ids_a_page == case.ids_a_page
    slot = poisoned(case.slot_offset + case.nbytes + 9)
    expected = slot.copy()
    expected[case.slot_offset : case.slot_offset + case.nbytes] = case.given(before)
    part = (ids, case.byte_offset, case.nbytes, slot, case.slot_offset)
    if summed:
        assert pages.gather_part_summed(*part, last_bytes=case.last_bytes) == checksum(case.given(before).tobytes())
    else:
        pages.gather_part(*part, last_bytes=case.last_bytes)
    assert (slot == expected).all()
    assert (memory == before).all()

    memory[:] = POISON
    slot[:] = pattern(len(slot), 1)
    expected = memory.copy()
    inside, there = slot[case.slot_offset : case.slot_offset + case.nbytes], case.part() >= 0
    expected[case.part()[there]] = inside[there]
    if summed:
        assert pages.scatter_part_summed(*part) == checksum(inside.tobytes()) == _core.part_checksum(inside)
    else:
        pages.scatter_part(*part)
    assert (memory == expected).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("fragment_bytes", [40_001, 40_000])
def test_threads_move_the_same_bytes(threads: int, fragment_bytes: int, in_blocks: bool) -> None:
    ids = tuple(np.where(np.arange(36) % 7 == 5, -1, np.arange(36)[::-1])) if in_blocks else tuple(range(15, 3, -1))
    size = (12 * 600_000 - 8_008 - 77, 64, in_blocks, 40_008)
    case = Case(5, 3, fragment_bytes, 8, 36 if in_blocks else 16, ids, 8_008, *size)
    memory = pattern(case.size + 24)
    slot = poisoned(case.nbytes + 128)
    pages = case.host_pages(memory)
    part = (np.array(case.ids, np.int64), case.byte_offset, case.nbytes, slot, 64, threads)
    total = pages.gather_part_summed(*part, last_bytes=case.last_bytes)
    assert (slot[64:-64] == case.given(memory)).all()
    assert total == _core.part_checksum(slot[64:-64])
    kept = slot.copy()
    slot[:] = POISON
    pages.gather_part(*part, last_bytes=case.last_bytes)
    assert (slot == kept).all()
    memory[:] = POISON
    assert pages.scatter_part_summed(*part) == total
    expected, there = np.full_like(memory, POISON), case.part() >= 0
    expected[case.part()[there]] = slot[64:-64][there]
    assert (memory == expected).all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pools_with_sums(data: st.DataObject) -> None:
    pages, page_bytes = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 7, 8, 40]))
    ids = data.draw(st.permutations(range(pages)))
    offset = data.draw(st.integers(0, pages * page_bytes))
    nbytes = data.draw(st.integers(0, pages * page_bytes - offset))
    pool, slot = pattern(pages * page_bytes), poisoned(nbytes + 5)
    virtual = pool.reshape(pages, page_bytes)[ids].reshape(-1)[offset : offset + nbytes]
    total = _core.gather_pages_summed(slot, 2, pool, ids, page_bytes, offset, nbytes)
    assert total == checksum(virtual.tobytes())
    assert slot.tobytes() == bytes([POISON] * 2) + virtual.tobytes() + bytes([POISON] * 3)
    back, plain = poisoned(len(pool)), poisoned(len(pool))
    assert _core.scatter_pages_summed(back, ids, page_bytes, offset, slot, 2, nbytes) == total
    _core.scatter_pages(plain, ids, page_bytes, offset, slot, 2, nbytes)
    assert (back == plain).all()


def test_what_a_checksum_finds() -> None:
    part = pattern(4096)
    right = _core.part_checksum(part)
    for at in (0, 1, 2047, 4095):
        for bit in range(8):
            part[at] ^= 1 << bit
            assert _core.part_checksum(part) != right
            part[at] ^= 1 << bit
    assert _core.part_checksum(part) == right
    halves = np.concatenate([part[2048:], part[:2048]])  # words in other places
    others = (halves, part[:-1], np.append(part, np.uint8(0)), part[8:], np.zeros_like(part), np.roll(part, 1))
    sums = {_core.part_checksum(np.ascontiguousarray(other)) for other in others}
    assert len(sums) == len(others) and right not in sums
    assert _core.part_checksum(b"") == 0


def make(memory: Any, **changes: Any) -> HostPages:
    arguments: dict[str, Any] = {
        "offsets": np.array([0, 48]),
        "strides": np.array([16, 16]),
        "pieces": 2,
        "piece_stride": 8,
        "fragment_bytes": 4,
        "pages": 3,
    }
    return HostPages(memory, **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([0, 49])}, r"offsets\[1\]: 49 with 3 pages of stride 16 ends at 93, behind the 92 bytes"),
        ({"offsets": np.array([-1, 0])}, "offsets: -1, must be in"),
        ({"offsets": np.array([], np.int64), "strides": np.array([], np.int64)}, "offsets: 0, must be in"),
        ({"strides": np.array([16])}, "strides: 1, must be in"),
        ({"strides": np.array([16, 3])}, "strides: 3, must be in"),
        ({"strides": np.array([16, 2**62])}, "strides: 4611686018427387904"),
        ({"pages": 4}, "pages of stride 16 ends at"),
        ({"pages": 0}, "pages: 0"),
        ({"pieces": 0}, "pieces: 0"),
        ({"pieces": 3}, r"offsets\[1\]"),
        ({"piece_stride": 3}, "piece_stride: 3"),
        ({"fragment_bytes": 0}, "fragment_bytes: 0"),
        ({"in_blocks": True}, r"piece_stride: 8, must be in \[0, 0\]"),
        ({"in_blocks": True, "pieces": 257, "piece_stride": 0}, r"pieces: 257, must be in \[1, 256\]"),
        ({"in_blocks": True, "piece_stride": 0, "pages": 4}, "with 4 pages of stride 16 ends at 100, behind the 92"),
    ],
)
def test_a_layout_must_lie_in_its_buffer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(bytearray(92), **changes)
    make(bytearray(92))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_ids": np.array([0, 3])}, IndexError, r"page_ids\[1\]: 3, must be in \[0, 3\)"),
        ({"page_ids": np.array([-1, 0])}, IndexError, r"page_ids\[0\]: -1"),
        ({"page_ids": np.array([], np.int64)}, ValueError, "page_ids: 0"),
        ({"byte_offset": 16}, ValueError, r"byte_offset: 16, must be in \[0, 15\]"),
        ({"byte_offset": -1}, ValueError, "byte_offset: -1"),
        ({"nbytes": 12}, ValueError, r"nbytes: 12, must be in \[13, 28\]"),
        ({"nbytes": 29}, ValueError, "nbytes: 29"),
        ({"slot_offset": 5}, ValueError, r"slot_offset: 5, must be in \[0, 4\]"),
        ({"slot_offset": -1}, ValueError, "slot_offset: -1"),
        ({"slot": bytearray(19)}, ValueError, r"nbytes: 20, must be in \[1, 19\]"),
        ({"threads": 0}, ValueError, "threads: 0"),
    ],
)
def test_bad_parts_move_nothing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    memory, slot = poisoned(92), pattern(24)
    pages = make(memory)
    part = {"page_ids": np.array([0, 2]), "byte_offset": 4, "nbytes": 20, "slot": slot, "slot_offset": 0, "threads": 1}
    for copy in (pages.gather_part, pages.gather_part_summed, pages.scatter_part, pages.scatter_part_summed):
        with pytest.raises(error, match=message):
            copy(**(part | changes))
    assert (memory == POISON).all()
    assert (slot == pattern(24)).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_ids": np.array([0, 3])}, IndexError, r"page_ids\[1\]: 3, must be in \[-1, 3\)"),
        ({"page_ids": np.array([-2, 0])}, IndexError, r"page_ids\[0\]: -2, must be in \[-1, 3\)"),
        (
            {"page_ids": np.array([0, 1, 2])},
            ValueError,
            "page_ids: 3 ids, must be a multiple of the 2 blocks of a page",
        ),
        ({"page_ids": np.array([], np.int64)}, ValueError, "page_ids: 0"),
        ({"page_ids": np.array([0, 1, 2, -1]), "nbytes": 12}, ValueError, r"nbytes: 12, must be in \[13, 28\]"),
    ],
)
def test_bad_blocks_move_nothing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    memory, slot = poisoned(92), pattern(24)
    pages = make(memory, in_blocks=True, piece_stride=0)
    part = {"page_ids": np.array([0, 2]), "byte_offset": 4, "nbytes": 10, "slot": slot}
    for copy in (pages.gather_part, pages.gather_part_summed, pages.scatter_part, pages.scatter_part_summed):
        with pytest.raises(error, match=message):
            copy(**(part | changes))
    with pytest.raises(ValueError, match="page_ids: 2 would be written twice"):
        pages.scatter_part(np.array([-1, 2, -1, 2]), 0, 24, bytes(24))
    with pytest.raises(ValueError, match="pages: in blocks, must be pages that one id names"):
        pages.zero_page_from(0, 0)
    assert (memory == POISON).all()
    assert (slot == pattern(24)).all()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("last_bytes", [0, 9, -1])
def test_a_last_page_has_some_bytes_and_no_more_than_all(last_bytes: int, in_blocks: bool) -> None:
    slot = poisoned(16)
    pages = make(poisoned(92), in_blocks=in_blocks, piece_stride=0 if in_blocks else 8)
    for copy in (pages.gather_part, pages.gather_part_summed):
        with pytest.raises(ValueError, match=rf"last_bytes: {last_bytes}, must be in \[1, 8\]"):
            copy(np.arange(pages.ids_a_page), 0, 16, slot, last_bytes=last_bytes)
    assert (slot == POISON).all()


def test_overlaps_and_twice_named_pages_are_refused() -> None:
    memory = poisoned(120)
    pages = make(memory)
    for copy in (pages.gather_part, pages.scatter_part):
        with pytest.raises(ValueError, match="slot: overlaps the pages of tensor 1"):
            copy(np.array([0]), 0, 16, memory[90:])
    pages.gather_part(np.array([0]), 0, 16, memory, 92)  # behind them
    with pytest.raises(ValueError, match="page_ids: 1 would be written twice"):
        pages.scatter_part(np.array([1, 1]), 0, 32, bytes(32))
    slot = bytearray(32)
    pages.gather_part(np.array([1, 1]), 0, 32, slot)
    with pytest.raises(TypeError, match="slot: not a writable"):
        pages.gather_part(np.array([1]), 0, 16, bytes(16))
    with pytest.raises(TypeError, match="buffer: not a writable"):
        make(bytes(92))


def test_zeros_behind_a_token() -> None:
    memory = poisoned(92)
    make(memory).zero_page_from(1, 1, first_piece=1)
    expected = poisoned(92)
    for tensor in (0, 48):
        expected[tensor + 16 + 8 + 1 : tensor + 16 + 8 + 4] = 0
    assert (memory == expected).all()
    make(memory).zero_page_from(1, 4)
    assert (memory == expected).all()
    for arguments, message in (((3, 0), "page_id: 3"), ((0, 5), "start: 5"), ((0, 0, 3), "first_piece: 3")):
        with pytest.raises(ValueError, match=message):
            make(memory).zero_page_from(*arguments)


def test_a_closed_pool_lets_go_of_its_buffer() -> None:
    memory = mmap.mmap(-1, 4096)
    pages = make(memory)
    with pytest.raises(BufferError):
        memory.close()
    pages.close()
    pages.close()
    memory.close()
    for use in (lambda: pages.gather_part(np.array([0]), 0, 16, bytearray(16)), lambda: pages.zero_page_from(0, 0)):
        with pytest.raises(ValueError, match="pages: they are closed"):
            use()


def test_what_is_added_up_is_what_lands() -> None:
    """Though the slot changes meanwhile: by another mapping its second half is the page that its first half goes to."""
    page_bytes = 100
    with open(os.memfd_create("slot"), "r+b") as file:
        file.truncate(4096)
        memory, slot = (np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint8) for _ in range(2))
    memory[:] = pattern(4096)
    first, second = memory[:page_bytes].copy(), memory[page_bytes : 2 * page_bytes].copy()
    pages = HostPages(memory, np.array([0]), np.array([page_bytes]), 1, 0, page_bytes, 40)
    total = pages.scatter_part_summed(np.array([1, 5]), 0, 2 * page_bytes, slot)
    landed = [memory[page * page_bytes :][:page_bytes] for page in (1, 5)]
    assert (landed[0] == first).all() and (landed[1] == second).all()
    assert total == checksum(first.tobytes() + second.tobytes())
