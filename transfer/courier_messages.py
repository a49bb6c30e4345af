"""What a daemon and its courier say to each other, one message a packet of their SOCK_SEQPACKET socketpair.

Orders go to the courier: `Setup` first and once, then `Connect` at most once, `Post` and `Expect`. Events come back:
`Started` first, then the others. A courier that cannot go on says `CourierDied` and exits. A peer can reach the
courier's ports, so the daemon believes an event no more than its bounds and its own records allow.

A packet is one byte of kind, the fixed fields, then the variable ones. All integers are little-endian and unsigned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

MAX_METADATA_BYTES = 64 * 1024
MAX_NOTIFICATION_BYTES = 256
MAX_MESSAGE_BYTES = 4096  # of an error's text, UTF-8
MAX_PACKET_BYTES = MAX_METADATA_BYTES + 64
MAX_SLOTS = 1024  # of each kind, on each side
MAX_SLOT_BYTES = 1 << 30
MIN_SLOT_BYTES = 4096
MAX_EXPECTED = (1 << 32) - 1


class MessageError(ValueError):
    """A packet or a value that the rules here forbid, named by `field`."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} is {value}, must be {bound}")
        self.field = field


# -- orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """The slot memory that came with the process, [receive slots][send slots], and the pid of its parent."""

    slot_bytes: int
    receive_slots: int
    send_slots: int
    parent: int


@dataclass(frozen=True, slots=True)
class Connect:
    """The other courier: its agent's metadata, the address of its receive slots in its process, their count and size.
    With no slots there is nothing to write to; the agent is added all the same."""

    metadata: bytes
    receive_address: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Post:
    """Write the first `nbytes` of a send slot to the start of a remote slot, then notify."""

    post_id: int
    send_slot: int
    remote_slot: int
    nbytes: int
    notification: bytes


@dataclass(frozen=True, slots=True)
class Expect:
    """How many transfers may bring parts now: above 0 the courier polls fast."""

    active: int


Order: TypeAlias = Setup | Connect | Post | Expect

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The agent is up and its receive slots, at this address of its process, are registered."""

    receive_address: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """The other courier's agent is known."""


@dataclass(frozen=True, slots=True)
class PostDone:
    """The write is complete in the peer's memory and its notification is on its way."""

    post_id: int


@dataclass(frozen=True, slots=True)
class PostFailed:
    """The write failed. It proves nothing about the peer's memory: bytes of it may have landed, or still land."""

    post_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Notification:
    """The peer's: every byte of the write that it came with is in the receive slot."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class CourierDied:
    """The courier's last event: nothing of it lands any more, and no post of it will be answered."""

    message: str


CourierEvent: TypeAlias = Connected | PostDone | PostFailed | Notification | CourierDied

# -- packets -----------------------------------------------------------------------------------------------------

_SETUP = struct.Struct("<BQIIQ")
_CONNECT = struct.Struct("<BQIQ")  # then the metadata
_POST = struct.Struct("<BQIIQ")  # then the notification
_EXPECT = struct.Struct("<BI")
_STARTED = struct.Struct("<BQ")  # then the metadata
_CONNECTED = struct.Struct("<B")
_POST_DONE = struct.Struct("<BQ")
_POST_FAILED = struct.Struct("<BQ")  # then the text
_NOTIFICATION = struct.Struct("<B")  # then the payload
_DIED = struct.Struct("<B")  # then the text

