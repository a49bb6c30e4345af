"""Packets between a daemon and its courier: each comes back as it went, and nothing else is taken."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.courier.messages import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_NOTIFICATION_BYTES,
    MAX_PACKET_BYTES,
    MAX_RANKS,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    CourierSetup,
    CourierStarted,
    Expect,
    MessageError,
    Notification,
    Order,
    Post,
    PostDone,
    PostFailed,
    RankSlots,
    RemoteRank,
    decode_event,
    decode_order,
    encode_event,
    encode_order,
)
from kvferry.transfer.protocol import slots

ORDERS: list[Order] = [
    CourierSetup(slot_bytes=1 << 23, receive_slots=16, send_slots=0, parent=4321),
    Connect(b"m" * MAX_METADATA_BYTES, 1 << 46, 16, 1 << 30),
    Connect(b"m", 0, 0, 0),
    CourierSetup(slot_bytes=1 << 25, receive_slots=64, send_slots=0, parent=1, devices=tuple(range(MAX_RANKS))),
    Connect(b"m" * MAX_METADATA_BYTES, 0, 128, 1 << 30, tuple(RemoteRank(1 << 46, i) for i in range(MAX_RANKS))),
    Post((1 << 64) - 1, 3, 5, 1 << 23, b"n" * MAX_NOTIFICATION_BYTES),
    Expect(0),
    Expect((1 << 32) - 1),
]
EVENTS: list[CourierStarted | CourierEvent] = [
    CourierStarted(1 << 46, b"m" * MAX_METADATA_BYTES),
    CourierStarted(0, b"m" * MAX_METADATA_BYTES, (RankSlots(1 << 46, b"r" * 64, 0, bytes(64)),) * MAX_RANKS),
    Connected(),
    PostDone(0),
    PostFailed((1 << 64) - 1, "ü: gone"),
    PostFailed(1, ""),
    Notification(b"\0"),
    Notification(b"n" * MAX_NOTIFICATION_BYTES, b"h" * HEADER_BYTES),
    CourierDied("x" * MAX_MESSAGE_BYTES),
]


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_orders_come_back(order: Order) -> None:
    packet = encode_order(order)
    assert len(packet) <= MAX_PACKET_BYTES
    assert decode_order(packet) == order


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_events_come_back(event: CourierStarted | CourierEvent) -> None:
    packet = encode_event(event)
    assert len(packet) <= MAX_PACKET_BYTES
    assert decode_event(packet) == event


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (Connect(b"", 4096, 1, 4096), "metadata's length"),
        (Connect(b"m" * (MAX_METADATA_BYTES + 1), 4096, 1, 4096), "metadata's length"),
        (Connect(b"m", 0, 1, 4096), "remote receive_address"),
        (Connect(b"m", (1 << 63) - 4095, 1, 4096), "remote receive_address"),
        (Connect(b"m", 4096, 1025, 4096), "remote slots"),
        (Connect(b"m", 4096, 1, 1), "remote slot_bytes"),
        (Post(1, 0, 0, 1, b""), "notification's length"),
        (Connect(b"m", 0, 3, 4096, (RemoteRank(4096, 0),) * 2), "remote slots"),
        (Connect(b"m", 0, 2, 4096, (RemoteRank(4096, 0), RemoteRank(0, 1))), "remote rank's address"),
        (Connect(b"m", 0, 2, 4096, (RemoteRank((1 << 63) - 4095, 0),) * 2), "remote rank's address"),
        (Connect(b"m", 0, 2, 4096, (RemoteRank(4096, 1024),)), "remote rank's device"),
        (Connect(b"m", 0, 65, 4096, (RemoteRank(4096, 0),) * 65), "remote ranks"),
        (CourierSetup(4096, 0, 0, 1), "receive_slots + send_slots"),
        (CourierSetup(4096, 3, 0, 1, (0, 1)), "receive_slots"),
        (CourierSetup(4096, 2, 1, 1, (0, 1)), "send_slots"),
        (CourierSetup(4096, 2, 2, 1, (0, 1024)), "device"),
        (CourierSetup(4096, 65, 65, 1, (0,) * 65), "devices' count"),
    ],
)
def test_orders_out_of_bounds(order: Order, field: str) -> None:
    with pytest.raises(MessageError) as raised:
        encode_order(order)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (Notification(b""), "notification's length"),
        (Notification(b"", b"h" * HEADER_BYTES), "notification's length"),
        (Notification(b"n", b"h"), "header's length"),
        (Notification(b"n" * (MAX_NOTIFICATION_BYTES + 1)), "notification's length"),
        (Notification(b"n", b"h" * (HEADER_BYTES + 1)), "header's length"),
    ],
)
def test_notifications_out_of_bounds(event: Notification, field: str) -> None:
    with pytest.raises(MessageError) as raised:
        encode_event(event)
    assert raised.value.field == field


def test_a_header_longer_than_its_packet_is_refused() -> None:
    packet = encode_event(Notification(b"notice", b"h" * HEADER_BYTES))
    for end in range(2, HEADER_BYTES + 3):
        with pytest.raises(MessageError, match="notification's length is"):
            decode_event(packet[:end])
    assert decode_event(packet[: HEADER_BYTES + 3]) == Notification(b"n", b"h" * HEADER_BYTES)
    for length in (1, HEADER_BYTES - 1, HEADER_BYTES + 1, 255):
        with pytest.raises(MessageError, match=f"header's length is {length}, must be 0 or 64"):
            decode_event(packet[:1] + bytes([length]) + bytes(300))


def test_a_header_is_as_long_as_in_the_slot_protocol() -> None:
    assert HEADER_BYTES == slots.HEADER_BYTES


def test_texts_are_cut() -> None:
    assert decode_event(encode_event(CourierDied("é" * MAX_MESSAGE_BYTES))) == CourierDied(
        "é" * (MAX_MESSAGE_BYTES // 2)
    )


@given(st.binary(max_size=64) | st.builds(lambda kind, rest: bytes([kind]) + rest, st.integers(1, 22), st.binary()))
def test_any_bytes_are_taken_whole_or_refused(packet: bytes) -> None:
    with contextlib.suppress(MessageError):
        order = decode_order(packet)
        assert decode_order(encode_order(order)) == order
    with contextlib.suppress(MessageError):
        event = decode_event(packet)
        assert decode_event(encode_event(event)) == event
