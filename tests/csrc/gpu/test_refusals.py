"""Refusals of a driver for copies between pages and rows, and what goes instead; bad bounds; what is no driver."""

import ctypes

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine, GpuError, GpuUnavailable
from tests.csrc.gpu.driver import answer, calls
from tests.csrc.gpu.row_copies import BLOCKS, POISON, SMALL, STRATEGIES, RowCopies, Strategy


@pytest.mark.parametrize("status", [801, 1])
def test_a_refused_batch_goes_by_loop_and_is_counted(fake: ctypes.CDLL, library: str, status: int) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, SMALL)
    answer(fake, "copy_batch", status)
    world.check("batch")
    counts = engine.statistics()
    assert counts["loop"]["copies"] >= 2
    assert counts["batch"]["copies"] == 0
    if status == 801:  # NotSupported is for good, InvalidValue for one call
        assert counts["fallbacks"] == {"the driver refused a batch": 1, "the driver has no batch": 1}
        assert not engine.can("batch")
    else:
        assert counts["fallbacks"] == {"the driver refused a batch": 2}
        assert engine.can("batch")


def test_an_old_driver_has_no_batch(fake: ctypes.CDLL, library: str) -> None:
    answer(fake, "old_driver", 1)
    engine = GpuCopyEngine(0, library)
    assert [engine.can(strategy) for strategy in STRATEGIES] == [False, True, True, True, True]
    for strategy in STRATEGIES:
        RowCopies(engine, SMALL).check(strategy)
        RowCopies(engine, BLOCKS).check(strategy)
    assert calls(fake, "copy_batch") == 0


@pytest.mark.parametrize(
    ("function", "reason", "strategy"),
    [
        ("copy_pitched", "the driver refused a pitched copy", "pitched"),
        ("module_load", "the driver takes no kernels", "staged"),
        ("module_load", "the driver takes no kernels", "kernel"),
        ("host_device_address", "rows are not pinned", "kernel"),
    ],
)
def test_without_kernels_or_pinned_rows_batch_moves_the_bytes(
    fake: ctypes.CDLL, library: str, function: str, reason: str, strategy: Strategy
) -> None:
    answer(fake, function, 801)
    engine = GpuCopyEngine(0, library, "hip")
    RowCopies(engine, SMALL).check(strategy)
    RowCopies(engine, BLOCKS).check(strategy)
    counts = engine.statistics()
    assert counts["fallbacks"] == {reason: 4}
    assert counts["batch"]["copies"] == 4


def test_without_memory_for_staging_batch_moves_the_bytes(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, SMALL)
    answer(fake, "mem_alloc", 2)
    world.check("staged")
    assert engine.statistics()["fallbacks"] == {"no memory for staging": 2}


def test_a_failed_call_leaves_no_copy_behind(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, SMALL)
    answer(fake, "launch", 700)
    waited = calls(fake, "event_synchronize")
    with pytest.raises(GpuError, match="kernel: OTHER"):
        engine.copy_pages_to_host(*world.arguments(), strategy="staged")
    assert calls(fake, "event_synchronize") > waited
    assert engine.statistics()["staged"]["copies"] == 0
    answer(fake, "launch", 0)
    world.check("staged")


def test_bad_bounds_move_nothing(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, SMALL)
    pages, ids, rows, stride, row_ids = world.arguments()
    spill, restore = engine.copy_pages_to_host, engine.copy_pages_from_host
    with pytest.raises(IndexError, match=r"page_ids\[1\]: 6, must be in \[0, 6\)"):
        spill(pages, np.array([0, 6]), rows, stride, np.array([0, 1]))
    with pytest.raises(IndexError, match=r"row_ids\[0\]: -1"):
        spill(pages, np.array([0]), rows, stride, np.array([-1]))
    with pytest.raises(IndexError, match=r"row_ids\[0\]: 5"):
        spill(pages, np.array([0]), rows[:-22], stride, np.array([5]))
    with pytest.raises(ValueError, match="order: 'any', must be stream or none"):
        spill(pages, ids, rows, stride, row_ids, order="any")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order: 'none', but a stream is given"):
        restore(pages, ids, rows, stride, row_ids, engine.stream, order="none")
    with pytest.raises(ValueError, match="row_ids: 3 would be written twice"):
        spill(pages, np.array([0, 1]), rows, stride, np.array([3, 3]))
    with pytest.raises(ValueError, match="page_ids: 1 would be written twice"):
        restore(pages, np.array([1, 1]), rows, stride, np.array([3, 4]))
    with pytest.raises(ValueError, match="row_ids: 1, must be in"):
        spill(pages, ids, rows, stride, np.array([1]))
    with pytest.raises(ValueError, match="row_stride"):
        spill(pages, ids, rows, world.case.row_bytes - 1, row_ids)
    with pytest.raises(ValueError, match="strategy: 'fast'"):
        spill(pages, ids, rows, stride, row_ids, strategy="fast")  # type: ignore[arg-type]
    for stream in (0, 1, 2, -1):  # the default streams
        with pytest.raises(ValueError, match="stream"):
            spill(pages, ids, rows, stride, row_ids, stream)
    with pytest.raises(ValueError, match="is no memory of a process"):
        engine.copy_list_to_host(np.array([8]), np.array([0]), np.array([4]))
    with pytest.raises(ValueError, match="by batch, loop or kernel"):
        engine.copy_list_to_host(np.array([8]), np.array([8]), np.array([4]), strategy="staged")  # type: ignore[arg-type]
    assert calls(fake, "copy_to_host") == 0
    assert calls(fake, "launch") == 0
    assert (world.rows == POISON).all()


def test_bad_blocks_move_nothing(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, BLOCKS)
    pages, ids, rows, stride, row_ids = world.arguments(restored=True)
    with pytest.raises(IndexError, match=r"page_ids\[2\]: -1, must be in \[0, 24\)"):
        engine.copy_pages_to_host(pages, ids, rows, stride, row_ids)
    for copy in (engine.copy_pages_to_host, engine.copy_pages_from_host):
        with pytest.raises(ValueError, match="page_ids: 6 ids, must be a multiple of the 4 blocks of a page"):
            copy(pages, np.arange(6), rows, stride, np.array([0]))
        with pytest.raises(ValueError, match=r"row_ids: 4, must be in \[1, 1\]"):
            copy(pages, np.arange(4), rows, stride, row_ids)
    with pytest.raises(IndexError, match=r"page_ids\[1\]: -2, must be in \[-1, 24\)"):
        engine.copy_pages_from_host(pages, np.array([0, -2, -1, 3]), rows, stride, np.array([0]))
    with pytest.raises(ValueError, match="page_ids: 3 would be written twice"):
        engine.copy_pages_from_host(pages, np.array([3, -1, -1, 3]), rows, stride, np.array([0]))
    assert calls(fake, "launch") == 0
    assert (world.rows == POISON).all()


def test_what_is_no_driver() -> None:
    with pytest.raises(GpuUnavailable, match="no GPU driver"):
        GpuCopyEngine(0, "libkvferry-has-no-such-driver.so")
    with pytest.raises(GpuUnavailable, match="older than CUDA 12"):
        GpuCopyEngine(0, "libc.so.6")
    with pytest.raises(GpuUnavailable, match="has no hipInit"):
        GpuCopyEngine(0, "libc.so.6", "hip")


def test_no_device(fake: ctypes.CDLL, library: str) -> None:
    answer(fake, "init", 100)
    with pytest.raises(GpuUnavailable):
        GpuCopyEngine(0, library)
