"""The pool's shared memory as a worker holds it: the lock that proves the worker lives, and the mapping."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray


class Attachment:
    """The lock on the session file, taken first, and the mapped segment.

    The kernel releases the lock when the process ends, however it ends: that is the daemon's proof that the worker
    writes no more. So the file stays open until the mapping is no longer used.
    """

    def __init__(self, session_file: str, segment: str, *, pages: int, page_bytes: int) -> None:
        """Raises OSError when a file cannot be opened or locked, ValueError when the segment is too short."""
        self._session_fd = os.open(session_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._session_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = _map_segment(segment, pages * page_bytes)
        except BaseException:
            os.close(self._session_fd)
            raise
        self.pool: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, count=pages * page_bytes).reshape(
            pages, page_bytes
        )
        """The pages, uint8 of shape (pages, page_bytes), writable, shared with the daemon."""

    def close(self) -> None:
        """Lets the memory and then the lock go. The caller touches no page any more."""
        self.pool = np.empty((0, 0), dtype=np.uint8)
        # A view may still be alive somewhere: the mapping goes with the last one, and nothing writes through it.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._session_fd)


def _map_segment(path: str, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            raise ValueError(f"segment {path} has {status.st_size} bytes; the pool needs {nbytes}")
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
