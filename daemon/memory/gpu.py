"""A pool on GPUs: on the device of each rank a plain allocation of the daemon, which workers map by CUDA IPC and which
outlives them; or allocations of an engine, which the daemon maps until that engine's end is proven.

Parts of pages are gathered into slots and scattered from them by kernels on two streams, pages are spilled and restored
on two others, so that none of the four waits for another. What a copy reads was finished before it is issued: a worker
reports pages only when its kernels have ended, and pages are told to a worker only when their copies have.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from kvferry._core import (
    GpuCopy,
    GpuCopyEngine,
    GpuError,
    GpuPages,
    GpuPinner,
    GpuUnavailable,
    PinnedBuffer,
)
from kvferry.daemon.memory.block_table import PLAIN_PAGES, BlockTable, PagePlaces, table_of
from kvferry.daemon.memory.gpu_completions import CopyEnds
from kvferry.daemon.memory.gpu_ranks import MappedRank, OwnRank, RankMemory, run_all
from kvferry.daemon.memory.interface import WHOLE, CopyEnd, ScatterEnd
from kvferry.daemon.memory.tier_lanes import TierBytes, TierLanes, clear_tails
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.courier.gpu_slots import GpuSlot
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.layouts import Int64s, RowMap
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane, rank_geometry
from kvferry.transfer.geometry.registration import Registration
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES

GATHERS = 2  # on a device: one runs, one is behind it
TIER_COPIES = 4  # in each direction: the bus has the next ones to do while one's kernel waits for room

log = logging.getLogger(__name__)


class GpuPartCopies:
    """The copies of one session."""

    def __init__(
        self,
        slot_of: Callable[[int], GpuSlot],
        ranks: list[RankMemory],
        lanes: list[tuple[int, RowMap, int]],
        ends: CopyEnds,
        places: PagePlaces = PLAIN_PAGES,
        tier: TierLanes[GpuPages] | None = None,
    ) -> None:
        """slot_of: of the session's direction. lanes: own rank, rows and cache of each. tier: the lanes in the host
        tier, of a session that sends. OSError: what they need on a device cannot be had."""
        self._places = places
        self._tier = tier
        self._slot_of = slot_of
        self._gathers_at_once = GATHERS * len(ranks)
        self._ends = ends
        self._sums = False
        try:
            self._lanes = [(ranks[rank].parts, ranks[rank].pages(rows), cache) for rank, rows, cache in lanes]
        except GpuError as error:
            raise OSError(f"tables of pages: {error}") from error

    @property
    def gathers_at_once(self) -> int:
        return self._gathers_at_once

    def begin_sums(self) -> None:
        try:
            for engine in {engine for engine, _, _ in self._lanes}:
                engine.prepare_sums()
        except GpuError as error:
            raise OSError(f"places of sums: {error}") from error
        self._sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        slot = self._slot_of(gather.send_slot)
        engine, rows, cache = self._lanes[gather.lane]
        places: PagePlaces = PLAIN_PAGES if gather.from_rows else self._places
        payload, ids = _payload(slot, gather.nbytes), places.of(gather.page_ids)
        last_bytes = places.last_bytes(gather.page_ids, cache)
        if self._sums:  # the GPU adds the sum to the header: nobody here has to wait for it first
            copy, header = engine.gather_part_summed, gather.header.with_sum(0).pack()
        else:
            copy, header = engine.gather_part, gather.header.pack()
        part = ids, gather.byte_offset, gather.nbytes, payload

        def begin() -> GpuCopy:
            return copy(self._of_tier(gather.lane) if gather.from_rows else rows, *part, None, header, last_bytes)

        issue(self._ends, begin, done, (engine, "gathers"))

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        slot = self._slot_of(scatter.slot)
        engine, rows, _ = self._lanes[scatter.lane]
        payload, ids = _payload(slot, scatter.nbytes), self._places.of(scatter.page_ids)
        part = rows, ids, scatter.byte_offset, scatter.nbytes, payload
        stream = engine, "scatters"
        if not self._sums:
            issue(self._ends, lambda: engine.scatter_part(*part), lambda problem: done(problem, None), stream)
            return
        copies: list[GpuCopy] = []

        def copy() -> GpuCopy:
            copies.append(engine.scatter_part_summed(*part))
            return copies[0]

        def ended(problem: str) -> None:
            payload_sum = None
            if not problem:
                try:
                    payload_sum = copies[0].checksum()
                except (GpuError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
            done(problem, payload_sum)

        issue(self._ends, copy, ended, stream)

    def _of_tier(self, lane: int) -> GpuPages:
        assert self._tier is not None, "a session that sends nothing was to send from the host tier"
        return self._tier.of(lane)

    def read_header(self, receive_slot: int) -> bytes:
        raise OSError(f"the header of receive slot {receive_slot}: it did not come with the notification")

    def close(self) -> None:
        """The slots are the link's, the tables of pages the pool's: nothing is freed."""
        self._lanes.clear()


def issue(ends: CopyEnds, copy: Callable[[], GpuCopy], done: CopyEnd, stream: Hashable = None) -> None:
    """Issues a copy, which `copy` begins; its end, or that it could not begin, is told to `done`. `stream`: as for
    `CopyEnds.issue`."""
    try:
        ends.issue(copy, done, stream)
    except (GpuError, ValueError, IndexError) as error:
        asyncio.get_running_loop().call_soon(done, f"{type(error).__name__}: {error}")


def _when_all(count: int, done: CopyEnd) -> CopyEnd:
    """An end to be told of so many ends; `done` is told of the last, with all that went wrong."""
    problems: list[str] = []

    def ended(problem: str) -> None:
        problems.append(problem)
        if len(problems) == count:
            done("; ".join(filter(None, problems)))

    return ended


def _payload(slot: GpuSlot, nbytes: int) -> int:
    """The address of the slot's payload. The state machines bound a part by its slot."""
    assert HEADER_BYTES + nbytes <= slot.nbytes, f"{nbytes} bytes for a slot of {slot.nbytes}"
    return slot.address + HEADER_BYTES


