"""Parts within a device: every byte between poisoned neighbours, over the fake driver and over a real one."""

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuWaiter
from tests.csrc.gpu.driver import calls
from tests.csrc.gpu.part_copies import Bytes, Case, PartCopies, cases, whole


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.booleans().flatmap(cases), summed=st.booleans())
def test_parts_over_the_fake(fake: ctypes.CDLL, library: str, case: Case, summed: bool) -> None:
    PartCopies(GpuCopyEngine(0, library), case).check(summed)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), data=st.data())
def test_zeros_over_the_fake(fake: ctypes.CDLL, library: str, case: Case, data: st.DataObject) -> None:
    page = data.draw(st.integers(0, case.pages - 1))
    start, first_piece = data.draw(st.integers(0, case.fragment_bytes)), data.draw(st.integers(0, case.pieces))
    PartCopies(GpuCopyEngine(0, library), case).check_zeros(page, start, first_piece)


def test_more_pages_than_one_launch_takes(fake: ctypes.CDLL, library: str) -> None:
    ids = tuple(np.random.default_rng(3).permutation(2100)[:2000].tolist())
    world = PartCopies(GpuCopyEngine(0, library), Case(2, 1, 16, 0, 2100, ids, 16, 2000 * 32 - 32))
    world.check(summed=True)
    assert world.engine.statistics()["gathered"] == {"parts": 1, "launches": 3, "bytes": 2000 * 32 - 32}
    world.check(summed=False)
    world.check_zeros(2099, 4, 0)


@pytest.mark.parametrize("refused", [None, "copy_batch"])
def test_without_kernels_the_driver_copies(fake: ctypes.CDLL, library: str, refused: str | None) -> None:
    fake.fake_answer(b"module_load", 801)
    if refused:
        fake.fake_answer(refused.encode(), 801)
    engine = GpuCopyEngine(0, library)
    assert not engine.has_kernels
    case = Case(3, 2, 64, 16, 5, (4, 0, 3), 32, 3 * 384 - 64)
    world = PartCopies(engine, case)
    world.check(summed=False)
    world.check_zeros(1, 10, 1)
    of_batches = {"the driver refused a batch": 1, "the driver has no batch": 1} if refused else {}
    assert engine.statistics()["fallbacks"] == {"the driver takes no kernels": 4, **of_batches}
    assert calls(fake, "copy_batch") == (1 if refused else 2), "what is not supported is not asked for again"
    assert (calls(fake, "copy_on_device") > 0) == (refused is not None)
    with pytest.raises(GpuError, match="checksum: this driver takes no kernels"):
        engine.gather_part_summed(*world.arguments())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ((np.array([0, 4]), 0, 32, 64), IndexError, r"page_ids\[1\]: 4, must be in \[0, 4\)"),
        ((np.array([], np.int64), 0, 1, 64), ValueError, "page_ids: 0, must be in"),
        ((np.array([0]), 32, 1, 64), ValueError, r"byte_offset: 32, must be in \[0, 31\]"),
        ((np.array([0, 1]), 4, 28, 64), ValueError, r"nbytes: 28, must be in \[29, 60\]"),
        ((np.array([0, 1]), 4, 61, 64), ValueError, "nbytes: 61"),
        ((np.array([0]), 0, 32, 0), ValueError, "slot_address: 0"),
    ],
)
def test_bad_parts_move_nothing(
    fake: ctypes.CDLL,
    library: str,
    change: tuple[NDArray[np.int64], int, int, int],
    error: type[Exception],
    message: str,
) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(2, 1, 16, 0, 4, (0,)))
    for copy in (world.engine.gather_part, world.engine.scatter_part_summed):
        with pytest.raises(error, match=message):
            copy(world.pages, *change)
    assert calls(fake, "launch") == 0
    with pytest.raises(ValueError, match="page_ids: 3 would be written twice"):
        world.engine.scatter_part(world.pages, np.array([3, 3]), 0, 64, 64)
    for bad, text in (((4, 0), "page_id: 4"), ((0, 17), "start: 17"), ((0, 0, 2), "first_piece: 2")):
        with pytest.raises(ValueError, match=text):
            world.engine.zero_page_from(world.pages, *bad)


@pytest.mark.parametrize(
    ("size", "slot", "summed", "message"),
    [
        (65, 1 << 20, False, r"header length: 65, must be in \[1, 64\]"),
        (7, 1 << 20, True, r"header length: 7, must be in \[8, 64\]"),
        (64, 64, False, "slot_address: 64, must be in"),
    ],
)
def test_bad_headers_move_nothing(
    fake: ctypes.CDLL, library: str, size: int, slot: int, summed: bool, message: str
) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(2, 1, 16, 0, 4, (0,)))
    gather = world.engine.gather_part_summed if summed else world.engine.gather_part
    with pytest.raises(ValueError, match=message):
        gather(world.pages, world.ids, 0, 32, slot, header=bytes(size))
    assert calls(fake, "launch") == 0


