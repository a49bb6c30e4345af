"""The process that holds a file's lock: a worker, or a daemon. When such a process is killed, the kernel may let the
lock go long before the driver of a GPU ends what the process had queued there (bench/gpu/proofs.py, `unlocked`); its
end comes behind both, unless a child shares the driver's open files (docs/internals/orders.md)."""

from __future__ import annotations

import contextlib
import errno
import os
import select

from kvferry.transfer.mapping.segment import FileLock

LOCKS = "/proc/locks"  # proc(5)
_LOOKS = 5  # a listing that is read in pieces (80 locks are one) lacks a lock now and then while others come and go
_EXITING = 0x4  # of a thread's flags: PF_EXITING, which is set before its memory and its files are let go
_FLAGS = 6  # their field in a thread's `stat`, behind its name


class LockHolder:
    """The process that holds a lock; owns a descriptor of it."""

    def __init__(self, pid: int) -> None:
        """OSError: it has ended, cannot be seen from here, or there is no pidfd_open."""
        if not hasattr(os, "pidfd_open"):  # Python was built for an older kernel
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)

    @staticmethod
    def find(lock: FileLock) -> LockHolder | None:
        """The holder of the lock; None where that is nobody who can be seen from here."""
        with contextlib.suppress(OSError):
            device, inode = lock.identity()
            if (pid := _listed(device, inode)) is not None:
                holder = LockHolder(pid)
                with contextlib.suppress(OSError):
                    if _listed(device, inode) == pid:
                        return holder
                holder.close()  # the number may have become another process's meanwhile
        return None

    def has_ended(self) -> bool:
        """Whether all its files are closed, a GPU's driver among them: no copy or kernel of it runs."""
        return bool(self._end.poll(0))

    def lives_on(self) -> bool:
        """Whether it is not about to end: a lock that was found free before was let go of on purpose."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{thread}/stat") as stat:
                    if not flags_of(stat.read()) & _EXITING:
                        return not self.has_ended()  # else it may be another one's number by now
        return False

    def close(self) -> None:
        os.close(self._fd)


def _listed(device: int, inode: int) -> int | None:
    """The process that holds the flock on this file, where it is listed. OSError."""
    for _ in range(_LOOKS):
        with open(LOCKS) as locks:
            pid = holder_of(locks.read(), device, inode)
        if pid is not None:
            return pid
    return None


def holder_of(locks: str, device: int, inode: int) -> int | None:
    """The process that holds the flock on this file, of a listing of /proc/locks."""
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == file:
            return int(fields[4])
    return None


def flags_of(stat: str) -> int:
    return int(stat.rpartition(")")[2].split()[_FLAGS])
