"""Random copies of every kind on one pool of a GPU, many at a time. Each holds its pages from when it is issued until
it is told to have ended; then they are anybody's at once: of another stream, another thread, another worker. Every byte
is compared.

On the fake device of tests/csrc all of it runs without a GPU.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvferry._core import GpuCopyEngine, part_checksum
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.interface import CopyEnd, PartCopies
from kvferry.transfer.courier.gpu_slots import GpuSlot
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader

GEOMETRY = KVGeometry(layers=4, kv_heads=2, head_dim=64, dtype="float16", page_size=16)
ROW = GEOMETRY.page_bytes
PAGES, ROWS, SLOTS, SLOT_PAGES = 48, 64, 12, 4
SLOT_BYTES = HEADER_BYTES + SLOT_PAGES * ROW
TASKS = 24
RECENT = 0.8  # of the pages that are taken, those that came free last
Bytes = NDArray[np.uint8]


class Slots:
    """A courier's, as far as copies ask of it."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.gpu_slots = self

    def send_slot(self, slot: int) -> GpuSlot:
        return GpuSlot(0, 0, self._address + slot * SLOT_BYTES, SLOT_BYTES)

    receive_slot = send_slot


class Storm:
    """`other`: what a worker, or whoever looks, copies with, on streams of its own."""

    def __init__(self, other: GpuCopyEngine, seed: int) -> None:
        self.random = Random(seed)
        self.shape = PoolShape(GEOMETRY, 1, StorageOrder.LAYER_MAJOR, PAGES)
        self.memory = GpuPoolMemory.create(self.shape, [0])
        self.address = self.memory._ranks[0]._base
        self.other = other
        self.slot_memory = other.allocate(SLOTS * SLOT_BYTES)
        self.slots = Slots(self.slot_memory.address)
        lanes = lanes_of(GEOMETRY, 1, 1)
        self.parts: PartCopies = self.memory.sending(cast(CourierLink, self.slots), lanes)
        self.summing: PartCopies = self.memory.sending(cast(CourierLink, self.slots), lanes)
        self.summing.begin_sums()
        self.host = mmap.mmap(-1, ROWS * ROW)
        self.memory.attach_rows(memoryview(self.host))
        self.pinned: object = self.memory.pinner().pin(memoryview(self.host))
        # What is written has no zero: those are from clearings.
        self.bank = np.random.default_rng(seed).integers(1, 256, (64, ROW), np.uint8)
        self.pages: list[int] = []  # free ones, the last that came free at the end
        self.free_rows, self.free_slots = list(range(ROWS)), list(range(SLOTS))
        self.content: dict[int, Bytes] = {}  # of each page
        self.kept: dict[int, Bytes] = {}  # of each row
        self.in_slots: dict[int, list[Bytes]] = {}
        self.left = 0
        self.met: Counter[str] = Counter()

    async def run(self, operations: int) -> Counter[str]:
        self.left = operations
        for page in range(PAGES):
            await self.write(page)
            self.pages.append(page)
        await asyncio.gather(*(self.go_on() for _ in range(TASKS)))
        for page in sorted(self.pages):
            self.expect(await self.read_pages([page]), [self.content[page]], f"page {page} at the end")
        assert len(self.pages) == PAGES
        return self.met

    def close(self) -> None:
        self.pinned = None
        self.memory.close()

    async def go_on(self) -> None:
        while self.left > 0:
            self.left -= 1
            action = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            await action(self)
            await asyncio.sleep(0)

    # -- who holds what --------------------------------------------------------------------------------------------

    async def take(self, most: int) -> list[int]:
        """Pages, mostly those that came free last."""
        while not self.pages:
            await asyncio.sleep(0)
        taken = []
        for _ in range(min(self.random.randint(1, most), len(self.pages))):
            recent = self.random.random() < RECENT
            taken.append(self.pages.pop(-1 if recent else self.random.randrange(len(self.pages))))
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        self.pages.extend(pages)

    def expect(self, found: Sequence[Bytes], wanted: Sequence[Bytes], what: str) -> None:
        for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
            wrong = np.flatnonzero(got != want)
            zeros = int((got[wrong] == 0).sum())
            assert not len(wrong), f"{what}: of row {i} {len(wrong)} bytes are wrong, {zeros} of them zero"

    # -- what others do --------------------------------------------------------------------------------------------

    def places(self, pages: Sequence[int]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.address + self.shape.storages[0].rows().fragments_of(pages)
        return found.reshape(-1)

    async def write(self, page: int) -> None:
        """A worker."""
        await asyncio.to_thread(self.write_at_once, page)

    def write_at_once(self, page: int) -> None:
        row = self.bank[self.random.randrange(len(self.bank))]
        to = self.places([page])
        size = ROW // len(to)
        source = row.ctypes.data + np.arange(len(to), dtype=np.int64) * size
        sizes = np.full(len(to), size, np.int64)
        self.other.copy_list_from_host(to, source, sizes, strategy="loop").wait()
        self.content[page] = row

    async def read_pages(self, pages: Sequence[int]) -> list[Bytes]:
        places = self.places(pages)
        size = ROW * len(pages) // len(places)
        return list((await self.read(places, size)).reshape(len(pages), ROW))

    async def read(self, places: NDArray[np.int64], size: int) -> Bytes:
        found: Bytes = np.zeros(len(places) * size, np.uint8)
        to = found.ctypes.data + np.arange(len(places), dtype=np.int64) * size
        sizes = np.full(len(places), size, np.int64)
        await asyncio.to_thread(lambda: self.other.copy_list_to_host(to, places, sizes, strategy="loop").wait())
        return found

    # -- operations ------------------------------------------------------------------------------------------------

    async def worker_writes(self) -> None:
        for page in (pages := await self.take(1)):
            await self.write(page)
        self.give_back(pages)

    async def gather(self) -> None:
        if self.free_slots:
            pages = await self.take(SLOT_PAGES)
            await self.gather_from(pages)
            self.give_back(pages)

    async def gather_from(self, pages: list[int]) -> None:
        """And looks at what is in the slot then."""
        while not self.free_slots:
            await asyncio.sleep(0)
        slot, rows = self.free_slots.pop(), [self.content[page] for page in pages]
        header = PartHeader(7, self.left, slot, 1, 0, 0, 0, len(pages) * ROW)
        gather = Gather(self.left, slot, Credit(slot, 1), pages, 0, 0, len(pages) * ROW, header)
        if self.random.random() < 0.5:
            header = header.with_sum(part_checksum(np.concatenate(rows)))
            await self.ended(lambda done: self.summing.gather(gather, done))
        else:
            await self.ended(lambda done: self.parts.gather(gather, done))
        start = self.slots.send_slot(slot).address
        found = await self.read(np.array([start]), HEADER_BYTES + len(pages) * ROW)
        assert bytes(found[:HEADER_BYTES]) == header.pack(), "the header is wrong"
        self.expect(found[HEADER_BYTES:].reshape(-1, ROW), rows, f"a slot gathered from pages {pages}")
        self.in_slots[slot] = rows
        self.free_slots.append(slot)
        self.met["gathers"] += 1

    async def scatter(self) -> None:
        filled = [slot for slot in self.free_slots if slot in self.in_slots]
        if not filled:
            return
        pages = await self.take(SLOT_PAGES)
        slot = next((slot for slot in filled if slot in self.free_slots), None)
        if slot is not None:
            self.free_slots.remove(slot)
            rows = self.in_slots[slot]
            pages, rest = pages[: len(rows)], pages[len(rows) :]
            self.give_back(rest)
            scatter = Scatter(slot, 1, pages, 0, 0, len(pages) * ROW)
            found = await self.summed(scatter)
            if found is not None:
                assert found == part_checksum(np.concatenate(rows[: len(pages)])), "the sum is wrong"
                self.met["sums"] += 1
            self.content.update(zip(pages, rows, strict=False))
            self.free_slots.append(slot)
            self.met["scatters"] += 1
        self.give_back(pages)

    async def summed(self, scatter: Scatter) -> int | None:
        """Of half of them; None: it was not added up."""
        parts = self.parts if self.random.random() < 0.5 else self.summing
        sums: list[int | None] = []

        def scattered(done: CopyEnd) -> None:
            parts.scatter(scatter, lambda problem, total: (sums.append(total), done(problem)))

        await self.ended(scattered)
        return sums[0]

    async def spill(self) -> None:
        if len(self.free_rows) < SLOT_PAGES:
            return
        pages = await self.take(SLOT_PAGES)
        rows = [self.free_rows.pop(self.random.randrange(len(self.free_rows))) for _ in pages]
        await asyncio.to_thread(self.memory.spill, np.array(pages), np.array(rows))
        found = np.frombuffer(self.host, np.uint8).reshape(ROWS, ROW)
        self.expect([found[row] for row in rows], [self.content[page] for page in pages], f"rows of pages {pages}")
        self.kept.update({row: self.content[page] for page, row in zip(pages, rows, strict=True)})
        self.free_rows += rows
        self.give_back(pages)
        self.met["spills"] += 1

    async def restore(self) -> None:
        known = [row for row in self.free_rows if row in self.kept][:SLOT_PAGES]
        if not known:
            return
        for row in known:
            self.free_rows.remove(row)
        pages = await self.take(len(known))
        rows = known[: len(pages)]
        await asyncio.to_thread(self.memory.restore, np.array(pages), np.array(rows))
        self.content.update({page: self.kept[row] for page, row in zip(pages, rows, strict=True)})
        self.free_rows += known
        self.give_back(pages)
        self.met["restores"] += 1

    async def clear_tail(self) -> None:
        """The page is then gathered at once half of the times, which needs no wait; and half of the times written."""
        (page,) = await self.take(1)
        tokens = self.random.randint(0, GEOMETRY.page_size - 1)
        row = self.content[page].copy().reshape(-1, GEOMETRY.page_size, ROW // GEOMETRY.fragments // GEOMETRY.page_size)
        row[:, tokens:] = 0
        self.content[page] = row.reshape(-1)
        clearing = self.ended(lambda done: self.memory.zero_tail(page, tokens, done))
        if self.random.random() < 0.5:
            await asyncio.gather(clearing, self.gather_from([page]))  # in this order
        else:
            await clearing
        if self.random.random() < 0.5:
            self.write_at_once(page)  # before the GPU comes to anything that it has not begun
        self.give_back([page])
        self.met["tails cleared"] += 1

    async def clear_pages(self) -> None:
        pages = await self.take(SLOT_PAGES)
        await self.ended(lambda done: self.memory.zero_pages(np.array(pages), done))
        self.content.update(dict.fromkeys(pages, np.zeros(ROW, np.uint8)))
        self.give_back(pages)
        self.met["pages cleared"] += len(pages)

    async def ended(self, issue: Callable[[CopyEnd], None]) -> None:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        issue(done.set_result)
        problem = await asyncio.wait_for(done, 120)
        assert problem == "", problem


WEIGHTS: dict[Callable[[Storm], Awaitable[Any]], int] = {
    Storm.worker_writes: 4,
    Storm.gather: 4,
    Storm.scatter: 4,
    Storm.spill: 2,
    Storm.restore: 3,
    Storm.clear_tail: 4,
    Storm.clear_pages: 1,
}


def run(
    other: GpuCopyEngine, seed: int, operations: int, change: Callable[[Storm], None] = lambda _: None
) -> Counter[str]:
    """What was met. AssertionError: a byte was wrong. `change`: of the storm, before it begins."""
    storm = Storm(other, seed)
    try:
        change(storm)
        return asyncio.run(storm.run(operations))
    finally:
        storm.close()