def test_a_header_goes_by_the_driver_where_it_takes_no_kernels(fake: ctypes.CDLL, library: str) -> None:
    fake.fake_answer(b"module_load", 801)
    PartCopies(GpuCopyEngine(0, library), Case(2, 1, 16, 0, 4, (0, 2), 0, 64, 64)).check(summed=False)
    assert calls(fake, "set_bytes") == 64


def test_a_failed_launch_leaves_no_copy_behind(fake: ctypes.CDLL, library: str) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(2, 1, 16, 0, 4, (2, 1)))
    fake.fake_answer(b"launch", 1)
    waited = calls(fake, "event_synchronize")
    for copy in (world.engine.gather_part_summed, world.engine.scatter_part):
        with pytest.raises(GpuError, match="kernel: INVALID_VALUE"):
            copy(*world.arguments())
    assert calls(fake, "event_synchronize") >= waited + 2
    fake.fake_answer(b"launch", 0)
    world.check(summed=True)


def test_a_launch_that_is_not_supported_goes_by_the_driver_for_good(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    world = PartCopies(engine, whole(2, 1, 16, 0, 4, (2, 1)))
    fake.fake_answer(b"launch", 801)
    world.check(summed=False)
    world.check_zeros(1, 3, 0)
    assert calls(fake, "launch") == 1
    assert not engine.has_kernels
    assert not engine.can("staged")
    assert engine.gather_part(*world.arguments()).strategy == "batch"
    counts = engine.statistics()["fallbacks"]
    assert (counts["the driver refused a kernel"], counts["the driver takes no kernels"]) == (1, 4)
    with pytest.raises(GpuError, match="checksum: this driver takes no kernels"):
        engine.gather_part_summed(*world.arguments())


@pytest.mark.parametrize("status", [1, 801])
def test_a_refused_batch_of_a_part_is_counted(fake: ctypes.CDLL, library: str, status: int) -> None:
    fake.fake_answer(b"module_load", 801)
    fake.fake_answer(b"copy_batch", status)
    world = PartCopies(GpuCopyEngine(0, library), whole(2, 1, 16, 0, 4, (2, 1)))
    for _ in range(3):
        world.engine.gather_part(*world.arguments())
    asked = {1: 3, 801: 1}[status]
    assert calls(fake, "copy_batch") == asked
    fallbacks = {
        "the driver takes no kernels": 3,
        "the driver refused a batch": asked,
        "the driver has no batch": 3 - asked,
    }
    assert world.engine.statistics()["fallbacks"] == {reason: count for reason, count in fallbacks.items() if count}


def test_pages_of_another_device_are_refused(fake: ctypes.CDLL, library: str) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(2, 1, 16, 0, 4, (2, 1)))
    other, same = GpuCopyEngine(1, library), GpuCopyEngine(0, library)
    rows = np.zeros(4096, np.uint8)
    ids = np.array([0, 1])
    copies: list[Callable[[GpuCopyEngine], GpuCopy]] = [
        lambda engine: engine.copy_pages_to_host(world.pages, ids, rows, 512, ids),
        lambda engine: engine.copy_pages_from_host(world.pages, ids, rows, 512, ids),
        lambda engine: engine.gather_part(*world.arguments()),
        lambda engine: engine.scatter_part_summed(*world.arguments()),
        lambda engine: engine.zero_pages(world.pages, ids),
        lambda engine: engine.zero_page_from(world.pages, 0, 0),
    ]
    for copy in (*copies, lambda engine: engine.check_pages(world.pages)):
        with pytest.raises(ValueError, match="pages: of device 0, but this engine's is device 1"):
            copy(other)
    for copy in copies:
        copy(same).wait()
    same.check_pages(world.pages)


def test_sums_are_bounded_and_come_back(fake: ctypes.CDLL, library: str) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(1, 1, 16, 0, 2, (1,)))
    held = [world.engine.gather_part_summed(*world.arguments()) for _ in range(1024)]
    with pytest.raises(GpuError, match="1024 sums of parts are under way or held"):
        world.engine.gather_part_summed(*world.arguments())
    held.pop()
    world.engine.gather_part_summed(*world.arguments())
    fake.fake_answer(b"event_query", 600)
    held.clear()  # dropped while they run: nobody else gets their cells
    world.engine.gather_part_summed(*world.arguments())  # the last cell
    with pytest.raises(GpuError, match="1024 sums"):
        world.engine.gather_part_summed(*world.arguments())
    fake.fake_answer(b"event_query", 0)
    copy = world.engine.gather_part_summed(*world.arguments())
    copy.checksum()
    plain = world.engine.gather_part(*world.arguments())
    with pytest.raises(ValueError, match="checksum: the copy was not one that adds up"):
        plain.checksum()
    fake.fake_answer(b"event_query", 600)
    with pytest.raises(ValueError, match="checksum: the copy is not done"):
        copy.checksum()
    fake.fake_answer(b"event_query", 0)


