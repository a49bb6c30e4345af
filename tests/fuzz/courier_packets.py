"""Packets between a daemon and its courier, and what a peer writes into slots and notifications.

Of the first byte follows what the rest is. What is decoded is encoded to the same bytes.
"""

from __future__ import annotations

from random import Random

from kvferry.transfer.courier.messages import (
    Connect,
    Connected,
    CourierDied,
    CourierSetup,
    CourierStarted,
    Expect,
    MessageError,
    Notification,
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
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartHeader, PartNotice, SlotError
from tests.fuzz.frames import bytes_changed
from tests.fuzz.stage import Finding

ORDER, EVENT, NOTICE, HEADER = range(4)
TEXTS = (PostFailed, CourierDied)  # whose text may have been no UTF-8


def one_input(data: bytes) -> None:
    if not data:
        return
    kind, rest = data[0] % 4, data[1:]
    try:
        if kind == ORDER:
            again = encode_order(decode_order(rest))
        elif kind == EVENT:
            event = decode_event(rest)
            again = rest if isinstance(event, TEXTS) else encode_event(event)
        elif kind == NOTICE:
            again = PartNotice.unpack(rest).pack()
        else:
            PartHeader.unpack(rest)
            again = rest
    except (MessageError, SlotError):
        return
    if again != rest:
        raise Finding(f"kind {kind}: {rest.hex()} was taken, and is encoded as {again.hex()}")


def mutate(data: bytes, most: int, seed: int) -> bytes:
    chance = Random(seed)
    if chance.random() < 0.1:
        data = chance.choice(SEEDS)
    return (data[:1] + bytes_changed(data[1:], chance, most))[:most] or b"\0"


def _seeds() -> list[bytes]:
    handle = bytes(64)
    orders = (
        CourierSetup(4096, 4, 4, 1),
        CourierSetup(4096, 4, 4, 1, (0, 1)),
        Connect(b"metadata", 1 << 20, 4, 4096),
        Connect(b"metadata", 0, 4, 4096, (RemoteRank(1 << 20, 0), RemoteRank(1 << 21, 1))),
        Post(1, 0, 0, 100, b"notice"),
        Expect(3),
    )
    events = (
        CourierStarted(1 << 20, b"metadata"),
        CourierStarted(0, b"metadata", (RankSlots(1 << 20, handle, 1 << 21, handle),)),
        Connected(),
        PostDone(1),
        PostFailed(1, "why"),
        Notification(b"notice"),
        Notification(b"notice", bytes(HEADER_BYTES)),
        CourierDied("why"),
    )
    notice = PartNotice(7, 1, 0, 1)
    header = PartHeader(
        epoch=7, transfer=1, slot=0, generation=1, lane=0, first_page=0, byte_offset=0, nbytes=16, checksum=0
    )
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    return [
        *(bytes([ORDER]) + encode_order(order) for order in orders),
        *(bytes([EVENT]) + encode_event(event) for event in events),
        bytes([NOTICE]) + notice.pack(),
        bytes([HEADER]) + packed,
    ]


SEEDS = _seeds()
