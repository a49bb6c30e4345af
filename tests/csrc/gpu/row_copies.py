"""Copies between pages of a pool on a device and rows of the host, with poison around all that is written."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopyEngine

POISON = 0xA5
Bytes = NDArray[np.uint8]
Strategy = Literal["batch", "loop", "kernel", "staged", "pitched"]
STRATEGIES: tuple[Strategy, ...] = ("batch", "loop", "kernel", "staged", "pitched")


@dataclass(frozen=True)
class Case:
    tensors: int
    pieces: int
    fragment_bytes: int
    pool: int
    page_ids: tuple[int, ...]
    row_ids: tuple[int, ...]
    padding: int  # bytes between pages of a tensor, between pieces, and between rows
    shift: int  # of all device addresses, off their alignment
    uneven: int = 0  # bytes by which tensors lie apart more and more
    in_blocks: bool = False
    lacking: tuple[int, ...] = ()  # places in page_ids of blocks that are not there when they are restored

    @property
    def ids_a_page(self) -> int:
        return self.pieces if self.in_blocks else 1

    @property
    def row_bytes(self) -> int:
        return self.tensors * self.pieces * self.fragment_bytes


@st.composite
def cases(draw: st.DrawFn, in_blocks: bool = False) -> Case:
    pool, pieces = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    count = draw(st.integers(0, pool))
    ids = count * pieces if in_blocks else count
    return Case(
        tensors=draw(st.integers(1, 5)),
        pieces=pieces,
        fragment_bytes=draw(st.sampled_from([1, 3, 4, 16, 48, 100, 512, 2048, 2064, 5000])),
        pool=pool,
        page_ids=tuple(draw(st.permutations(range(pool * pieces if in_blocks else pool)))[:ids]),
        row_ids=tuple(draw(st.permutations(range(pool)))[:count]),
        padding=draw(st.sampled_from([0, 0, 1, 16])),
        shift=draw(st.sampled_from([0, 0, 4, 1])),
        uneven=draw(st.sampled_from([0, 0, 16])),
        in_blocks=in_blocks,
        lacking=tuple(draw(st.sets(st.integers(0, ids - 1)))) if in_blocks and ids else (),
    )


class RowCopies:
    """A pool on the device, whose bytes go there and come back by plain copies, and rows on the host."""

    def __init__(self, engine: GpuCopyEngine, case: Case) -> None:
        self.engine = engine
        self.case = case
        self.piece_stride = 0 if case.in_blocks else case.fragment_bytes + case.padding
        self.page_stride = (case.fragment_bytes if case.in_blocks else case.pieces * self.piece_stride) + case.padding
        self.pool = case.pool * case.ids_a_page
        self.tensor_bytes = self.pool * self.page_stride + 7
        self.size = case.shift + self.offset(case.tensors)
        self.memory = engine.allocate(self.size)
        begin = self.memory.address + case.shift
        bases = np.array([begin + self.offset(tensor) for tensor in range(case.tensors)], np.int64)
        strides = np.full(case.tensors, self.page_stride, np.int64)
        layout = case.fragment_bytes, self.pool, case.pieces, self.piece_stride, case.in_blocks
        self.pages = engine.pages(bases, strides, *layout)
        assert self.pages.row_bytes == case.row_bytes
        assert self.pages.fragments == case.tensors * case.pieces
        self.row_stride = case.row_bytes + case.padding
        self.rows: Bytes = np.full(case.pool * self.row_stride + 5, POISON, np.uint8)
        self.pinned = _core.PinnedBuffer(engine, self.rows)

    def offset(self, tensor: int) -> int:
        return tensor * self.tensor_bytes + self.case.uneven * (tensor * tensor // 3)

    def read(self) -> Bytes:
        bytes_: Bytes = np.zeros(self.size, np.uint8)
        self.engine.copy_list_to_host(*self.whole(bytes_), strategy="loop").wait()
        return bytes_

    def write(self, bytes_: Bytes) -> None:
        to, source, sizes = self.whole(bytes_)
        self.engine.copy_list_from_host(source, to, sizes, strategy="loop").wait()

    def whole(self, bytes_: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        return np.array([bytes_.ctypes.data]), np.array([self.memory.address]), np.array([self.size])

    def fragments(self, restored: bool = False) -> Iterator[tuple[slice, slice]]:
        """Of the pages copied: where in the device's bytes, where in the rows' bytes."""
        case, size = self.case, self.case.fragment_bytes
        for i, row in enumerate(case.row_ids):
            for f in range(case.tensors * case.pieces):
                tensor, piece = divmod(f, case.pieces)
                place = i * case.pieces + piece if case.in_blocks else i
                if restored and place in case.lacking:
                    continue
                page = case.page_ids[place]
                at = case.shift + self.offset(tensor) + page * self.page_stride + piece * self.piece_stride
                in_row = row * self.row_stride + f * size
                yield slice(at, at + size), slice(in_row, in_row + size)

    def arguments(self, restored: bool = False) -> tuple[Any, ...]:
        page_ids, row_ids = (np.array(ids, np.int64) for ids in (self.case.page_ids, self.case.row_ids))
        if restored:
            page_ids[list(self.case.lacking)] = -1
        return self.pages, page_ids, self.rows, self.row_stride, row_ids

    def check(self, strategy: Strategy, *, done: bool = True) -> None:
        """A spill and a restore, with poison around all that is written. done: what the driver says when it is."""
        random = np.random.default_rng(1)
        on_device: Bytes = random.integers(0, 256, self.size, np.uint8)
        self.write(on_device)
        self.rows[:] = POISON
        expected = self.rows.copy()
        for device, row in self.fragments():
            expected[row] = on_device[device]
        copy = self.engine.copy_pages_to_host(*self.arguments(), strategy=strategy)
        copy.wait()
        assert copy.done() == done
        assert (self.rows == expected).all()
        assert (self.read() == on_device).all()

        self.rows[:] = random.integers(0, 256, len(self.rows), np.uint8)
        before = self.rows.copy()
        expected = np.full(self.size, POISON, np.uint8)
        self.write(expected)
        for device, row in self.fragments(restored=True):
            expected[device] = before[row]
        self.engine.copy_pages_from_host(*self.arguments(restored=True), strategy=strategy).wait()
        assert (self.read() == expected).all()
        assert (self.rows == before).all()


BLOCKS = Case(
    3, 4, 512, 6, tuple(range(23, 7, -1)), (2, 3, 0, 5), 16, 0, in_blocks=True, lacking=(2, 3, 5, 12, 13, 14, 15)
)
SMALL = Case(3, 2, 512, 6, (4, 1, 5, 0), (2, 3, 0, 5), 16, 0)
TIGHT = {"buffer_bytes": 8192, "small_bytes": 4096, "buffers": 2, "batch_descriptors": 3}
