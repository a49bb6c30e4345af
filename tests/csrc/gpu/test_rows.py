"""Copies between a GPU and rows of the host: every byte by every strategy, over a fake driver and over a real one.

The fake's device memory is this process's, and its kernel reads the same parameters as the GPU's.
"""

import ctypes
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import _core
from kvferry._core import GpuCopyEngine
from kvferry.transfer.host_tier.copy_plan import GpuCopies
from tests.csrc.gpu.driver import calls
from tests.csrc.gpu.row_copies import BLOCKS, POISON, SMALL, STRATEGIES, TIGHT, Bytes, Case, RowCopies, Strategy, cases


@pytest.mark.parametrize("api", ["cuda", "hip"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_is_a_table_of_entry_points(
    fake: ctypes.CDLL, library: str, api: Literal["cuda", "hip"], strategy: Strategy
) -> None:
    engine = GpuCopyEngine(0, library, api)
    RowCopies(engine, SMALL).check(strategy)
    pitched = "copy_pitched_batch" if api == "cuda" else "copy_pitched"
    used = {"batch": "copy_batch", "loop": "copy_to_host", "pitched": pitched}
    assert calls(fake, used.get(strategy, "launch")) > 0
    assert engine.statistics()["fallbacks"] == {}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.booleans().flatmap(cases), strategy=st.sampled_from(STRATEGIES), tight=st.booleans())
def test_bytes_over_the_fake(fake: ctypes.CDLL, library: str, case: Case, strategy: Strategy, tight: bool) -> None:
    RowCopies(GpuCopyEngine(0, library, **(TIGHT if tight else {})), case).check(strategy)


def test_more_pages_than_one_launch_takes(fake: ctypes.CDLL, library: str) -> None:
    ids = np.random.default_rng(3).permutation(1100)[:1000]
    case = Case(2, 1, 32, 1100, tuple(ids.tolist()), tuple(ids[::-1].tolist()), 0, 0)
    for strategy in STRATEGIES:
        RowCopies(GpuCopyEngine(0, library), case).check(strategy)


def many_blocks(fragment_bytes: int) -> Case:
    ids = np.random.default_rng(3).permutation(1200).tolist()
    rows = np.random.default_rng(4).permutation(300).tolist()
    lacking = tuple(range(0, 1200, 7))
    return Case(2, 4, fragment_bytes, 300, tuple(ids), tuple(rows), 0, 0, in_blocks=True, lacking=lacking)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_blocks_than_one_launch_takes(fake: ctypes.CDLL, library: str, strategy: Strategy) -> None:
    engine = GpuCopyEngine(0, library)
    RowCopies(engine, many_blocks(32)).check(strategy)
    assert engine.statistics()[strategy]["copies"] >= 2
    assert engine.statistics()["fallbacks"] == {}


def test_batches_are_capped_ordered_and_merged(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, batch_descriptors=5)
    world = RowCopies(engine, SMALL)
    engine.copy_pages_to_host(*world.arguments(), strategy="batch").wait()
    assert fake.fake_largest_batch() == 5
    assert fake.fake_source_order() == 1  # stream: what a kernel still writes is not read
    engine.copy_pages_from_host(*world.arguments(), strategy="batch").wait()
    assert fake.fake_source_order() == 3  # any: stable host memory
    assert calls(fake, "copy_batch") == 10  # 24 fragments each way
    whole = Case(3, 1, 512, 6, (2, 3, 4), (1, 2, 3), 0, 0)
    before = engine.statistics()["batch"]["descriptors"]
    one_run = RowCopies(engine, Case(1, 1, 512, 6, whole.page_ids, whole.row_ids, 0, 0))
    one_run.check("batch")
    assert engine.statistics()["batch"]["descriptors"] == before + 2  # neighbours on both sides go as one


def check_slices(engine: GpuCopyEngine, strategy: Strategy) -> None:
    """Two ranks' pools of different fragments, one row a page for both: each copies its slice, and no more."""
    copies = GpuCopies(engine, strategy)
    rng = np.random.default_rng(11)
    pool, fragments, tensors = 12, (512, 2048), 3
    widths = [tensors * fragment for fragment in fragments]
    stride = sum(widths) + 64
    rows: Bytes = np.full((pool, stride), POISON, np.uint8)
    pinned = _core.PinnedBuffer(engine, rows)
    page_ids, row_ids = rng.permutation(pool)[:7], rng.permutation(pool)[:7]
    expected, ranks, offset = rows.copy(), [], 16
    for fragment, width in zip(fragments, widths, strict=True):
        memory = engine.allocate(tensors * pool * fragment)
        bytes_: Bytes = rng.integers(0, 256, len(memory), np.uint8)
        at, by, size = np.array([memory.address]), np.array([bytes_.ctypes.data]), np.array([len(memory)])
        engine.copy_list_from_host(at, by, size, strategy="loop").wait()
        bases = memory.address + np.arange(tensors) * pool * fragment
        pages = engine.pages(bases, np.full(tensors, fragment), fragment, pool)
        tensor = bytes_.reshape(tensors, pool, fragment)
        expected[row_ids, offset : offset + width] = tensor[:, page_ids].transpose(1, 0, 2).reshape(7, width)
        ranks.append((pages, memory, bytes_, offset))
        offset += width
    running = [copies.to_host(p, page_ids, rows, row_ids, row_stride=stride, row_offset=o) for p, _, _, o in ranks]
    for copy in running:
        copy.wait()
        assert copy.strategy == strategy
    assert (rows == expected).all()
    for pages, memory, bytes_, offset in ranks:
        back: Bytes = np.full_like(bytes_, POISON)
        at, by, size = np.array([memory.address]), np.array([back.ctypes.data]), np.array([len(memory)])
        engine.copy_list_from_host(at, by, size, strategy="loop").wait()
        copies.from_host(pages, page_ids, rows, row_ids, row_stride=stride, row_offset=offset).wait()
        engine.copy_list_to_host(by, at, size, strategy="loop").wait()
        fragment = pages.fragment_bytes
        wanted: Bytes = np.full_like(bytes_, POISON).reshape(tensors, pool, fragment)
        wanted[:, page_ids] = bytes_.reshape(tensors, pool, fragment)[:, page_ids]
        assert (back == wanted.reshape(-1)).all()
    assert (rows == expected).all()
    with pytest.raises(ValueError, match=f"row_offset is {rows.size}"):
        copies.to_host(ranks[0][0], page_ids, rows, row_ids, row_stride=stride, row_offset=rows.size)
    with pytest.raises(
        IndexError, match=r"row_ids\[0\]: 11, must be in \[0, 11\)"
    ):  # its slice ends behind the last row
        copies.to_host(ranks[1][0], [0], rows, [11], row_stride=stride, row_offset=16 + 64 + widths[0])
    del pinned


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_has_its_slice_of_wider_rows(fake: ctypes.CDLL, library: str, strategy: Strategy) -> None:
    check_slices(GpuCopyEngine(0, library, **TIGHT), strategy)


@pytest.mark.parametrize("strategy", ["batch", "loop"])
def test_list(fake: ctypes.CDLL, library: str, strategy: Literal["batch", "loop"]) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(1000)
    source: Bytes = np.random.default_rng(5).integers(0, 256, 1000, np.uint8)
    back: Bytes = np.full(1000, POISON, np.uint8)
    at, sizes = np.array([0, 100, 500, 900]), np.array([50, 0, 300, 100])
    engine.copy_list_from_host(memory.address + at, source.ctypes.data + at, sizes, strategy=strategy).wait()
    engine.copy_list_to_host(back.ctypes.data + at, memory.address + at, sizes, strategy=strategy).wait()
    expected = np.full(1000, POISON, np.uint8)
    for begin, size in zip(at, sizes, strict=True):
        expected[begin : begin + size] = source[begin : begin + size]
    assert (back == expected).all()


# -- a real device


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_pages_on_a_gpu(strategy: Strategy, gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine(**TIGHT)
    for case in (
        SMALL,
        Case(5, 3, 2064, 7, (6, 0, 3), (1, 2, 6), 16, 0),
        Case(2, 2, 100, 5, (1, 4, 2), (0, 4, 1), 0, 4),
        Case(4, 1, 5000, 4, (3, 1), (0, 2), 1, 1),
        Case(5, 1, 2048, 4, (3, 1), (0, 2), 16, 0, uneven=48),
        BLOCKS,
        Case(2, 2, 100, 5, (1, 9, 2, 4), (4, 1), 0, 4, in_blocks=True, lacking=(1,)),
        Case(5, 1, 5000, 4, (3, 1), (0, 2), 16, 0, uneven=48, in_blocks=True, lacking=(0,)),
    ):
        RowCopies(engine, case).check(strategy)
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_slices_of_wider_rows_on_a_gpu(strategy: Strategy, gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    check_slices(gpu_engine(**TIGHT), strategy)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_pages_on_a_gpu(strategy: Strategy, gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine()
    ids = np.random.default_rng(3).permutation(1100)[:1000]
    RowCopies(engine, Case(6, 1, 4096, 1100, tuple(ids.tolist()), tuple(ids[::-1].tolist()), 0, 0)).check(strategy)
    RowCopies(engine, Case(3, 4, 1 << 18, 70, tuple(range(0, 70, 2)), tuple(range(35)), 0, 0)).check(strategy)
    RowCopies(engine, many_blocks(4096)).check(strategy)
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
def test_both_directions_at_a_time_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine(buffer_bytes=1 << 20)
    case = Case(8, 1, 8192, 64, tuple(range(0, 64, 2)), tuple(range(32)), 0, 0)
    one, other = RowCopies(engine, case), RowCopies(engine, case)
    source: Bytes = np.random.default_rng(9).integers(0, 256, one.size, np.uint8)
    one.write(source)
    other.rows[:] = np.random.default_rng(10).integers(0, 256, len(other.rows), np.uint8)
    other.write(np.full(other.size, POISON, np.uint8))
    for _ in range(20):
        copies = [
            engine.copy_pages_to_host(*one.arguments(), strategy="staged"),
            engine.copy_pages_from_host(*other.arguments(), strategy="staged"),
        ]
    for copy in copies:
        copy.wait()
    restored = other.read()
    for device, row in one.fragments():
        assert (one.rows[row] == source[device]).all()
        assert (restored[device] == other.rows[row]).all()
