"""Copies of pages that are made of an engine's blocks: parts to and from a slot of the device, rows of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopyEngine, GpuMemory
from tests.csrc.gpu.row_copies import POISON, Bytes, Strategy

NONE = -1


@dataclass(frozen=True)
class Case:
    """`ids`: blocks of the pages, `pieces` each."""

    tensors: int
    pieces: int
    block_bytes: int
    padding: int  # between blocks, and before the first: all addresses are multiples of their common divisor
    blocks: int
    ids: tuple[int, ...]
    byte_offset: int
    nbytes: int
    last_bytes: int | None = None
    slot_offset: int = 0

    @property
    def stride(self) -> int:
        return self.block_bytes + self.padding

    @property
    def size(self) -> int:
        return self.padding + self.tensors * self.blocks * self.stride

    @property
    def row_bytes(self) -> int:
        return self.tensors * self.pieces * self.block_bytes

    @property
    def count(self) -> int:
        return len(self.ids) // self.pieces

    def places(self) -> NDArray[np.int64]:
        """Of each byte of the pages' rows, (pages, tensors, bytes): where it is in memory; -1: nowhere."""
        ids = np.array(self.ids, np.int64).reshape(-1, 1, self.pieces, 1)
        tensors = np.arange(self.tensors).reshape(1, -1, 1, 1)
        begins = self.padding + (tensors * self.blocks + ids) * self.stride
        found: NDArray[np.int64] = np.where(ids < 0, NONE, begins + np.arange(self.block_bytes))
        return found.reshape(self.count, self.tensors, -1)

    def part(self, *, cut: bool) -> NDArray[np.int64]:
        """`places` of the part; cut: of a gather, which ends where the prompt does."""
        places = self.places()
        if cut and self.last_bytes is not None:
            places[-1, :, self.last_bytes :] = NONE
        return places.reshape(-1)[self.byte_offset : self.byte_offset + self.nbytes]