_KIND_SETUP, _KIND_CONNECT, _KIND_POST, _KIND_EXPECT = 1, 2, 3, 4
_KIND_STARTED, _KIND_CONNECTED, _KIND_POST_DONE, _KIND_POST_FAILED, _KIND_NOTIFICATION, _KIND_DIED = range(17, 23)


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises MessageError unless low <= value <= high."""
    if not low <= value <= high:
        raise MessageError(field, value, f"in {low}..{high}")


def check_slots(slot_bytes: int, receive_slots: int, send_slots: int) -> None:
    """Raises MessageError for slot counts or sizes (bytes) that no courier takes."""
    check_range("slot_bytes", slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES)
    check_range("receive_slots", receive_slots, 0, MAX_SLOTS)
    check_range("send_slots", send_slots, 0, MAX_SLOTS)
    if receive_slots + send_slots == 0:
        raise MessageError("receive_slots + send_slots", 0, "at least 1")


def check_connect(connect: Connect) -> None:
    """Raises MessageError for a remote courier that no courier connects to."""
    check_range("metadata's length", len(connect.metadata), 1, MAX_METADATA_BYTES)
    check_range("remote slots", connect.slots, 0, MAX_SLOTS)
    if connect.slots:
        check_range("remote slot_bytes", connect.slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES)
        last = (1 << 63) - connect.slots * connect.slot_bytes
        check_range("remote receive_address", connect.receive_address, 1, last)


def encode_order(order: Order) -> bytes:
    """Raises MessageError, or struct.error for an integer that does not fit its field."""
    if isinstance(order, Post):
        check_range("notification's length", len(order.notification), 1, MAX_NOTIFICATION_BYTES)
        fixed = _POST.pack(_KIND_POST, order.post_id, order.send_slot, order.remote_slot, order.nbytes)
        return fixed + order.notification
    if isinstance(order, Expect):
        return _EXPECT.pack(_KIND_EXPECT, order.active)
    if isinstance(order, Connect):
        check_connect(order)
        fixed = _CONNECT.pack(_KIND_CONNECT, order.receive_address, order.slots, order.slot_bytes)
        return fixed + order.metadata
    check_slots(order.slot_bytes, order.receive_slots, order.send_slots)
    return _SETUP.pack(_KIND_SETUP, order.slot_bytes, order.receive_slots, order.send_slots, order.parent)


def decode_order(packet: bytes) -> Order:
    """Raises MessageError for what is no order."""
    kind = _kind(packet)
    if kind == _KIND_POST:
        (_, post_id, send_slot, remote_slot, nbytes), rest = _split(_POST, packet)
        check_range("notification's length", len(rest), 1, MAX_NOTIFICATION_BYTES)
        return Post(post_id, send_slot, remote_slot, nbytes, rest)
    if kind == _KIND_EXPECT:
        return Expect(_whole(_EXPECT, packet)[1])
    if kind == _KIND_CONNECT:
        (_, address, slots, slot_bytes), rest = _split(_CONNECT, packet)
        connect = Connect(rest, address, slots, slot_bytes)
        check_connect(connect)
        return connect
    if kind == _KIND_SETUP:
        _, slot_bytes, receive_slots, send_slots, parent = _whole(_SETUP, packet)
        check_slots(slot_bytes, receive_slots, send_slots)
        return Setup(slot_bytes, receive_slots, send_slots, parent)
    raise MessageError("order's kind", kind, f"in {_KIND_SETUP}..{_KIND_EXPECT}")


def encode_event(event: Started | CourierEvent) -> bytes:
    """Raises MessageError for metadata or a payload over its limit; longer texts are cut."""
    if isinstance(event, PostDone):
        return _POST_DONE.pack(_KIND_POST_DONE, event.post_id)
    if isinstance(event, Notification):
        check_range("notification's length", len(event.payload), 1, MAX_NOTIFICATION_BYTES)
        return _NOTIFICATION.pack(_KIND_NOTIFICATION) + event.payload
    if isinstance(event, PostFailed):
        return _POST_FAILED.pack(_KIND_POST_FAILED, event.post_id) + _text(event.message)
    if isinstance(event, Started):
        check_range("metadata's length", len(event.metadata), 1, MAX_METADATA_BYTES)
        return _STARTED.pack(_KIND_STARTED, event.receive_address) + event.metadata
    if isinstance(event, CourierDied):
        return _DIED.pack(_KIND_DIED) + _text(event.message)
    return _CONNECTED.pack(_KIND_CONNECTED)


def decode_event(packet: bytes) -> Started | CourierEvent:
    """Raises MessageError for what is no event."""
    kind = _kind(packet)
    if kind == _KIND_POST_DONE:
        return PostDone(_whole(_POST_DONE, packet)[1])
    if kind == _KIND_NOTIFICATION:
        _, rest = _split(_NOTIFICATION, packet)
        check_range("notification's length", len(rest), 1, MAX_NOTIFICATION_BYTES)
        return Notification(rest)
    if kind == _KIND_POST_FAILED:
        (_, post_id), rest = _split(_POST_FAILED, packet)
        return PostFailed(post_id, _read_text(rest))
    if kind == _KIND_STARTED:
        (_, address), rest = _split(_STARTED, packet)
        check_range("metadata's length", len(rest), 1, MAX_METADATA_BYTES)
        return Started(address, rest)
    if kind == _KIND_DIED:
        return CourierDied(_read_text(_split(_DIED, packet)[1]))
    if kind == _KIND_CONNECTED:
        _whole(_CONNECTED, packet)
        return Connected()
    raise MessageError("event's kind", kind, f"in {_KIND_STARTED}..{_KIND_DIED}")


def _kind(packet: bytes) -> int:
    check_range("packet's length", len(packet), 1, MAX_PACKET_BYTES)
    return packet[0]


def _split(form: struct.Struct, packet: bytes) -> tuple[tuple[int, ...], bytes]:
    """The fixed fields, kind included, and what follows them."""
    if len(packet) < form.size:
        raise MessageError("packet's length", len(packet), f"at least {form.size} for kind {packet[0]}")
    return form.unpack_from(packet), packet[form.size :]


def _whole(form: struct.Struct, packet: bytes) -> tuple[int, ...]:
    if len(packet) != form.size:
        raise MessageError("packet's length", len(packet), f"{form.size} for kind {packet[0]}")
    return form.unpack(packet)


def _text(message: str) -> bytes:
    return message.encode(errors="replace")[:MAX_MESSAGE_BYTES]


def _read_text(text: bytes) -> str:
    check_range("text's length", len(text), 0, MAX_MESSAGE_BYTES)
    return text.decode(errors="replace")