class RowsPinner:
    """Pins for all devices of the process, since the context of one of them stays: `interface.Pinner`."""

    def __init__(self, engine: GpuCopyEngine) -> None:
        self._pinner = GpuPinner(engine)

    def pin(self, memory: memoryview) -> PinnedBuffer:
        try:
            return self._pinner.pin(memory)
        except GpuError as error:
            raise OSError(f"{len(memory)} bytes are not pinned: {error}") from error


class GpuPoolMemory:
    """The memory of a pool on GPUs: see `kvferry.daemon.memory.interface.PoolMemory`."""

    def __init__(self, shape: PoolShape, ranks: list[RankMemory], table: BlockTable | None = None) -> None:
        """Use `create`."""
        self.shape = shape
        self.block_table = table
        self._places: PagePlaces = table or PLAIN_PAGES
        self._ranks = ranks
        self._ends = CopyEnds()
        self._rows: TierBytes | None = None
        if not self.can_sum:
            log.warning("the driver takes none of the kernels that copy: copies are slow, and checksums cannot be made")

    @staticmethod
    def create(shape: PoolShape, devices: Sequence[int]) -> GpuPoolMemory:
        """Makes the pool, rank i on device devices[i]. OSError where a device is missing or has too little memory."""
        assert len(devices) == shape.ranks, f"{len(devices)} devices for {shape.ranks} ranks"
        ranks: list[RankMemory] = []
        for ordinal in devices:
            try:
                ranks.append(OwnRank(shape.storages, shape.rank_bytes, ordinal))
            except (GpuUnavailable, GpuError) as error:
                raise OSError(f"cuda:{ordinal}: {error}") from error
        return GpuPoolMemory(shape, ranks)

    @staticmethod
    def map(registration: Registration, geometry: KVGeometry, devices: Sequence[int]) -> GpuPoolMemory:
        """An engine's allocations. OSError where a device is missing; ValueError where memory is not what was
        registered: it names the field."""
        own = rank_geometry(geometry, len(registration.ranks))
        ranks: list[MappedRank] = []
        try:
            for i, device in enumerate(devices):
                try:
                    ranks.append(MappedRank(i, registration, own, device))
                except (GpuUnavailable, GpuError) as error:
                    raise OSError(f"cuda:{device}: {error}") from error
            places = tuple(rank.storages for rank in ranks)
            shape = PoolShape(geometry, len(ranks), registration.order, registration.pages, places)
            return GpuPoolMemory(shape, list(ranks), table_of(registration, geometry))
        except BaseException:
            for made in ranks:
                made.close()
            raise

    @property
    def can_sum(self) -> bool:
        return all(rank.parts.has_kernels for rank in self._ranks)

    @property
    def workers(self) -> dict[str, Executor]:
        return {}  # its copies run on the devices

    @property
    def tier_copies(self) -> int:
        return TIER_COPIES

    def late_copies(self, now: float) -> dict[str, float]:
        return {"oldest copy on its GPUs": self._ends.oldest(now)}

    def rank_pools(self) -> list[wire.RankPool]:
        return [pool for rank in self._ranks for pool in rank.rank_pools()]

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> GpuPartCopies:
        rows = self.shape.sending_rows(lanes)
        own = [(lane.sender, each, lane.cache) for lane, each in zip(lanes, rows, strict=True)]
        tier = TierLanes(self.shape, lanes, lambda: self._rows, self._of_tier)
        return GpuPartCopies(link.gpu_slots.send_slot, self._ranks, own, self._ends, self._places, tier)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> GpuPartCopies:
        rows = self.shape.receiving_rows(lanes)
        own = [(lane.receiver, each, lane.cache) for lane, each in zip(lanes, rows, strict=True)]
        return GpuPartCopies(link.gpu_slots.receive_slot, self._ranks, own, self._ends, self._places)

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        if self.block_table is not None:
            self.block_table.cut(page, tokens)
            asyncio.get_running_loop().call_soon(done, "")
            return
        clearings = [(rank, clear) for rank in self._ranks for clear in rank.zero_tail(page, tokens)]
        ended = _when_all(len(clearings), done)
        for rank, clear in clearings:
            try:
                self._ends.issue(clear, ended)
            except (GpuError, ValueError) as error:
                raise OSError(f"cuda:{rank.ordinal}: {error}") from error

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        """A kernel for each cache, on the device of each rank."""
        clearings = [clear for rank in self._ranks for clear in rank.zero_pages(pages)]
        ended = _when_all(len(clearings), done)
        for clear in clearings:
            issue(self._ends, clear, ended)

    def pinner(self) -> RowsPinner:
        return RowsPinner(self._ranks[0].spills.engine)

    def attach_rows(self, rows: memoryview) -> None:
        self._rows = np.frombuffer(rows, np.uint8)

    def detach_rows(self) -> None:
        self._rows = None

    def spill(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        issues: list[Callable[[], GpuCopy]] = []
        for shard, part in itertools.product(self.shape.row_shards, parts):
            rank = self._ranks[shard.ranks[0]]
            to = {"row_stride": self.shape.row_bytes, "row_offset": shard.start}
            ids, whole = self._places.of(pages[part]), rank.whole[shard.cache]
            issues.append(partial(rank.spills.to_host, whole, ids, self._tier_rows, rows[part], **to))
        run_all(issues)
        clear_tails(self.shape, self.block_table, pages, np.frombuffer(self._tier_rows, np.uint8), rows)

    def restore(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        issues: list[Callable[[], GpuCopy]] = []
        for shard, part in itertools.product(self.shape.row_shards, parts):
            source = {"row_stride": self.shape.row_bytes, "row_offset": shard.start}
            for each in shard.ranks:
                rank = self._ranks[each]
                ids, whole = self._places.of(pages[part]), rank.whole[shard.cache]
                issues.append(partial(rank.restores.from_host, whole, ids, self._tier_rows, rows[part], **source))
        run_all(issues)

    def copy_statistics(self) -> CopyStatistics:
        copiers = [copies for rank in self._ranks for copies in (rank.spills, rank.restores)]
        return sum((copies.statistics() for copies in copiers), CopyStatistics())

    def stop(self) -> None:
        self._ends.stop()

    def close(self) -> None:
        self._ends.close()
        self.detach_rows()
        for rank in self._ranks:
            try:
                rank.close()
            except GpuError as error:
                log.error("cuda:%d: %s", rank.ordinal, error)
        self._ranks.clear()

    def _of_tier(self, lane: Lane, tier: TierBytes, rows: RowMap) -> GpuPages:
        return self._ranks[lane.sender].tier_pages(rows, tier.ctypes.data)

    @property
    def _tier_rows(self) -> memoryview:
        assert self._rows is not None, "there is no host tier"
        return self._rows.data
