"""Copies between a GPU and rows of the host: every byte by every strategy, over a fake driver and over a real one.

The fake's device memory is this process's, and its kernel reads the same parameters as the GPU's.
"""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopyEngine, GpuError, GpuUnavailable
from kvferry.transfer.host_tier.copy_plan import GpuCopies

POISON = 0xA5
Bytes = NDArray[np.uint8]
Strategy = Literal["batch", "loop", "kernel", "staged", "pitched"]
STRATEGIES: tuple[Strategy, ...] = ("batch", "loop", "kernel", "staged", "pitched")
ROOT = Path(__file__).resolve().parents[2]


def real_engine(**tuning: int) -> GpuCopyEngine:
    try:
        return GpuCopyEngine(0, **tuning)
    except (GpuUnavailable, GpuError) as reason:
        pytest.skip(f"needs a GPU: {reason}")


def answer(fake: ctypes.CDLL, name: str, status: int) -> None:
    fake.fake_answer(name.encode(), status)


def calls(fake: ctypes.CDLL, name: str) -> int:
    return int(fake.fake_calls(name.encode()))


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

    @property
    def row_bytes(self) -> int:
        return self.tensors * self.pieces * self.fragment_bytes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pool = draw(st.integers(1, 9))
    count = draw(st.integers(0, pool))
    return Case(
        tensors=draw(st.integers(1, 5)),
        pieces=draw(st.integers(1, 3)),
        fragment_bytes=draw(st.sampled_from([1, 3, 4, 16, 48, 100, 512, 2048, 2064, 5000])),
        pool=pool,
        page_ids=tuple(draw(st.permutations(range(pool)))[:count]),
        row_ids=tuple(draw(st.permutations(range(pool)))[:count]),
        padding=draw(st.sampled_from([0, 0, 1, 16])),
        shift=draw(st.sampled_from([0, 0, 4, 1])),
        uneven=draw(st.sampled_from([0, 0, 16])),
    )


class World:
    """A pool on the device, whose bytes go there and come back by plain copies, and rows on the host."""

    def __init__(self, engine: GpuCopyEngine, case: Case) -> None:
        self.engine = engine
        self.case = case
        self.piece_stride = case.fragment_bytes + case.padding
        self.page_stride = case.pieces * self.piece_stride + case.padding
        self.tensor_bytes = case.pool * self.page_stride + 7
        self.size = case.shift + self.offset(case.tensors)
        self.memory = engine.allocate(self.size)
        begin = self.memory.address + case.shift
        bases = np.array([begin + self.offset(tensor) for tensor in range(case.tensors)], np.int64)
        strides = np.full(case.tensors, self.page_stride, np.int64)
        self.pages = engine.pages(bases, strides, case.fragment_bytes, case.pool, case.pieces, self.piece_stride)
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

    def fragments(self) -> Iterator[tuple[slice, slice]]:
        """Of the pages copied: where in the device's bytes, where in the rows' bytes."""
        case, size = self.case, self.case.fragment_bytes
        for page, row in zip(case.page_ids, case.row_ids, strict=True):
            for f in range(case.tensors * case.pieces):
                tensor, piece = divmod(f, case.pieces)
                at = case.shift + self.offset(tensor) + page * self.page_stride + piece * self.piece_stride
                in_row = row * self.row_stride + f * size
                yield slice(at, at + size), slice(in_row, in_row + size)

    def arguments(self) -> tuple[Any, ...]:
        page_ids, row_ids = (np.array(ids, np.int64) for ids in (self.case.page_ids, self.case.row_ids))
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
        for device, row in self.fragments():
            expected[device] = before[row]
        self.engine.copy_pages_from_host(*self.arguments(), strategy=strategy).wait()
        assert (self.read() == expected).all()
        assert (self.rows == before).all()


SMALL = Case(3, 2, 512, 6, (4, 1, 5, 0), (2, 3, 0, 5), 16, 0)
TIGHT = {"buffer_bytes": 8192, "small_bytes": 4096, "buffers": 2, "batch_descriptors": 3}


@pytest.mark.parametrize("api", ["cuda", "hip"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_is_a_table_of_entry_points(
    fake: ctypes.CDLL, library: str, api: Literal["cuda", "hip"], strategy: Strategy
) -> None:
    engine = GpuCopyEngine(0, library, api)
    World(engine, SMALL).check(strategy)
    pitched = "copy_pitched_batch" if api == "cuda" else "copy_pitched"
    used = {"batch": "copy_batch", "loop": "copy_to_host", "pitched": pitched}
    assert calls(fake, used.get(strategy, "launch")) > 0
    assert engine.statistics()["fallbacks"] == {}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), strategy=st.sampled_from(STRATEGIES), tight=st.booleans())
