"""The workers of one side: those that are here, and lost ones until it is proven that they write no more. Shell.

A worker holds the lock of its session file while it has the pool mapped. One that says it is quiesced is gone with its
stream; one whose stream breaks is lost, and gone a second after that lock is free, and its process, where that can be
seen, lives on or has ended. The ranks of one engine are workers each; to the core they are one, the first, which has
left with the first of them, and is gone with the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.daemon.core.errors import exhausted, precondition
from kvferry.daemon.sides.rank_words import RankWords
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.mapping.lock_holder import LockHolder
from kvferry.transfer.mapping.segment import FileLock
from kvferry.waiting import awake

log = logging.getLogger(__name__)

WORKER_QUEUE = 8192  # events that may wait for a worker's stream
PROOF_SECONDS = 0.1  # between looks at a lost worker's lock
# Behind the proof. Copies of a process that had forked a child with its GPU open, or that calls exec, were seen to land
# for some 10 ms more, as were those into shared memory of one in another PID namespace.
SETTLE_SECONDS = 1.0
QUIESCE_SECONDS = 5.0  # behind the first rank of an engine that is quiesced, for the others to be so
SEEN_WITH = (
    "run both in one PID namespace; the daemon's kernel (from 5.3 on), seccomp profile and Python must have pidfd_open,"
    " and --shm-dir must be on a file system of one device number in stat and /proc/locks: tmpfs is, btrfs and some"
    " overlays are not"
)


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    name: str
    namespace_id: bytes
    lock: FileLock
    events: asyncio.Queue[wire.WorkerEvent]
    maps_gpus: bool = False  # memory of GPUs that is the daemon's
    holder: LockHolder | None = None
    attached: bool = False
    quiesced: bool = False
    overflown: asyncio.Event = field(default_factory=asyncio.Event)
    ranks: Ranks = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = Ranks([self])

    def tell(self, event: wire.WorkerEvent) -> None:
        try:
            self.events.put_nowait(event)
        except asyncio.QueueFull:
            self.overflown.set()  # its stream ends

    def lets_go(self) -> bool:
        """Whether the worker has let its lock go and lives on, or its process has ended. Of one that cannot be seen,
        which maps no memory of GPUs, the lock is all: the kernel lets that go behind the process's memory."""
        if not self.lock.try_acquire():
            return False
        return self.holder is None or self.holder.lives_on() or self.holder.has_ended()

    def drop_lock(self) -> None:
        """Lets the lock and its session file go."""
        self.lock.close()
        self.lock.unlink()
        if self.holder is not None:
            self.holder.close()
            self.holder = None


@dataclass(slots=True, eq=False)
class Ranks:
    """The workers that are the ranks of one engine, by rank; most are the only one of theirs."""

    workers: list[Worker]
    words: RankWords | None = None  # where there are several
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # one has left, and so must all
    in_order: bool = False  # that one was quiesced
    lost: bool = False  # one's stream broke
    gone: set[int] = field(default_factory=set)  # numbers of those that write no more

    @property
    def owner(self) -> Worker:
        """The one that the core knows."""
        return self.workers[0]

    @staticmethod
    def join(workers: list[Worker]) -> None:
        """Makes these the ranks of one engine."""
        ranks = Ranks(workers, RankWords(len(workers)))
        for worker in workers:
            worker.ranks = ranks


class WorkerEnds(Protocol):
    """A side as it is told how workers end, of an engine's ranks once for the first: `worker_left`, then `worker_lost`
    unless it is gone already, then `worker_gone`."""

    def worker_left(self, worker: Worker) -> None:
        """The worker's stream has ended."""

    def worker_lost(self, worker: Worker) -> None:
        """The worker may still write."""

    def worker_gone(self, worker: Worker) -> None:
        """The worker writes no more: that is proven."""


