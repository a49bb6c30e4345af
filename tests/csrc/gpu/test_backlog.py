"""Copies in no order with each other: every byte of each, how many bytes are under way, what they are staged in."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopy, GpuCopyEngine
from kvferry.transfer.host_tier.copy_plan import STRATEGIES, Strategy

NOT_READY, NO_MEMORY = 600, 2
POISON = 0xA5


class Pool:
    """Scattered pages on a device and rows on the host, moved in pieces that are all under way at a time."""

    def __init__(
        self, engine: GpuCopyEngine, *, pages: int = 60, pieces: int = 5, tensors: int = 3, fragment: int = 4096
    ) -> None:
        rng = np.random.default_rng(pages)
        self.engine = engine
        self.shape = (tensors, pages, fragment)
        self.memory = engine.allocate(tensors * pages * fragment)
        bases = self.memory.address + np.arange(tensors) * pages * fragment
        self.pages = engine.pages(bases, np.full(tensors, fragment), fragment, pages)
        self.rows: NDArray[np.uint8] = np.full((pages, self.pages.row_bytes), POISON, np.uint8)
        self.pinned = _core.PinnedBuffer(engine, self.rows)
        self.page_ids, self.row_ids = (
            rng.permutation(pages)[: pages - 7] for _ in range(2)
        )  # neighbours stay as they are
        self.pieces = list(
            zip(np.array_split(self.page_ids, pieces), np.array_split(self.row_ids, pieces), strict=True)
        )

    def bytes_of(self, piece: int) -> int:
        return len(self.pieces[piece][0]) * self.pages.row_bytes

    def spill(self, piece: int, strategy: Strategy) -> GpuCopy:
        page_ids, row_ids = self.pieces[piece]
        to = self.rows, self.pages.row_bytes, row_ids
        return self.engine.copy_pages_to_host(self.pages, page_ids, *to, strategy=strategy, order="none")

    def restore(self, piece: int, strategy: Strategy) -> GpuCopy:
        page_ids, row_ids = self.pieces[piece]
        source = self.rows, self.pages.row_bytes, row_ids
        return self.engine.copy_pages_from_host(self.pages, page_ids, *source, strategy=strategy, order="none")

    def transfer(self, host: NDArray[np.uint8], move: Callable[..., GpuCopy], *, to_host: bool) -> None:
        on_host, on_device = np.array([host.ctypes.data]), np.array([self.memory.address])
        ends = (on_host, on_device) if to_host else (on_device, on_host)
        move(*ends, np.array([host.nbytes]), strategy="loop").wait()

    def check(self, strategies: list[Strategy]) -> None:
        """strategies: of the pieces in turn."""
        tensors: NDArray[np.uint8] = np.random.default_rng(2).integers(0, 256, self.shape, np.uint8)
        self.transfer(tensors, self.engine.copy_list_from_host, to_host=False)
        self.rows[:] = POISON
        ways = [strategies[piece % len(strategies)] for piece in range(len(self.pieces))]
        running = [self.spill(piece, way) for piece, way in enumerate(ways)]
        for copy, way in zip(running, ways, strict=True):
            copy.wait()
            assert copy.strategy == way
        expected = np.full_like(self.rows, POISON)
        expected[self.row_ids] = tensors[:, self.page_ids].transpose(1, 0, 2).reshape(len(self.page_ids), -1)
        assert (self.rows == expected).all()

        poisoned = np.full_like(tensors, POISON)
        self.transfer(poisoned, self.engine.copy_list_from_host, to_host=False)
        for copy in [self.restore(piece, way) for piece, way in enumerate(ways)]:
            copy.wait()
        found = np.zeros_like(tensors)
        self.transfer(found, self.engine.copy_list_to_host, to_host=True)
        poisoned[:, self.page_ids] = tensors[:, self.page_ids]
        assert (found == poisoned).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes(fake: ctypes.CDLL, library: str, strategy: Strategy) -> None:
    Pool(GpuCopyEngine(0, library)).check([strategy])


def test_bytes_of_copies_behind_others(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, buffer_bytes=40960, small_bytes=4096, buffers=2, deep_buffers=5)
    pool = Pool(engine)
    fake.fake_answer(b"event_query", NOT_READY)
    pool.check(["staged", "staged", "pitched"])
    assert fake.fake_calls(b"mem_alloc") == 1 + 1 + 2 * 5, "pool, its table, and a ring for each direction"


@pytest.mark.parametrize("piece_bytes", [1024, 5000])
def test_bytes_beside_kernels_that_hold_the_gpu_go_in_pieces(fake: ctypes.CDLL, library: str, piece_bytes: int) -> None:
    engine = GpuCopyEngine(0, library, buffer_bytes=40960, deep_piece_bytes=piece_bytes)
    pool = Pool(engine)
    fake.fake_answer(b"event_query", NOT_READY)
    pool.check(["staged"])
    whole = fake.fake_largest_batch()
    for _ in range(2):
        assert engine.busy()
        time.sleep(0.01)
        fake.fake_answer(b"event_query", 0)
        fake.fake_answer(b"elapsed_us", 300)
        engine.busy()  # the probe has ended
        fake.fake_answer(b"event_query", NOT_READY)
        time.sleep(0.01)
    pool.check(["staged"])
    assert fake.fake_largest_batch() > 2 * whole


def test_copies_by_several_threads(fake: ctypes.CDLL, library: str) -> None:
    in_threads(Pool(GpuCopyEngine(0, library, buffer_bytes=8192, small_bytes=4096, deep_buffers=5)))


def in_threads(pool: Pool) -> None:
    """As a daemon's tiers: each copies its own pages to the host and back, time and again."""
    tensors: NDArray[np.uint8] = np.random.default_rng(3).integers(0, 256, pool.shape, np.uint8)
    pool.transfer(tensors, pool.engine.copy_list_from_host, to_host=False)

    def work(piece: int) -> None:
        for strategy in STRATEGIES * 4:
            for copy in (pool.spill, pool.restore):
                running = copy(piece, strategy)
                assert running.wait_for(20)

    with ThreadPoolExecutor(len(pool.pieces)) as threads:
        for done in [threads.submit(work, piece) for piece in range(len(pool.pieces))]:
            done.result(60)
    found = np.zeros_like(tensors)
    pool.transfer(found, pool.engine.copy_list_to_host, to_host=True)
    assert (found == tensors).all()
    expected = tensors[:, pool.page_ids].transpose(1, 0, 2).reshape(len(pool.page_ids), -1)
    assert (pool.rows[pool.row_ids] == expected).all()
    assert pool.engine.under_way_to_host == pool.engine.under_way_from_host == 0


