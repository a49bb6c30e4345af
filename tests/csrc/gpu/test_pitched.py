"""Pitched copies: runs of fragments, batches of them, and how many go by fragments behind other copies."""

import ctypes
import dataclasses

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine
from tests.csrc.gpu.driver import answer, calls
from tests.csrc.gpu.row_copies import BLOCKS, Case, RowCopies

BESIDE = Case(3, 2, 8192, 40, tuple(range(37)), tuple(range(36, -1, -1)), 16, 0)


def test_pitched_copies_are_issued_together(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = RowCopies(engine, BESIDE)
    world.check("pitched")
    assert (calls(fake, "copy_pitched_batch"), calls(fake, "copy_pitched")) == (2 * 3, 0)  # of 16 pages each
    answer(fake, "copy_pitched_batch", 1)
    world.check("pitched")
    assert calls(fake, "copy_pitched") == 2 * 37 * 3
    answer(fake, "copy_pitched_batch", 801)
    world.check("pitched")
    before = calls(fake, "copy_pitched_batch")
    answer(fake, "copy_pitched_batch", 0)
    world.check("pitched")
    assert calls(fake, "copy_pitched_batch") == before, "a driver that does not support it is not asked again"
    assert engine.statistics()["fallbacks"] == {"the driver refused a batch of pitched copies": 2 * 3 + 1}
    assert engine.statistics()["pitched"]["copies"] == 8


def test_pitched_copies_that_follow_others_go_in_part_by_fragments(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, "hip", apart_percent=45, batch_descriptors=7)
    world = RowCopies(engine, BESIDE)
    world.check("pitched")
    assert engine.statistics()["pitched"]["descriptors"] == 2 * 37 * 3  # one run a tensor
    assert calls(fake, "copy_batch") == 0
    answer(fake, "event_query", 600)  # from now on the copy before is not done
    world.check("pitched", done=False)
    assert engine.statistics()["pitched"]["descriptors"] == 2 * (37 * 3 + 21 * 3 + 16 * 6)
    assert engine.statistics()["fallbacks"] == {}
    assert calls(fake, "copy_batch") > 2 * 16 * 6 // 7
    answer(fake, "copy_pitched", 801)
    world.check("pitched", done=False)
    assert engine.statistics()["fallbacks"] == {"the driver refused a pitched copy": 2}
    assert engine.statistics()["batch"]["copies"] == 2
    before = calls(fake, "copy_pitched")
    answer(fake, "copy_pitched", 0)
    answer(fake, "copy_batch", 1)  # those apart go by single copies
    world.check("pitched", done=False)
    assert calls(fake, "copy_pitched") == before + 2 * 21 * 3


def test_long_runs_go_in_several_pitched_copies(fake: ctypes.CDLL, library: str) -> None:
    lines = GpuCopyEngine(0, library, pitched_bytes=1)
    world = RowCopies(lines, BESIDE)
    world.check("pitched")
    assert lines.statistics()["pitched"]["descriptors"] == 2 * 37 * 6  # a fragment is not split
    run_bytes = world.pages.row_bytes // 3
    halves = GpuCopyEngine(0, library, pitched_bytes=run_bytes - 1)
    RowCopies(halves, BESIDE).check("pitched")
    assert halves.statistics()["pitched"]["descriptors"] == 2 * 37 * 3 * 2
    with pytest.raises(ValueError, match="pitched_bytes: 0, must be in"):
        GpuCopyEngine(0, library, pitched_bytes=0)


def test_a_block_of_all_tensors_is_a_pitched_copy(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    RowCopies(engine, BLOCKS).check("pitched")
    assert engine.statistics()["pitched"]["descriptors"] == 16 + 9  # seven are not there when they are restored
    uneven = dataclasses.replace(BLOCKS, tensors=5, uneven=16)
    RowCopies(engine, uneven).check("pitched")
    assert engine.statistics()["fallbacks"] == {}
    apart = GpuCopyEngine(0, library, apart_percent=100)
    world = RowCopies(apart, dataclasses.replace(BLOCKS, fragment_bytes=8192))
    world.check("pitched")
    answer(fake, "event_query", 600)
    world.check("pitched", done=False)
    assert calls(fake, "copy_batch") == 2


def went_apart(fake: ctypes.CDLL, engine: GpuCopyEngine, world: RowCopies) -> int:
    """Of 37 pages: three runs a page, or six fragments. A copy behind another, whose time is known then."""
    before = engine.statistics()["pitched"]["descriptors"]
    answer(fake, "event_query", 600)
    copy = engine.copy_pages_to_host(*world.arguments(), strategy="pitched")
    answer(fake, "event_query", 0)
    copy.wait()
    engine.busy()  # which looks how long the last one took
    return (engine.statistics()["pitched"]["descriptors"] - before - 37 * 3) // 3


def test_fewer_go_by_fragments_where_issuing_them_is_what_takes_long(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, apart_percent=45)
    world = RowCopies(engine, BESIDE)
    answer(fake, "elapsed_us", 1)
    assert went_apart(fake, engine, world) == 0  # nobody is before the first
    assert went_apart(fake, engine, world) == 16  # what fragments cost is not known
    assert went_apart(fake, engine, world) == 1  # one of the sixteen that could, to go on learning
    answer(fake, "elapsed_us", 1_000_000)
    went_apart(fake, engine, world)
    assert went_apart(fake, engine, world) == 16


def test_copies_that_the_driver_refused_say_nothing_of_pitched_ones(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, "hip", apart_percent=45)
    world = RowCopies(engine, BESIDE)
    answer(fake, "copy_pitched", 801)
    answer(fake, "elapsed_us", 1_000_000)
    went_apart(fake, engine, world)
    assert engine.statistics()["batch"]["copies"] == 1
    answer(fake, "copy_pitched", 0)
    answer(fake, "elapsed_us", 1)
    assert went_apart(fake, engine, world) == 16  # what fragments cost is not known
    assert went_apart(fake, engine, world) == 1


def test_runs(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)

    def runs(bases: list[int], strides: list[int], pieces: int = 1, piece_stride: int = 0) -> int:
        return engine.pages(np.array(bases), np.array(strides), 16, 4, pieces, piece_stride).runs

    assert runs([1000, 2000, 3000], [64] * 3) == 1
    assert runs([1000, 2000, 3001, 4002], [64] * 4) == 2
    assert runs([3000, 2000, 1000], [64] * 3) == 3  # a pitch is not negative
    assert runs([1000, 2000, 3000, 4000], [64, 64, 80, 80]) == 2
    assert runs([1000, 1000 + (1 << 31)], [64] * 2) == 2
    assert runs([1000, 2000], [640, 640], 8, 80) == 2
    assert runs([1000], [64], 2, 1 << 31) == 0
