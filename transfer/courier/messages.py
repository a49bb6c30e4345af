"""Messages between a daemon and its courier, one a packet of their SOCK_SEQPACKET socketpair.

Orders go to the courier: `CourierSetup` first and once, then `Connect` at most once, `Post` and `Expect`. Events come
back: `CourierStarted` first, then the others. A courier that cannot go on says `CourierDied` and exits. A peer can
reach the courier's ports, so the daemon believes an event no more than its bounds and its own records allow.

A packet is one byte of kind, the fixed fields, then the variable ones. All integers are little-endian and unsigned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

MAX_METADATA_BYTES = 64 * 1024
MAX_NOTIFICATION_BYTES = 256
HEADER_BYTES = 64  # as in slots.py, which couriers of slots in host memory do not import
MAX_MESSAGE_BYTES = 4096  # of an error's text, UTF-8
MAX_RANKS = 64
IPC_HANDLE_BYTES = 64
MAX_PACKET_BYTES = MAX_METADATA_BYTES + MAX_RANKS * 144 + 64
MAX_SLOTS = 1024  # of each kind, on each side
MAX_SLOT_BYTES = 1 << 30
MIN_SLOT_BYTES = 4096
MAX_EXPECTED = (1 << 32) - 1
MAX_DEVICE = 1023
MAX_ADDRESS = (1 << 63) - 1


class MessageError(ValueError):
    """A packet or a value that the rules here forbid, named by `field`."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} is {value}, must be {bound}")
        self.field = field


# -- orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CourierSetup:
    """The slots, and the pid of the courier's parent. `devices` empty: slots in the memory that came with the process,
    [receive slots][send slots]. Else the device of each rank: slot i is rank i // (slots / ranks)'s, on its device."""

    slot_bytes: int
    receive_slots: int
    send_slots: int
    parent: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """The place of one rank's receive slots in the other courier's process: their address, and the device by its number
    there."""

    address: int
    device: int


@dataclass(frozen=True, slots=True)
class Connect:
    """The other courier: its agent's metadata, the address of its receive slots in its process, their count and size.
    With no slots there is nothing to write to; the agent is added all the same. Slots on GPUs have an address a rank
    in place of `receive_address`, which is 0 then."""

    metadata: bytes
    receive_address: int
    slots: int
    slot_bytes: int
    ranks: tuple[RemoteRank, ...] = ()


class Post(NamedTuple):
    """Write the first `nbytes` of a send slot to the start of a remote slot, then notify."""

    post_id: int
    send_slot: int
    remote_slot: int
    nbytes: int
    notification: bytes


@dataclass(frozen=True, slots=True)
class Expect:
    """The number of transfers that may bring parts now, or whose parts are about to be posted: above 0 the courier
    polls fast."""

    active: int


Order: TypeAlias = CourierSetup | Connect | Post | Expect

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSlots:
    """One rank's slots on its GPU: addresses in the courier's process, and the handles by which others map them.
    Address 0 where it has none of that kind."""

    receive_address: int
    receive_handle: bytes
    send_address: int
    send_handle: bytes


@dataclass(frozen=True, slots=True)
class CourierStarted:
    """The agent is up and its receive slots are registered: at this address of its process, or, on GPUs, rank by
    rank."""

    receive_address: int
    metadata: bytes
    ranks: tuple[RankSlots, ...] = ()


@dataclass(frozen=True, slots=True)
class Connected:
    """The other courier's agent is known."""


class PostDone(NamedTuple):
    """The write is complete in the peer's memory and its notification is on its way."""

    post_id: int


@dataclass(frozen=True, slots=True)
class PostFailed:
    """The write failed. It proves nothing about the peer's memory: bytes of it may have landed, or still land."""

    post_id: int
    message: str


class Notification(NamedTuple):
    """The peer's: every byte of the write that it came with is in the receive slot. header: the first bytes of the slot
    on a GPU that a part's notification names, read after it had come; empty for other notifications, and for slots in
    host memory, which the daemon reads."""

    payload: bytes
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class CourierDied:
    """The courier's last event: nothing of it lands any more, and no post of it will be answered."""

    message: str


CourierEvent: TypeAlias = Connected | PostDone | PostFailed | Notification | CourierDied

# -- packets -----------------------------------------------------------------------------------------------------

