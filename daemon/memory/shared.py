"""A pool in shared memory, a segment for each rank, the daemon's own or an engine's; copies by memcpy: small ones at
once, large ones on the copy threads that it owns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry.daemon.memory.block_table import PLAIN_PAGES, BlockTable, PagePlaces, table_of
from kvferry.daemon.memory.copy_threads import CopyThreads, attempt
from kvferry.daemon.memory.interface import WHOLE, CopyEnd, ScatterEnd
from kvferry.daemon.memory.tier_lanes import TierLanes, clear_tails
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.courier.host_slots import HostSlots
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.layouts import Int64s, RankStorage, RowMap, Storages
from kvferry.transfer.geometry.pool_shape import PoolShape, RowShard
from kvferry.transfer.geometry.rank_lanes import Lane, rank_geometry
from kvferry.transfer.geometry.registration import Registration, SharedFile
from kvferry.transfer.host_tier.copy_strategies import AUTO, ENVIRONMENT, MEMCPY, CopyStatistics, StrategyCounts
from kvferry.transfer.mapping.segment import Segment
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES

INLINE_BYTES = 256 * 1024  # below it the hop to a thread costs more than the copy


def host_pages(pool: memoryview, rows: RowMap) -> _core.HostPages:
    """These rows of a rank's memory, to be copied part by part. ValueError where they do not lie in it."""
    bounds = (rows.pieces, rows.piece_stride, rows.fragment_bytes, rows.pages, rows.in_blocks)
    return _core.HostPages(pool, rows.offsets, rows.strides, *bounds)


class LanePages(NamedTuple):
    """A lane's rows in this side's memory."""

    rows: _core.HostPages
    cache: int


class SharedPartCopies:
    """The copies of one session."""

    def __init__(
        self,
        slots: HostSlots,
        lanes: list[LanePages],
        threads: CopyThreads,
        places: PagePlaces,
        tier: TierLanes[_core.HostPages] | None = None,
    ) -> None:
        """tier: the lanes in the host tier, of a session that sends."""
        self._places = places
        self._tier = tier
        self._slots = slots
        self._lanes = lanes
        self._threads = threads
        self._sums = False

    @property
    def gathers_at_once(self) -> int:
        return self._threads.count + 1

    def begin_sums(self) -> None:
        self._sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        slot, (rows, cache) = self._slots.send_slot(gather.send_slot), self._lanes[gather.lane]
        places = self._places
        if gather.from_rows:
            assert self._tier is not None, "a session that sends nothing was to send from the host tier"
            rows, places = self._tier.of(gather.lane), PLAIN_PAGES

        def copy() -> None:
            ids, header = places.of(gather.page_ids), gather.header
            last_bytes = places.last_bytes(gather.page_ids, cache)
            part = ids, gather.byte_offset, gather.nbytes, slot, HEADER_BYTES, 1, last_bytes
            if self._sums:
                header = header.with_sum(rows.gather_part_summed(*part))
            else:
                rows.gather_part(*part)
            slot[:HEADER_BYTES] = header.pack()

        self._run(copy, gather.nbytes, done)

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        slot, rows = self._slots.receive_slot(scatter.slot), self._lanes[scatter.lane].rows
        payload_sum: int | None = None

        def copy() -> None:
            nonlocal payload_sum
            part = self._places.of(scatter.page_ids), scatter.byte_offset, scatter.nbytes, slot, HEADER_BYTES
            if self._sums:
                payload_sum = rows.scatter_part_summed(*part)
            else:
                rows.scatter_part(*part)

        self._run(copy, scatter.nbytes, lambda problem: done(problem, payload_sum))

    def read_header(self, receive_slot: int) -> bytes:
        return bytes(self._slots.receive_slot(receive_slot)[:HEADER_BYTES])

    def close(self) -> None:
        for lane in self._lanes:
            lane.rows.close()
        for rows in self._tier.made if self._tier is not None else ():
            rows.close()

    def _run(self, copy: Callable[[], None], nbytes: int, done: CopyEnd) -> None:
        if nbytes <= INLINE_BYTES:
            # Its completion comes later all the same: callers may hold a state machine half-way.
            asyncio.get_running_loop().call_soon(done, attempt(copy))
        else:
            self._threads.run(copy).add_done_callback(lambda finished: done(finished.result()))


