"""The pool's shared memory as a worker holds it: the lock that proves the worker lives, and the mapping."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import numpy as np

from kvferry.client.engine_pools import EnginePools
from kvferry.client.rank_pools import RankPools
from kvferry.proto import common_pb2, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.transfer.mapping.segment import FileLock, Segment

_log = logging.getLogger(__name__)


class Attachment:
    """The lock on the session file, taken first, and the mapped segments.

    The kernel releases the lock when the process ends, however it ends: with that end it is the daemon's proof that the
    worker writes no more. So the lock is held until the mapping is no longer used.
    """

    def __init__(
        self, session_file: str, welcome: worker_pb2.Welcome, geometry: KVGeometry, own: EnginePools | None = None
    ) -> None:
        """`own`: memory that was registered as the pool; it ends with this. Raises OSError when a file cannot be
        opened, ValueError when it is locked, a segment is too short, or what the daemon says of its pools cannot be."""
        self._own = own
        self._segments: list[Segment] = []
        if own is not None:
            if geometry != own.pools.geometry or welcome.pages != own.pools.pages:
                raise ValueError(f"the daemon speaks of {welcome.pages} pages; {own.pools.pages} were registered")
            if welcome.block_tokens != own.message.block_tokens:
                raise ValueError(
                    f"block_tokens is {welcome.block_tokens}; {own.message.block_tokens} was registered: the daemon is "
                    "older than blocks, upgrade it"
                )
            self._lock = FileLock.open(session_file)
            self._take_lock()
            self.pools: RankPools = own.pools
            """The pages, writable, shared with the daemon."""
            return
        pools = list(welcome.rank_pools) or [worker_pb2.RankPool(segment=welcome.segment)]
        order = _order(welcome)
        nbytes = rank_geometry(geometry, len(pools)).page_bytes * welcome.pages
        on_gpus = [bool(pool.ipc_handle) for pool in pools]
        if any(on_gpus) and not all(on_gpus):
            raise ValueError("rank_pools: some lie on GPUs, others in shared memory")
        self._lock = FileLock.open(session_file)
        self._take_lock()
        try:
            if any(on_gpus):
                from kvferry.client.gpu_pools import GpuRankPools  # needs torch

                self.pools = GpuRankPools(geometry, order, welcome.pages, pools)
            else:
                self.pools = self._map(geometry, order, welcome.pages, pools, nbytes)
        except BaseException:
            self._unmap()
            self._lock.close()
            raise

    def _take_lock(self) -> None:
        if not self._lock.try_acquire():
            self._lock.close()
            raise ValueError(f"session file {self._lock.path} is locked by another process")

    def _map(
        self, geometry: KVGeometry, order: StorageOrder, pages: int, pools: list[worker_pb2.RankPool], nbytes: int
    ) -> RankPools:
        """The segments of all ranks."""
        for pool in pools:
            self._segments.append(Segment.open(pool.segment, pool.offset + nbytes))
        memories = [
            np.frombuffer(segment.buffer, np.uint8, nbytes, pool.offset)
            for segment, pool in zip(self._segments, pools, strict=True)
        ]
        return RankPools(geometry, order, pages, memories)

    @property
    def owns(self) -> bool:
        """The pool is memory of this worker's own."""
        return self._own is not None

    def close(self) -> None:
        """Lets the memory and then the lock go, behind what is queued on the devices. Where that fails the lock stays
        held to the end of this process, and the log says so. The caller touches no page any more."""
        self._close(self.pools.release if self._own is None else self._own.close)

    def close_mapped(self) -> None:
        """Closes what `close` closes, but for memory of the worker's own that the daemon may still have mapped."""
        assert self._own is not None
        self._close(self._own.close_mapped)

    def _close(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception as error:
            self._lock.keep()
            _log.error("what is queued on a device may still write pages: their lock stays while this lives: %s", error)
        finally:
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


def check_further(geometry: KVGeometry, said: common_pb2.Geometry) -> None:
    """ValueError where the daemon leaves out caches that the worker has said its pages have."""
    if len(geometry.further) != len(said.further):
        raise ValueError(
            f"geometry.further has {len(geometry.further)} entries; {len(said.further)} were said: the daemon is older "
            "than pages of several caches, upgrade it"
        )
