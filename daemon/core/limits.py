"""Bounds of everything that comes in, and the checks that name field, value and bound."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.daemon.core.errors import invalid
from kvferry.proto import common_pb2 as common
from kvferry.proto.limits import MAX_ATTEMPT, MAX_PRIORITY, REQUEST_ID_BYTES
from kvferry.radix.digests import DIGEST_BYTES

MAX_ASKS_PER_REQUEST = 16  # open at the prefill daemon; also how often a decode daemon asks again


class Name(NamedTuple):
    """A request's name: 16 random bytes and the number of the try, from 1."""

    request_id: bytes
    attempt: int

    def to_proto(self) -> common.RequestName:
        return common.RequestName(request_id=self.request_id, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.request_id.hex()}#{self.attempt}"


def name_of(message: common.RequestName) -> Name:
    if len(message.request_id) != REQUEST_ID_BYTES:
        raise invalid(f"name.request_id has {len(message.request_id)} bytes; it must have {REQUEST_ID_BYTES}")
    if not 1 <= message.attempt <= MAX_ATTEMPT:
        raise invalid(f"name.attempt is {message.attempt}; it must be 1 to {MAX_ATTEMPT}")
    return Name(message.request_id, message.attempt)


def check_priority(priority: int) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid(f"priority is {priority}; it must be {-MAX_PRIORITY} to {MAX_PRIORITY}")


def check_prompt(*, tokens: int, digests: bytes, tail_digest: bytes, page_size: int, max_tokens: int) -> None:
    """Raises INVALID_ARGUMENT unless the digests are those of a prompt of `tokens` tokens."""
    if not 1 <= tokens <= max_tokens:
        raise invalid(f"tokens is {tokens}; it must be 1 to {max_tokens}")
    full, partial = divmod(tokens, page_size)
    if len(digests) != full * DIGEST_BYTES:
        raise invalid(
            f"digests has {len(digests)} bytes; {tokens} tokens at page size {page_size} need {full} x {DIGEST_BYTES}"
        )
    want = DIGEST_BYTES if partial else 0
    if len(tail_digest) != want:
        raise invalid(
            f"tail_digest has {len(tail_digest)} bytes; {partial} tokens behind the last full page need {want}"
        )


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