_SETUP = struct.Struct("<BQIIQ")  # then the devices
_DEVICE = struct.Struct("<I")
_CONNECT = struct.Struct("<BQIQI")  # then the ranks, as many as the last field says, and the metadata
_REMOTE_RANK = struct.Struct("<QI")
_POST = struct.Struct("<BQIIQ")  # then the notification
_EXPECT = struct.Struct("<BI")
_STARTED = struct.Struct("<BQI")  # then the ranks, as many as the last field says, and the metadata
_RANK_SLOTS = struct.Struct(f"<Q{IPC_HANDLE_BYTES}sQ{IPC_HANDLE_BYTES}s")
_CONNECTED = struct.Struct("<B")
_POST_DONE = struct.Struct("<BQ")
_POST_FAILED = struct.Struct("<BQ")  # then the text
_NOTIFICATION = struct.Struct("<BB")  # then the header, as long as the last field says, and the payload
_DIED = struct.Struct("<B")  # then the text

_KIND_SETUP, _KIND_CONNECT, _KIND_POST, _KIND_EXPECT = 1, 2, 3, 4
_KIND_STARTED, _KIND_CONNECTED, _KIND_POST_DONE, _KIND_POST_FAILED, _KIND_NOTIFICATION, _KIND_DIED = range(17, 23)


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raises MessageError unless low <= value <= high."""
    if not low <= value <= high:
        raise MessageError(field, value, f"in {low}..{high}")


def check_slots(slot_bytes: int, receive_slots: int, send_slots: int, devices: tuple[int, ...] = ()) -> None:
    """Raises MessageError for slot counts, sizes (bytes) or devices that no courier takes."""
    check_range("slot_bytes", slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES)
    check_range("receive_slots", receive_slots, 0, MAX_SLOTS)
    check_range("send_slots", send_slots, 0, MAX_SLOTS)
    if receive_slots + send_slots == 0:
        raise MessageError("receive_slots + send_slots", 0, "at least 1")
    check_range("devices' count", len(devices), 0, MAX_RANKS)
    for device in devices:
        check_range("device", device, 0, MAX_DEVICE)
    for field, slots in (("receive_slots", receive_slots), ("send_slots", send_slots)):
        _check_shared(field, slots, len(devices))


def _check_shared(field: str, slots: int, ranks: int) -> None:
    if ranks and slots % ranks:
        raise MessageError(field, slots, f"a multiple of the {ranks} ranks")


def check_connect(connect: Connect) -> None:
    """Raises MessageError for a remote courier that no courier connects to."""
    check_range("metadata's length", len(connect.metadata), 1, MAX_METADATA_BYTES)
    check_range("remote slots", connect.slots, 0, MAX_SLOTS)
    check_range("remote ranks", len(connect.ranks), 0, MAX_RANKS)
    _check_shared("remote slots", connect.slots, len(connect.ranks))
    for rank in connect.ranks:
        check_range("remote rank's device", rank.device, 0, MAX_DEVICE)
    if not connect.slots:
        return
    check_range("remote slot_bytes", connect.slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES)
    if not connect.ranks:
        last = MAX_ADDRESS + 1 - connect.slots * connect.slot_bytes
        check_range("remote receive_address", connect.receive_address, 1, last)
    for rank in connect.ranks:
        last = MAX_ADDRESS + 1 - connect.slots // len(connect.ranks) * connect.slot_bytes
        check_range("remote rank's address", rank.address, 1, last)


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
        fixed = _CONNECT.pack(_KIND_CONNECT, order.receive_address, order.slots, order.slot_bytes, len(order.ranks))
        ranks = b"".join(_REMOTE_RANK.pack(rank.address, rank.device) for rank in order.ranks)
        return fixed + ranks + order.metadata
    check_slots(order.slot_bytes, order.receive_slots, order.send_slots, order.devices)
    fixed = _SETUP.pack(_KIND_SETUP, order.slot_bytes, order.receive_slots, order.send_slots, order.parent)
    return fixed + b"".join(_DEVICE.pack(device) for device in order.devices)


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
        (_, address, slots, slot_bytes, count), rest = _split(_CONNECT, packet)
        ranks, metadata = _records(_REMOTE_RANK, count, rest)
        connect = Connect(metadata, address, slots, slot_bytes, tuple(RemoteRank(*rank) for rank in ranks))
        check_connect(connect)
        return connect
    if kind == _KIND_SETUP:
        (_, slot_bytes, receive_slots, send_slots, parent), rest = _split(_SETUP, packet)
        records, left = _records(_DEVICE, len(rest) // _DEVICE.size, rest)
        check_range("bytes behind the devices", len(left), 0, 0)
        devices = tuple(device for (device,) in records)
        check_slots(slot_bytes, receive_slots, send_slots, devices)
        return CourierSetup(slot_bytes, receive_slots, send_slots, parent, devices)
    raise MessageError("order's kind", kind, f"in {_KIND_SETUP}..{_KIND_EXPECT}")


def encode_event(event: CourierStarted | CourierEvent) -> bytes:
    """Raises MessageError for metadata or a payload over its limit; longer texts are cut."""
    if isinstance(event, PostDone):
        return _POST_DONE.pack(_KIND_POST_DONE, event.post_id)
    if isinstance(event, Notification):
        check_range("notification's length", len(event.payload), 1, MAX_NOTIFICATION_BYTES)
        _check_header(len(event.header))
        return _NOTIFICATION.pack(_KIND_NOTIFICATION, len(event.header)) + event.header + event.payload
    if isinstance(event, PostFailed):
        return _POST_FAILED.pack(_KIND_POST_FAILED, event.post_id) + _text(event.message)
    if isinstance(event, CourierStarted):
        check_range("metadata's length", len(event.metadata), 1, MAX_METADATA_BYTES)
        check_range("ranks", len(event.ranks), 0, MAX_RANKS)
        ranks = [
            _RANK_SLOTS.pack(rank.receive_address, rank.receive_handle, rank.send_address, rank.send_handle)
            for rank in event.ranks
        ]
        fixed = _STARTED.pack(_KIND_STARTED, event.receive_address, len(event.ranks))
        return fixed + b"".join(ranks) + event.metadata
    if isinstance(event, CourierDied):
        return _DIED.pack(_KIND_DIED) + _text(event.message)
    return _CONNECTED.pack(_KIND_CONNECTED)


def decode_event(packet: bytes) -> CourierStarted | CourierEvent:
    """Raises MessageError for what is no event."""
    kind = _kind(packet)
    if kind == _KIND_POST_DONE:
        return PostDone(_whole(_POST_DONE, packet)[1])
    if kind == _KIND_NOTIFICATION:
        (_, length), rest = _split(_NOTIFICATION, packet)
        _check_header(length)
        check_range("notification's length", len(rest) - length, 1, MAX_NOTIFICATION_BYTES)
        return Notification(rest[length:], rest[:length])
    if kind == _KIND_POST_FAILED:
        (_, post_id), rest = _split(_POST_FAILED, packet)
        return PostFailed(post_id, _read_text(rest))
    if kind == _KIND_STARTED:
        (_, address, count), rest = _split(_STARTED, packet)
        ranks, metadata = _records(_RANK_SLOTS, count, rest)
        check_range("metadata's length", len(metadata), 1, MAX_METADATA_BYTES)
        return CourierStarted(address, metadata, tuple(RankSlots(*rank) for rank in ranks))
    if kind == _KIND_DIED:
        return CourierDied(_read_text(_split(_DIED, packet)[1]))
    if kind == _KIND_CONNECTED:
        _whole(_CONNECTED, packet)
        return Connected()
    raise MessageError("event's kind", kind, f"in {_KIND_STARTED}..{_KIND_DIED}")


def _check_header(length: int) -> None:
    if length not in (0, HEADER_BYTES):
        raise MessageError("header's length", length, f"0 or {HEADER_BYTES}")


def _kind(packet: bytes) -> int:
    check_range("packet's length", len(packet), 1, MAX_PACKET_BYTES)
    return packet[0]


def _records(form: struct.Struct, count: int, packet: bytes) -> tuple[list[tuple[Any, ...]], bytes]:
    """The ranks' records that a packet goes on with, and what follows them."""
    check_range("ranks", count, 0, MAX_RANKS)
    size = form.size * count
    check_range("length of what follows the fixed fields", len(packet), size, MAX_PACKET_BYTES)
    return list(form.iter_unpack(packet[:size])), packet[size:]


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
