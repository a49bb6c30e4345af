"""Pages in an engine's blocks, some of which are not there: every byte by every way, over the fake driver and over a
real one."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry._core import GpuCopyEngine
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout, StorageOrder
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
)
from tests.csrc.engine_allocations import handle_of
from tests.csrc.gpu.block_copies import NONE, BlockCopies, Case, cases
from tests.csrc.gpu.driver import calls
from tests.csrc.gpu.row_copies import STRATEGIES, TIGHT, Strategy

SLOWLY = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# In words of 16, 4 and 1 bytes, with blocks that are not there, and with a prompt's end inside of a block.
SMALL = (
    Case(3, 2, 64, 16, 10, (4, NONE, 9, 0, NONE, 2), 48, 3 * 384 - 96, 80),
    Case(2, 4, 32, 16, 9, (8, 1, 6, 3), 0, 256, 48, 64),
    Case(2, 1, 100, 4, 5, (3, NONE), 96, 200, 52, 4),
    Case(2, 3, 33, 1, 9, (1, 2, NONE, 3, 8, 7), 7, 350, 50, 1),
    Case(1, 2, 48, 0, 4, (NONE, NONE), 0, 96, 47),
)
WHOLE = (
    Case(3, 2, 512, 16, 10, (4, 1, 9, 0, 7, 2), 0, 1),
    Case(5, 4, 2064, 16, 12, (11, 3, 5, 0, 2, 8, 1, 7), 0, 1),
    Case(2, 2, 100, 4, 8, (6, 1, 2, 5), 0, 1),
    Case(3, 3, 33, 1, 9, (1, 2, 4, 3, 8, 7), 0, 1),
    Case(2, 1, 2048, 0, 6, (3, 0, 5), 0, 1),
)


def lacking(case: Case) -> Case:
    """Every third block is not there."""
    return replace(case, ids=tuple(NONE if i % 3 == 1 else block for i, block in enumerate(case.ids)))


def many(pieces: int, pages: int, *, lack: bool) -> Case:
    """More blocks than one launch names, of pages that it may not divide."""
    ids = np.random.default_rng(3).permutation(pages * pieces + 50)[: pages * pieces]
    if lack:
        ids[::7] = NONE
    row = 2 * pieces * 16
    last = pieces * 16 - 24 if pieces > 1 else None
    return Case(2, pieces, 16, 16, pages * pieces + 50, tuple(ids.tolist()), 16, pages * row - 32, last)


@SLOWLY
@given(case=cases(), summed=st.booleans())
def test_parts_over_the_fake(fake: ctypes.CDLL, library: str, case: Case, summed: bool) -> None:
    BlockCopies(GpuCopyEngine(0, library), case).check_parts(summed)


@SLOWLY
@given(case=cases(), strategy=st.sampled_from(STRATEGIES), tight=st.booleans(), apart=st.sampled_from([0, 16, 1]))
def test_rows_over_the_fake(
    fake: ctypes.CDLL, library: str, case: Case, strategy: Strategy, tight: bool, apart: int
) -> None:
    engine = GpuCopyEngine(0, library, **(TIGHT if tight else {}))
    BlockCopies(engine, case).check_rows(strategy, apart)
    BlockCopies(engine, replace(case, ids=tuple(range(case.pieces)))).check_rows(strategy, apart)
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.parametrize("pieces", [1, 7, 256])
def test_more_blocks_than_one_launch_names(fake: ctypes.CDLL, library: str, pieces: int) -> None:
    engine, pages = GpuCopyEngine(0, library), 2000 // pieces
    BlockCopies(engine, many(pieces, pages, lack=True)).check_parts(summed=True)
    launches = engine.statistics()["gathered"]["launches"]
    assert launches == -(-pages // (900 // pieces)), "ids are parameters of a launch"
    for strategy in STRATEGIES:
        BlockCopies(engine, many(pieces, pages, lack=False)).check_rows(strategy)


@pytest.mark.parametrize("refused", [None, "copy_batch"])
def test_without_kernels_the_driver_copies(fake: ctypes.CDLL, library: str, refused: str | None) -> None:
    fake.fake_answer(b"module_load", 801)
    if refused:
        fake.fake_answer(refused.encode(), 801)
    for case in SMALL:
        BlockCopies(GpuCopyEngine(0, library), case).check_parts(summed=False)


def test_the_blocks_of_a_page_are_pitched_copies_of_their_own(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    BlockCopies(engine, WHOLE[0]).check_rows("pitched")
    assert engine.statistics()["pitched"]["descriptors"] == 2 * 6, "of all tensors"
    BlockCopies(engine, lacking(WHOLE[0])).check_rows("pitched")
    assert engine.statistics()["pitched"]["descriptors"] == 2 * 6 + 4


def test_what_cannot_be_moves_nothing(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = BlockCopies(engine, Case(2, 2, 16, 0, 8, (0, 1), 0, 64))
    pages, rows, row, slot = world.pages, np.zeros(256, np.uint8), np.array([0]), world.slot.address
    for ids, error, words in (
        ([0, 1, 2], ValueError, "page_ids: 3 ids, must be a multiple of the 2 blocks of a page"),
        ([0, 8], IndexError, r"page_ids\[1\]: 8, must be in \[-1, 8\)"),
        ([-2, 0], IndexError, r"page_ids\[0\]: -2, must be in \[-1, 8\)"),
    ):
        with pytest.raises(error, match=words):
            engine.gather_part(pages, np.array(ids), 0, 64, slot)
        with pytest.raises(error, match=words):
            engine.copy_pages_from_host(pages, np.array(ids), rows, 64, row)
    with pytest.raises(IndexError, match=r"page_ids\[1\]: -1, must be in \[0, 8\)"):
        engine.copy_pages_to_host(pages, np.array([0, NONE]), rows, 64, row)
    with pytest.raises(ValueError, match="row_ids: 2, must be in"):
        engine.copy_pages_to_host(pages, np.array([0, 1]), rows, 64, np.array([0, 1]))
    for last in (0, 33):
        with pytest.raises(ValueError, match=rf"last_bytes: {last}, must be in \[1, 32\]"):
            engine.gather_part_summed(pages, np.array([0, 1]), 0, 64, slot, last_bytes=last)
    for copy in (
        lambda: engine.scatter_part(pages, np.array([3, 3]), 0, 64, slot),
        lambda: engine.copy_pages_from_host(pages, np.array([3, 3]), rows, 64, row),
    ):
        with pytest.raises(ValueError, match="page_ids: 3 would be written twice"):
            copy()
    for copy in (
        lambda: engine.zero_pages(pages, row),
        lambda: engine.zero_page_from(pages, 0, 0),
        lambda: engine.move_pages(pages, row, pages, row),
    ):
        with pytest.raises(ValueError, match="in blocks, must be pages that one id names"):
            copy()
    assert calls(fake, "launch") == 0
    bases, strides = np.array([4096]), np.array([16])
    for pieces, stride, words in ((257, 0, r"pieces: 257, must be in \[1, 256\]"), (2, 16, "piece_stride: 16")):
        with pytest.raises(ValueError, match=words):
            engine.pages(bases, strides, 16, 8, pieces, stride, in_blocks=True)


def test_a_pool_of_an_engines_blocks(fake: ctypes.CDLL, on_the_fake: None) -> None:
    """Its places lie in two allocations: pages are loaded and stored by the blocks that they are bound to."""
    geometry = KVGeometry(2, 1, 4, "float32", 16, Layout.ENGINE)
    blocks, places, per_page = 12, 4, 2
    size = geometry.page_bytes // places // per_page
    stride, start = size + 32, 4096
    apart = blocks * stride
    addresses = [int(fake.fake_foreign(start + 2 * apart)) for _ in range(2)]
    memories = tuple(
        RegisteredMemory(GpuAllocation(handle_of(address), bytes(16)), start + 2 * apart) for address in addresses
    )
    tensors = tuple(RegisteredTensor(i // 2, start + i % 2 * apart, stride, size) for i in range(places))
    rank = RegisteredRank(memories, tensors)
    memory = GpuPoolMemory.map(Registration(blocks, StorageOrder.PAGE_MAJOR, (rank,), 8), geometry, [0])
    assert memory.block_table is not None and memory.rank_pools() == []
    views = [
        np.ctypeslib.as_array((ctypes.c_uint8 * (2 * apart)).from_address(address + start)).reshape(2, blocks, stride)
        for address in addresses
    ]
    for seed, view in enumerate(views):
        view[:] = np.random.default_rng(seed).integers(0, 256, view.shape, np.uint8)
    before = np.concatenate(views)
    rows = np.frombuffer(mmap.mmap(-1, 3 * geometry.page_bytes), np.uint8)
    memory.attach_rows(memoryview(rows))
    kept = rows.reshape(3, places, per_page, size)
    memory.block_table.bind([20, 3], [5, 0, 7, 11])
    memory.spill(np.array([3, 20]), np.array([0, 2]))
    assert (kept[0] == before[:, [7, 11], :size]).all() and (kept[2] == before[:, [5, 0], :size]).all()
    assert not kept[1].any()
    memory.block_table.bind([20, 1], [NONE, 8, 9, 2])
    memory.restore(np.array([20, 1]), np.array([0, 2]))
    want = before.copy()
    want[:, 8, :size] = kept[0][:, 1]
    want[:, [9, 2], :size] = kept[2]
    assert (np.concatenate(views) == want).all(), "what is no block of the page's was written, or one was not"
    with pytest.raises(OSError, match=r"page_ids\[0\]: -1"):
        memory.spill(np.array([20]), np.array([1]))
    with pytest.raises(AssertionError, match="an engine's blocks were to be cleared"):
        memory._ranks[0].zero_pages(np.array([1]))
    memory.detach_rows()
    memory.close()
    for address in addresses:
        fake.fake_foreign_ends(address)


# -- a real device


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("case", SMALL)
def test_small_parts_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], case: Case, summed: bool) -> None:
    world = BlockCopies(gpu_engine(), case)
    world.check_parts(summed)
    assert world.engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("pieces", [1, 7, 256])
def test_many_blocks_of_parts_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], pieces: int, summed: bool) -> None:
    BlockCopies(gpu_engine(), many(pieces, 2000 // pieces, lack=True)).check_parts(summed)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], strategy: Strategy) -> None:
    engine = gpu_engine(**TIGHT)
    for case in (*WHOLE, *map(lacking, WHOLE)):
        for apart in (0, 16, 1):
            BlockCopies(engine, case).check_rows(strategy, apart)
    BlockCopies(engine, many(7, 300, lack=False)).check_rows(strategy)
    BlockCopies(engine, many(256, 8, lack=True)).check_rows(strategy)
    assert engine.statistics()["fallbacks"] == {}
