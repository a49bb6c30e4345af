"""A worker's view of its requests: their names, how they fail, and what the daemon answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from kvferry.proto import common_pb2, worker_pb2
from kvferry.proto.limits import MAX_ATTEMPT, MAX_MESSAGE_BYTES, REQUEST_ID_BYTES
from kvferry.radix.digests import DIGEST_BYTES

MAX_FINISH_DIGEST_BYTES = MAX_MESSAGE_BYTES - 256  # beside them: a name and two numbers


class RequestName(NamedTuple):
    """A request's name: 16 random bytes and the number of the try, from 1."""

    request_id: bytes
    attempt: int

    @classmethod
    def from_proto(cls, message: common_pb2.RequestName) -> RequestName:
        """Raises ValueError that names the field when the name is not well formed."""
        if len(message.request_id) != REQUEST_ID_BYTES:
            raise ValueError(f"name.request_id has {len(message.request_id)} bytes; it must have {REQUEST_ID_BYTES}")
        if not 1 <= message.attempt <= MAX_ATTEMPT:
            raise ValueError(f"name.attempt is {message.attempt}; it must be 1 to {MAX_ATTEMPT}")
        return cls(message.request_id, message.attempt)

    def to_proto(self) -> common_pb2.RequestName:
        return common_pb2.RequestName(request_id=self.request_id, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.request_id.hex()}#{self.attempt}"


class RequestFailed(Exception):
    """One request is over; `code` is kvferry.v1.ErrorCode (numbers as gRPC's status codes), `of_prefill` as Error's."""

    def __init__(self, code: common_pb2.ErrorCode, message: str, of_prefill: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.of_prefill = of_prefill


class NotOpened(RequestFailed):
    """Refused here: the daemon has heard nothing of it, so there is nothing to abort. A request of the same name that
    runs already goes on."""


class NameInUse(NotOpened):
    """A request of that name runs."""


def name_in_use(name: RequestName) -> NameInUse:
    return NameInUse(
        common_pb2.ERROR_FAILED_PRECONDITION, f"name {name} is already in use; a new try takes the next attempt number"
    )


class Retracted(Exception):
    """The daemon wants a ready request's pages back: it is to finish, and may be admitted again with what it has."""


class DaemonGone(Exception):
    """The session with the daemon is broken: the pool's pages must not be touched any more."""


class DaemonEnded(DaemonGone):
    """The daemon was told to end, and said so."""


class HandshakeFailed(Exception):
    """The daemon refused the worker, or could not be reached in time."""


class DaemonAbsent(HandshakeFailed):
    """No daemon was there in time, or it was about to go."""


class Admitted(NamedTuple):
    matched_tokens: int  # readable or arriving for someone else; a multiple of the page size
    pages: tuple[int, ...]  # ids of all prompt pages in order, the partial one too
    local_tokens: int  # without a prefill daemon: readable tokens, from which the worker computes
    host_tokens: int  # of the matched ones, those that come back from the host tier


class Begun(NamedTuple):
    matched_tokens: int  # at most floor((tokens - 1) / page size) * page size
    pages: tuple[int, ...]  # ids of all prompt pages in order
    fetched_tokens: int  # of the matched ones, those that were fetched for this prompt


class Patience(NamedTuple):
    """What a prefill worker waits for before it computes: see Patience in proto/worker.proto. `proceed` is called with
    Proceed.fetch_tokens."""

    kind: worker_pb2.Patience
    held_tokens: int = 0
    proceed: Callable[[int], None] | None = None


FOR_PAGES = Patience(worker_pb2.PATIENCE_PAGES)


class Ready(NamedTuple):
    aux: bytes  # as the prefill worker gave it; empty when the worker computes the prompt itself
    delta_pages: int
    delta_bytes: int
    elapsed_us: int  # admit to ready
    page_tokens_from: int | None = None  # the daemon wants the prompt's tokens from there on


class Stowed(NamedTuple):
    stored: bool  # the blocks are the engine's again: the prompt waits in the host tier
    asked: bool  # else why: it was asked for. Or there was no room


class PageTokens(NamedTuple):
    """Tokens of full pages, from `first_token` of the request on."""

    first_token: int
    tokens: Sequence[int]


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class _AdmitWords(TypedDict):
    digests: bytes
    tokens: int
    tail_digest: bytes
    prefill: str
    max_new_tokens: int
    deadline_s: float


class AdmitWords(_AdmitWords, total=False):
    """The fields of an Admit beside its name; `DaemonClient.admit` says what they mean."""

    priority: int
    warmup: bool
    held_tokens: int
    traceparent: str
    blocks: Sequence[int]
    blocks_from: int
    held_blocks: Sequence[int]


def admit_message(name: RequestName, words: AdmitWords) -> worker_pb2.WorkerMessage:
    message = worker_pb2.WorkerMessage()
    admit = message.admit  # filled in place: what is put in a message is copied
    admit.name.request_id, admit.name.attempt = name
    admit.digests, admit.tokens, admit.tail_digest = words["digests"], words["tokens"], words["tail_digest"]
    admit.prefill, admit.max_new_tokens = words["prefill"], words["max_new_tokens"]
    admit.deadline_ms = milliseconds(words["deadline_s"])
    admit.priority, admit.warmup = words.get("priority", 0), words.get("warmup", False)
    admit.held_tokens, admit.traceparent = words.get("held_tokens", 0), words.get("traceparent", "")
    admit.blocks_from = words.get("blocks_from", 0)
    admit.blocks.extend(words.get("blocks", ()))
    admit.held_blocks.extend(words.get("held_blocks", ()))
    return message


def check_size(size: int, tokens: int, page_size: int) -> None:
    """NotOpened where the digests of a prompt of so many tokens make its message, of `size` bytes, too long."""
    if size > MAX_MESSAGE_BYTES:
        raise NotOpened(
            common_pb2.ERROR_INVALID_ARGUMENT,
            f"tokens has {tokens} tokens: with their digests at page size {page_size} the message to "
            f"the daemon has {size} bytes; it may have {MAX_MESSAGE_BYTES}",
        )


def check_output_digests(tokens: int, max_new_tokens: int, page_size: int) -> None:
    """NotOpened where the digests of the output do not fit in a message: behind the output it would be too late."""
    new_digests = ((tokens + max_new_tokens) // page_size - tokens // page_size) * DIGEST_BYTES
    if new_digests > MAX_FINISH_DIGEST_BYTES:
        raise NotOpened(
            common_pb2.ERROR_INVALID_ARGUMENT,
            f"max_new_tokens is {max_new_tokens}: the output's digests at page size {page_size} may have "
            f"{new_digests} bytes; they may have {MAX_FINISH_DIGEST_BYTES}",
        )


def with_page_tokens(finish: worker_pb2.Finish, tokens: PageTokens | None) -> worker_pb2.Finish:
    """The message with these tokens, where they fit: they are for others only."""
    if tokens is not None:
        finish.page_tokens.first_token = tokens.first_token
        finish.page_tokens.tokens.extend(tokens.tokens)
        if finish.ByteSize() > MAX_FINISH_DIGEST_BYTES:
            finish.ClearField("page_tokens")
    return finish
