"""Canonical CBOR (RFC 8949, section 4.2.1) of a page's extra keys: the bytes of `cbor2.dumps(keys, canonical=True)`."""

import math
import struct
from collections.abc import Sequence
from typing import TypeAlias

ExtraKey: TypeAlias = "bool | int | float | str | bytes | Sequence[ExtraKey] | None"

NULL = b"\xf6"
MAX_DEPTH = 16  # of lists in lists

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _TAG = 0, 1, 2, 3, 4, 6
_POSITIVE_BIGNUM, _NEGATIVE_BIGNUM = 2, 3


def encode(value: ExtraKey, *, field: str = "extra", depth: int = 0) -> bytes:
    """The value's only canonical encoding. TypeError or ValueError name `field` and what is wrong in it."""
    if value is None:
        return NULL
    if isinstance(value, bool):  # before int, of which it is one
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field}: {value!r} is not encodable as UTF-8: {error.reason}") from None
        return _head(_TEXT, len(text)) + text
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, (list, tuple)):
        if depth == MAX_DEPTH:
            raise ValueError(f"{field}: lists nested deeper than {MAX_DEPTH}")
        items = (encode(item, field=f"{field}[{i}]", depth=depth + 1) for i, item in enumerate(value))
        return _head(_ARRAY, len(value)) + b"".join(items)
    raise TypeError(f"{field}: {type(value).__name__}, must be None, bool, int, float, str, bytes, list or tuple")


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes([major << 5 | info]) + argument.to_bytes(size, "big")
    raise AssertionError(f"no CBOR argument: {argument}")


def _integer(value: int) -> bytes:
    negative = value < 0
    argument = -1 - value if negative else value
    if argument < 1 << 64:
        return _head(_NEGATIVE if negative else _UNSIGNED, argument)
    number = argument.to_bytes((argument.bit_length() + 7) // 8, "big")
    return _head(_TAG, _NEGATIVE_BIGNUM if negative else _POSITIVE_BIGNUM) + _head(_BYTES, len(number)) + number


def _float(value: float) -> bytes:
    if math.isnan(value):
        return b"\xf9\x7e\x00"
    for initial, code in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            short = struct.pack(code, value)
        except OverflowError:  # too large for this width
            continue
        if struct.unpack(code, short)[0] == value:
            return initial + short
    return b"\xfb" + struct.pack(">d", value)
