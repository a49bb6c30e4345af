"""The process that holds a file's lock: a worker. When such a process is killed, the kernel may let the lock go long
before the driver of a GPU ends what the process had queued there (bench/gpu/proofs.py, `unlocked`); its end comes
behind both."""

from __future__ import annotations

import contextlib
import os
import select

from kvferry.transfer.segment import FileLock

LOCKS = "/proc/locks"  # proc(5)
_LOOKS = 3  # a listing may lack a lock while others come and go
_EXITING = 0x4  # of a thread's flags: PF_EXITING, which is set before its memory and its files are let go
_FLAGS = 6  # their field in a thread's `stat`, behind its name


class LockHolder:
    """Owns a descriptor of the process."""

    def __init__(self, pid: int) -> None:
        """OSError: it has ended, or cannot be seen from here."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)

    @staticmethod
    def find(lock: FileLock) -> LockHolder | None:
        """None where the lock is nobody's that is in this PID namespace."""
        with contextlib.suppress(OSError):
            device, inode = lock.identity()
            for _ in range(_LOOKS):
                with open(LOCKS) as locks:
                    pid = holder_of(locks.read(), device, inode)
                if pid is not None:
                    return LockHolder(pid)
        return None

    def has_ended(self) -> bool:
        """All its files are closed, a GPU's driver among them: no copy or kernel of it runs."""
        return bool(self._end.poll(0))

    def lives_on(self) -> bool:
        """It is not about to end: a lock that was found free before was let go of on purpose."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{thread}/stat") as stat:
                    if not flags_of(stat.read()) & _EXITING:
                        return not self.has_ended()  # else it may be another one's number by now
        return False

    def close(self) -> None:
        os.close(self._fd)


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
