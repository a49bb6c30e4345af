"""The copies of sessions' parts and the clearing of pages: they take their time, and some fail."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from kvferry._core import part_checksum
from kvferry.daemon.memory.interface import CopyEnd, ScatterEnd
from kvferry.radix.pool import PageState
from kvferry.transfer.courier.host_slots import HostSlots
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics, StrategyCounts
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Buffer
from tests.simulation.clock import Clock, expect
from tests.simulation.memory import Memory
from tests.simulation.prompts import GEOMETRY, PAGE_BYTES

_SCATTERED = (PageState.LEASED, PageState.ARRIVING, PageState.ORPHANED)
_READABLE = (PageState.CACHED, PageState.SPILLING)


class SimParts:
    """The copies of one session: they take their time, and some fail."""

    gathers_at_once = 64

    def __init__(self, clock: Clock, memory: Memory, failing: float, slots: HostSlots) -> None:
        self._clock, self._memory, self._failing, self._slots = clock, memory, failing, slots
        self._pool = memory.pool
        self._sums = False

    def begin_sums(self) -> None:
        self._sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        """Behind the clearing of a tail that was begun before."""
        memory = self._memory
        states = self._pool.states(gather.page_ids)
        expect(PageState.FREE not in states, f"{memory.who}: a gather names the free page in {gather.page_ids}")
        begins = max(memory.zeroed_at.get(page, 0.0) for page in gather.page_ids)
        delay = max(0.0, begins - self._clock.now) + self._clock.between(0.00002, 0.001)
        self._clock.after(delay, self._gathered, gather, memory.generations(gather.page_ids), done)

    def _gathered(self, gather: Gather, generations: Sequence[int], done: CopyEnd) -> None:
        memory = self._memory
        memory.check_kept(gather.page_ids, generations, "a gather ran")
        if self._clock.chance(self._failing):
            self._clock.counts["gathers that failed"] += 1
            done("injected")
            return
        data = b"".join(memory.read(page) for page in gather.page_ids)[gather.byte_offset :][: gather.nbytes]
        slot = self._slots.send_slot(gather.send_slot)
        slot[HEADER_BYTES : HEADER_BYTES + gather.nbytes] = data
        header = gather.header.with_sum(part_checksum(data)) if self._sums else gather.header
        slot[:HEADER_BYTES] = header.pack()
        done("")

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        states = set(self._pool.states(scatter.page_ids))
        expect(
            states <= set(_SCATTERED),
            f"{self._memory.who}: a scatter names pages {scatter.page_ids} in states {states}",
        )
        generations = self._memory.generations(scatter.page_ids)
        self._clock.after(self._clock.between(0.00002, 0.001), self._scattered, scatter, generations, done)

    def _scattered(self, scatter: Scatter, generations: Sequence[int], done: ScatterEnd) -> None:
        memory, nbytes = self._memory, scatter.nbytes
        memory.check_kept(scatter.page_ids, generations, "a scatter ran")
        failed = self._clock.chance(self._failing)
        if failed:
            nbytes //= 2
        slot = self._slots.receive_slot(scatter.slot)
        at, left = scatter.byte_offset, bytes(slot[HEADER_BYTES : HEADER_BYTES + nbytes])
        payload_sum = part_checksum(left) if self._sums else None
        for page in scatter.page_ids:
            room = PAGE_BYTES - at
            start = page * PAGE_BYTES + at
            memory.bytes[start : start + len(left[:room])] = left[:room]
            left, at = left[room:], 0
        if failed:
            self._clock.counts["scatters that failed"] += 1
        done("injected" if failed else "", payload_sum)

    def read_header(self, receive_slot: int) -> Buffer:
        return self._slots.receive_slot(receive_slot)[:HEADER_BYTES]

    def close(self) -> None:
        pass


class SimPoolMemory:
    """As `kvferry.daemon.memory.interface.PoolMemory`, as far as sessions ask of it."""

    def __init__(self, clock: Clock, memory: Memory, failing: float) -> None:
        self._clock, self._memory, self._failing = clock, memory, failing
        self.shape = PoolShape(GEOMETRY, 1, StorageOrder.PAGE_MAJOR, memory.pool.pages)
        self.workers: dict[str, Executor] = {}
        self.can_sum = True

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        return SimParts(self._clock, self._memory, self._failing, link.host_slots)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        return SimParts(self._clock, self._memory, self._failing, link.host_slots)

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        self._clock.after(self._clock.between(0.00002, 0.002), self._zeroed, pages.tolist(), done)

    def _zeroed(self, pages: list[int], done: CopyEnd) -> None:
        """Their request may have ended meanwhile, and another one has them: it is told behind its own clearing."""
        states = set(self._memory.pool.states(pages))
        expect(not states & set(_READABLE), f"{self._memory.who}: pages {pages} are cleared in states {states}")
        for page in pages:
            self._memory.write(page, bytes(PAGE_BYTES))
        self._clock.counts["pages cleared"] += len(pages)
        done("")

    def copy_statistics(self) -> CopyStatistics:
        return CopyStatistics({"memcpy": StrategyCounts()})

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        delay = self._clock.between(0.00002, 0.003)
        self._memory.zeroed_at[page] = self._clock.now + delay
        self._clock.after(delay, self._tail_zeroed, page, tokens, self._memory.generations([page]), done)

    def _tail_zeroed(self, page: int, tokens: int, generations: list[int], done: CopyEnd) -> None:
        memory = self._memory
        del memory.zeroed_at[page]
        memory.check_kept([page], generations, "its tail was cleared")
        size, kept = GEOMETRY.fragment_bytes, tokens * GEOMETRY.fragment_token_bytes
        for start in range(page * PAGE_BYTES, (page + 1) * PAGE_BYTES, size):
            memory.bytes[start + kept : start + size] = bytes(size - kept)
        self._clock.counts["tails cleared"] += 1
        done("")
