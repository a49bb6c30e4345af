"""Couriers with real NIXL: what lands, and orders that cannot be."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvferry.transfer.courier.messages import CourierDied, CourierEvent, MessageError, Notification, PostDone
from tests.transfer.courier.ends import SECONDS, SLOT, End, ends, run

# -- what lands ----------------------------------------------------------------------------------------------------


def test_bytes_before_notification_and_neighbours_intact() -> None:
    async def test() -> None:
        slot_bytes = 8 << 20
        receiving = {"slot_bytes": slot_bytes, "receive_slots": 3, "send_slots": 0}
        sending = {"slot_bytes": slot_bytes, "receive_slots": 0, "send_slots": 2}
        async with ends(receiving, sending) as (receiver, sender):
            whole, part = os.urandom(slot_bytes), os.urandom(5000)
            for slot in range(3):
                receiver.link.host_slots.receive_slot(slot)[:] = b"\xa5" * slot_bytes
            sender.link.host_slots.send_slot(0)[:] = whole
            sender.link.host_slots.send_slot(1)[: len(part)] = part
            seen: asyncio.Queue[tuple[CourierEvent, bytes]] = asyncio.Queue()
            receiver.handler = lambda event: seen.put_nowait((event, bytes(receiver.link.host_slots.receive_slot(1))))
            receiver.link.expect(1)

            sender.link.post(7, 0, 1, slot_bytes, b"whole")
            event, landed = await asyncio.wait_for(seen.get(), SECONDS)
            assert event == Notification(b"whole")
            assert landed == whole
            assert await sender.next() == PostDone(7)

            sender.link.post(8, 1, 1, len(part), b"part")
            event, landed = await asyncio.wait_for(seen.get(), SECONDS)
            assert event == Notification(b"part")
            assert landed == part + whole[len(part) :]
            assert await sender.next() == PostDone(8)
            for slot in (0, 2):
                assert receiver.link.host_slots.receive_slot(slot) == b"\xa5" * slot_bytes

    run(test())


def test_posts_back_and_forth() -> None:
    async def test() -> None:
        async with ends() as pair:
            for end in pair:
                end.link.expect(1)
            for number in range(64):
                sender, receiver = pair[number % 2], pair[(number + 1) % 2]
                slot, remote, notification = number // 2 % 2, number // 4 % 2, b"%d" % number
                data = os.urandom(SLOT - number)
                sender.link.host_slots.send_slot(slot)[: len(data)] = data
                sender.link.post(number, slot, remote, len(data), notification)
                assert await receiver.next() == Notification(notification)
                assert receiver.link.host_slots.receive_slot(remote)[: len(data)] == data
                assert await sender.next() == PostDone(number)

    run(test())


def test_many_posts_in_flight_are_each_answered() -> None:
    async def test() -> None:
        slots = 16
        async with ends({"receive_slots": slots}, {"send_slots": slots}) as (receiver, sender):
            for slot in range(slots):
                sender.link.host_slots.send_slot(slot)[:] = bytes([slot + 1]) * SLOT
                sender.link.post(100 + slot, slot, slots - 1 - slot, SLOT, bytes([slot]))
            done = [await sender.next() for _ in range(slots)]
            heard = [await receiver.next() for _ in range(slots)]  # without expect: slower, never lost
            assert {event.post_id for event in done if isinstance(event, PostDone)} == set(range(100, 100 + slots))
            assert {event.payload[0] for event in heard if isinstance(event, Notification)} == set(range(slots))
            for slot in range(slots):
                assert receiver.link.host_slots.receive_slot(slots - 1 - slot) == bytes([slot + 1]) * SLOT

    run(test())


# -- orders that cannot be -----------------------------------------------------------------------------------------


def test_orders_are_checked() -> None:
    async def test() -> None:
        async with ends({"send_slots": 0}) as (receiver, sender):
            post = sender.link.post
            for arguments, field in (
                ((1, 2, 0, SLOT, b"x"), "send_slot"),
                ((1, -1, 0, SLOT, b"x"), "send_slot"),
                ((1, 0, 2, SLOT, b"x"), "remote_slot"),
                ((1, 0, 0, SLOT + 1, b"x"), "nbytes"),
                ((1, 0, 0, 0, b"x"), "nbytes"),
                ((1, 0, 0, SLOT, b""), "notification's length"),
                ((1, 0, 0, SLOT, b"x" * 257), "notification's length"),
                ((-1, 0, 0, SLOT, b"x"), "post_id"),
            ):
                with pytest.raises(MessageError) as raised:
                    post(*arguments)
                assert raised.value.field == field
            with pytest.raises(MessageError, match="send_slot"):
                receiver.link.post(1, 0, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="receive slot is 2"):
                receiver.link.host_slots.receive_slot(2)
            with pytest.raises(MessageError, match="send slot is 2"):
                sender.link.host_slots.send_slot(2)
            with pytest.raises(MessageError, match="called once"):
                sender.connect(receiver)
            with pytest.raises(MessageError, match="active is -1"):
                sender.link.expect(-1)
            post(1, 0, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="post_id is 1"):
                post(1, 1, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="send_slot is 0"):
                post(2, 0, 0, SLOT, b"x")
            assert await sender.next() == PostDone(1)
            post(1, 0, 0, SLOT, b"y")
            assert await sender.next() == PostDone(1)

    run(test())


def test_garbage_metadata_ends_the_courier() -> None:
    async def test() -> None:
        end = await End().start()
        try:
            with pytest.raises(MessageError, match="after Connected"):
                end.link.post(1, 0, 0, SLOT, b"x")
            end.link.connect(b"garbage", 4096, 1, SLOT)
            died = await end.next()
            assert isinstance(died, CourierDied)
            assert "nixl" in died.message
        finally:
            await end.link.stop(SECONDS)

    run(test())
