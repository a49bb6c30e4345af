"""The pool's shared memory as a worker holds it: the lock that proves the worker lives, and the mapping."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.segment import FileLock, Segment


class Attachment:
    """The lock on the session file, taken first, and the mapped segment.

    The kernel releases the lock when the process ends, however it ends: that is the daemon's proof that the worker
    writes no more. So the lock is held until the mapping is no longer used.
    """

    def __init__(self, session_file: str, segment: str, *, pages: int, page_bytes: int) -> None:
        """Raises OSError when a file cannot be opened, ValueError when it is locked or the segment too short."""
        self._lock = FileLock.open(session_file)
        try:
            if not self._lock.try_acquire():
                raise ValueError(f"session file {session_file} is locked by another process")
            self._segment = Segment.open(segment, pages * page_bytes)
        except BaseException:
            self._lock.close()
            raise
        self.pool: NDArray[np.uint8] = np.frombuffer(
            self._segment.buffer, dtype=np.uint8, count=pages * page_bytes
        ).reshape(pages, page_bytes)
        """The pages, uint8 of shape (pages, page_bytes), writable, shared with the daemon."""

    def close(self) -> None:
        """Lets the memory and then the lock go. The caller touches no page any more."""
        self.pool = np.empty((0, 0), dtype=np.uint8)
        # A view may still be alive somewhere: the mapping goes with the last one, and nothing writes through it.
        with contextlib.suppress(BufferError):
            self._segment.close()
        self._lock.close()
