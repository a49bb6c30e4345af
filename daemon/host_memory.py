"""A pool in shared memory, a segment for each rank; copies by memcpy: small ones at once, large ones on the copy
threads that it owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry.daemon.pool_memory import CopyEnd
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.courier_link import CourierLink
from kvferry.transfer.lanes import Lane
from kvferry.transfer.layouts import Int64s, RowMap
from kvferry.transfer.pool_shape import PoolShape, RowShard
from kvferry.transfer.receiver import Scatter
from kvferry.transfer.segment import Segment
from kvferry.transfer.sender import Gather
from kvferry.transfer.slots import HEADER_BYTES

INLINE_BYTES = 256 * 1024  # below it the hop to a thread costs more than the copy


class RankRows:
    """Rows of one rank's memory, to be copied part by part."""

    def __init__(self, pool: memoryview, rows: RowMap) -> None:
        """ValueError where the rows do not lie in the pool."""
        if rows.end > len(pool):
            raise ValueError(f"rows end at byte {rows.end}; the pool has {len(pool)}")
        self._pool = pool
        self._rows = rows
        self._address = np.frombuffer(pool, np.uint8).ctypes.data
        one_row = rows.fragments == 1 and int(rows.offsets[0]) == 0 and int(rows.strides[0]) == rows.row_bytes
        self._contiguous = one_row

    def gather(self, slot: memoryview, page_ids: Sequence[int], byte_offset: int, nbytes: int) -> None:
        """A part of these pages' rows -> behind the slot's header."""
        if self._contiguous:
            ids = np.asarray(page_ids, np.int64)
            _core.gather_pages(slot, HEADER_BYTES, self._pool, ids, self._rows.row_bytes, byte_offset, nbytes)
            return
        memory, payload, sizes = self._runs(slot, page_ids, byte_offset, nbytes)
        _core.copy_list(payload, memory, sizes)

    def scatter(self, slot: memoryview, page_ids: Sequence[int], byte_offset: int, nbytes: int) -> None:
        """The reverse."""
        if self._contiguous:
            ids = np.asarray(page_ids, np.int64)
            _core.scatter_pages(self._pool, ids, self._rows.row_bytes, byte_offset, slot, HEADER_BYTES, nbytes)
            return
        memory, payload, sizes = self._runs(slot, page_ids, byte_offset, nbytes)
        _core.copy_list(memory, payload, sizes)

    def _runs(
        self, slot: memoryview, page_ids: Sequence[int], byte_offset: int, nbytes: int
    ) -> tuple[Int64s, Int64s, Int64s]:
        if HEADER_BYTES + nbytes > len(slot):
            raise ValueError(f"nbytes is {nbytes}; the slot has room for {len(slot) - HEADER_BYTES}")
        runs = self._rows.part(page_ids, byte_offset, nbytes)
        payload = np.frombuffer(slot, np.uint8).ctypes.data + HEADER_BYTES
        return self._address + runs.memory, payload + runs.stream, runs.sizes


class HostPartCopies:
    """Of one session."""

    def __init__(self, link: CourierLink, lanes: list[RankRows], executor: ThreadPoolExecutor) -> None:
        self._link = link
        self._lanes = lanes
        self._executor = executor

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        slot, rows = self._link.send_slot(gather.send_slot), self._lanes[gather.lane]

        def copy() -> None:
            rows.gather(slot, gather.page_ids, gather.byte_offset, gather.nbytes)

        self._run(copy, gather.nbytes, done)

    def scatter(self, scatter: Scatter, done: CopyEnd) -> None:
        slot, rows = self._link.receive_slot(scatter.slot), self._lanes[scatter.lane]

        def copy() -> None:
            rows.scatter(slot, scatter.page_ids, scatter.byte_offset, scatter.nbytes)

        self._run(copy, scatter.nbytes, done)

    def write_header(self, send_slot: int, header: bytes) -> None:
        self._link.send_slot(send_slot)[:HEADER_BYTES] = header

    def read_header(self, receive_slot: int) -> memoryview:
        return self._link.receive_slot(receive_slot)[:HEADER_BYTES]

    def close(self) -> None:
        """The slots are the link's."""

    def _run(self, copy: Callable[[], None], nbytes: int, done: CopyEnd) -> None:
        loop = asyncio.get_running_loop()
        if nbytes <= INLINE_BYTES:
            # Its completion comes later all the same: callers may hold a state machine half-way.
            loop.call_soon(done, _attempt(copy))
        else:
            future = loop.run_in_executor(self._executor, _attempt, copy)
            future.add_done_callback(lambda finished: done(finished.result()))


