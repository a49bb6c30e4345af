"""Spills and restores that cannot be issued on one of two devices, over the fake driver: nobody waits for ever, and no
copy of the other device runs on."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry._core import GpuError
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.host_tier.copy_plan import GpuCopies
from kvferry.transfer.host_tier.rows import AnonymousRows

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)
PAGES, ROWS = 6, 4
NOT_READY, LAUNCH_FAILED = 600, 719
DIRECTIONS = ("spill", "restore")
METHODS = {"spill": "to_host", "restore": "from_host"}
WHERE = np.array([4, 1]), np.array([0, 3])


@pytest.fixture
def memory(fake: ctypes.CDLL, on_the_fake: None) -> Iterator[GpuPoolMemory]:
    made = GpuPoolMemory.create(PoolShape(GEOMETRY, 2, StorageOrder.LAYER_MAJOR, PAGES), [0, 1])
    yield made
    fake.fake_reset()
    made.close()


def copies_of(memory: GpuPoolMemory, direction: str, rank: int) -> GpuCopies:
    of = memory._ranks[rank]
    return of.spills if direction == "spill" else of.restores


def before(monkeypatch: pytest.MonkeyPatch, copies: GpuCopies, direction: str, step: Callable[[], None]) -> None:
    """`step` comes before each copy of this direction is issued."""
    issue = getattr(copies, METHODS[direction])

    def stepped(*args: Any, **rest: Any) -> object:
        step()
        return issue(*args, **rest)

    monkeypatch.setattr(copies, METHODS[direction], stepped)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_first_rank_is_waited_for_when_the_second_one_fails(
    fake: ctypes.CDLL, memory: GpuPoolMemory, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    rows = memoryview(mmap.mmap(-1, ROWS * memory.shape.row_bytes))
    pinned = memory.pinner().pin(rows)
    memory.attach_rows(rows)
    issued, ended = threading.Event(), threading.Event()

    def fail() -> None:
        fake.fake_answer(b"copy_batch", LAUNCH_FAILED)
        fake.fake_answer(b"launch", LAUNCH_FAILED)
        fake.fake_answer(b"event_query", NOT_READY)  # so the first rank's copy runs
        issued.set()

    before(monkeypatch, copies_of(memory, direction, 1), direction, fail)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            getattr(memory, direction)(*WHERE)
        except BaseException as error:
            problems.append(error)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert issued.wait(20)
    assert not ended.wait(0.2), "the first rank's copy still runs"
    fake.fake_answer(b"event_query", 0)
    thread.join(20)
    (problem,) = problems
    assert isinstance(problem, OSError) and "a copy could not be issued: " in str(problem)
    del pinned


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_probe_that_fails_is_a_copy_that_fails(
    memory: GpuPoolMemory, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The strategy is chosen before a copy is issued, and asks the device."""
    rows = memoryview(mmap.mmap(-1, ROWS * memory.shape.row_bytes))
    pinned = memory.pinner().pin(rows)
    memory.attach_rows(rows)

    def fail(*_: object) -> str:
        raise GpuError("launch: OTHER")

    monkeypatch.setattr(copies_of(memory, direction, 1), "plan", fail)
    with pytest.raises(OSError, match="a copy could not be issued: launch: OTHER"):
        getattr(memory, direction)(*WHERE)
    outside = np.array([PAGES]), np.array([0])
    with pytest.raises(OSError, match=r"page_ids\[0\]"):
        getattr(memory, direction)(*outside)
    del pinned


@pytest.mark.parametrize("error", [GpuError, RuntimeError, KeyError])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_host_tier_ends_the_copy(
    memory: GpuPoolMemory, monkeypatch: pytest.MonkeyPatch, direction: str, error: type[Exception]
) -> None:
    def fail() -> None:
        raise error("injected")

    before(monkeypatch, copies_of(memory, direction, 1), direction, fail)
    kind = SPILL if direction == "spill" else RESTORE
    copy: Any = SimpleNamespace(
        kind=kind, device=[4, 1], host=[0, 3], digests=bytes(64), parents=bytes(64), outputs=b""
    )

    async def story() -> None:
        tier = HostTier(memory, AnonymousRows(ROWS, memory.shape.row_bytes), ROWS, checksums=False)
        await tier.grow(Cache(PAGES, GEOMETRY.page_size, host_pages=ROWS, host_there=0), bytes(32), lambda: None)
        told: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()
        tier.start(CopyStarted(7, bytes(32), copy), lambda *words: told.set_result(words))
        number, failed, mismatched, _ = await asyncio.wait_for(told, 20)
        assert (number, failed, mismatched) == (7, [4, 1], 0)
        await tier.close()

    asyncio.run(story())


def test_a_tail_that_cannot_be_cleared_is_said(fake: ctypes.CDLL, memory: GpuPoolMemory) -> None:
    fake.fake_answer(b"launch", LAUNCH_FAILED)
    told: list[str] = []

    async def story() -> None:
        with pytest.raises(OSError, match="cuda:0: "):
            memory.zero_tail(2, 10, told.append)

    asyncio.run(story())
    assert not told
