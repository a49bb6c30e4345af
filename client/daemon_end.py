"""The proof that a daemon copies nothing any more from an engine's blocks, nor into them.

Its own word is one: that it has unmapped them, or that it maps them anew. Where that cannot come, since it was killed,
the end of its process is. While it stands still there is none: its copies may go on.
"""

from __future__ import annotations

import asyncio
import logging
import os

from kvferry.proto import worker_pb2
from kvferry.transfer.mapping.lock_holder import LockHolder
from kvferry.transfer.mapping.segment import FileLock

LOOK_SECONDS = 0.02
GRACE_SECONDS = 1.0  # behind its lock, where its process cannot be seen
LATE_SECONDS = 10.0  # after which the log says that the proof is awaited, again and again

_log = logging.getLogger(__name__)


class DaemonEnd:
    """The proof of one daemon's end, as far as one session goes. All methods belong to one event loop."""

    def __init__(self, welcome: worker_pb2.Welcome) -> None:
        """OSError where the daemon's lock cannot be opened."""
        folder = os.path.dirname(welcome.session_file)
        self._daemon = welcome.daemon
        self._lock: FileLock | None = FileLock.open(os.path.join(folder, f"kvferry-{welcome.incarnation.hex()}-lock"))
        self._holder = LockHolder.find(self._lock)
        self._free_since: float | None = None

    @property
    def proven(self) -> bool:
        """Whether there is the proof."""
        if self._lock is not None and self._has_ended(self._lock):
            self.prove()
        return self._lock is None

    def prove(self) -> None:
        """The daemon itself has said so. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
            if self._holder is not None:
                self._holder.close()

    async def wait(self) -> None:
        """Waits for the proof, however long it takes."""
        loop = asyncio.get_running_loop()
        late = loop.time() + LATE_SECONDS
        while not self.proven:
            if loop.time() >= late:
                _log.error(
                    "daemon %r is gone and its process has not ended: blocks that it may still write stay its own",
                    self._daemon,
                )
                late = loop.time() + LATE_SECONDS
            await asyncio.sleep(LOOK_SECONDS)

    def _has_ended(self, lock: FileLock) -> bool:
        if self._holder is not None:
            return self._holder.has_ended()
        now = asyncio.get_running_loop().time()
        if self._free_since is None and lock.try_acquire():
            self._free_since = now
        return self._free_since is not None and now - self._free_since >= GRACE_SECONDS
