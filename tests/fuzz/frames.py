"""An input as a run of frames, so that one input is a whole conversation; and what changes it at random.

A frame is a tag (one byte, the target's), its length (two bytes, little endian) and its bytes. What is cut off short is
the last frame; whatever bytes there are, they are frames.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_FRAMES = 48
_HEAD = struct.Struct("<BH")
_INTEGERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 255, 256, 4095, 4096, 65535, 65536, 1 << 20, 1 << 30)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_FLOATS = (0.0, -1.0, 0.5, 1e308, math.inf, -math.inf, math.nan)


@dataclass(frozen=True, slots=True)
class Frame:
    tag: int
    body: bytes


def split(data: bytes) -> list[Frame]:
    found, at = [], 0
    while at + _HEAD.size <= len(data) and len(found) < MAX_FRAMES:
        tag, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        found.append(Frame(tag, data[at : at + length]))
        at += length
    return found


def join(frames: Sequence[Frame]) -> bytes:
    return b"".join(
        _HEAD.pack(frame.tag, len(frame.body)) + frame.body for frame in frames if len(frame.body) < 1 << 16
    )


MutateBody = Callable[[Frame, Random], Frame]


def change(data: bytes, most: int, chance: Random, others: Sequence[bytes], body: MutateBody) -> bytes:
    """One or some changes: of frames by `body`, of their order, and with frames of `others`."""
    frames = split(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        what = chance.random()
        if not frames or what < 0.12:
            donor = split(chance.choice(others))
            if donor:
                frames.insert(chance.randint(0, len(frames)), chance.choice(donor))
            continue
        at = chance.randrange(len(frames))
        if what < 0.2:
            del frames[at]
        elif what < 0.28:
            frames.insert(chance.randint(0, len(frames)), frames[at])
        elif what < 0.35:
            other = chance.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        else:
            frames[at] = body(frames[at], chance)
    return join(frames[:MAX_FRAMES])[:most]


def bytes_changed(data: bytes, chance: Random, most: int = 4096) -> bytes:
    """Flipped, cut, repeated or replaced in part."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        what = chance.randrange(5)
        at = chance.randrange(len(changed) + 1)
        if what == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif what == 1:
            del changed[at:]
        elif what == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 33))
        elif what == 3:
            changed[at:at] = changed[: chance.randint(0, 64)]
        else:
            changed[at : at + 8] = chance.choice((0, 1, (1 << 64) - 1, 1 << 32, 1 << 63)).to_bytes(8, "little")
    return bytes(changed[:most])


def parsed(kind: type[Message], data: bytes) -> Message | None:
    """As gRPC does it; None where it would end the call."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    return message


def message_changed(message: Message, chance: Random, words: Sequence[bytes | str]) -> None:
    """One field, somewhere in it. `words`: what its bytes and strings may become."""
    fields: list[FieldDescriptor] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    field = chance.choice(present if present and chance.random() < 0.7 else fields)
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        _repeated_changed(value, field, chance, words)
    elif field.message_type is not None:
        value.SetInParent()
        message_changed(value, chance, words)
    elif chance.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, value, chance, words))


def _repeated_changed(values: Any, field: FieldDescriptor, chance: Random, words: Sequence[bytes | str]) -> None:
    if len(values) and chance.random() < 0.4:
        del values[chance.randrange(len(values))]
    elif field.message_type is None:
        values.append(_value(field, values[0] if len(values) else _zero(field), chance, words))
    elif len(values) and chance.random() < 0.6:
        message_changed(chance.choice(values), chance, words)
    else:
        new = values.add()
        if len(values) > 1 and chance.random() < 0.5:
            new.CopyFrom(values[0])
        message_changed(new, chance, words)


def _zero(field: FieldDescriptor) -> object:
    return {FieldDescriptor.CPPTYPE_STRING: "" if field.type == FieldDescriptor.TYPE_STRING else b""}.get(
        field.cpp_type, 0
    )


def _value(field: FieldDescriptor, old: Any, chance: Random, words: Sequence[bytes | str]) -> object:
    if field.cpp_type in _BITS:
        low, high = _BITS[field.cpp_type]
        new = chance.choice((*_INTEGERS, high, high - 1, low, old + 1, old - 1, chance.randint(low, high), -old))
        return min(max(new, low), high)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((*range(16), -1, (1 << 31) - 1))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not old
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        texts = [word for word in words if isinstance(word, str)]
        return chance.choice((*texts, "", "\0", "é" * 65, "x" * 513, old + "x", old[:-1]))
    blobs = [word for word in words if isinstance(word, bytes)]
    new = chance.choice((*blobs, b"", old[:-1], old + b"\0", old + old, bytes(33), bytes(65536)[: 1 << 15]))
    return bytes_changed(old, chance) if chance.random() < 0.3 else new