def drawn_ids(draw: st.DrawFn, pieces: int, blocks: int, *, lack: bool) -> tuple[int, ...]:
    pages = draw(st.integers(1, blocks // pieces))
    ids = draw(st.permutations(range(blocks)))[: pages * pieces]
    missing = draw(st.sets(st.integers(0, len(ids) - 1), max_size=len(ids))) if lack else set()
    return tuple(NONE if i in missing else block for i, block in enumerate(ids))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors, pieces, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(4, 12))
    unit = draw(st.sampled_from([1, 4, 16]))  # of all sizes
    block_bytes = unit * draw(st.sampled_from([1, 2, 5, 8]))
    ids = drawn_ids(draw, pieces, blocks, lack=True)
    pages, row_bytes = len(ids) // pieces, tensors * pieces * block_bytes
    byte_offset = unit * draw(st.integers(0, row_bytes // unit - 1))
    least = max((pages - 1) * row_bytes - byte_offset + unit, unit)
    nbytes = unit * draw(st.integers(least // unit, (pages * row_bytes - byte_offset) // unit))
    step = draw(st.sampled_from([unit, 1]))  # a prompt's end may be where no access begins
    last_bytes = draw(st.none() | st.integers(1, pieces * block_bytes // step).map(lambda n: n * step))
    padding = unit * draw(st.sampled_from([0, 1, 3]))
    slot_offset = draw(st.sampled_from([0, 0, 64, unit, 1]))
    return Case(tensors, pieces, block_bytes, padding, blocks, ids, byte_offset, nbytes, last_bytes, slot_offset)


class BlockCopies:
    """An engine's blocks on the device, a slot there, and rows of the host."""

    def __init__(self, engine: GpuCopyEngine, case: Case) -> None:
        self.engine, self.case = engine, case
        self.memory = engine.allocate(case.size)
        self.slot = engine.allocate(case.slot_offset + case.nbytes + 16)
        tensors = np.arange(case.tensors, dtype=np.int64) * case.blocks * case.stride
        bases, strides = self.memory.address + case.padding + tensors, np.full(case.tensors, case.stride, np.int64)
        self.pages = engine.pages(bases, strides, case.block_bytes, case.blocks, case.pieces, 0, in_blocks=True)
        assert self.pages.row_bytes == case.row_bytes
        self.ids = np.array(case.ids, np.int64)

    def get(self, memory: GpuMemory) -> Bytes:
        bytes_: Bytes = np.zeros(len(memory), np.uint8)
        to, source, sizes = np.array([bytes_.ctypes.data]), np.array([memory.address]), np.array([len(memory)])
        self.engine.copy_list_to_host(to, source, sizes, strategy="loop").wait()
        return bytes_

    def put(self, memory: GpuMemory, bytes_: Bytes) -> None:
        to, source, sizes = np.array([memory.address]), np.array([bytes_.ctypes.data]), np.array([len(memory)])
        self.engine.copy_list_from_host(to, source, sizes, strategy="loop").wait()

    def check_parts(self, summed: bool) -> None:
        """A gather and a scatter, beside what numpy makes of them."""
        case, engine, random = self.case, self.engine, np.random.default_rng(1)
        part = self.pages, self.ids, case.byte_offset, case.nbytes, self.slot.address + case.slot_offset
        inside = slice(case.slot_offset, case.slot_offset + case.nbytes)
        memory: Bytes = random.integers(1, 256, case.size, np.uint8)  # none of it is the zeros of what is not there
        self.put(self.memory, memory)
        slot: Bytes = np.full(len(self.slot), POISON, np.uint8)
        self.put(self.slot, slot)
        places = case.part(cut=True)
        slot[inside] = np.where(places < 0, 0, memory[places])
        gather = engine.gather_part_summed if summed else engine.gather_part
        copy = gather(*part, last_bytes=case.last_bytes)
        copy.wait()
        assert (self.get(self.slot) == slot).all()
        assert (self.get(self.memory) == memory).all()
        if summed:
            assert copy.checksum() == _core.part_checksum(slot[inside])

        slot = random.integers(0, 256, len(self.slot), np.uint8)
        self.put(self.slot, slot)
        places = case.part(cut=False)
        memory[places[places >= 0]] = slot[inside][places >= 0]
        copy = (engine.scatter_part_summed if summed else engine.scatter_part)(*part)
        copy.wait()
        assert (self.get(self.memory) == memory).all(), "what is no block of the page's was written, or one was not"
        assert (self.get(self.slot) == slot).all()
        if summed:
            assert copy.checksum() == _core.part_checksum(slot[inside])

    def check_rows(self, strategy: Strategy, apart: int = 0) -> None:
        """A load into the blocks that are there, and a store of pages that lack none. `apart`: bytes between rows."""
        case, random = self.case, np.random.default_rng(2)
        stride, order = case.row_bytes + apart, random.permutation(case.count)
        rows: Bytes = random.integers(0, 256, (case.count, stride), np.uint8)
        pinned, before = _core.PinnedBuffer(self.engine, rows), rows.copy()
        memory: Bytes = random.integers(0, 256, case.size, np.uint8)
        self.put(self.memory, memory)
        places = case.places().reshape(case.count, -1)
        for page, row in zip(places, order.tolist(), strict=True):
            memory[page[page >= 0]] = rows[row, : case.row_bytes][page >= 0]
        arguments = self.pages, self.ids, rows, stride, order
        copy = self.engine.copy_pages_from_host(*arguments, strategy=strategy)
        copy.wait()
        assert copy.strategy == strategy
        assert (self.get(self.memory) == memory).all(), "what is no block of the page's was written, or one was not"
        assert (rows == before).all()

        rows[:] = POISON
        before = rows.copy()
        if NONE not in case.ids:
            for page, row in zip(places, order.tolist(), strict=True):
                before[row, : case.row_bytes] = memory[page]
            self.engine.copy_pages_to_host(*arguments, strategy=strategy).wait()
        assert (rows == before).all()
        assert (self.get(self.memory) == memory).all()
        del pinned
