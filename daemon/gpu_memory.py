"""A pool on GPUs: on the device of each rank a plain allocation of the daemon, which workers map by CUDA IPC and which
outlives them.

Parts of pages are gathered into slots and scattered from them by kernels on two streams, pages are spilled and restored
on two others, so that none of the four waits for another. What a copy reads was finished before it is issued: a worker
reports pages only when its kernels have ended, and pages are told to a worker only when their copies have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuPages, GpuUnavailable, PinnedBuffer
from kvferry.daemon.copy_ends import CopyEnds
from kvferry.daemon.pool_memory import CopyEnd
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.copy_plan import GpuCopies
from kvferry.transfer.courier_link import CourierLink, GpuSlot
from kvferry.transfer.lanes import Lane
from kvferry.transfer.layouts import Int64s, RowMap
from kvferry.transfer.pool_shape import PoolShape
from kvferry.transfer.receiver import Scatter
from kvferry.transfer.sender import Gather
from kvferry.transfer.slots import HEADER_BYTES

GATHERS = 2  # on a device: one runs, one is behind it
COPY_SECONDS = 60.0  # for a spill or a restore: a device that takes longer is lost

log = logging.getLogger(__name__)


class RankMemory:
    """One rank's memory, and the engines that copy there. GpuUnavailable, GpuError."""

    def __init__(self, shape: PoolShape, ordinal: int) -> None:
        self.shape = shape
        self.ordinal = ordinal
        # Two, since an engine has one stream to the host: a restore, which a request waits for, is not behind spills.
        self.spills = GpuCopies(GpuCopyEngine(ordinal))
        self.restores = GpuCopies(GpuCopyEngine(ordinal))
        self.memory = self.spills.engine.allocate(shape.storage.nbytes)
        self.spills.engine.check_range(self.memory.address, shape.storage.nbytes)
        whole = shape.storage.rows()
        self.spilled = self.pages(self.spills.engine, whole)
        self.restored = self.pages(self.restores.engine, whole)
        self._planes = self.pages(self.parts, shape.storage.planes())

    @property
    def parts(self) -> GpuCopyEngine:
        """That gathers, scatters and clears."""
        return self.spills.engine

    def pages(self, engine: GpuCopyEngine, rows: RowMap) -> GpuPages:
        """These rows of the memory."""
        bases = np.ascontiguousarray(rows.offsets + self.memory.address)
        strides = np.ascontiguousarray(rows.strides)
        return engine.pages(bases, strides, rows.fragment_bytes, rows.pages, rows.pieces, rows.piece_stride)

    def zero_tail(self, page: int, tokens: int) -> None:
        """Before any gather that is issued later."""
        start = tokens * self.shape.storage.geometry.fragment_token_bytes
        self.parts.zero_page_from(self._planes, page, start, 0, self.parts.gather_stream)

    def rank_pool(self) -> wire.RankPool:
        nbytes = self.shape.storage.nbytes
        handle, offset = self.parts.export_memory(self.memory.address, nbytes)
        uuid = self.parts.device_uuid()
        return wire.RankPool(ipc_handle=handle, device=self.ordinal, device_uuid=uuid, nbytes=nbytes, offset=offset)


class GpuPartCopies:
    """Of one session."""

    def __init__(
        self,
        link: CourierLink,
        slot_of: Callable[[int], GpuSlot],
        ranks: list[RankMemory],
        lanes: list[tuple[int, RowMap]],
        ends: CopyEnds,
    ) -> None:
        """slot_of: of the session's direction. lanes: own rank and rows of each."""
        self._link = link
        self._slot_of = slot_of
        self._ranks = ranks
        self._lanes = [(ranks[rank].parts, ranks[rank].pages(ranks[rank].parts, rows)) for rank, rows in lanes]
        self._ends = ends

    @property
    def gathers_at_once(self) -> int:
        return GATHERS * len(self._ranks)

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        slot = self._slot_of(gather.send_slot)
        engine, rows = self._lanes[gather.lane]
        payload, ids = _payload(slot, gather.nbytes), np.asarray(gather.page_ids, np.int64)
        self._run(lambda: engine.gather_part(rows, ids, gather.byte_offset, gather.nbytes, payload), done)

    def scatter(self, scatter: Scatter, done: CopyEnd) -> None:
        slot = self._slot_of(scatter.slot)
        engine, rows = self._lanes[scatter.lane]
        payload, ids = _payload(slot, scatter.nbytes), np.asarray(scatter.page_ids, np.int64)
        self._run(lambda: engine.scatter_part(rows, ids, scatter.byte_offset, scatter.nbytes, payload), done)

    def write_header(self, send_slot: int, header: bytes) -> None:
        self._link.write_header(send_slot, header)

    def read_header(self, receive_slot: int) -> bytes:
        return self._link.read_header(receive_slot, HEADER_BYTES)

    def close(self) -> None:
        """The slots are the link's."""

    def _run(self, issue: Callable[[], GpuCopy], done: CopyEnd) -> None:
        try:
            self._ends.add(issue(), done)
        except (GpuError, ValueError, IndexError) as error:
            asyncio.get_running_loop().call_soon(done, f"{type(error).__name__}: {error}")