class SharedPoolMemory:
    """The memory of a pool in shared memory: see `kvferry.daemon.memory.interface.PoolMemory`."""

    def __init__(
        self, shape: PoolShape, segments: list[Segment], threads: int, table: BlockTable | None = None
    ) -> None:
        """Use `create`."""
        self.shape = shape
        self.block_table = table
        self._places: PagePlaces = table or PLAIN_PAGES
        self._segments = segments
        self._memory = [np.frombuffer(segment.buffer, np.uint8) for segment in segments]
        self._planes = [  # and bytes of a token there; none of blocks, of which nothing is cleared
            (host_pages(segment.buffer, storage.planes()), storage.geometry.fragment_token_bytes)
            for rank, segment in enumerate(segments)
            for storage in shape.storages_of(rank)
            if isinstance(storage, RankStorage)
        ]
        self._tier_rows: NDArray[np.uint8] | None = None
        self._threads = CopyThreads(threads)
        self._counts = StrategyCounts()
        self._counting = threading.Lock()  # a spill and a restore may run at the same time

    @staticmethod
    def create(shape: PoolShape, directory: str, stem: str, threads: int) -> SharedPoolMemory:
        """Makes the pool in segments `stem`, or `stem`-RANK for more than one rank. OSError where there is too little
        memory."""
        segments: list[Segment] = []
        try:
            for rank in range(shape.ranks):
                name = f"{stem}-{rank}" if shape.ranks > 1 else stem
                segments.append(Segment.create(directory, name, shape.rank_bytes))
            return SharedPoolMemory(shape, segments, threads)
        except BaseException:
            for segment in segments:
                segment.unlink()
                segment.close()
            raise

    @staticmethod
    def map(registration: Registration, geometry: KVGeometry, directory: str, threads: int) -> SharedPoolMemory:
        """An engine's files in `directory`. OSError where one cannot be mapped, ValueError where one is not what it
        must be: they name the field.
        """
        segments: list[Segment] = []
        places: list[Storages] = []
        own = rank_geometry(geometry, len(registration.ranks))
        try:
            for i, rank in enumerate(registration.ranks):
                memory = rank.memories[0]
                assert isinstance(memory.source, SharedFile), "a pool in shared memory is of files"
                try:
                    segments.append(Segment.open_within(directory, memory.source.name, memory.nbytes))
                except (OSError, ValueError) as error:
                    kind = OSError if isinstance(error, OSError) else ValueError
                    raise kind(f"pool.ranks[{i}].memories[0].file.name {memory.source.name!r}: {error}") from error
                places.append(registration.storages(i, own, [0]))
            shape = PoolShape(geometry, len(segments), registration.order, registration.pages, tuple(places))
            return SharedPoolMemory(shape, segments, threads, table_of(registration, geometry))
        except BaseException:
            for segment in segments:
                segment.close()
            raise

    @property
    def can_sum(self) -> bool:
        return True

    @property
    def workers(self) -> dict[str, Executor]:
        return {"copy worker": self._threads.executor}

    @property
    def tier_copies(self) -> int:
        return 1  # each is by `threads` threads

    def late_copies(self, now: float) -> dict[str, float]:
        return {"oldest copy on the copy threads": self._threads.oldest(now)}

    def rank_pools(self) -> list[wire.RankPool]:
        if self.shape.places:
            return []  # the engine's own
        return [wire.RankPool(segment=segment.path, nbytes=segment.nbytes) for segment in self._segments]

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> SharedPartCopies:
        rows = zip(lanes, self.shape.sending_rows(lanes), strict=True)
        ranks = [LanePages(host_pages(self._segments[lane.sender].buffer, each), lane.cache) for lane, each in rows]
        tier = TierLanes(self.shape, lanes, lambda: self._tier_rows, lambda _, tier, each: host_pages(tier.data, each))
        return SharedPartCopies(link.host_slots, ranks, self._threads, self._places, tier)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> SharedPartCopies:
        rows = zip(lanes, self.shape.receiving_rows(lanes), strict=True)
        ranks = [LanePages(host_pages(self._segments[lane.receiver].buffer, each), lane.cache) for lane, each in rows]
        return SharedPartCopies(link.host_slots, ranks, self._threads, self._places)

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        if self.block_table is not None:
            self.block_table.cut(page, tokens)
        for planes, token_bytes in self._planes:
            planes.zero_page_from(page, tokens * token_bytes)
        asyncio.get_running_loop().call_soon(done, "")

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        """Clears them on the copy threads, an equal share on each, behind what they do already."""
        shares = [share for share in np.array_split(pages, self._threads.count) if len(share)]
        copies = [self._threads.run(partial(self._zero, share)) for share in shares]
        together = asyncio.gather(*copies)
        together.add_done_callback(lambda ended: done("; ".join(filter(None, ended.result()))))

    def _zero(self, pages: Int64s) -> None:
        for planes, _ in self._planes:
            for page in pages.tolist():
                self._threads.step()
                planes.zero_page_from(page, 0)

    def pinner(self) -> None:
        """Copies in host memory need no pins."""

    def attach_rows(self, rows: memoryview) -> None:
        self._tier_rows = np.frombuffer(rows, np.uint8)

    def detach_rows(self) -> None:
        self._tier_rows = None

    def spill(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        for shard in self.shape.row_shards:
            tier, sizes = self._tier_runs(shard, shard.ranks[0], rows)
            pool, there = self._pool_runs(shard, shard.ranks[0], pages)
            assert there.all(), "a block that is not there was to be spilled"
            _core.copy_list(tier, pool, sizes, self._threads.count)
            self._count(sizes)
        assert self._tier_rows is not None
        clear_tails(self.shape, self.block_table, pages, self._tier_rows, rows)

    def restore(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        for shard in self.shape.row_shards:
            for rank in shard.ranks:
                tier, sizes = self._tier_runs(shard, rank, rows)
                pool, there = self._pool_runs(shard, rank, pages)
                _core.copy_list(pool[there], tier[there], sizes[there], self._threads.count)
                self._count(sizes[there])

    def copy_statistics(self) -> CopyStatistics:
        forced = MEMCPY if os.environ.get(ENVIRONMENT) == MEMCPY else AUTO
        return CopyStatistics({MEMCPY: self._counts}, {}, forced)

    def _count(self, sizes: Int64s) -> None:
        with self._counting:
            self._counts += StrategyCounts(1, len(sizes), int(sizes.sum()))

    def stop(self) -> None:
        """Those that run may still tell of their ends."""

    def close(self) -> None:
        self._threads.close()
        self._memory.clear()
        for planes, _ in self._planes:
            planes.close()
        self._planes.clear()
        for segment in self._segments:
            if not self.shape.places:  # an engine's names are its own: a new file may have one by now
                segment.unlink()
            segment.close()
        self._segments.clear()

    def _tier_runs(self, shard: RowShard, rank: int, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Addresses and sizes, in these rows, of the shard's fragments as the rank has them."""
        assert self._tier_rows is not None, "there is no host tier"
        count = len(self._tier_rows) // self.shape.row_bytes
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
            raise ValueError(f"rows are {int(rows.min())} to {int(rows.max())}; they must be 0 to {count - 1}")
        whole = self.shape.whole_rows[rank][shard.cache]
        size = whole.fragment_bytes
        fragments = np.arange(whole.fragments, dtype=np.int64) * size
        starts = self._tier_rows.ctypes.data + rows * self.shape.row_bytes + shard.start
        at = (starts[:, None] + fragments).ravel()
        return at, np.full(len(at), size, np.int64)

    def _pool_runs(self, shard: RowShard, rank: int, pages: Int64s) -> tuple[Int64s, NDArray[np.bool_]]:
        """Addresses of the fragments that the rank has of the shard's pages, and which of them there are."""
        ids, rows = self._places.of(pages), self.shape.whole_rows[rank][shard.cache]
        there = np.ones((len(pages), rows.fragments), np.bool_)
        if rows.in_blocks:
            there = np.tile((ids >= 0).reshape(-1, rows.pieces), (1, len(rows.offsets)))
            ids = np.maximum(ids, 0)
        return (self._memory[rank].ctypes.data + rows.fragments_of(ids)).ravel(), there.ravel()
