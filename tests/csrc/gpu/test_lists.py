"""Lists of fragments between a GPU and the host, and what a driver refuses: over the fake driver, and a real one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry._core import GpuCopyEngine, GpuError, PinnedBuffer
from kvferry.transfer.host_tier.copy_plan import ENVIRONMENT, GpuCopies
from tests.csrc.gpu.driver import answer, calls

POISON = 0xA5
Bytes = NDArray[np.uint8]
PAGE = 4096
PER_LAUNCH = 170
Strategy = Literal["batch", "loop", "kernel"]


def fallbacks(engine: GpuCopyEngine) -> dict[str, int]:
    return engine.statistics()["fallbacks"]


class Scattered:
    """Items in places of their own on both sides, each a multiple of `unit` bytes, with poison between them."""

    def __init__(self, engine: GpuCopyEngine, items: int, unit: int, longest: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.engine = engine
        self.sizes = rng.integers(1, longest // unit + 1, items) * unit
        place = longest + (16 if unit % 16 == 0 else unit)
        self.nbytes = items * place
        self.memory = engine.allocate(self.nbytes)
        self.host: Bytes = np.full(self.nbytes + PAGE, POISON, np.uint8)
        self.first = -self.host.ctypes.data % PAGE  # of a page
        self.rows = self.host[self.first : self.first + self.nbytes]
        self.pinned: PinnedBuffer | None = PinnedBuffer(engine, self.host)
        self.on_device, self.on_host = (rng.permutation(items) * place for _ in range(2))

    def move(self, to_host: bool, at: NDArray[np.int64], by: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        copy = self.engine.copy_list_to_host if to_host else self.engine.copy_list_from_host
        copy(at, by, sizes, strategy="loop").wait()

    def get(self) -> Bytes:
        out: Bytes = np.zeros(self.nbytes, np.uint8)
        self.move(True, np.array([out.ctypes.data]), np.array([self.memory.address]), np.array([self.nbytes]))
        return out

    def put(self, bytes_: Bytes) -> None:
        self.move(False, np.array([self.memory.address]), np.array([bytes_.ctypes.data]), np.array([self.nbytes]))

    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """On the host, on the device."""
        return self.rows.ctypes.data + self.on_host, self.memory.address + self.on_device

    def check(self, strategy: Strategy, moved_by: Strategy | None = None) -> None:
        """Every byte, both ways."""
        rng = np.random.default_rng(2)
        host, device = self.addresses()
        before: Bytes = rng.integers(0, 256, self.nbytes, np.uint8)
        self.put(before)
        self.rows[:] = POISON
        expected = self.rows.copy()
        for at, by, size in zip(self.on_host, self.on_device, self.sizes, strict=True):
            expected[at : at + size] = before[by : by + size]
        copy = self.engine.copy_list_to_host(host, device, self.sizes, strategy=strategy)
        copy.wait()
        assert copy.strategy == (moved_by or strategy)
        assert (self.rows == expected).all()
        assert (self.get() == before).all()

        self.rows[:] = rng.integers(0, 256, self.nbytes, np.uint8)
        wanted: Bytes = np.full(self.nbytes, POISON, np.uint8)
        self.put(wanted)
        for at, by, size in zip(self.on_device, self.on_host, self.sizes, strict=True):
            wanted[at : at + size] = self.rows[by : by + size]
        self.engine.copy_list_from_host(device, host, self.sizes, strategy=strategy).wait()
        assert (self.get() == wanted).all()


@pytest.mark.parametrize("strategy", ["batch", "loop", "kernel"])
@pytest.mark.parametrize(("unit", "longest"), [(16, 6000), (4, 5000), (1, 3000), (2048, 8192)])
@pytest.mark.parametrize("items", [1, PER_LAUNCH, 2 * PER_LAUNCH + 1])
def test_every_byte_of_a_list(
    fake: ctypes.CDLL, library: str, strategy: Strategy, unit: int, longest: int, items: int
) -> None:
    engine = GpuCopyEngine(0, library)
    Scattered(engine, items, unit, longest - longest % unit).check(strategy)
    assert fallbacks(engine) == {}
    launches = -(-items // PER_LAUNCH)
    assert calls(fake, "launch") == (2 * launches if strategy == "kernel" else 0)
    if items > 1:  # one may be aligned better than its unit
        width = 16 if unit % 16 == 0 else unit
        assert calls(fake, f"copy_list_{width}") == calls(fake, "launch")
    counts = engine.statistics()[strategy]
    assert counts["descriptors"] >= 2 * items


def test_an_odd_item_slows_only_its_own_launch(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 3 * PER_LAUNCH, 16, 512)
    list_.sizes[PER_LAUNCH] = 15
    list_.check("kernel")
    assert [calls(fake, f"copy_list_{width}") for width in (16, 4, 1)] == [4, 0, 2]


def test_what_is_pinned_here_needs_no_question(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 20, 16, 512)
    asked = calls(fake, "host_device_address")
    list_.check("kernel")
    assert calls(fake, "host_device_address") == asked
    list_.pinned = None  # another's pinning is asked for: the first and the last byte of each
    list_.check("kernel")
    assert calls(fake, "host_device_address") == asked + 2 * 2 * 20
    assert fallbacks(engine) == {}


@pytest.mark.parametrize("how", ["not_pinned_from", "seen_elsewhere_from"])
def test_from_the_first_item_that_is_not_pinned_batch_moves_the_list(fake: ctypes.CDLL, library: str, how: str) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 2 * PER_LAUNCH, 16, 512)
    list_.pinned = None
    order = np.argsort(list_.on_host)
    list_.on_host, list_.on_device, list_.sizes = list_.on_host[order], list_.on_device[order], list_.sizes[order]
    at = PER_LAUNCH + 7
    list_.sizes[at] = 512
    answer(fake, how, list_.rows.ctypes.data + int(list_.on_host[at]) + 511)  # the last byte of this one
    list_.check("kernel", "batch")
    assert fallbacks(engine) == {"host memory is not pinned": 2}
    assert calls(fake, "copy_list_16") == 2, "one launch each way went before it"


def test_rows_are_pinned_to_their_last_byte(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(8 * 64)
    pages = engine.pages(np.array([memory.address]), np.array([64]), 64, 8)
    rows: Bytes = np.zeros(8 * 64, np.uint8)
    begin = rows.ctypes.data

    def strategy(row_ids: list[int]) -> str:
        ids = np.array(row_ids)
        return engine.copy_pages_to_host(pages, np.arange(len(ids)), rows, 64, ids, strategy="kernel").strategy

    assert strategy([5, 2]) == "kernel"
    answer(fake, "not_pinned_from", begin + 6 * 64)
    assert strategy([5, 2]) == "kernel"
    answer(fake, "not_pinned_from", begin + 6 * 64 - 1)
    assert strategy([2, 5]) == "batch"
    answer(fake, "not_pinned_from", 1 << 62)
    answer(fake, "seen_elsewhere_from", begin + 6 * 64 - 1)
    assert strategy([5, 2]) == "batch"
    assert fallbacks(engine) == {"rows are not pinned": 2}


@pytest.mark.parametrize("status", [1, 801])
def test_a_refused_launch_of_a_list_goes_by_batch(fake: ctypes.CDLL, library: str, status: int) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 3, 16, 512)
    answer(fake, "launch", status)
    list_.check("kernel", "batch")
    if status == 801:  # for good
        assert fallbacks(engine) == {"the driver refused a kernel": 1, "the driver takes no kernels": 1}
        assert [engine.can(name) for name in ("kernel", "staged", "batch")] == [False, False, True]  # type: ignore[arg-type]
        assert not engine.busy()
    else:
        assert fallbacks(engine) == {"the driver refused a kernel": 2}
        answer(fake, "launch", 0)
        list_.check("kernel")


@pytest.mark.parametrize("strategy", ["kernel", "staged"])
@pytest.mark.parametrize("status", [1, 801])
def test_a_refused_launch_of_pages_goes_by_batch(
    fake: ctypes.CDLL, library: str, strategy: Literal["kernel", "staged"], status: int
) -> None:
    engine = GpuCopyEngine(0, library, buffer_bytes=1024, small_bytes=512, buffers=2)
    memory = engine.allocate(4 * 6 * 64)
    source: Bytes = np.random.default_rng(4).integers(0, 256, len(memory), np.uint8)
    whole = np.array([memory.address]), np.array([source.ctypes.data]), np.array([len(memory)])
    engine.copy_list_from_host(*whole, strategy="loop").wait()
    pages = engine.pages(memory.address + np.arange(4) * 6 * 64, np.full(4, 64), 64, 6)
    rows: Bytes = np.full((7, 256), POISON, np.uint8)
    pinned = PinnedBuffer(engine, rows)
    ids, row_ids = np.array([5, 0, 2, 3]), np.array([1, 6, 0, 3])
    expected = rows.copy()
    expected[row_ids] = source.reshape(4, 6, 64)[:, ids].transpose(1, 0, 2).reshape(4, 256)
    answer(fake, "launch", status)
    copy = engine.copy_pages_to_host(pages, ids, rows, 256, row_ids, strategy=strategy)
    assert copy.strategy == "batch"
    copy.wait()
    assert (rows == expected).all()
    engine.copy_pages_from_host(pages, ids, rows, 256, row_ids[::-1].copy(), strategy=strategy).wait()
    back: Bytes = np.zeros_like(source)
    engine.copy_list_to_host(np.array([back.ctypes.data]), whole[0], whole[2], strategy="loop").wait()
    wanted = source.reshape(4, 6, 64).copy()
    wanted[:, ids] = rows[row_ids[::-1]].reshape(4, 4, 64).transpose(1, 0, 2)
    assert (back == wanted.reshape(-1)).all()
    for_good = {"the driver refused a kernel": 1, "the driver takes no kernels": 1}
    assert fallbacks(engine) == (for_good if status == 801 else {"the driver refused a kernel": 2})
    assert engine.can(strategy) == (status == 1)
    assert engine.statistics()["batch"]["copies"] == 2
    del pinned


def test_a_probe_that_is_refused_fails_no_copy(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(4 * 64)
    pages = engine.pages(memory.address + np.arange(2) * 128, np.full(2, 64), 64, 2)
    rows: Bytes = np.zeros(256, np.uint8)
    answer(fake, "launch", 801)
    ids = np.array([0, 1])
    assert engine.copy_pages_to_host(pages, ids, rows, 128, ids, strategy="pitched").strategy == "pitched"
    assert not engine.busy()


def test_neighbours_of_a_list_stay_apart(fake: ctypes.CDLL, library: str) -> None:
    """They may lie in two allocations."""
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(64)
    host: Bytes = np.arange(64, dtype=np.uint8)
    at = np.arange(0, 64, 16)
    engine.copy_list_from_host(memory.address + at, host.ctypes.data + at, np.full(4, 16)).wait()
    assert engine.statistics()["batch"]["descriptors"] == 4
    assert fake.fake_largest_batch() == 4


OTHER = 0x7000


def test_a_stream_of_another_device_is_refused_before_anything_is_issued(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 3, 16, 64)
    host, device = list_.addresses()
    pages = engine.pages(np.array([list_.memory.address]), np.array([16]), 16, 4)
    ids = np.array([0])
    answer(fake, "stream_of_another_device", OTHER)
    issues: list[Callable[[], object]] = [
        lambda: engine.copy_list_to_host(host, device, list_.sizes, OTHER),
        lambda: engine.copy_list_from_host(device, host, list_.sizes, OTHER, "kernel"),
        lambda: engine.copy_pages_to_host(pages, ids, list_.rows, 16, ids, OTHER, "loop"),
        lambda: engine.gather_part(pages, ids, 0, 16, list_.memory.address + 64, OTHER),
    ]
    for issue in issues:
        with pytest.raises(GpuError, match="event: OTHER"):
            issue()
    assert [calls(fake, name) for name in ("copy_batch", "copy_to_host", "launch")] == [0, 0, 0]
    assert (list_.rows == POISON).all()


def test_a_copy_whose_end_cannot_be_marked_is_waited_for(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    list_ = Scattered(engine, 3, 16, 64)
    host, device = list_.addresses()
    answer(fake, "event_records_left", 1)
    with pytest.raises(GpuError, match="event: OTHER"):
        engine.copy_list_to_host(host, device, list_.sizes)
    assert calls(fake, "copy_batch") == 1
    assert calls(fake, "stream_synchronize") == 1, "its stream takes no event: it is waited for as a whole"
    answer(fake, "event_records_left", 1 << 30)


def test_the_plan_of_a_list(fake: ctypes.CDLL, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    engine = GpuCopyEngine(0, library)
    small, few, large = (Scattered(engine, *shape) for shape in ((40, 16, 4096), (2, 16, 4096), (4, 1 << 18, 1 << 19)))

    def strategies(copies: GpuCopies, list_: Scattered) -> set[str]:
        host, device = (addresses.tolist() for addresses in list_.addresses())
        sizes = list_.sizes.tolist()
        before: Bytes = np.random.default_rng(3).integers(0, 256, list_.nbytes, np.uint8)
        list_.put(before)
        there = copies.list_to_host(host, device, sizes)
        there.wait()
        list_.put(np.zeros(list_.nbytes, np.uint8))
        back = copies.list_from_host(device, host, sizes)
        back.wait()
        found = list_.get()
        for at, size in zip(list_.on_device, list_.sizes, strict=True):
            assert (found[at : at + size] == before[at : at + size]).all()
        return {there.strategy, back.strategy}

    copies = GpuCopies(engine)
    assert [strategies(copies, list_) for list_ in (small, few, large)] == [{"kernel"}, {"batch"}, {"batch"}]
    for forced, moved_by in (("loop", "loop"), ("pitched", "batch"), ("staged", "kernel"), ("kernel", "kernel")):
        monkeypatch.setenv(ENVIRONMENT, forced)
        assert strategies(GpuCopies(engine), few) == {moved_by}
    assert fallbacks(engine) == {}
    answer(fake, "event_query", 600)  # no kernel ends: the GPU is busy
    time.sleep(0.02)  # that it was idle is believed for 5 ms
    assert copies.plan_list(40 * 4096, 40) == "batch"
    answer(fake, "event_query", 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("unit", "longest"), [(16, 6000), (4, 5000), (1, 3000), (2048, 8192), (16, 1 << 17)])
@pytest.mark.parametrize("strategy", ["batch", "loop", "kernel"])
def test_lists_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], strategy: Strategy, unit: int, longest: int) -> None:
    engine = gpu_engine()
    Scattered(engine, 2 * PER_LAUNCH + 31, unit, longest - longest % unit).check(strategy)
    assert fallbacks(engine) == {}
