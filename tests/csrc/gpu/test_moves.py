"""Rows between two pools of one device: every byte between poisoned neighbours, over the fake driver and a real one."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry._core import GpuCopyEngine
from tests.csrc.gpu.driver import calls
from tests.csrc.gpu.part_copies import POISON, Bytes, Case, PartCopies, whole


@st.composite
def moves(draw: st.DrawFn) -> tuple[Case, Case]:
    """Of one shape, in other places, with other gaps."""
    tensors, pieces = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    fragment_bytes = draw(st.sampled_from([1, 4, 16])) * draw(st.sampled_from([1, 2, 5, 16]))
    rows = draw(st.integers(1, 5))
    ends = []
    for distinct in (False, True):
        pages = draw(st.integers(rows, 7))
        some = (
            st.permutations(range(pages)) if distinct else st.lists(st.integers(0, pages - 1), min_size=7, max_size=7)
        )
        padding = draw(st.sampled_from([0, 0, 16, 4, 1]))
        ends.append(whole(tensors, pieces, fragment_bytes, padding, pages, tuple(draw(some)[:rows])))
    return ends[0], ends[1]


def check(engine: GpuCopyEngine, source: Case, target: Case) -> None:
    here, there = PartCopies(engine, source), PartCopies(engine, target)
    bytes_: Bytes = np.random.default_rng(1).integers(0, 256, source.size, np.uint8)
    here.put(here.pool, bytes_)
    expected = np.full(target.size, POISON, np.uint8)
    there.put(there.pool, expected)
    expected[target.part()] = bytes_[source.part()]
    copy = engine.move_pages(here.pages, here.ids, there.pages, there.ids)
    assert copy.wait_for(20) and copy.done()
    assert (there.get(there.pool) == expected).all()
    assert (here.get(here.pool) == bytes_).all()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=moves())
def test_moves_over_the_fake(fake: ctypes.CDLL, library: str, ends: tuple[Case, Case]) -> None:
    check(GpuCopyEngine(0, library), *ends)


def many(padding: int) -> Case:
    ids = tuple(np.random.default_rng(padding).permutation(1100)[:1000].tolist())
    return whole(2, 1, 16, padding, 1100, ids)


def test_more_rows_than_one_launch_takes(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    check(engine, many(0), many(16))
    assert engine.statistics()["scattered"] == {"parts": 1, "launches": 3, "bytes": 1000 * 32}


@pytest.mark.parametrize("refused", [None, "copy_batch"])
def test_without_kernels_the_driver_moves(fake: ctypes.CDLL, library: str, refused: str | None) -> None:
    fake.fake_answer(b"module_load", 801)
    if refused:
        fake.fake_answer(refused.encode(), 801)
    engine = GpuCopyEngine(0, library)
    check(engine, whole(3, 2, 64, 16, 5, (4, 0, 4)), whole(3, 2, 64, 0, 6, (1, 0, 3)))
    assert engine.statistics()["fallbacks"]["the driver takes no kernels"] == 1
    assert (calls(fake, "copy_on_device") > 0) == (refused is not None)


def test_overlapping_rows_of_a_pool_are_its_blocks(fake: ctypes.CDLL, library: str) -> None:
    """As the connector has them: pages of 3 blocks in 2 layers, a row for each block that begins there in the first."""
    engine = GpuCopyEngine(0, library)
    pages, layers, blocks, size = 4, 2, 3, 16
    here = PartCopies(engine, whole(layers, 1, size, 0, 9, (7, 2, 5)))
    bytes_: Bytes = np.random.default_rng(1).integers(0, 256, here.case.size, np.uint8)
    here.put(here.pool, bytes_)
    memory = engine.allocate(pages * layers * blocks * size)
    bases = memory.address + np.arange(layers, dtype=np.int64) * blocks * size
    count = pages * layers * blocks - (layers - 1) * blocks
    rows = engine.pages(bases, np.full(layers, size, np.int64), size, count)
    engine.check_pages(rows)
    here.put(memory, np.full(len(memory), POISON, np.uint8))
    at = [(3, 2), (0, 1), (2, 0)]  # page, block
    ids = np.array([page * layers * blocks + block for page, block in at])
    engine.move_pages(here.pages, here.ids, rows, ids).wait()
    expected = np.full((pages, layers, blocks, size), POISON, np.uint8)
    for (page, block), row in zip(at, bytes_[here.case.part()].reshape(3, layers, size), strict=True):
        expected[page, :, block] = row
    assert (here.get(memory) == expected.reshape(-1)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source_ids": np.array([4, 0])}, IndexError, r"source_ids\[0\]: 4, must be in \[0, 4\)"),
        ({"target_ids": np.array([0, 6])}, IndexError, r"target_ids\[1\]: 6, must be in \[0, 6\)"),
        ({"target_ids": np.array([5, 5])}, ValueError, "target_ids: 5 would be written twice"),
        ({"target_ids": np.array([5])}, ValueError, "length of target_ids: 1, must be in"),
        ({"shape": {"tensors": 3}}, ValueError, "tensors of target: 3"),
        ({"shape": {"pieces": 2}}, ValueError, "pieces of target: 2"),
        ({"shape": {"fragment_bytes": 32}}, ValueError, "fragment_bytes of target: 32"),
    ],
)
def test_bad_moves_move_nothing(
    fake: ctypes.CDLL, library: str, change: dict[str, object], error: type[Exception], message: str
) -> None:
    engine = GpuCopyEngine(0, library)
    source, target = whole(2, 1, 16, 0, 4, (0, 1)), whole(2, 1, 16, 0, 6, (0, 1))
    target = dataclasses.replace(target, **change.pop("shape", {}))  # type: ignore[arg-type]
    here, there = PartCopies(engine, source), PartCopies(engine, target)
    ids = {"source_ids": here.ids, "target_ids": there.ids} | change
    with pytest.raises(error, match=message):
        engine.move_pages(here.pages, ids["source_ids"], there.pages, ids["target_ids"])  # type: ignore[arg-type]
    assert calls(fake, "launch") == 0


# -- a real device


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=moves())
def test_moves_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], ends: tuple[Case, Case]) -> None:
    check(gpu_engine(), *ends)


@pytest.mark.gpu
def test_many_rows_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine()
    check(engine, many(0), many(16))
    check(
        engine, whole(64, 1, 32768, 0, 300, tuple(range(250))), whole(64, 1, 32768, 64, 260, tuple(range(249, -1, -1)))
    )