def test_bytes_over_the_fake(fake: ctypes.CDLL, library: str, case: Case, strategy: Strategy, tight: bool) -> None:
    World(GpuCopyEngine(0, library, **(TIGHT if tight else {})), case).check(strategy)


def test_more_pages_than_one_launch_takes(fake: ctypes.CDLL, library: str) -> None:
    ids = np.random.default_rng(3).permutation(1100)[:1000]
    case = Case(2, 1, 32, 1100, tuple(ids.tolist()), tuple(ids[::-1].tolist()), 0, 0)
    for strategy in STRATEGIES:
        World(GpuCopyEngine(0, library), case).check(strategy)


def test_batches_are_capped_ordered_and_merged(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, batch_descriptors=5)
    world = World(engine, SMALL)
    engine.copy_pages_to_host(*world.arguments(), strategy="batch").wait()
    assert fake.fake_largest_batch() == 5
    assert fake.fake_source_order() == 1  # stream: what a kernel still writes is not read
    engine.copy_pages_from_host(*world.arguments(), strategy="batch").wait()
    assert fake.fake_source_order() == 3  # any: stable host memory
    assert calls(fake, "copy_batch") == 10  # 24 fragments each way
    whole = Case(3, 1, 512, 6, (2, 3, 4), (1, 2, 3), 0, 0)
    before = engine.statistics()["batch"]["descriptors"]
    one_run = World(engine, Case(1, 1, 512, 6, whole.page_ids, whole.row_ids, 0, 0))
    one_run.check("batch")
    assert engine.statistics()["batch"]["descriptors"] == before + 2  # neighbours on both sides go as one


BESIDE = Case(3, 2, 8192, 40, tuple(range(37)), tuple(range(36, -1, -1)), 16, 0)


