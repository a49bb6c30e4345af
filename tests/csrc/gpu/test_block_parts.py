"""Parts of pages in blocks, and of pages that are not full, over the fake driver and a real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry._core import GpuCopyEngine
from tests.csrc.gpu.driver import calls
from tests.csrc.gpu.part_copies import Case, PartCopies, cases
from tests.csrc.gpu_orders import Orders


def many(blocks: int, pieces: int, lacking: int, fragment_bytes: int, last_bytes: int | None) -> Case:
    """Pages of 2 tensors, whose every `lacking`-th block is none, but for the front of the first."""
    ids = np.random.default_rng(blocks).permutation(blocks)
    ids[lacking - 1 :: lacking] = -1
    nbytes = len(ids) * 2 * fragment_bytes - fragment_bytes
    where = (0, blocks, tuple(ids.tolist()), fragment_bytes, nbytes)
    return Case(2, pieces, fragment_bytes, *where, in_blocks=True, last_bytes=last_bytes)


def test_more_blocks_than_one_launch_takes(fake: ctypes.CDLL, library: str) -> None:
    world = PartCopies(GpuCopyEngine(0, library), many(2100, 7, 5, 16, 48))
    world.check(summed=True)
    assert world.engine.statistics()["gathered"]["launches"] == 3  # of 128 pages each
    world.check(summed=False)


def test_a_tail_goes_by_the_launch_that_has_the_last_page(fake: ctypes.CDLL, library: str) -> None:
    ids = tuple(np.random.default_rng(3).permutation(1100)[:1000].tolist())
    for pages in (1000, 901, 900):
        case = Case(2, 1, 32, 0, 1100, ids[:pages], 16, pages * 64 - 16, last_bytes=16)
        PartCopies(GpuCopyEngine(0, library), case).check(summed=True)


@pytest.mark.parametrize("refused", [None, "copy_batch"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(in_blocks=True))
def test_without_kernels_the_driver_copies_blocks(
    fake: ctypes.CDLL, library: str, refused: str | None, case: Case
) -> None:
    fake.fake_answer(b"module_load", 801)
    if refused:
        fake.fake_answer(refused.encode(), 801)
    PartCopies(GpuCopyEngine(0, library), case).check(summed=False)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_nobody_reads_behind_the_last_byte(
    fake: ctypes.CDLL, library: str, orders: Orders, in_blocks: bool, kernels: bool
) -> None:
    """A worker writes there meanwhile."""
    fake.fake_answer(b"module_load", 0 if kernels else 801)
    ids = (2, -1, 0, 3) if in_blocks else (2, 0)
    world = PartCopies(GpuCopyEngine(0, library), Case(2, 2, 64, 0, 4, ids, 0, 2 * 256, 64, in_blocks, 80))
    orders.tells("a worker")
    row = world.pool.address + world.case.row()[:, 1, 16:]
    for begin in (row[:, 0] + (3 if in_blocks else 0) * world.case.stride).tolist():
        orders.writes("a worker", begin, 48)
    world.engine.gather_part(*world.arguments(), last_bytes=80).wait()
    orders.check()
    world.engine.gather_part(*world.arguments(), last_bytes=81).wait()
    found = orders.take()
    assert found and all("a worker" in each for each in found)
    orders.told_by("a worker")


def test_bad_blocks_move_nothing(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = PartCopies(engine, Case(2, 2, 16, 0, 4, (3, -1), 0, 64, 64, in_blocks=True))
    slot = world.slot.address + 64
    for copy in (engine.gather_part, engine.gather_part_summed, engine.scatter_part, engine.scatter_part_summed):
        with pytest.raises(IndexError, match=r"page_ids\[1\]: 4, must be in \[-1, 4\)"):
            copy(world.pages, np.array([0, 4]), 0, 64, slot)
        with pytest.raises(IndexError, match=r"page_ids\[0\]: -2, must be in \[-1, 4\)"):
            copy(world.pages, np.array([-2, 1]), 0, 64, slot)
        with pytest.raises(ValueError, match="page_ids: 3 ids, must be a multiple of the 2 blocks of a page"):
            copy(world.pages, np.array([0, 1, 2]), 0, 64, slot)
    with pytest.raises(ValueError, match="page_ids: 3 would be written twice"):
        engine.scatter_part(world.pages, np.array([-1, 3, -1, 3]), 0, 128, slot)
    for last_bytes in (0, 33):
        with pytest.raises(ValueError, match=rf"last_bytes: {last_bytes}, must be in \[1, 32\]"):
            engine.gather_part(*world.arguments(), last_bytes=last_bytes)
    assert calls(fake, "launch") == 0


def test_pages_in_blocks_are_not_zeroed_or_moved(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    blocks = PartCopies(engine, Case(2, 2, 16, 0, 4, (3, 1), 0, 64, in_blocks=True))
    pages = PartCopies(engine, Case(2, 2, 16, 0, 4, (3,), 0, 64))
    refused = "in blocks, must be pages that one id names"
    with pytest.raises(ValueError, match=f"pages: {refused}"):
        engine.zero_pages(blocks.pages, blocks.ids)
    with pytest.raises(ValueError, match=f"pages: {refused}"):
        engine.zero_page_from(blocks.pages, 0, 0)
    with pytest.raises(ValueError, match=f"source: {refused}"):
        engine.move_pages(blocks.pages, blocks.ids, pages.pages, pages.ids)
    with pytest.raises(ValueError, match=f"target: {refused}"):
        engine.move_pages(pages.pages, pages.ids, blocks.pages, blocks.ids)
    strides, bases = np.full(1, 16), np.array([blocks.pool.address])
    with pytest.raises(ValueError, match=r"piece_stride: 16, must be in \[0, 0\]"):
        engine.pages(bases, strides, 16, 4, 2, 16, in_blocks=True)
    with pytest.raises(ValueError, match=r"pieces: 257, must be in \[1, 256\]"):
        engine.pages(bases, strides, 16, 4, 257, in_blocks=True)
    assert calls(fake, "launch") == 0


# -- a real device


@pytest.mark.gpu
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.booleans().flatmap(cases), summed=st.booleans())
def test_parts_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], case: Case, summed: bool) -> None:
    PartCopies(gpu_engine(), case).check(summed)


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
def test_many_blocks_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], summed: bool) -> None:
    engine = gpu_engine()
    for case in (many(2100, 7, 5, 16, 48), many(4096, 16, 9, 4096, 5 * 4096 + 1040), many(512, 256, 3, 100, 1001)):
        PartCopies(engine, case).check(summed)
    pages = tuple(np.random.default_rng(5).permutation(300)[:200].tolist())
    PartCopies(engine, Case(8, 16, 256, 256, 300, pages, 512, 200 * 32768 - 512, last_bytes=2064)).check(summed)
    assert engine.statistics()["fallbacks"] == {}
