"""Parts of pages that are made of an engine's blocks, in host memory, beside what numpy makes of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry._core import HostPages, part_checksum

NONE = -1


class Engine:
    """Memory of `blocks` blocks in `tensors` tensors, whose strides leave gaps, and pages of `pieces` of them."""

    def __init__(self, chosen: random.Random) -> None:
        self.tensors, self.pieces, self.blocks = chosen.randint(1, 4), chosen.randint(1, 4), 24
        self.block = chosen.choice([1, 5, 8, 16, 48])
        self.stride = self.block + chosen.choice([0, 3, 16])
        self.memory = np.array(
            [chosen.randrange(256) for _ in range(self.tensors * self.blocks * self.stride)], np.uint8
        )
        offsets = np.arange(self.tensors, dtype=np.int64) * self.blocks * self.stride
        strides = np.full(self.tensors, self.stride, np.int64)
        self.pages = HostPages(self.memory, offsets, strides, self.pieces, 0, self.block, self.blocks, in_blocks=True)
        self.row = self.tensors * self.pieces * self.block

    def bytes_of(self, tensor: int, block: int) -> NDArray[np.uint8]:
        at = (tensor * self.blocks + block) * self.stride
        return self.memory[at : at + self.block]

    def rows(self, ids: list[int], last_bytes: int | None) -> NDArray[np.uint8]:
        """What a gather of all of it gives."""
        out = np.zeros((len(ids) // self.pieces, self.tensors, self.pieces, self.block), np.uint8)
        for number, block in enumerate(ids):
            page, piece = divmod(number, self.pieces)
            for tensor in range(self.tensors):
                if block != NONE:
                    out[page, tensor, piece] = self.bytes_of(tensor, block)
        if last_bytes is not None:
            out[-1].reshape(self.tensors, -1)[:, last_bytes:] = 0
        return out.reshape(-1)


def ids_of(chosen: random.Random, engine: Engine) -> list[int]:
    pages = chosen.randint(1, 24 // engine.pieces)
    ids = chosen.sample(range(engine.blocks), pages * engine.pieces)
    return [NONE if chosen.random() < 0.2 else block for block in ids]


@pytest.mark.parametrize("seed", range(120))
def test_gathers_and_scatters(seed: int) -> None:
    chosen = random.Random(seed)
    engine = Engine(chosen)
    ids = ids_of(chosen, engine)
    pages = len(ids) // engine.pieces
    offset = chosen.randrange(engine.row)
    nbytes = chosen.randint(max((pages - 1) * engine.row - offset + 1, 1), pages * engine.row - offset)
    last = chosen.choice([None, chosen.randint(1, engine.pieces * engine.block)])
    threads = chosen.randint(1, 3)
    names = np.array(ids, np.int64)
    want = engine.rows(ids, last)[offset : offset + nbytes]

    before = engine.memory.copy()
    slot = np.full(nbytes + 7, 0xEE, np.uint8)
    engine.pages.gather_part(names, offset, nbytes, slot, 3, threads, last)
    assert (slot[3 : 3 + nbytes] == want).all() and (slot[:3] == 0xEE).all() and (slot[3 + nbytes :] == 0xEE).all()
    slot[:] = 0xEE
    assert engine.pages.gather_part_summed(names, offset, nbytes, slot, 3, threads, last) == part_checksum(
        want.tobytes()
    )
    assert (slot[3 : 3 + nbytes] == want).all() and (engine.memory == before).all()

    new = np.array([chosen.randrange(256) for _ in range(nbytes)], np.uint8)
    expected = Engine(random.Random(seed))
    expected.memory[:] = before
    whole = expected.rows(ids, None)
    whole[offset : offset + nbytes] = new
    for number, block in enumerate(ids):
        if block != NONE:
            page, piece = divmod(number, engine.pieces)
            rows = whole.reshape(pages, engine.tensors, engine.pieces, engine.block)
            for tensor in range(engine.tensors):
                expected.bytes_of(tensor, block)[:] = rows[page, tensor, piece]
    if chosen.random() < 0.5:
        engine.pages.scatter_part(names, offset, nbytes, new, 0, threads)
    else:
        assert engine.pages.scatter_part_summed(names, offset, nbytes, new, 0, threads) == part_checksum(new.tobytes())
    assert (engine.memory == expected.memory).all(), "what is no block of the page's was written, or one was not"
    engine.pages.close()


def test_what_cannot_be_is_refused() -> None:
    memory = np.zeros(24 * 8, np.uint8)
    offsets, strides = np.zeros(1, np.int64), np.full(1, 8, np.int64)
    pages = HostPages(memory, offsets, strides, 2, 0, 8, 24, in_blocks=True)
    assert (pages.ids_a_page, pages.row_bytes, pages.pages) == (2, 16, 24)
    slot = np.zeros(64, np.uint8)
    for ids, part, error, words in (
        ([0, 1, 2], (0, 16), ValueError, "page_ids: 3 ids, must be a multiple of the 2 blocks"),
        ([0, 24], (0, 16), IndexError, r"page_ids\[1\]: 24, must be in \[-1, 24\)"),
        ([0, -2], (0, 16), IndexError, r"page_ids\[1\]: -2"),
        ([0, 1], (0, 17), ValueError, "nbytes"),
    ):
        with pytest.raises(error, match=words):
            pages.gather_part(np.array(ids, np.int64), *part, slot)
    for last in (0, 17):
        with pytest.raises(ValueError, match=f"last_bytes: {last}, must be 1 to 16|last_bytes is {last}|last_bytes"):
            pages.gather_part(np.array([0, 1], np.int64), 0, 16, slot, last_bytes=last)
    with pytest.raises(ValueError, match="page_ids: 3 would be written twice"):
        pages.scatter_part(np.array([3, 3], np.int64), 0, 16, slot)
    pages.scatter_part(np.array([-1, -1], np.int64), 0, 16, slot)
    with pytest.raises(ValueError, match="in blocks"):
        pages.zero_page_from(0, 0)
    with pytest.raises(ValueError, match="piece_stride"):
        HostPages(memory, offsets, strides, 2, 8, 8, 24, in_blocks=True)
    pages.close()
