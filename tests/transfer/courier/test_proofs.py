"""Proofs that nothing is written into a slot any more, with real NIXL: the writer's handle is DONE, or the receiving
courier is reaped. A writer that is reaped proves less: what lay in its socket may still land, in its slot and
nowhere else, and is never announced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from kvferry.transfer.courier.link import CourierConfig, CourierLink
from kvferry.transfer.courier.messages import Connected, CourierDied, CourierEvent, Notification, PostDone, PostFailed

BIG = 16 << 20  # more than sockets hold
SECONDS = 30.0
WATCHED = 0.4  # seconds in which nothing may land


class End:
    def __init__(self) -> None:
        self.events: asyncio.Queue[CourierEvent] = asyncio.Queue()
        self.link: CourierLink

    async def start(self) -> None:
        config = CourierConfig(
            slot_bytes=BIG, receive_slots=2, send_slots=2, port_range=(21164, 21199), tcp_user_timeout_s=2.0
        )
        self.link = await CourierLink.start(config, self.events.put_nowait, 60.0)

    async def next(self) -> CourierEvent:
        return await asyncio.wait_for(self.events.get(), SECONDS)


@contextlib.asynccontextmanager
async def couriers() -> AsyncIterator[tuple[End, End]]:
    """(receiver, sender), connected."""
    pair = End(), End()
    try:
        for end in pair:
            await end.start()
        for end, other in (pair, pair[::-1]):
            end.link.connect(other.link.metadata, other.link.receive_address, 2, BIG)
        for end in pair:
            assert await end.next() == Connected()
        yield pair
    finally:
        for end in pair:
            if hasattr(end, "link"):
                await end.link.stop(SECONDS)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def fill(slot: memoryview, byte: int) -> None:
    slot[:] = bytes([byte]) * len(slot)


async def stays(slot: memoryview) -> None:
    before = bytes(slot)
    await asyncio.sleep(WATCHED)
    assert slot == before, "bytes landed behind the proof"


async def some_landed(slot: memoryview, byte: int) -> bool:
    """Within a while; the write is then under way."""
    for _ in range(200):
        if slot[0] == byte:
            return True
        await asyncio.sleep(0.01)
    return False


def test_a_handle_that_is_done() -> None:
    async def test() -> None:
        async with couriers() as (receiver, sender):
            slot, source = receiver.link.host_slots.receive_slot(0), sender.link.host_slots.send_slot(0)
            for round_ in range(1, 4):
                fill(source, round_)
                sender.link.post(round_, 0, 0, BIG, b"x")
                assert await sender.next() == PostDone(round_)
                fill(source, 0xEE)  # what is sent next must not land in place of it
                assert slot == bytes([round_]) * BIG, "a write that is done is not wholly there"
                await stays(slot)
                assert await receiver.next() == Notification(b"x")

    run(test())


def test_a_receiving_courier_that_is_reaped_in_the_midst_of_a_write() -> None:
    async def test() -> None:
        async with couriers() as (receiver, sender):
            slot = receiver.link.host_slots.receive_slot(0)
            fill(sender.link.host_slots.send_slot(0), 7)
            os.kill(receiver.link.pid, signal.SIGSTOP)
            sender.link.post(1, 0, 0, BIG, b"x")
            await asyncio.sleep(0.1)
            await receiver.link.stop(SECONDS)  # reaped, stopped as it was
            await stays(slot)
            assert slot != bytes([7]) * BIG, "the write was over before the courier was"
            failed = await sender.next()
            assert isinstance(failed, PostFailed), failed
            await stays(slot)

    run(test())


@pytest.mark.nightly
def test_a_writer_that_is_reaped_proves_nothing_to_a_receiver_that_stood_still() -> None:
    async def test() -> None:
        async with couriers() as (receiver, sender):
            slot, neighbour = receiver.link.host_slots.receive_slot(0), receiver.link.host_slots.receive_slot(1)
            fill(neighbour, 9)
            fill(sender.link.host_slots.send_slot(0), 7)
            os.kill(receiver.link.pid, signal.SIGSTOP)
            sender.link.post(1, 0, 0, BIG, b"x")
            await asyncio.sleep(0.1)
            os.kill(sender.link.pid, signal.SIGKILL)
            assert isinstance(await sender.next(), CourierDied)
            await sender.link.stop(SECONDS)  # reaped
            assert slot[0] == 0, "the receiver stood still, and yet it wrote"
            os.kill(receiver.link.pid, signal.SIGCONT)
            landed = await some_landed(slot, 7)
            await asyncio.sleep(WATCHED)
            print(
                f"behind the writer's end {'bytes' if landed else 'no byte'} landed, of {BIG}: {bytes(slot).count(7)}"
            )
            assert neighbour == bytes([9]) * BIG, "a slot was hit that was not written to"
            assert slot != bytes([7]) * BIG
            # The slot's credit comes back with its notification, and none comes: it is given to nobody again.
            said = [receiver.events.get_nowait() for _ in range(receiver.events.qsize())]
            assert not any(isinstance(event, Notification) for event in said), said

    run(test())
