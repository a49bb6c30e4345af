"""The aux blob: what a prefill worker tells the decode worker besides the KV. Opaque to the daemons."""

from __future__ import annotations

import struct

_FORM = struct.Struct("<4sI")
_MAGIC = b"kvf1"


def pack_first_token(token: int) -> bytes:
    return _FORM.pack(_MAGIC, token)


def unpack_first_token(blob: bytes, vocabulary: int) -> int:
    """Raises ValueError when the blob is not one of `pack_first_token`, or its token not below `vocabulary`."""
    if len(blob) != _FORM.size:
        raise ValueError(f"aux has {len(blob)} bytes; it must have {_FORM.size}")
    magic, token = _FORM.unpack(blob)
    if magic != _MAGIC:
        raise ValueError(f"aux begins with {magic!r}; this worker reads {_MAGIC!r}")
    if token >= vocabulary:
        raise ValueError(f"aux gives first token {token}; the vocabulary has {vocabulary} tokens")
    return int(token)
