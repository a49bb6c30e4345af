"""Pools in shared memory over several ranks, and what moves pages from one to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from kvferry._core import part_checksum
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.mapping.segment import Segment
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Credit, PartHeader

PAGES = 6


class Slots:
    """A link's slots in this process."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = [bytearray(slot_bytes) for _ in range(slots)]
        self.host_slots = self

    def send_slot(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    receive_slot = send_slot


def pool(
    path: Path, name: str, geometry: KVGeometry, ranks: int, order: StorageOrder
) -> tuple[SharedPoolMemory, list[np.ndarray]]:
    """And its ranks' memory as another process maps it."""
    memory = SharedPoolMemory.create(PoolShape(geometry, ranks, order, PAGES), str(path), name, 2)
    segments = [Segment.open(found.segment, found.nbytes) for found in memory.rank_pools()]
    return memory, [np.frombuffer(segment.buffer, np.uint8) for segment in segments]


async def ended(start: Callable[[Callable[[str], None]], None]) -> str:
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    start(done.set_result)
    assert not done.done(), "it ends after the call"
    return await asyncio.wait_for(done, 10)


async def scattered(start: Callable[[Callable[[str, int | None], None]], None]) -> tuple[str, int | None]:
    done: asyncio.Future[tuple[str, int | None]] = asyncio.get_running_loop().create_future()
    start(lambda problem, payload_sum: done.set_result((problem, payload_sum)))
    assert not done.done(), "it ends after the call"
    return await asyncio.wait_for(done, 10)


async def ended_of_tail(memory: SharedPoolMemory, page: int, tokens: int) -> str:
    return await ended(lambda done: memory.zero_tail(page, tokens, done))


async def move(source: SharedPoolMemory, target: SharedPoolMemory, pages: list[int], to: list[int]) -> None:
    """All rows of these pages, lane by lane, in parts of any size."""
    geometry = source.shape.geometry
    lanes = lanes_of(geometry, source.shape.ranks, target.shape.ranks)
    part = max(1, 2 * max(lane.row_bytes for lane in lanes) // 3)
    slots = cast(CourierLink, Slots(1, HEADER_BYTES + part))
    sending, receiving = source.sending(slots, lanes), target.receiving(slots, lanes)
    summing, checking = source.sending(slots, lanes), target.receiving(slots, lanes)
    summing.begin_sums()
    checking.begin_sums()
    for number, lane in enumerate(lanes):
        total = lane.row_bytes * len(pages)
        for start in range(0, total, part):
            nbytes = min(part, total - start)
            first, offset = divmod(start, lane.row_bytes)
            last = (start + nbytes - 1) // lane.row_bytes
            header = PartHeader(7, 1, 0, 1, number, first, offset, nbytes)
            gather = Gather(1, 0, Credit(0, 1), pages[first : last + 1], first, offset, nbytes, header, number)
            assert await ended(lambda done, gather=gather: sending.gather(gather, done)) == ""
            assert receiving.read_header(0) == header.pack()
            scatter = Scatter(0, 1, to[first : last + 1], first, offset, nbytes, number)
            assert await scattered(lambda done, scatter=scatter: receiving.scatter(scatter, done)) == ("", None)
            payload = bytes(slots.send_slot(0)[HEADER_BYTES : HEADER_BYTES + nbytes])
            payload_sum = part_checksum(payload)
            assert await ended(lambda done, gather=gather: summing.gather(gather, done)) == ""
            assert receiving.read_header(0) == header.with_sum(payload_sum).pack()
            found = await scattered(lambda done, scatter=scatter: checking.scatter(scatter, done))
            assert found == ("", payload_sum)
            assert slots.send_slot(0)[HEADER_BYTES : HEADER_BYTES + nbytes] == payload
    for parts in (sending, receiving, summing, checking):
        parts.close()
