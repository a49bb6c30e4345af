"""The pool's shared memory as a worker holds it: the lock that proves the worker lives, and the mapping."""

from __future__ import annotations

import contextlib

import numpy as np

from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry import KVGeometry
from kvferry.transfer.lanes import rank_geometry
from kvferry.transfer.layouts import RankStorage, StorageOrder
from kvferry.transfer.segment import FileLock, Segment
from kvferry.workers.rank_pools import RankPools


class Attachment:
    """The lock on the session file, taken first, and the mapped segments.

    The kernel releases the lock when the process ends, however it ends: that is the daemon's proof that the worker
    writes no more. So the lock is held until the mapping is no longer used.
    """

    def __init__(self, session_file: str, welcome: worker_pb2.Welcome, geometry: KVGeometry) -> None:
        """Raises OSError when a file cannot be opened, ValueError when it is locked, a segment is too short, or what
        the daemon says of its pools cannot be."""
        pools = list(welcome.rank_pools) or [worker_pb2.RankPool(segment=welcome.segment)]
        order = _order(welcome)
        storage = RankStorage.make(rank_geometry(geometry, len(pools)), order, welcome.pages)
        if any(pool.ipc_handle for pool in pools):
            raise ValueError("rank_pools: they lie on GPUs; this worker maps shared memory")
        self._segments: list[Segment] = []
        self._lock = FileLock.open(session_file)
        try:
            if not self._lock.try_acquire():
                raise ValueError(f"session file {session_file} is locked by another process")
            for pool in pools:
                self._segments.append(Segment.open(pool.segment, pool.offset + storage.nbytes))
        except BaseException:
            self._unmap()
            self._lock.close()
            raise
        memories = [
            np.frombuffer(segment.buffer, np.uint8, storage.nbytes, pool.offset)
            for segment, pool in zip(self._segments, pools, strict=True)
        ]
        self.pools = RankPools(geometry, order, welcome.pages, memories)
        """The pages, writable, shared with the daemon."""

    def close(self) -> None:
        """Lets the memory and then the lock go. The caller touches no page any more."""
        self.pools.release()
        self._unmap()
        self._lock.close()

    def _unmap(self) -> None:
        for segment in self._segments:
            # A view may still be alive somewhere: the mapping goes with the last one, and nothing writes through it.
            with contextlib.suppress(BufferError):
                segment.close()
        self._segments.clear()


def _order(welcome: worker_pb2.Welcome) -> StorageOrder:
    storage = welcome.storage or common_pb2.STORAGE_PAGE_MAJOR
    known = {int(order) for order in StorageOrder}
    if int(storage) not in known:
        raise ValueError(f"storage is {storage}; it must be one of {sorted(known)}")
    return StorageOrder(storage)
