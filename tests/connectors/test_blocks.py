"""Copies between an engine's blocks and the daemon's pages."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.connectors.blocks import BlockMap, PoolPages
from tests.connectors.engine_memory import BLOCK, BLOCK_BYTES, LAYERS, EngineMemory


def new_pool(engine: EngineMemory, pages: int = 6) -> NDArray[np.uint8]:
    return np.full((pages, engine.map.page_bytes), 0xEE, dtype=np.uint8)


def pages_of(pool: NDArray[np.uint8]) -> PoolPages:
    return PoolPages(pool.reshape(-1), pool.__array_interface__["data"][0], *pool.shape)


@pytest.mark.parametrize("gap", [0, 24])
def test_whole_pages_go_there_and_back(gap: int) -> None:
    engine, other = EngineMemory(16, 2, gap), EngineMemory(16, 2, gap, seed=1)
    pool = new_pool(engine)
    pages, blocks = [4, 0, 2], [3, 9, 1, 15, 0, 8]
    engine.to_pages(pages_of(pool), pages, blocks, 0, 6 * BLOCK)
    for i, page in enumerate(pages):
        assert pool[page].tobytes() == engine.page(blocks[2 * i : 2 * i + 2])
    assert (pool[[1, 3, 5]] == 0xEE).all()
    theirs = [5, 6, 7, 8, 9, 10]
    before = [other.block(n) for n in range(16)]
    between = [layer[:, BLOCK_BYTES:].copy() for layer in other.layers]
    other.to_blocks(pages_of(pool), pages, theirs, 0, 6 * BLOCK)
    assert [other.block(n) for n in theirs] == [engine.block(n) for n in blocks]
    assert [other.block(n) for n in range(16) if n not in theirs] == [before[n] for n in range(16) if n not in theirs]
    assert all((layer[:, BLOCK_BYTES:] == old).all() for layer, old in zip(other.layers, between, strict=True))


def test_a_copy_may_begin_within_a_page_and_end_within_a_block() -> None:
    engine = EngineMemory(16, 2)
    pool = new_pool(engine)
    engine.to_pages(pages_of(pool), [1, 3, 5], [7, 2, 11], 3 * BLOCK, 5 * BLOCK + 1)
    halves = pool.reshape(6, LAYERS, 2, BLOCK_BYTES)
    assert halves[3, :, 1].tobytes() == engine.block(7)
    assert halves[5, :, 0].tobytes() == engine.block(2)
    assert halves[5, :, 1].tobytes() == engine.block(11)
    assert (halves[3, :, 0] == 0xEE).all() and (pool[1] == 0xEE).all()


def test_nothing_is_a_copy_too() -> None:
    engine = EngineMemory(4)
    before = [layer.copy() for layer in engine.layers]
    engine.to_blocks(pages_of(new_pool(engine)), [0], [], BLOCK, BLOCK)
    assert all((layer == old).all() for layer, old in zip(engine.layers, before, strict=True))


@pytest.mark.parametrize(
    ("pages", "blocks", "start", "end", "message"),
    [
        ([0], [1], 3, 8, "start is 3"),
        ([0], [1], 16, 8, "start is 16"),
        ([0, 1], [1], 0, 16, "block_ids has 1 entries"),
        ([0, 6], [1, 2], 0, 16, "pages: 0 to 6; they must be 0 to 5"),
        ([0, 1], [1, 16], 0, 16, "block_ids: 1 to 16; they must be 0 to 15"),
        ([0, 1], [-1, 2], 0, 16, "block_ids: -1 to 2"),
    ],
)
def test_what_is_out_of_bounds_is_named(
    pages: list[int], blocks: list[int], start: int, end: int, message: str
) -> None:
    engine = EngineMemory(16)
    with pytest.raises((ValueError, IndexError), match=message):
        engine.map.places(pages_of(new_pool(engine)), pages, blocks, start, end)


def test_a_pool_of_other_pages_is_refused() -> None:
    engine = EngineMemory(4)
    with pytest.raises(ValueError, match="pool has pages of 10 bytes; a page must have 512"):
        engine.map.places(pages_of(np.zeros((4, 10), dtype=np.uint8)), [0], [0], 0, BLOCK)


@pytest.mark.parametrize("end", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK])
def test_behind_the_last_token_of_a_page_nothing_is_left(end: int) -> None:
    engine = EngineMemory(4, 2)
    pool = new_pool(engine)
    engine.to_pages(pages_of(pool), [0, 1, 2], [3, 1, 2, 0, 1, 3], 0, 6 * BLOCK)
    before = pool.copy()
    tail = engine.map.tail([0, 1, 2], 4 * BLOCK + end)
    assert (tail is None) == (end == 2 * BLOCK)
    places = engine.map.places(pages_of(pool), [2], [1, 3], 0, end)
    engine.mover.to_pages(pages_of(pool), places, None, tail)
    halves = pool[2].reshape(LAYERS, 2, BLOCK_BYTES)
    assert halves[:, 0].tobytes() == engine.beginning(1, end)
    assert halves[:, 1].tobytes() == engine.beginning(3, end - BLOCK)
    assert (np.delete(pool, 2, axis=0) == np.delete(before, 2, axis=0)).all()


def test_blocks_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="strides: 8 is below a block's 64 bytes"):
        BlockMap(np.array([0], dtype=np.int64), np.array([8], dtype=np.int64), 64, 4, 8, 1, np.zeros(64, np.int32))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (np.zeros(63, np.int32), r"order has shape \(63,\); it must have a block's 64 bytes"),
        (np.arange(64, dtype=np.int32), "order: 0 to 63; tokens are 0 to 7"),
    ],
)
def test_an_order_of_other_blocks_is_refused(order: NDArray[np.int32], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockMap(np.array([0], dtype=np.int64), np.array([64], dtype=np.int64), 64, 4, 8, 1, order)
