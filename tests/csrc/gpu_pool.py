"""A daemon's pool on two fake GPUs with a session in each direction, and random requests that use it."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry._core import GpuCopyEngine
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.transfer.courier.gpu_slots import GpuSlot, MappedSlots
from kvferry.transfer.courier.messages import HEADER_BYTES, RankSlots
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import Credit, PartHeader
from tests.csrc.gpu_orders import HOST, Orders

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)
RANKS, PAGES, ROWS, SLOTS = 2, 12, 6, 4
MOST = 3  # pages of a request
SLOT_BYTES = HEADER_BYTES + MOST * GEOMETRY.page_bytes
WORKER, COURIER = "worker", "courier"
Pages = Sequence[int]


class Pool:
    """The memory of one side with a session in each direction."""

    def __init__(self, fake: ctypes.CDLL, library: str, orders: Orders) -> None:
        self.orders = orders
        shape = PoolShape(GEOMETRY, RANKS, StorageOrder.LAYER_MAJOR, PAGES)
        self.memory = GpuPoolMemory.create(shape, range(RANKS))
        self.rows = np.frombuffer(mmap.mmap(-1, ROWS * shape.row_bytes), np.uint8)
        self.memory.attach_rows(memoryview(self.rows))
        self.pinned: object = self.memory.pinner().pin(memoryview(self.rows))
        own = [[int(fake.fake_foreign(SLOTS * SLOT_BYTES)) for _ in range(2)] for _ in range(RANKS)]
        named = [[(at, at.to_bytes(8, "little") + bytes([0x5A] * 56)) for at in each] for each in own]
        slots = [RankSlots(*receiving, *sending) for receiving, sending in named]
        engines = [GpuCopyEngine(rank, library) for rank in range(RANKS)]
        self.slots = MappedSlots(range(RANKS), slots, (RANKS * SLOTS, RANKS * SLOTS), SLOT_BYTES, engines.__getitem__)
        link: Any = SimpleNamespace(gpu_slots=self.slots)
        self.lanes = lanes_of(GEOMETRY, RANKS, RANKS)
        self.sending, self.receiving = self.memory.sending(link, self.lanes), self.memory.receiving(link, self.lanes)
        self.summing = self.memory.sending(link, self.lanes)
        if self.memory.can_sum:
            self.summing.begin_sums()

    def of_pages(self, touch: Callable[[str, int, int], None], who: str, pages: Pages) -> None:
        """All bytes of the pages, on all ranks."""
        for rank in self.memory._ranks:
            rows = self.memory.shape.storages[0].rows()
            for begin in rows.fragments_of(pages).ravel().tolist():
                touch(who, rank._base + begin, rows.fragment_bytes)

    def of_rows(self, touch: Callable[[str, int, int], None], rows: Pages) -> None:
        size = self.memory.shape.row_bytes
        for row in rows:
            touch(HOST, self.rows.ctypes.data + row * size, size)

    def close(self) -> None:
        """As a daemon does at its end, whose sessions have ended."""
        self.pinned = None
        self.memory.close()
        self.slots.close()


HASTY_LAG = 300  # of what is not waited for: so much later than all else that others touch its pages before


class Daemon:
    """Gives pages to requests that come at random, several at a time, and takes them back. `hasty`: a kind of copy that
    it does not wait for."""

    def __init__(self, pool: Pool, seed: int, hasty: str = "") -> None:
        self.random = np.random.default_rng(seed)
        self.pool, self.memory, self.orders, self.hasty = pool, pool.memory, pool.orders, hasty
        self.pages, self.rows = list(range(PAGES)), list(range(ROWS))  # that are free
        self.send_slots, self.receive_slots = ([list(range(SLOTS)) for _ in range(RANKS)] for _ in range(2))
        self.late: list[asyncio.Future[str]] = []
        self.done: dict[str, int] = {}
        self.sums = True  # of some gathers

    async def run(self, requests: int) -> None:
        async def each(kinds: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
            for kind in kinds:
                await kind()
                await asyncio.sleep(0)

        kinds = [self.compute, self.receive, self.spill_and_restore, self.reuse]
        drawn = [kinds[i] for i in self.random.integers(0, len(kinds), requests)]
        await asyncio.gather(*(each(drawn[first::3]) for first in range(3)))
        await asyncio.gather(*self.late)

    # -- requests

    async def compute(self) -> None:
        """A worker fills pages of which the last is not full; they are sent behind the clearing of its tail, or not at
        all, since their request is over."""
        pages = await self.take()
        await self.clear(pages)
        self.worker_fills(pages)
        tokens = int(self.random.integers(1, GEOMETRY.page_size))
        tail = self.ended("tail", lambda done: self.memory.zero_tail(pages[-1], tokens, done))
        if self.random.integers(2):
            clearing = asyncio.ensure_future(tail)
            await asyncio.sleep(0)  # it is issued
            await self.send(pages)
            await clearing
        else:
            await tail
        self.free(pages)

    async def receive(self) -> None:
        """Pages that come in slots, and that a worker then reads and goes on with."""
        pages = await self.take()
        await self.clear(pages)
        await asyncio.gather(*(self.scatter(lane, pages) for lane in range(len(self.pool.lanes))))
        self.orders.tells(WORKER)
        self.pool.of_pages(self.orders.reads, WORKER, pages)
        self.pool.of_pages(self.orders.writes, WORKER, pages[-1:])
        self.orders.told_by(WORKER)
        await self.send(pages)
        self.free(pages)

    async def spill_and_restore(self) -> None:
        pages = await self.take()
        self.worker_fills(pages)
        rows = [self.rows.pop() for _ in pages[: len(self.rows)]]
        kept = pages[: len(rows)]
        sent = asyncio.ensure_future(self.send(pages))  # both read them
        await self.between_tiers("spill", kept, rows)
        self.pool.of_rows(self.orders.reads, rows)  # their checksums
        await sent
        self.free(pages)
        if rows:
            pages = await self.take(len(rows))
            await self.between_tiers("restore", pages, rows)
            self.pool.of_rows(self.orders.reads, rows)
            await self.send(pages)
            self.free(pages)
            self.rows += rows

    async def reuse(self) -> None:
        """Pages that nobody clears."""
        pages = await self.take()
        self.worker_fills(pages)
        self.free(pages)

    # -- what they consist of

    async def take(self, count: int | None = None) -> list[int]:
        count = count if count is not None else int(self.random.integers(1, MOST + 1))
        while len(self.pages) < count:
            await asyncio.sleep(0)
        return [self.pages.pop(int(self.random.integers(len(self.pages)))) for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        self.pages += pages

    async def clear(self, pages: Pages) -> None:
        await self.ended("clearing", lambda done: self.memory.zero_pages(np.array(pages), done))

    def worker_fills(self, pages: Pages) -> None:
        self.orders.tells(WORKER)
        self.pool.of_pages(self.orders.writes, WORKER, pages)
        self.orders.told_by(WORKER)

    async def send(self, pages: Pages) -> None:
        await asyncio.gather(*(self.gather(lane, pages) for lane in range(len(self.pool.lanes))))

    async def gather(self, lane: int, pages: Pages) -> None:
        rank, row_bytes = self.pool.lanes[lane].sender, self.pool.lanes[lane].row_bytes
        number = await _one_of(self.send_slots[rank])
        slot = rank * SLOTS + number
        nbytes = len(pages) * row_bytes
        header = PartHeader(0, 0, slot, 0, lane, 0, 0, nbytes)
        what = Gather(0, slot, Credit(0, 0), pages, 0, 0, nbytes, header, lane)
        parts = self.pool.summing if self.sums and self.random.integers(2) else self.pool.sending
        await self.ended("gather", lambda done: parts.gather(what, done))
        self.orders.tells(COURIER)
        self.courier(self.orders.reads, self.pool.slots.send_slot(slot))
        self.orders.told_by(COURIER)
        self.send_slots[rank].append(number)

    async def scatter(self, lane: int, pages: Pages) -> None:
        rank, row_bytes = self.pool.lanes[lane].receiver, self.pool.lanes[lane].row_bytes
        number = await _one_of(self.receive_slots[rank])
        slot = rank * SLOTS + number
        self.orders.tells(COURIER)  # a credit
        self.courier(self.orders.writes, self.pool.slots.receive_slot(slot))
        self.orders.told_by(COURIER)
        what = Scatter(slot, 0, pages, 0, 0, len(pages) * row_bytes, lane)
        await self.ended("scatter", lambda done: self.pool.receiving.scatter(what, lambda problem, _: done(problem)))
        self.receive_slots[rank].append(number)

    def courier(self, touch: Callable[[str, int, int], None], slot: GpuSlot) -> None:
        touch(COURIER, slot.address, slot.nbytes)

    async def between_tiers(self, kind: str, pages: Pages, rows: Pages) -> None:
        if pages:
            self.begins(kind)
            await asyncio.to_thread(getattr(self.memory, kind), np.array(pages), np.array(rows))

    async def ended(self, what: str, issue: Callable[[Callable[[str], None]], None]) -> None:
        self.begins(what)
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        issue(end.set_result)
        if what == self.hasty:
            self.late.append(end)
        else:
            assert await end == ""

    def begins(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
        self.orders.lag(HASTY_LAG if what == self.hasty else int(self.random.integers(0, 6)))


async def _one_of(free: list[int]) -> int:
    while not free:
        await asyncio.sleep(0)
    return free.pop()