def _payload(slot: GpuSlot, nbytes: int) -> int:
    """Its address. The state machines bound a part by its slot."""
    assert HEADER_BYTES + nbytes <= slot.nbytes, f"{nbytes} bytes for a slot of {slot.nbytes}"
    return slot.address + HEADER_BYTES


class GpuPoolMemory:
    """See `kvferry.daemon.pool_memory.PoolMemory`."""

    def __init__(self, shape: PoolShape, ranks: list[RankMemory]) -> None:
        """Use `create`."""
        self.shape = shape
        self._ranks = ranks
        self._ends = CopyEnds()
        self._rows: memoryview | None = None
        self._pinned: PinnedBuffer | None = None

    @staticmethod
    def create(shape: PoolShape, devices: Sequence[int]) -> GpuPoolMemory:
        """Rank i on device devices[i]. OSError where a device is missing or has too little memory."""
        assert len(devices) == shape.ranks, f"{len(devices)} devices for {shape.ranks} ranks"
        ranks: list[RankMemory] = []
        for ordinal in devices:
            try:
                ranks.append(RankMemory(shape, ordinal))
            except (GpuUnavailable, GpuError) as error:
                raise OSError(f"cuda:{ordinal}: {error}") from error
        return GpuPoolMemory(shape, ranks)

    @property
    def workers(self) -> dict[str, Executor]:
        return {}  # its copies run on the devices

    def rank_pools(self) -> list[wire.RankPool]:
        return [rank.rank_pool() for rank in self._ranks]

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> GpuPartCopies:
        rows = self.shape.sending_rows(lanes)
        own = [(lane.sender, each) for lane, each in zip(lanes, rows, strict=True)]
        return GpuPartCopies(link, link.send_gpu_slot, self._ranks, own, self._ends)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> GpuPartCopies:
        rows = self.shape.receiving_rows(lanes)
        own = [(lane.receiver, each) for lane, each in zip(lanes, rows, strict=True)]
        return GpuPartCopies(link, link.receive_gpu_slot, self._ranks, own, self._ends)

    def zero_tail(self, page: int, tokens: int) -> None:
        for rank in self._ranks:
            rank.zero_tail(page, tokens)

    def attach_rows(self, rows: memoryview) -> None:
        self._rows = rows
        try:
            self._pinned = PinnedBuffer(self._ranks[0].spills.engine, rows)  # for all devices of the process
        except GpuError as error:
            log.warning("the host tier is not pinned, its copies will be slow: %s", error)

    def detach_rows(self) -> None:
        self._pinned = None
        self._rows = None

    def spill(self, pages: Int64s, rows: Int64s) -> None:
        copies: list[GpuCopy] = []
        for shard in self.shape.row_shards:
            rank = self._ranks[shard.ranks[0]]
            to = {"row_stride": self.shape.row_bytes, "row_offset": shard.start}
            copies.append(rank.spills.to_host(rank.spilled, pages, self._host_rows, rows, **to))
        _wait(copies)

    def restore(self, pages: Int64s, rows: Int64s) -> None:
        copies: list[GpuCopy] = []
        for shard in self.shape.row_shards:
            source = {"row_stride": self.shape.row_bytes, "row_offset": shard.start}
            for each in shard.ranks:
                rank = self._ranks[each]
                copies.append(rank.restores.from_host(rank.restored, pages, self._host_rows, rows, **source))
        _wait(copies)

    def close(self) -> None:
        self._ends.close()
        self.detach_rows()
        self._ranks.clear()

    @property
    def _host_rows(self) -> memoryview:
        assert self._rows is not None, "there is no host tier"
        return self._rows


def _wait(copies: list[GpuCopy]) -> None:
    """For all of them, also when one failed: after that none touches its memory. OSError: one did."""
    problem: GpuError | None = None
    for copy in copies:
        try:
            if not copy.wait_for(COPY_SECONDS):
                log.error("a copy between the tiers takes more than %g s; waiting on", COPY_SECONDS)
                copy.wait()
        except GpuError as error:
            problem = error
    if problem is not None:
        raise OSError(str(problem)) from problem