def test_waits(fake: ctypes.CDLL, library: str) -> None:
    world = PartCopies(GpuCopyEngine(0, library), whole(1, 1, 16, 0, 2, (1,)))
    copies = [world.engine.gather_part(*world.arguments()) for _ in range(3)]
    waiter = GpuWaiter()
    assert waiter.wait(0) == [] and waiter.wait(0.01) == []
    fake.fake_answer(b"event_query", 600)
    begin = time.monotonic()
    assert not copies[0].wait_for(0.02)
    assert 0.02 <= time.monotonic() - begin < 2
    for copy in copies[:2]:
        waiter.add(copy)
    assert waiter.wait(0.01) == [] and len(waiter) == 2
    threading.Timer(0.05, lambda: fake.fake_answer(b"event_query", 0)).start()
    assert waiter.wait(10) == copies[:2] and len(waiter) == 0
    threading.Timer(0.05, lambda: waiter.add(copies[2])).start()
    assert waiter.wait(10) == copies[2:]
    threading.Timer(0.05, waiter.wake).start()
    begin = time.monotonic()
    assert waiter.wait(10) == [] and time.monotonic() - begin < 5
    fake.fake_answer(b"event_query", 719)
    waiter.add(copies[0])
    assert waiter.wait(10) == copies[:1]
    with pytest.raises(GpuError, match="copy:"):
        copies[0].done()
    fake.fake_answer(b"event_query", 0)
    for seconds in (-1.0, float("nan"), 1e7):
        with pytest.raises(ValueError, match="seconds"):
            waiter.wait(seconds)
        with pytest.raises(ValueError, match="seconds"):
            copies[0].wait_for(seconds)


@pytest.mark.parametrize("ready_after", [0.6, 1.4], ids=["meanwhile", "soon after"])
def test_a_wait_outlives_a_standstill(fake: ctypes.CDLL, library: str, ready_after: float) -> None:
    """Of 1.2 s behind a query that found the copy still running."""
    world = PartCopies(GpuCopyEngine(0, library), whole(1, 1, 16, 0, 2, (1,)))
    copy = world.engine.gather_part(*world.arguments())
    fake.fake_answer(b"event_query", 600)
    fake.fake_answer(b"event_query_pause_ms", 1200)
    threading.Timer(ready_after, lambda: fake.fake_answer(b"event_query", 0)).start()
    assert copy.wait_for(1.0)


# -- a real device

SMALL = (
    Case(3, 2, 64, 16, 6, (4, 1, 5, 0), 48, 4 * 384 - 96),
    Case(2, 1, 100, 4, 5, (3, 0), 96, 200, 4),
    Case(2, 3, 33, 1, 4, (1, 2, 3), 7, 500, 1),
    Case(1, 1, 1 << 20, 0, 3, (2, 0), 1 << 19, 1 << 20, 64),
)


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("case", SMALL)
def test_small_parts_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], case: Case, summed: bool) -> None:
    world = PartCopies(gpu_engine(), case)
    world.check(summed)
    world.check_zeros(case.pages - 1, case.fragment_bytes // 3, case.pieces - 1)
    assert world.engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True])
def test_large_parts_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], summed: bool) -> None:
    ids = tuple(np.random.default_rng(3).permutation(2100)[:2000].tolist())
    PartCopies(gpu_engine(), Case(4, 1, 4096, 0, 2100, ids, 4096 + 16, 2000 * 16384 - 4096 - 48, 64)).check(summed)
    heads = tuple(np.random.default_rng(4).permutation(300)[:200].tolist())
    PartCopies(gpu_engine(), Case(8, 16, 256, 256, 300, heads, 512, 200 * 32768 - 512)).check(summed)
    PartCopies(gpu_engine(), Case(2, 1, 8192, 1, 64, tuple(range(0, 64, 3)), 5, 22 * 16384 - 5, 3)).check(summed)


@pytest.mark.gpu
def test_many_sums_and_waits_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine()
    world = PartCopies(engine, Case(8, 1, 4096, 0, 64, tuple(range(0, 64, 2)), 0, 32 * 8 * 4096))
    pool: Bytes = np.random.default_rng(7).integers(0, 256, world.case.size, np.uint8)
    world.put(world.pool, pool)
    expected = _core.part_checksum(pool[world.case.part()])
    waiter = GpuWaiter()
    running: set[GpuCopy] = set()
    for _ in range(5):
        for _ in range(200):
            copy = engine.gather_part_summed(*world.arguments())
            waiter.add(copy)
            running.add(copy)
        while running:
            ended = waiter.wait(20)
            assert ended
            for copy in ended:
                running.remove(copy)
                assert copy.checksum() == expected
