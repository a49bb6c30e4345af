"""Named shared memory and the locks by which a process is known to live.

A daemon's files in `shm_dir` carry its incarnation: `kvferry-<32 hex digits>-<what>`. While it lives it holds an
exclusive flock on `kvferry-<incarnation>-lock`; files of an incarnation whose lock nobody holds were left by a dead
daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import time

UNFINISHED_SECONDS = 60.0  # a lock file that is being made has its lock long before

_OURS = re.compile(r"^kvferry-([0-9a-f]{32})-[a-z0-9-]{1,64}$")
_UNFINISHED = ".new"
_OUR_UNFINISHED = re.compile(rf"^kvferry-[0-9a-f]{{32}}-lock{re.escape(_UNFINISHED)}$")


class Segment:
    """A file of fixed size, mapped shared and writable."""

    def __init__(self, path: str, nbytes: int, fd: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.buffer = memoryview(self._map)
        """The bytes, writable."""

    @staticmethod
    def create(directory: str, name: str, nbytes: int) -> Segment:
        """A new file, 0600, its memory reserved now: where there is too little, OSError comes here and not a bus error
        later. FileExistsError where the name is taken, symbolic links included."""
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}; it must be at least 1")
        path = os.path.join(directory, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return Segment(path, nbytes, fd)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @staticmethod
    def open(path: str, nbytes: int) -> Segment:
        """Maps a file of at least `nbytes`. OSError, or ValueError where it is shorter."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < nbytes:
                raise ValueError(f"segment {path} has {size} bytes; {nbytes} are needed")
            return Segment(path, nbytes, fd)
        finally:
            os.close(fd)

    @staticmethod
    def open_within(directory: str, name: str, nbytes: int) -> Segment:
        """Maps a plain file that another process of this user made in `directory`, its memory reserved now. OSError, or
        ValueError where it is not a plain name, not this user's, or has other than `nbytes` bytes.
        """
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name[:128]!r} is not the plain name of a file")
        path = os.path.join(directory, name)
        # O_NONBLOCK: a named pipe would hold up whoever opens it.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is not a plain file")
            if found.st_uid != os.geteuid():
                raise ValueError(f"it belongs to user {found.st_uid}; it must be the daemon's, {os.geteuid()}")
            if found.st_size != nbytes:
                raise ValueError(f"it has {found.st_size} bytes; {nbytes} were registered")
            os.posix_fallocate(fd, 0, nbytes)
            return Segment(path, nbytes, fd)
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Removes the name; who has it mapped keeps the memory. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Unmaps. The memory stays while a view of `buffer` is alive."""
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()


class FileLock:
    """An exclusive flock on a file; the kernel releases it when its holder ends, however it ends: behind the holder's
    memory, and before or behind what it had open besides."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @staticmethod
    def create(path: str) -> FileLock:
        """A new file, 0600. FileExistsError where the name is taken."""
        return FileLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    @staticmethod
    def create_held(path: str) -> FileLock:
        """Creates the file as `create` does, but nobody ever sees it without its lock held."""
        lock = FileLock.create(f"{path}{_UNFINISHED}")  # `reclaim_stale` leaves it alone while it is young
        acquired = lock.try_acquire()
        assert acquired, "a file that was just made is locked by another"
        os.rename(lock.path, path)
        lock.path = path
        return lock

    @staticmethod
    def open(path: str) -> FileLock:
        """An existing file."""
        return FileLock(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))

    def try_acquire(self) -> bool:
        """Whether the lock is held now; False where another open file holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def identity(self) -> tuple[int, int]:
        """Device and inode of the file."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino

    def keep(self) -> None:
        """Leaves the lock held, where it is, to the end of this process: `close` does nothing any more."""
        self._fd = -1

    def close(self) -> None:
        """Releases the lock, too. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def unlink(self) -> None:
        """Removes the file. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def reclaim_stale(directory: str) -> list[str]:
    """Removes the files of daemons that are dead; returns their paths. Files without a lock file are left to a later
    call, since their daemon may be starting: the lock file is made first, and goes last. Lock files that were never
    finished go once they are old."""
    removed: list[str] = []
    by_owner: dict[str, list[str]] = {}
    for name in os.listdir(directory):
        found = _OURS.match(name)
        if found is not None:
            by_owner.setdefault(found.group(1), []).append(os.path.join(directory, name))
        elif _OUR_UNFINISHED.match(name) and _remove_unfinished(os.path.join(directory, name)):
            removed.append(os.path.join(directory, name))
    for owner, paths in by_owner.items():
        lock_path = os.path.join(directory, f"kvferry-{owner}-lock")
        try:
            lock = FileLock.open(lock_path)
        except OSError:  # not ours to open, or gone meanwhile
            continue
        try:
            if lock.try_acquire():
                for path in sorted(paths, key=lambda path: path == lock_path):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        removed.append(path)
        finally:
            lock.close()
    return removed


def _remove_unfinished(path: str) -> bool:
    """A lock file whose daemon died before it had its name."""
    with contextlib.suppress(OSError):
        lock = FileLock.open(path)
        try:
            if time.time() - os.lstat(path).st_mtime > UNFINISHED_SECONDS and lock.try_acquire():
                os.unlink(path)
                return True
        finally:
            lock.close()
    return False


def owned_files(directory: str, owner: bytes) -> list[str]:
    """The paths of the files of the daemon of that incarnation, but for its lock file."""
    prefix = f"kvferry-{owner.hex()}-"
    names = [name for name in os.listdir(directory) if name.startswith(prefix) and name != f"{prefix}lock"]
    return [os.path.join(directory, name) for name in sorted(names)]
