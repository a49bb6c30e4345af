"""The holder of a file's lock, and when such a worker writes no more: one that is killed may still run behind its
lock, and for a while behind its process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.sides import workers as side_workers
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.workers import SideWorkers, Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.mapping import lock_holder
from kvferry.transfer.mapping.lock_holder import LockHolder, flags_of, holder_of
from kvferry.transfer.mapping.segment import FileLock
from tests.daemon.sides.worker_ends import WorkerEnds
from tests.support.standstill import jumping_clock

LOCKS = """\
1: POSIX  ADVISORY  WRITE 11 00:1b:7 0 EOF
2: FLOCK  ADVISORY  WRITE 12 00:1b:70 0 EOF
3: FLOCK  ADVISORY  WRITE 13 00:1c:7 0 EOF
4: FLOCK  ADVISORY  WRITE 14 00:1b:7 0 EOF
4: -> FLOCK  ADVISORY  WRITE 15 00:1b:7 0 EOF
5: OFDLCK ADVISORY  WRITE -1 08:01:7 0 0
"""
HOLDER = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
fcntl.flock(file, fcntl.LOCK_UN)
print("free", flush=True)
sys.stdin.readline()
"""
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ON_A_GPU = [wire.RankPool(ipc_handle=b"h")]


@contextmanager
def holding(path: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it hears a line, and ends when it hears another."""
    command = [*prefix, sys.executable, "-c", HOLDER, path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            told = heard(process)
            if not told and prefix:
                assert process.stderr is not None
                pytest.skip(f"no PID namespace can be made here: {process.stderr.read()[:200]}")
            assert told == "locked\n"
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FileLock]:
    made = FileLock.create(str(tmp_path / "session"))
    yield made
    made.close()


def test_the_holder_in_a_listing() -> None:
    device = os.makedev(0, 0x1B)
    assert holder_of(LOCKS, device, 7) == 14
    assert holder_of(LOCKS, device, 8) is None
    assert holder_of("", device, 7) is None


def test_the_flags_of_a_thread_with_an_odd_name() -> None:
    assert flags_of("7 (a) 1 (b c) S 1 2 3 4 5 4194308 9 9\n") == 4194308


def test_a_holder_lives_on_until_it_ends(lock: FileLock) -> None:
    assert LockHolder.find(lock) is None
    with holding(lock.path) as process:
        holder = LockHolder.find(lock)
        assert holder is not None and holder.pid == process.pid
        assert holder.lives_on() and not holder.has_ended()
        process.kill()
        assert holder._end.poll(10_000)
        assert holder.has_ended() and not holder.lives_on(), "nobody has waited for it yet"
    assert holder.has_ended() and not holder.lives_on()
    holder.close()


def test_a_holder_is_seen_from_its_pid_namespace_and_those_around_it(lock: FileLock) -> None:
    with holding(lock.path, NAMESPACE):
        holder = LockHolder.find(lock)
        assert holder is not None, Path(lock_holder.LOCKS).read_text()
        assert holder.lives_on()
        holder.close()
    finding = f"""if True:
        from kvferry.transfer.mapping.lock_holder import LockHolder
        from kvferry.transfer.mapping.segment import FileLock
        print(LockHolder.find(FileLock.open({lock.path!r})))
        """
    with holding(lock.path):
        found = subprocess.run([*NAMESPACE, sys.executable, "-c", finding], capture_output=True, text=True, timeout=30)
    said = f"it ended with {found.returncode}, and said {found.stdout!r}, {found.stderr!r}"
    assert found.stdout == "None\n", said


def test_a_listing_that_lacks_a_lock_is_read_again(lock: FileLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hundreds of locks come and go, 4 in 100 lack one that stays."""
    listed = iter([*[None] * 4, os.getpid()] * 2)
    monkeypatch.setattr(lock_holder, "holder_of", lambda *file: next(listed))
    holder = LockHolder.find(lock)
    assert holder is not None
    holder.close()


@pytest.mark.parametrize("then", [None, OSError(errno.EMFILE, "too many open files")])
def test_a_number_that_has_become_another_ones_is_no_holder(
    lock: FileLock, monkeypatch: pytest.MonkeyPatch, then: OSError | None
) -> None:
    """The process that was listed ends before its number is opened, or the list cannot be read again."""
    descriptors = len(os.listdir("/proc/self/fd"))
    listed = iter([os.getpid()])

    def holder_of(*file: object) -> int | None:
        if (pid := next(listed, None)) is None and then is not None:
            raise then
        return pid

    monkeypatch.setattr(lock_holder, "holder_of", holder_of)
    assert LockHolder.find(lock) is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_without_pidfd_open_nobody_is_seen(lock: FileLock, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileLockHeld(lock.path):
        monkeypatch.delattr(os, "pidfd_open")
        assert LockHolder.find(lock) is None


# -- a side's workers


class Workers(SideWorkers):
    def __init__(self, folder: Path) -> None:
        self.ends = WorkerEnds()
        super().__init__(str(folder / "worker-"), self.ends, SideTasks("decode"))

    def come(self, pools: Sequence[wire.RankPool] = ()) -> Worker:
        worker = self.make("w", bytes(32), pools)
        self.enter(worker)
        return worker

    async def is_gone(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.ends.gone.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_workers, "PROOF_SECONDS", 0.01)
    monkeypatch.setattr(side_workers, "SETTLE_SECONDS", 0.01)


def test_a_lost_worker_that_lets_its_lock_go_is_gone(tmp_path: Path) -> None:
    async def story() -> None:
        workers = Workers(tmp_path)
        worker = workers.come(ON_A_GPU)
        with holding(worker.lock.path) as process:
            workers.attach(worker)
            workers.leave(worker)
            assert not await workers.is_gone(0.2)
            tell(process)
            assert heard(process) == "free\n"
            assert await workers.is_gone(10)
            assert worker.holder is None

    asyncio.run(story())
    assert not list(tmp_path.iterdir()), "its session file"


def test_a_lost_worker_that_is_killed_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the process that an operator may have to end."""
    caplog.set_level(logging.INFO)

    async def story() -> None:
        workers = Workers(tmp_path)
        worker = workers.come(ON_A_GPU)
        with holding(worker.lock.path) as process:
            workers.attach(worker)
            workers.leave(worker)
            assert f"worker w is lost: process {process.pid} may write" in caplog.text
            process.kill()
            assert await workers.is_gone(10)

    asyncio.run(story())
    assert "worker w, which was lost, writes no more" in caplog.text


def test_a_lost_worker_is_gone_a_while_behind_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was killed with it may have its GPU's driver still open; a standstill of the daemon is no wait."""
    monkeypatch.setattr(side_workers, "SETTLE_SECONDS", 1.6)
    stand_still = jumping_clock(monkeypatch)

    async def story() -> None:
        workers = Workers(tmp_path)
        worker = workers.come(ON_A_GPU)
        with holding(worker.lock.path) as process:
            workers.attach(worker)
            workers.leave(worker)
            process.kill()
            process.wait()
            await asyncio.sleep(0.1)
            assert worker.lets_go()
            stand_still(60.0)
            assert not await workers.is_gone(0.8)
            assert workers.lost == 1
            assert await workers.is_gone(10)

    asyncio.run(story())


def test_one_that_is_quiesced_is_gone_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        workers = Workers(tmp_path)
        worker = workers.come(ON_A_GPU)
        with FileLockHeld(worker.lock.path):
            workers.attach(worker)
            worker.quiesced = True
            workers.leave(worker)
            assert workers.ends.gone.is_set()

    asyncio.run(story())


class Ending:
    """A process that has let its files go, and has not ended."""

    pid = 1
    ended = closed = False

    def lives_on(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.closed = True


def test_a_process_that_is_about_to_end_may_write_although_its_lock_is_free(tmp_path: Path) -> None:
    async def story() -> None:
        workers = Workers(tmp_path)
        worker = workers.come()
        with FileLockHeld(worker.lock.path):
            workers.attach(worker)
            assert worker.holder is not None and worker.holder.pid == os.getpid()
            worker.holder.close()
            ending = worker.holder = cast(Any, Ending())
        workers.leave(worker)
        assert not await workers.is_gone(0.3)
        assert workers.lost == 1
        ending.ended = True
        assert await workers.is_gone(10)
        assert ending.closed and workers.lost == 0

    asyncio.run(story())


class FileLockHeld:
    """By this process."""

    def __init__(self, path: str) -> None:
        self._lock = FileLock.open(path)

    def __enter__(self) -> None:
        assert self._lock.try_acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.close()


def test_gpus_are_for_workers_whose_end_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockHolder, "find", staticmethod(lambda lock: None))
    workers = Workers(tmp_path)
    for pools in ([], [wire.RankPool(segment="s")]):
        worker = workers.come(pools)
        with FileLockHeld(worker.lock.path):
            workers.attach(worker)
            assert worker.attached
    worker = workers.come(ON_A_GPU)
    with FileLockHeld(worker.lock.path), pytest.raises(RequestError, match="run both in one PID namespace") as refusal:
        workers.attach(worker)
    for cause in ("pidfd_open", "seccomp", "--shm-dir", "/proc/locks"):
        assert cause in refusal.value.message
    assert not worker.attached
    workers.close()


def test_attached_is_believed_of_who_holds_the_lock(tmp_path: Path) -> None:
    """Its end is told by the lock, so pages of one without it would be given away while it may write them."""
    workers = Workers(tmp_path)
    worker = workers.come()
    with pytest.raises(RequestError, match="the session file is not locked"):
        workers.attach(worker)
    assert not worker.attached
    with FileLockHeld(worker.lock.path):  # the look has let it go again
        workers.attach(worker)
        assert worker.attached
    workers.close()


def test_who_says_attached_twice_is_looked_at_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    worker = workers.come(ON_A_GPU)
    with FileLockHeld(worker.lock.path):
        workers.attach(worker)
        holder = worker.holder
        workers.attach(worker)
        assert worker.holder is holder
    workers.close()
    assert worker.holder is None