def test_what_is_under_way_is_counted_for_each_direction(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    pool = Pool(engine)
    assert (engine.under_way_to_host, engine.under_way_from_host) == (0, 0)
    fake.fake_answer(b"event_query", NOT_READY)
    held = [pool.spill(0, "staged"), pool.spill(1, "batch"), pool.restore(2, "pitched")]
    assert engine.under_way_to_host == pool.bytes_of(0) + pool.bytes_of(1)
    assert engine.under_way_from_host == pool.bytes_of(2)
    fake.fake_answer(b"event_query", 0)
    assert (engine.under_way_to_host, engine.under_way_from_host) == (0, 0)
    del held


def test_many_under_way_are_not_all_remembered(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    pool = Pool(engine)
    fake.fake_answer(b"event_query", NOT_READY)
    held = [pool.spill(0, "loop") for _ in range(300)]
    assert engine.under_way_to_host == 256 * pool.bytes_of(0)
    fake.fake_answer(b"event_query", 700)  # whatever became of them, they have ended
    assert engine.under_way_to_host == 0
    fake.fake_answer(b"event_query", 0)
    del held


def test_copies_behind_others_begin_with_no_small_parts_and_have_more_buffers(fake: ctypes.CDLL, library: str) -> None:
    row = 3 * 4096
    engine = GpuCopyEngine(0, library, buffer_bytes=6 * row, small_bytes=row, growth=2, buffers=3, deep_buffers=7)
    pool = Pool(engine)
    fake.fake_reset()

    def launches(piece: int) -> int:
        before = int(fake.fake_calls(b"launch"))
        pool.spill(piece, "staged")
        return int(fake.fake_calls(b"launch")) - before

    assert launches(0) == 4 + 1, "1, 2, 4 pages, the rest of 11, and a probe"
    assert fake.fake_calls(b"mem_alloc") == 3
    fake.fake_answer(b"event_query", NOT_READY)
    launches(1)
    assert launches(2) == 2, "6 pages and the rest"
    assert fake.fake_calls(b"mem_alloc") == 7


def test_a_long_copy_has_more_buffers_though_nothing_is_before_it(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, buffer_bytes=12288, small_bytes=4096, buffers=2, deep_buffers=6)
    pool = Pool(engine)
    fake.fake_reset()
    pool.spill(0, "staged").wait()
    assert fake.fake_calls(b"mem_alloc") == 6


def test_without_memory_for_more_buffers_those_that_are_there_do(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library, buffer_bytes=12288, small_bytes=4096, buffers=2)
    pool = Pool(engine)
    asked = fake.fake_calls(b"mem_alloc")
    fake.fake_answer(b"mem_allocs_left", 3)
    held = [pool.spill(0, "staged")]
    assert fake.fake_calls(b"mem_alloc") == asked + 3 + 1
    held += [pool.spill(1, "staged"), pool.spill(2, "staged")]
    assert fake.fake_calls(b"mem_alloc") == asked + 3 + 1, "once for a direction"
    for copy in held:
        copy.wait()
    fake.fake_answer(b"mem_allocs_left", 100)
    pool.check(["staged"])
    assert fake.fake_calls(b"mem_alloc") == asked + 3 + 1 + 8, "restores have a ring of their own"
    assert engine.statistics()["fallbacks"] == {}


@pytest.mark.gpu
def test_copies_by_several_threads_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    in_threads(Pool(gpu_engine(), pages=400, pieces=4, tensors=48))


@pytest.mark.gpu
def test_bytes_of_small_copies_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    Pool(gpu_engine()).check(list(STRATEGIES))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], strategy: Strategy) -> None:
    pool = Pool(gpu_engine(), pages=800, pieces=12, tensors=48)
    for _ in range(3):
        pool.check([strategy])
    pool.check([strategy, "staged"])
