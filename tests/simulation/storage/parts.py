"""The copies of sessions' parts and the clearing of pages: piece by piece, beside each other, and some fail.

Only what the product orders is ordered: by waiting for an end, or a gather behind a clearing that was issued earlier,
on each rank for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from kvferry._core import HostPages, part_checksum
from kvferry.daemon.memory.block_table import PLAIN_PAGES, PagePlaces, PlainPages
from kvferry.daemon.memory.interface import CopyEnd, ScatterEnd
from kvferry.daemon.memory.shared import host_pages
from kvferry.daemon.memory.tier_lanes import TierBytes, TierLanes
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from kvferry.transfer.courier.host_slots import HostSlots
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import Int64s, RankStorage, RowMap
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane, heads_of, rank_geometry
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics, StrategyCounts
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Buffer
from tests.simulation.clock import Clock, expect
from tests.simulation.prompts import GEOMETRY, PAGE_BYTES
from tests.simulation.storage.copies import batches, cut, strew
from tests.simulation.storage.memory import Access, Clearing, Memory, RowAccess

_GATHERED = (PageState.LEASED, PageState.CACHED, PageState.SPILLING, PageState.ORPHANED)
_SCATTERED = (PageState.LEASED, PageState.ARRIVING, PageState.ORPHANED)
_TAILS = (PageState.LEASED, PageState.ORPHANED)
_CLEARED = tuple(state for state in PageState if state not in (PageState.CACHED, PageState.SPILLING))
_TAIL_CLEARING = "the clearing of a tail"


def shape_of(memory: Memory, geometry: KVGeometry, ranks: int) -> PoolShape:
    """Of a pool in this memory."""
    if memory.blocks is not None:
        places, blocks = ((memory.blocks.storage,),), memory.blocks.count
        return PoolShape(geometry, ranks, StorageOrder.PAGE_MAJOR, blocks, places)
    return _shape_of_pages(memory.pages, geometry, ranks)


def _shape_of_pages(pages: int, geometry: KVGeometry, ranks: int) -> PoolShape:
    """Each rank's own heads, in the bytes of whole pages: so one look at a page sees what all ranks have of it."""
    tensors, own = GEOMETRY.layers * GEOMETRY.tensors, rank_geometry(geometry, ranks)
    size, head_bytes = PAGE_BYTES // tensors, PAGE_BYTES // tensors // GEOMETRY.kv_heads
    tensor, stride = np.arange(tensors, dtype=np.int64) * size, np.full(tensors, PAGE_BYTES, np.int64)
    places = [
        (RankStorage(own, tensor + heads_of(GEOMETRY, ranks, rank).first * head_bytes, stride, pages),)
        for rank in range(ranks)
    ]
    return PoolShape(geometry, ranks, StorageOrder.PAGE_MAJOR, pages, tuple(places))


