"""Copies of parts of pages into a slot of the same device and back, between poisoned neighbours."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopyEngine, GpuMemory, GpuPages

POISON = 0xA5
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    tensors: int
    pieces: int
    fragment_bytes: int
    padding: int  # between pages, between pieces, before a tensor
    pages: int
    ids: tuple[int, ...]
    byte_offset: int
    nbytes: int
    slot_offset: int = 0
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
        return self.tensors * (self.pages * self.stride + self.padding) + 16

    def offsets(self) -> NDArray[np.int64]:
        """Of tensors, the last first."""
        return self.padding + np.arange(self.tensors, dtype=np.int64)[::-1] * (self.pages * self.stride + self.padding)

    def row(self) -> NDArray[np.int64]:
        """Where the bytes of page 0 lie, in the order of its row: (tensors, pieces, bytes)."""
        pieces = np.arange(self.pieces)[None, :, None] * self.piece_stride
        found: NDArray[np.int64] = self.offsets()[:, None, None] + pieces + np.arange(self.fragment_bytes)
        return found

    def part(self, last_bytes: int | None = None) -> NDArray[np.int64]:
        """Where the part's bytes lie; -1: nowhere. last_bytes: of the last page's tensors, if not all."""
        ids = np.array(self.ids, np.int64).reshape(-1, 1, self.ids_a_page, 1)
        where: NDArray[np.int64] = np.where(ids < 0, -1, ids * self.stride + self.row())
        where.reshape(len(ids), self.tensors, -1)[-1, :, last_bytes or self.row_bytes :] = -1
        return where.reshape(-1)[self.byte_offset : self.byte_offset + self.nbytes]

    def given(self, pool: Bytes) -> Bytes:
        """What a gather of this pool puts into the slot."""
        where = self.part(self.last_bytes)
        return np.where(where < 0, 0, pool[where]).astype(np.uint8)


def whole(tensors: int, pieces: int, fragment_bytes: int, padding: int, pages: int, ids: tuple[int, ...]) -> Case:
    return Case(tensors, pieces, fragment_bytes, padding, pages, ids, 0, tensors * pieces * fragment_bytes * len(ids))


@st.composite
def block_ids(draw: st.DrawFn, count: int) -> tuple[int, tuple[int, ...]]:
    """How many blocks there are, and ids of `count` different ones, of which some are none."""
    there = draw(st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count))
    blocks = max(1, sum(there) + draw(st.integers(0, 2)))
    ids = iter(draw(st.permutations(range(blocks))))
    return blocks, tuple(next(ids) if each else -1 for each in there)


@st.composite
def cases(draw: st.DrawFn, in_blocks: bool = False) -> Case:
    tensors, pieces, pages = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    unit = draw(st.sampled_from([1, 4, 16]))  # of all sizes
    fragment_bytes = unit * draw(st.sampled_from([1, 2, 5, 16]))
    ids = tuple(draw(st.permutations(range(pages)))[: draw(st.integers(1, pages))])
    count = len(ids)
    if in_blocks:
        pages, ids = draw(block_ids(count * pieces))
    row_bytes = tensors * pieces * fragment_bytes
    byte_offset = unit * draw(st.integers(0, row_bytes // unit - 1))
    least = max((count - 1) * row_bytes - byte_offset + unit, unit)
    nbytes = unit * draw(st.integers(least // unit, (count * row_bytes - byte_offset) // unit))
    padding = unit * draw(st.sampled_from([0, 0, 1, 3]))
    slot_offset = draw(st.sampled_from([0, 0, 64, unit, 1]))
    tail = st.integers(1, pieces * fragment_bytes) | st.integers(1, pieces * fragment_bytes // unit).map(unit.__mul__)
    shape = tensors, pieces, fragment_bytes, padding, pages
    return Case(*shape, ids, byte_offset, nbytes, slot_offset, in_blocks, draw(st.none() | tail))


class PartCopies:
    """A pool and a slot on the device."""

    def __init__(self, engine: GpuCopyEngine, case: Case) -> None:
        self.engine, self.case = engine, case
        self.pool = engine.allocate(case.size)
        self.slot = engine.allocate(case.slot_offset + case.nbytes + 16)
        self.pages: GpuPages = engine.pages(
            self.pool.address + case.offsets(),
            np.full(case.tensors, case.stride, np.int64),
            case.fragment_bytes,
            case.pages,
            case.pieces,
            case.piece_stride,
            case.in_blocks,
        )
        assert self.pages.ids_a_page == case.ids_a_page
        engine.check_pages(self.pages)
        self.ids = np.array(case.ids, np.int64)
        self.inside = slice(case.slot_offset, case.slot_offset + case.nbytes)

    def get(self, memory: GpuMemory) -> Bytes:
        bytes_: Bytes = np.zeros(len(memory), np.uint8)
        to, source, sizes = np.array([bytes_.ctypes.data]), np.array([memory.address]), np.array([len(memory)])
        self.engine.copy_list_to_host(to, source, sizes, strategy="loop").wait()
        return bytes_

    def put(self, memory: GpuMemory, bytes_: Bytes) -> None:
        to, source, sizes = np.array([memory.address]), np.array([bytes_.ctypes.data]), np.array([len(memory)])
        self.engine.copy_list_from_host(to, source, sizes, strategy="loop").wait()

    def arguments(self) -> tuple[GpuPages, NDArray[np.int64], int, int, int]:
        case = self.case
        return self.pages, self.ids, case.byte_offset, case.nbytes, self.slot.address + case.slot_offset

    def header(self, payload_sum: int | None) -> tuple[bytes, bytes]:
        """As large as there is room for before the part: as it is given, and as it must be found."""
        size = min(self.case.slot_offset, 64)
        if payload_sum is None:
            return 2 * (np.random.default_rng(3).bytes(size),)
        if size < 8:
            return b"", b""
        front = np.random.default_rng(3).bytes(size - 8)
        added = (payload_sum + (1 << 64) - 3) % (1 << 64)
        return front + ((1 << 64) - 3).to_bytes(8, "little"), front + added.to_bytes(8, "little")

    def check(self, summed: bool) -> None:
        case, engine = self.case, self.engine
        pool: Bytes = np.random.default_rng(1).integers(0, 256, case.size, np.uint8)
        given = case.given(pool)
        self.put(self.pool, pool)
        expected = np.full(len(self.slot), POISON, np.uint8)
        self.put(self.slot, expected)
        expected[self.inside] = given
        header, written = self.header(_core.part_checksum(given) if summed else None)
        expected[case.slot_offset - len(written) : case.slot_offset] = np.frombuffer(written, np.uint8)
        gather = engine.gather_part_summed if summed else engine.gather_part
        copy = gather(*self.arguments(), header=header, last_bytes=case.last_bytes)
        assert copy.wait_for(20) and copy.done()
        assert (self.get(self.slot) == expected).all()
        assert (self.get(self.pool) == pool).all()
        if summed:
            assert copy.checksum() == _core.part_checksum(given)

        slot: Bytes = np.random.default_rng(2).integers(0, 256, len(self.slot), np.uint8)
        self.put(self.slot, slot)
        expected = np.full(case.size, POISON, np.uint8)
        self.put(self.pool, expected)
        part = case.part()
        there = part >= 0
        expected[part[there]] = slot[self.inside][there]
        copy = (engine.scatter_part_summed if summed else engine.scatter_part)(*self.arguments())
        copy.wait()
        assert (self.get(self.pool) == expected).all()
        assert (self.get(self.slot) == slot).all()
        if summed:
            total = _core.part_checksum(slot[self.inside])
            assert copy.checksum() == total
            again = engine.add_up(self.arguments()[-1], case.nbytes)
            again.wait()
            assert again.checksum() == total

    def check_zeros(self, page: int, start: int, first_piece: int) -> None:
        case = self.case
        pool: Bytes = np.full(case.size, POISON, np.uint8)
        self.put(self.pool, pool)
        self.engine.zero_page_from(self.pages, page, start, first_piece).wait()
        pool[(page * case.stride + case.row())[:, first_piece:, start:].reshape(-1)] = 0
        assert (self.get(self.pool) == pool).all()
        self.engine.zero_pages(self.pages, self.ids).wait()
        for id_ in case.ids:
            pool[(id_ * case.stride + case.row()).reshape(-1)] = 0
        assert (self.get(self.pool) == pool).all()
