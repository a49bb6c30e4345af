"""The workers of one side: those that are here, and lost ones until it is proven that they write no more. Shell.

A worker holds the lock of its session file while it has the pool mapped. One that says it is quiesced is gone with its
stream; one whose stream breaks is lost, and gone once the kernel has released that lock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.daemon.errors import exhausted, precondition
from kvferry.daemon.side_tasks import SideTasks
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.segment import FileLock

WORKER_QUEUE = 8192  # events that may wait for a worker's stream
PROOF_SECONDS = 0.1  # between looks at a lost worker's lock


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    name: str
    namespace_id: bytes
    lock: FileLock
    events: asyncio.Queue[wire.WorkerEvent]
    attached: bool = False
    quiesced: bool = False
    overflown: asyncio.Event = field(default_factory=asyncio.Event)

    def drop_lock(self) -> None:
        """The session file goes, too."""
        self.lock.close()
        self.lock.unlink()


class WorkerEnds(Protocol):
    """Who is told how workers end: `worker_left`, then `worker_lost` unless it is gone already, then `worker_gone`."""

    def worker_left(self, worker: Worker) -> None:
        """Its stream has ended."""

    def worker_lost(self, worker: Worker) -> None:
        """It may still write."""

    def worker_gone(self, worker: Worker) -> None:
        """It writes no more: that is proven."""


class SideWorkers:
    """`path_prefix`: of their session files, which a worker's number follows."""

    def __init__(self, path_prefix: str, ends: WorkerEnds, tasks: SideTasks) -> None:
        self.here: dict[int, Worker] = {}  # by number
        self._lost: dict[int, Worker] = {}
        self._path_prefix = path_prefix
        self._ends = ends
        self._tasks = tasks
        self._next_number = 1

    @property
    def may_write(self) -> int:
        """How many: those that are here, and lost ones."""
        return len(self.here) + len(self._lost)

    @property
    def lost(self) -> int:
        """Whose stream broke, and whose end is not proven."""
        return len(self._lost)

    def new_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def make(self, name: str, namespace_id: bytes) -> Worker:
        """One with a session file, which is not here yet. RESOURCE_EXHAUSTED where the file cannot be made."""
        number = self.new_number()
        path = f"{self._path_prefix}{number}"
        try:
            lock = FileLock.create(path)
        except OSError as error:
            raise exhausted(f"session file {path}: {error.strerror or error}") from error
        return Worker(number, name, namespace_id, lock, asyncio.Queue(WORKER_QUEUE))

    def enter(self, worker: Worker) -> None:
        self.here[worker.number] = worker

    def attach(self, worker: Worker) -> None:
        """The worker says that it holds its lock; it is looked at."""
        if worker.lock.try_acquire():
            worker.lock.release()
            raise precondition("attached: the session file is not locked; flock it before mapping the pool")
        worker.attached = True

    def leave(self, worker: Worker) -> None:
        """Its stream has ended."""
        del self.here[worker.number]
        self._ends.worker_left(worker)
        if worker.quiesced or not worker.attached:
            self._proved(worker)
            return
        self._ends.worker_lost(worker)
        self._lost[worker.number] = worker
        self._tasks.start(self._await_proof(worker))

    async def _await_proof(self, worker: Worker) -> None:
        """Until the kernel has released the lost worker's lock it may still write."""
        while not worker.lock.try_acquire():
            await asyncio.sleep(PROOF_SECONDS)
        del self._lost[worker.number]
        self._proved(worker)

    def _proved(self, worker: Worker) -> None:
        worker.drop_lock()
        self._ends.worker_gone(worker)

    def close(self) -> None:
        """No stream is served, and no proof awaited any more."""
        for worker in [*self.here.values(), *self._lost.values()]:
            worker.drop_lock()
