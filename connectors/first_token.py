"""The first token of a reply, in the aux blob of its request: the prefill engine samples it, the decode engine begins
behind it. Little-endian: magic, the token's id."""

from __future__ import annotations

import struct

_FORMAT = struct.Struct("<4sI")
_MAGIC = b"KVT1"


def blob_of(token: int | None) -> bytes:
    """The blob that names it; None: the decode engine is to sample it."""
    return b"" if token is None else _FORMAT.pack(_MAGIC, token)


def token_of(blob: bytes) -> int | None:
    """The token that the blob names; None: it names none, or in a form that is not known here."""
    if len(blob) != _FORMAT.size or not blob.startswith(_MAGIC):
        return None
    token: int = _FORMAT.unpack(blob)[1]
    return token
