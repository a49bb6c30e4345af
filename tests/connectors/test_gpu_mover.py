"""Copies between an engine's blocks and a pool on a GPU: which bytes move, and that they wait for what the engine
computes."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.connectors.blocks import PoolPages
from tests.connectors.engine_memory import BLOCK, BLOCK_BYTES, LAYERS, EngineMemory, held_bytes
from tests.support.devices import need

pytestmark = pytest.mark.gpu
SLEEP_CYCLES = 400_000_000  # some tenths of a second
PAGES, PER_PAGE = 6, 2


@pytest.fixture
def engine() -> EngineMemory:
    need(0)
    return EngineMemory(16, PER_PAGE, gap=24, device=0)


@pytest.fixture
def pool(engine: EngineMemory) -> PoolPages:
    import torch

    memory = torch.full((PAGES * engine.map.page_bytes,), 0xEE, dtype=torch.uint8, device="cuda:0")
    return PoolPages(memory, memory.data_ptr(), PAGES, engine.map.page_bytes)


def pages_of(pool: PoolPages) -> np.ndarray:  # type: ignore[type-arg]
    return held_bytes(pool.memory).reshape(PAGES, -1)


def test_whole_pages_go_there_and_back_and_nothing_beside_them(engine: EngineMemory, pool: PoolPages) -> None:
    blocks, pages = [3, 9, 1, 15, 0, 8], [4, 0, 2]
    engine.to_pages(pool, pages, blocks, 0, 6 * BLOCK)
    for i, page in enumerate(pages):
        assert pages_of(pool)[page].tobytes() == engine.page(blocks[2 * i : 2 * i + 2])
    assert (pages_of(pool)[[1, 3, 5]] == 0xEE).all()
    other = EngineMemory(16, PER_PAGE, gap=24, seed=1, device=0)
    before = [held_bytes(layer) for layer in other.layers]
    theirs = [5, 6, 7, 8, 9, 10]
    other.to_blocks(pool, pages, theirs, 0, 6 * BLOCK)
    assert [other.block(n) for n in theirs] == [engine.block(n) for n in blocks]
    for layer, old in zip(other.layers, before, strict=True):
        assert (np.delete(held_bytes(layer), theirs, axis=0) == np.delete(old, theirs, axis=0)).all()
        assert (held_bytes(layer)[:, BLOCK_BYTES:] == old[:, BLOCK_BYTES:]).all()


def test_blocks_that_begin_within_a_page_go_there_and_back(engine: EngineMemory, pool: PoolPages) -> None:
    blocks = [3, 9, 1, 15, 0, 8, 7, 2, 11, 4]
    engine.to_pages(pool, [4, 0, 2, 5, 1], blocks, 0, 10 * BLOCK)
    for i, page in enumerate([4, 0, 2, 5, 1]):
        assert pages_of(pool)[page].tobytes() == engine.page(blocks[2 * i : 2 * i + 2])
    wanted = engine.block(15)
    engine.to_blocks(pool, [4, 0], [5, 6, 10], BLOCK, 4 * BLOCK)
    assert [engine.block(n) for n in (5, 6, 10)] == [engine.block(9), engine.block(1), wanted]


def test_what_the_engine_still_computes_is_waited_for(engine: EngineMemory, pool: PoolPages) -> None:
    import torch

    torch.cuda._sleep(SLEEP_CYCLES)
    for layer in engine.layers:
        layer[3:5] += 7
    engine.to_pages(pool, [1], [3, 4], 0, 2 * BLOCK)
    assert pages_of(pool)[1].tobytes() == engine.page([3, 4])


def test_blocks_are_written_when_the_engine_is_done_with_them(engine: EngineMemory, pool: PoolPages) -> None:
    import torch

    wanted = engine.page([0, 1])
    engine.to_pages(pool, [1], [0, 1], 0, 2 * BLOCK)
    torch.cuda._sleep(SLEEP_CYCLES)
    for layer in engine.layers:
        layer[6:8] = 0xAA  # of a request that is over: its last step is still under way
    engine.to_blocks(pool, [1], [6, 7], 0, 2 * BLOCK)
    assert engine.page([6, 7]) == wanted


def test_what_the_engine_begins_later_is_not_waited_for(engine: EngineMemory, pool: PoolPages) -> None:
    import torch

    moment = engine.mover.moment()
    torch.cuda._sleep(SLEEP_CYCLES)
    later = torch.cuda.Event()
    later.record()
    engine.to_pages(pool, [1], [3, 4], 0, 2 * BLOCK, moment)
    assert not later.query()


def test_behind_the_last_token_nothing_is_left(engine: EngineMemory, pool: PoolPages) -> None:
    end = BLOCK + 3
    places = engine.map.places(pool, [2], [5, 6], 0, end)
    engine.mover.to_pages(pool, places, engine.mover.moment(), engine.map.tail([2], end))
    halves = pages_of(pool)[2].reshape(LAYERS, PER_PAGE, BLOCK_BYTES)
    assert halves[:, 0].tobytes() == engine.block(5)
    assert halves[:, 1].tobytes() == engine.beginning(6, 3)
    assert (np.delete(pages_of(pool), 2, axis=0) == 0xEE).all()


def test_a_pool_in_shared_memory_or_of_several_ranks_is_refused(engine: EngineMemory, pool: PoolPages) -> None:
    assert engine.mover.misfit([pool.memory]) == ""
    assert "shared memory" in engine.mover.misfit([np.zeros(8, np.uint8)])
    assert "cuda:0 and cuda:0" in engine.mover.misfit([pool.memory, pool.memory])


def test_nothing_of_its_own_lies_in_the_engines_pool_which_is_discarded_when_it_sleeps(pool: PoolPages) -> None:
    import torch

    theirs = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(theirs):
        engine = EngineMemory(16, PER_PAGE, device=0)
    segments = [(each["address"], each["total_size"]) for each in theirs.snapshot()]

    def discarded(tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + size for start, size in segments)

    assert all(discarded(layer) for layer in engine.layers)
    for layer in engine.layers:
        layer.zero_()
    held = [each for value in vars(engine.mover).values() for each in (value if isinstance(value, list) else [value])]
    tensors = [each for each in held if torch.is_tensor(each)]
    assert tensors and not any(map(discarded, tensors))