class HostPoolMemory:
    """See `kvferry.daemon.pool_memory.PoolMemory`."""

    def __init__(self, shape: PoolShape, segments: list[Segment], threads: int) -> None:
        """Use `create`."""
        self.shape = shape
        self._segments = segments
        self._memory = [np.frombuffer(segment.buffer, np.uint8) for segment in segments]
        self._host: NDArray[np.uint8] | None = None
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvferry-copy")

    @staticmethod
    def create(shape: PoolShape, directory: str, stem: str, threads: int) -> HostPoolMemory:
        """Segments `stem`, or `stem`-RANK for more than one rank. OSError where there is too little memory."""
        segments: list[Segment] = []
        try:
            for rank in range(shape.ranks):
                name = f"{stem}-{rank}" if shape.ranks > 1 else stem
                segments.append(Segment.create(directory, name, shape.storage.nbytes))
        except BaseException:
            for segment in segments:
                segment.unlink()
                segment.close()
            raise
        return HostPoolMemory(shape, segments, threads)

    def rank_pools(self) -> list[wire.RankPool]:
        return [wire.RankPool(segment=segment.path, nbytes=segment.nbytes) for segment in self._segments]

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> HostPartCopies:
        rows = zip(lanes, self.shape.sending_rows(lanes), strict=True)
        ranks = [RankRows(self._segments[lane.sender].buffer, each) for lane, each in rows]
        return HostPartCopies(link, ranks, self._executor)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> HostPartCopies:
        rows = zip(lanes, self.shape.receiving_rows(lanes), strict=True)
        ranks = [RankRows(self._segments[lane.receiver].buffer, each) for lane, each in rows]
        return HostPartCopies(link, ranks, self._executor)

    def zero_tail(self, page: int, tokens: int) -> None:
        tail = self.shape.storage.tail(tokens)
        for memory in self._memory:
            for start in tail.fragments_of([page])[0].tolist():
                memory[start : start + tail.fragment_bytes] = 0

    def attach_rows(self, rows: memoryview) -> None:
        self._host = np.frombuffer(rows, np.uint8)

    def detach_rows(self) -> None:
        self._host = None

    def spill(self, pages: Int64s, rows: Int64s) -> None:
        for shard in self.shape.row_shards:
            host, sizes = self._host_runs(shard, rows)
            _core.copy_list(host, self._pool_runs(shard, shard.ranks[0], pages), sizes, self._threads)

    def restore(self, pages: Int64s, rows: Int64s) -> None:
        for shard in self.shape.row_shards:
            host, sizes = self._host_runs(shard, rows)
            for rank in shard.ranks:
                _core.copy_list(self._pool_runs(shard, rank, pages), host, sizes, self._threads)

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        self._memory.clear()
        for segment in self._segments:
            segment.unlink()
            segment.close()
        self._segments.clear()

    def _host_runs(self, shard: RowShard, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Addresses and sizes of the shard's fragments in these rows."""
        assert self._host is not None, "there is no host tier"
        count = len(self._host) // self.shape.row_bytes
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            raise ValueError(f"rows are {int(rows.min())} to {int(rows.max())}; they must be 0 to {count - 1}")
        size = shard.rows.fragment_bytes
        fragments = np.arange(shard.rows.fragments, dtype=np.int64) * size
        starts = self._host.ctypes.data + rows * self.shape.row_bytes + shard.start
        at = (starts[:, None] + fragments).ravel()
        return at, np.full(len(at), size, np.int64)

    def _pool_runs(self, shard: RowShard, rank: int, pages: Int64s) -> Int64s:
        found: Int64s = (self._memory[rank].ctypes.data + shard.rows.fragments_of(pages)).ravel()
        return found


def _attempt(copy: Callable[[], None]) -> str:
    try:
        copy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