class _Part:
    """A copy of a part, under way: the bytes that it has read, and where each piece of them is in the pages."""

    __slots__ = ("_offset", "_pages", "_places", "_row_bytes", "access", "payload", "rows", "slot")

    def __init__(
        self,
        part: Gather | Scatter,
        rows: HostPages,
        slot: memoryview,
        access: Access | RowAccess,
        places: PagePlaces,
    ) -> None:
        self._places = places
        self.rows, self.slot, self.access = rows, slot[HEADER_BYTES : HEADER_BYTES + part.nbytes], access
        self._pages, self._offset, self._row_bytes = part.page_ids, part.byte_offset, rows.row_bytes
        self.payload = memoryview(bytearray(part.nbytes))

    def gather(self, piece: tuple[int, int]) -> None:
        start, end = piece
        pages, offset = self._place(start, end)
        ids, last = self._places.of(pages), self._places.last_bytes(pages, 0)
        self.rows.gather_part(ids, offset, end - start, self.payload, start, 1, last)
        self.slot[start:end] = self.payload[start:end]

    def scatter(self, piece: tuple[int, int]) -> None:
        start, end = piece
        self.payload[start:end] = self.slot[start:end]
        pages, offset = self._place(start, end)
        self.rows.scatter_part(self._places.of(pages), offset, end - start, self.payload, start)

    def _place(self, start: int, end: int) -> tuple[Sequence[int], int]:
        """The pages of a piece, and its byte in their rows."""
        size = self._row_bytes
        first, offset = divmod(self._offset + start, size)
        pages = self._pages[first : (self._offset + end - 1) // size + 1]
        self.access.touch(pages)
        return pages, offset


class SimParts:
    """The copies of one session between slots and the heads that its lanes carry."""

    def __init__(
        self,
        pool: SimPoolMemory,
        slots: HostSlots,
        ranks: Sequence[int],
        rows: Sequence[RowMap],
        tier: TierLanes[HostPages] | None = None,
    ) -> None:
        """ranks, rows: own ones of each lane. tier: of one that sends, its lanes in the host tier."""
        self._tier = tier
        self.gathers_at_once = pool.gathers_at_once
        self._pool, self._slots, self._ranks = pool, slots, ranks
        self._lanes = [host_pages(pool.memory.of_rank(rank), each) for rank, each in zip(ranks, rows, strict=True)]
        self._busy: set[int] = set()  # slots that are copied from, or to
        self._sums = False

    def begin_sums(self) -> None:
        self._sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        """Behind the clearing of a tail that was begun before."""
        pool, memory, slot = self._pool, self._pool.memory, self._slots.send_slot(gather.send_slot)
        if gather.from_rows:
            part = self._part_of_rows(gather, slot)
        else:
            access = Access(memory, "a gather", gather.page_ids, _GATHERED, writes=False, behind=_TAIL_CLEARING)
            part = _Part(gather, self._lanes[gather.lane], slot, access, pool.places)
        begins = 0.0
        if pool.tails:
            rank = self._ranks[gather.lane]
            begins = max(pool.tails.get((rank, page), 0.0) for page in gather.page_ids)

        def ended() -> None:
            data = bytes(part.payload)
            expect(bytes(part.slot) == data, f"{memory.who}: somebody wrote the sending slot of a gather that ran")
            slot[:HEADER_BYTES] = (gather.header.with_sum(part_checksum(data)) if self._sums else gather.header).pack()
            done("")

        self._copy("gathers", gather.send_slot, part, part.gather, ended, lambda: done("injected"), begins)

    def _part_of_rows(self, gather: Gather, slot: memoryview) -> _Part:
        assert self._tier is not None, "a session that sends nothing was to send from the host tier"
        self._pool.clock.counts["parts sent from the host tier"] += 1
        access = RowAccess(self._pool.memory, gather.page_ids)
        return _Part(gather, self._tier.of(gather.lane), slot, access, PLAIN_PAGES)

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        memory, slot = self._pool.memory, self._slots.receive_slot(scatter.slot)
        owner = (self, scatter.transfer)
        access = Access(memory, "a scatter", scatter.page_ids, _SCATTERED, writes=True, owner=owner)
        part = _Part(scatter, self._lanes[scatter.lane], slot, access, self._pool.places)

        def ended() -> None:
            done("", part_checksum(bytes(part.payload)) if self._sums else None)

        self._copy("scatters", scatter.slot, part, part.scatter, ended, lambda: done("injected", None))

    def _copy(
        self,
        what: str,
        slot: int,
        part: _Part,
        copy: Callable[[tuple[int, int]], None],
        ended: Callable[[], None],
        failed: Callable[[], None],
        begins: float = 0.0,
    ) -> None:
        """From `begins` on; it fails with some of its pieces copied."""
        pool = self._pool
        clock, random = pool.clock, pool.clock.random
        expect(slot not in self._busy, f"{pool.memory.who}: two {what} have slot {slot}")
        self._busy.add(slot)
        if len(self._lanes) > 1:
            clock.counts["copies of some heads"] += 1
        pieces = cut(random, len(part.payload), part.rows.row_bytes // 2)
        fails = clock.chance(pool.failing)
        if fails:
            clock.counts[f"{what} that failed"] += 1
            pieces = random.sample(pieces, random.randrange(len(pieces) + 1))
        begins = max(begins, clock.now)
        ends = begins + clock.between(0.00002, 0.001)
        left = strew(clock, begins, ends, copy, pieces)

        def told() -> None:
            for piece in left:
                copy(piece)
            self._busy.remove(slot)
            part.access.end()
            (failed if fails else ended)()

        pool.tell(ends, told)

    def read_header(self, receive_slot: int) -> Buffer:
        return self._slots.receive_slot(receive_slot)[:HEADER_BYTES]

    def close(self) -> None:
        expect(not self._busy, f"{self._pool.memory.who}: copies are closed while those of slots {self._busy} run")
        for rows in (*self._lanes, *(self._tier.made if self._tier is not None else ())):
            rows.close()


class SimPoolMemory:
    """As `kvferry.daemon.memory.interface.PoolMemory`, as far as sessions ask of it."""

    def __init__(
        self, clock: Clock, memory: Memory, failing: float, ranks: int = 1, geometry: KVGeometry = GEOMETRY
    ) -> None:
        self.clock, self.memory, self.failing = clock, memory, failing
        self.shape = shape_of(memory, geometry, ranks)
        self.block_table = memory.table
        self.places: PagePlaces = memory.table or PlainPages()
        self.workers: dict[str, Executor] = {}
        self.can_sum = True
        self.tier_copies = 1 + clock.seed % 2 * 2  # as host memory has it, and as GPUs do
        self.gathers_at_once = clock.random.choice((2 * ranks, 64))
        self.tails: dict[tuple[int, int], float] = {}  # by rank and page whose tail is being cleared: when that is done
        self.tier_rows: TierBytes | None = None  # of a tier that can be sent from
        self.tell = clock.at  # by whom the daemon is told of ends
        self._clearing: dict[Access, Callable[[], None]] = {}  # that run, and what ends each of them
        storages = [self.shape.storages_of(rank)[0] for rank in range(ranks)]
        self._planes = [  # none of blocks, of which nothing is cleared
            host_pages(memory.of_rank(rank), storage.planes())
            for rank, storage in enumerate(storages)
            if isinstance(storage, RankStorage)
        ]

    def pinner(self) -> None:
        """Its copies need no pins."""

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        tier = TierLanes(self.shape, lanes, lambda: self.tier_rows, lambda _, tier, each: host_pages(tier.data, each))
        return SimParts(self, link.host_slots, [lane.sender for lane in lanes], self.shape.sending_rows(lanes), tier)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        return SimParts(self, link.host_slots, [lane.receiver for lane in lanes], self.shape.receiving_rows(lanes))

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        clock, cleared = self.clock, pages.tolist()
        access = Clearing(self.memory, "the clearing of pages", cleared, _CLEARED, writes=True)
        left = dict.fromkeys((rank, page) for rank in range(self.shape.ranks) for page in cleared)
        ends = clock.now + clock.between(0.00002, 0.002)

        def clear(batch: Sequence[tuple[int, int]]) -> None:
            batch = [place for place in batch if place in left]
            access.touch([page for _, page in batch])
            for rank, page in batch:
                self._planes[rank].zero_page_from(page, 0)
                del left[rank, page]

        def end() -> None:
            clear(list(left))
            access.end()
            clock.counts["pages cleared"] += len(cleared)

        self._clears(access, end, ends, done)
        strew(clock, clock.now, ends, clear, batches(clock.random, list(left)))

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        """On each rank for itself: a gather of one rank may have ended before another rank's clearing has."""
        if self.block_table is not None:
            self.block_table.cut(page, tokens)
            self.clock.counts["tails of blocks cut"] += 1
            self.tell(self.clock.now + self.clock.between(0.00001, 0.001), done, "")
            return
        clock, start = self.clock, tokens * self.shape.rank_geometry.fragment_token_bytes
        access = Access(self.memory, _TAIL_CLEARING, [page], _TAILS, writes=True)
        ends = [clock.now + clock.between(0.00001, 0.003) for _ in self._planes]  # no gather runs before one
        left = dict.fromkeys(range(len(ends)))

        def clear(rank: int) -> None:
            if rank in left:
                access.touch([page])
                self._planes[rank].zero_page_from(page, start)
                del left[rank]

        def end() -> None:
            for rank in list(left):
                clear(rank)
            access.end()
            for rank in range(len(ends)):
                del self.tails[rank, page]
            clock.counts["tails cleared"] += 1

        for rank, at in enumerate(ends):
            self.tails[rank, page] = at
            clock.at(at, partial(clear, rank))
        self._clears(access, end, max(ends) + clock.between(0.00002, 0.001), done)

    def _clears(self, access: Access, end: Callable[[], None], at: float, done: CopyEnd) -> None:
        """`end` clears what is left, then at the latest: where the memory is let go before, as that waits for it."""
        self._clearing[access] = end

        def ended() -> None:
            if self._clearing.pop(access, None) is not None:
                end()
                done("")

        self.tell(at, ended)

    def rank_pools(self) -> list[wire.RankPool]:
        return []

    def stop(self) -> None:
        pass

    def close(self) -> None:
        """Waits for clearings, of which nobody is told any more; sessions' parts have ended before."""
        while self._clearing:
            self._clearing.popitem()[1]()
        expect(not self.memory.accesses, f"{self.memory.who}: memory is let go while copies run")
        self.memory.mapped = False

    def copy_statistics(self) -> CopyStatistics:
        return CopyStatistics({"memcpy": StrategyCounts()})