def test_pitched_copies_are_issued_together(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = World(engine, BESIDE)
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
    world = World(engine, BESIDE)
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
    world = World(lines, BESIDE)
    world.check("pitched")
    assert lines.statistics()["pitched"]["descriptors"] == 2 * 37 * 6  # a fragment is not split
    run_bytes = world.pages.row_bytes // 3
    halves = GpuCopyEngine(0, library, pitched_bytes=run_bytes - 1)
    World(halves, BESIDE).check("pitched")
    assert halves.statistics()["pitched"]["descriptors"] == 2 * 37 * 3 * 2
    with pytest.raises(ValueError, match="pitched_bytes: 0, must be in"):
        GpuCopyEngine(0, library, pitched_bytes=0)


def went_apart(fake: ctypes.CDLL, engine: GpuCopyEngine, world: World) -> int:
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
    world = World(engine, BESIDE)
    answer(fake, "elapsed_us", 1)
    assert went_apart(fake, engine, world) == 0  # nobody is before the first
    assert went_apart(fake, engine, world) == 16  # what fragments cost is not known
    assert went_apart(fake, engine, world) == 1  # one of the sixteen that could, to go on learning
    answer(fake, "elapsed_us", 1_000_000)
    went_apart(fake, engine, world)
    assert went_apart(fake, engine, world) == 16


def test_copies_that_the_driver_refused_say_nothing_of_pitched_ones(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, "hip", apart_percent=45)
    world = World(engine, BESIDE)
    answer(fake, "copy_pitched", 801)
    answer(fake, "elapsed_us", 1_000_000)
    went_apart(fake, engine, world)
    assert engine.statistics()["batch"]["copies"] == 1
    answer(fake, "copy_pitched", 0)
    answer(fake, "elapsed_us", 1)
    assert went_apart(fake, engine, world) == 16  # what fragments cost is not known
    assert went_apart(fake, engine, world) == 1


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


@pytest.mark.parametrize("status", [801, 1])
def test_a_refused_batch_goes_by_loop_and_is_counted(fake: ctypes.CDLL, library: str, status: int) -> None:
    engine = GpuCopyEngine(0, library)
    world = World(engine, SMALL)
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
        World(engine, SMALL).check(strategy)
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
    World(engine, SMALL).check(strategy)
    counts = engine.statistics()
    assert counts["fallbacks"] == {reason: 2}
    assert counts["batch"]["copies"] == 2


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


def test_busy(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = World(engine, SMALL)  # its memory outlives the copies
    assert not engine.busy()
    time.sleep(0.01)  # what was found is old
    answer(fake, "event_query", 600)
    launched = calls(fake, "launch")
    assert engine.busy() and engine.busy()
    assert calls(fake, "launch") == launched + 1  # the second answer is the first probe's
    answer(fake, "event_query", 0)
    answer(fake, "elapsed_us", 10)
    time.sleep(0.01)
    assert not engine.busy()  # once may have been chance
    answer(fake, "event_query", 600)
    time.sleep(0.01)
    assert engine.busy()
    answer(fake, "event_query", 0)
    time.sleep(0.1)
    assert engine.busy()  # twice was not
    time.sleep(1)
    assert not engine.busy()
    answer(fake, "elapsed_us", 300)
    engine.copy_pages_to_host(*world.arguments(), strategy="pitched")
    assert engine.busy()  # the probe that followed the copy took long
    time.sleep(1.05)
    answer(fake, "elapsed_us", 10)
    assert not engine.busy()
    engine.copy_pages_to_host(*world.arguments(), strategy="staged")
    answer(fake, "elapsed_us", 900)
    assert engine.busy()  # the copy's kernel waited
    answer(fake, "module_load", 801)
    assert not GpuCopyEngine(0, library).busy()


def test_one_slow_probe_counts_once(fake: ctypes.CDLL, library: str) -> None:
    engine, took = GpuCopyEngine(0, library), 1.0
    for _ in range(50):
        engine = GpuCopyEngine(0, library)
        answer(fake, "event_query", 600)
        began = time.monotonic()
        assert engine.busy()
        answer(fake, "event_query", 0)
        answer(fake, "elapsed_us", 300)
        assert engine.busy()  # it has ended, and was slow
        answer(fake, "elapsed_us", 10)
        took = time.monotonic() - began
        if took < 0.004:  # there was no other one
            break
    assert took < 0.004
    time.sleep(0.01)
    assert not engine.busy()


def test_without_memory_for_staging_batch_moves_the_bytes(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = World(engine, SMALL)
    answer(fake, "mem_alloc", 2)
    world.check("staged")
    assert engine.statistics()["fallbacks"] == {"no memory for staging": 2}


def test_a_failed_call_leaves_no_copy_behind(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = World(engine, SMALL)
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
    world = World(engine, SMALL)
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


def test_the_kept_kernels_are_those_of_the_source() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc to compile the kernels with")
    made = subprocess.run(["bash", str(ROOT / "csrc/cuda/kernels/make.sh")], check=True, capture_output=True, text=True)
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    if "release 13.0," not in version:
        pytest.skip("the kept kernels were compiled by nvcc 13.0; another release may order instructions otherwise")
    assert made.stdout == (ROOT / "csrc/cuda/generated/kernels_ptx.cpp").read_text()


# -- a real device


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_pages_on_a_gpu(strategy: Strategy) -> None:
    engine = real_engine(**TIGHT)
    for case in (
        SMALL,
        Case(5, 3, 2064, 7, (6, 0, 3), (1, 2, 6), 16, 0),
        Case(2, 2, 100, 5, (1, 4, 2), (0, 4, 1), 0, 4),
        Case(4, 1, 5000, 4, (3, 1), (0, 2), 1, 1),
        Case(5, 1, 2048, 4, (3, 1), (0, 2), 16, 0, uneven=48),
    ):
        World(engine, case).check(strategy)
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_slices_of_wider_rows_on_a_gpu(strategy: Strategy) -> None:
    check_slices(real_engine(**TIGHT), strategy)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_pages_on_a_gpu(strategy: Strategy) -> None:
    engine = real_engine()
    ids = np.random.default_rng(3).permutation(1100)[:1000]
    World(engine, Case(6, 1, 4096, 1100, tuple(ids.tolist()), tuple(ids[::-1].tolist()), 0, 0)).check(strategy)
    World(engine, Case(3, 4, 1 << 18, 70, tuple(range(0, 70, 2)), tuple(range(35)), 0, 0)).check(strategy)
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
def test_both_directions_at_a_time_on_a_gpu() -> None:
    engine = real_engine(buffer_bytes=1 << 20)
    case = Case(8, 1, 8192, 64, tuple(range(0, 64, 2)), tuple(range(32)), 0, 0)
    one, other = World(engine, case), World(engine, case)
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