class SideWorkers:
    """The workers of one side. `path_prefix`: of their session files, which a worker's number follows."""

    def __init__(self, path_prefix: str, ends: WorkerEnds, tasks: SideTasks) -> None:
        self.here: dict[int, Worker] = {}  # by number
        self._lost: dict[int, Worker] = {}
        self._path_prefix = path_prefix
        self._ends = ends
        self._tasks = tasks
        self._next_number = 1

    @property
    def may_write(self) -> int:
        """The number of workers that may write: those that are here, and lost ones."""
        workers = [*self.here.values(), *self._lost.values()]
        return len({worker.ranks.owner.number for worker in workers})

    @property
    def lost(self) -> int:
        """The number of workers whose stream broke, and whose end is not proven."""
        return len(self._lost)

    def new_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def make(self, name: str, namespace_id: bytes, pools: Sequence[wire.RankPool]) -> Worker:
        """A worker with a session file, which is not here yet, and is to map these pools. RESOURCE_EXHAUSTED where the
        file cannot be made."""
        number = self.new_number()
        path = f"{self._path_prefix}{number}"
        try:
            lock = FileLock.create(path)
        except OSError as error:
            raise exhausted(f"session file {path}: {error.strerror or error}") from error
        maps_gpus = any(pool.ipc_handle for pool in pools)
        return Worker(number, name, namespace_id, lock, asyncio.Queue(WORKER_QUEUE), maps_gpus)

    def enter(self, worker: Worker) -> None:
        self.here[worker.number] = worker

    def attach(self, worker: Worker) -> None:
        """Takes the worker's word that it holds its lock, which is looked at. FAILED_PRECONDITION."""
        if worker.attached:
            return
        if worker.lock.try_acquire():
            worker.lock.release()
            raise precondition("attached: the session file is not locked; flock it before mapping the pool")
        worker.holder = LockHolder.find(worker.lock)
        if worker.holder is None and worker.maps_gpus:
            raise precondition(
                f"attached: this daemon cannot see the process that has locked {worker.lock.path}; only its end proves"
                f" that what it queued on a GPU is over: {SEEN_WITH}"
            )
        worker.attached = True

    def leave(self, worker: Worker) -> None:
        """Takes the worker out of those that are here: its stream has ended."""
        del self.here[worker.number]
        ranks = worker.ranks
        if not ranks.leaving.is_set():
            ranks.in_order = worker.quiesced
            ranks.leaving.set()
            self._ends.worker_left(ranks.owner)
        if worker.quiesced or not worker.attached:
            self._proved(worker)
            return
        if not ranks.lost:
            ranks.lost = True
            self._ends.worker_lost(ranks.owner)
        self._lost[worker.number] = worker
        process = "a process that cannot be seen" if worker.holder is None else f"process {worker.holder.pid}"
        log.info("worker %s is lost: %s may write its pages until its end is proven", worker.name, process)
        self._tasks.start(self._await_proof(worker))

    async def other_rank_left(self, worker: Worker) -> None:
        """Returns when another rank of its engine has left; where that was quiesced, a while later: this one may be
        about to say so, too."""
        ranks = worker.ranks
        await ranks.leaving.wait()
        if ranks.in_order and not ranks.lost:
            await asyncio.sleep(QUIESCE_SECONDS)

    async def _await_proof(self, worker: Worker) -> None:
        """Waits for the proof; until then the lost worker may still write."""
        while not worker.lets_go():
            await asyncio.sleep(PROOF_SECONDS)
        await awake(SETTLE_SECONDS)
        log.info("worker %s, which was lost, writes no more", worker.name)
        del self._lost[worker.number]
        self._proved(worker)

    def _proved(self, worker: Worker) -> None:
        worker.drop_lock()
        ranks = worker.ranks
        ranks.gone.add(worker.number)
        if len(ranks.gone) == len(ranks.workers):
            self._ends.worker_gone(ranks.owner)

    def close(self) -> None:
        """Drops all locks: no stream is served, and no proof awaited any more."""
        for worker in [*self.here.values(), *self._lost.values()]:
            worker.drop_lock()
