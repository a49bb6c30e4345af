"""A worker that ends, or execs, while the GPU has copies of it queued: its pages are others' once those are over.

A look at its lock every millisecond: with rarer ones the copies are over before the lock is found free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.sides import workers as side_workers
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.workers import SideWorkers
from kvferry.proto import worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.mapping.lock_holder import LockHolder
from tests.csrc import dying_worker
from tests.daemon.sides.worker_ends import WorkerEnds

GEOMETRY = KVGeometry(layers=16, kv_heads=8, head_dim=128, dtype="float16", page_size=64)
PAGES = 64  # 256 MiB, in 0.1 ms: some 1000 copies are queued, up to a tenth of a second's
TRIES = 4


class Daemon:
    """As much of one as pages, and workers that are lost, need."""

    def __init__(self, folder: Path, other: GpuCopyEngine) -> None:
        self.memory = GpuPoolMemory.create(PoolShape(GEOMETRY, 1, StorageOrder.LAYER_MAJOR, PAGES), [0])
        self.other, self.ends = other, WorkerEnds()
        self.workers = SideWorkers(str(folder / "worker-"), self.ends, SideTasks("decode"))

    async def lose_a_worker(self, how: str) -> int:
        """Bytes that are wrong of pages that are cleared once it is gone. `how`: as dying_worker has it."""
        pools = self.memory.rank_pools()
        worker = self.workers.make("w", bytes(32), pools)
        self.workers.enter(worker)
        welcome = worker_pb2.Welcome(
            session_file=worker.lock.path, geometry=GEOMETRY.to_proto(), pages=PAGES, rank_pools=pools
        )
        welcome.storage = int(self.memory.shape.order)  # type: ignore[assignment]
        command = [sys.executable, dying_worker.__file__, how]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(welcome.SerializeToString().hex().encode() + b"\n")
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
            self.workers.attach(worker)
            if how == "execs":
                process.stdin.write(b"\n")
            else:
                os.killpg(process.pid, signal.SIGKILL)
            self.workers.leave(worker)
            await asyncio.wait_for(self.ends.gone.wait(), 60)
            self.ends.gone.clear()
            await self.clear()
            await asyncio.sleep(0.3)
            return await asyncio.to_thread(self.nonzero_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def clear(self) -> None:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.memory.zero_pages(np.arange(PAGES), done.set_result)
        assert await asyncio.wait_for(done, 60) == ""

    def nonzero_bytes(self) -> int:
        found = np.empty(PAGES * GEOMETRY.page_bytes, np.uint8)
        start = np.array([self.memory._ranks[0]._base])
        self.other.copy_list_to_host(
            np.array([found.ctypes.data]), start, np.array([len(found)]), strategy="loop"
        ).wait()
        return int(np.count_nonzero(found))


def wrong_bytes(folder: Path, other: GpuCopyEngine, how: str) -> list[int]:
    async def run() -> list[int]:
        daemon = Daemon(folder, other)
        try:
            return [await daemon.lose_a_worker(how) for _ in range(TRIES)]
        finally:
            daemon.memory.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_workers, "PROOF_SECONDS", 0.001)


async def no_wait(seconds: float) -> None:
    pass


@pytest.mark.gpu
def test_nothing_lands_behind_its_lock_and_its_end(
    tmp_path: Path, gpu_engine: Callable[..., GpuCopyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has neither forked nor execs: the proof needs no wait behind it."""
    monkeypatch.setattr(side_workers, "awake", no_wait)
    assert wrong_bytes(tmp_path, gpu_engine(), "killed") == [0] * TRIES


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["forked", "execs"])
def test_nothing_lands_a_while_behind_its_lock(
    tmp_path: Path, gpu_engine: Callable[..., GpuCopyEngine], how: str
) -> None:
    assert wrong_bytes(tmp_path, gpu_engine(), how) == [0] * TRIES


@pytest.mark.gpu
def test_its_lock_alone_proves_nothing(
    tmp_path: Path, gpu_engine: Callable[..., GpuCopyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockHolder, "lives_on", lambda self: True)
    monkeypatch.setattr(side_workers, "awake", no_wait)
    wrong = wrong_bytes(tmp_path, gpu_engine(), "killed")
    print(wrong)
    assert any(wrong)
