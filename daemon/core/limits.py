"""Bounds of everything that comes in, and the checks that name field, value and bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.daemon.core.errors import RequestError, invalid, precondition
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_ATTEMPT, MAX_PRIORITY, REQUEST_ID_BYTES
from kvferry.radix.digests import DIGEST_BYTES

MAX_ASKS_PER_REQUEST = 16  # open at the prefill daemon; also how often a decode daemon asks again


class TransferNumbers:
    """The transfers that each session has asked for in one direction: their numbers grow."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def take(self, session: int, transfer: int) -> RequestError | None:
        """The session's next transfers have greater numbers. The objection to this one, or None."""
        newest = self._newest.get(session, -1)
        self._newest[session] = max(transfer, newest)
        if transfer > newest:
            return None
        return precondition(f"transfer is {transfer}; it must be greater than {newest}, the newest of the session")

    def session_down(self, session: int) -> None:
        self._newest.pop(session, None)


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


def hands_in(request: wire.Admit) -> bool:
    """Whether the worker has all of the prompt, and only gives it to be kept."""
    return request.prefill == "" and request.held_tokens == request.tokens


class LeaseBlocks(NamedTuple):
    """The blocks of an Admit, page by page; both empty: the pool is of pages."""

    own: tuple[int, ...] = ()  # to be written, or handed in; -1: the engine's own, or none
    held: tuple[int, ...] = ()  # of its first pages, which the engine holds and which may be read


NO_BLOCKS = LeaseBlocks()


def check_blocks(request: wire.Admit, blocks: LeaseBlocks) -> None:
    """INVALID_ARGUMENT where these blocks of it, or that it has none, forbid something that it asks for."""
    if blocks.own and request.max_new_tokens != 1:
        raise invalid(f"max_new_tokens is {request.max_new_tokens}; with blocks it must be 1")
    if request.ends_itself and not blocks.own:
        raise invalid("ends_itself is set; without blocks it cannot be")
    if request.ends_itself and blocks.held:  # Progress is to follow
        raise invalid(f"ends_itself is set; with {len(request.held_blocks)} held_blocks it cannot be")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The blocks of an engine: how many there are, and of how many tokens one and a page are."""

    blocks: int
    block_tokens: int
    page_size: int

    @property
    def per_page(self) -> int:
        return self.page_size // self.block_tokens

    def check(self, blocks: Sequence[int], field: str = "blocks") -> None:
        """INVALID_ARGUMENT unless the engine has these blocks, each of which is there once."""
        if blocks and max(blocks) >= self.blocks:
            raise invalid(f"{field} has {max(blocks)}; the engine has blocks 0 to {self.blocks - 1}")
        if len(set(blocks)) < len(blocks):
            raise invalid(f"{field} has {len(blocks) - len(set(blocks))} entries twice; a prompt's blocks are distinct")

    def of_pages(self, blocks: Sequence[int], start: int, tokens: int) -> tuple[int, ...]:
        """The blocks of each page of a prompt of `tokens`, where `blocks` are those from token `start` on; -1 where
        there is none. INVALID_ARGUMENT."""
        size, most = self.block_tokens, pages_for(tokens, self.block_tokens)
        if start % size or start >= tokens:
            raise invalid(f"blocks_from is {start}; it must be a multiple of {size} below the prompt's {tokens} tokens")
        first = start // size
        if not 1 <= len(blocks) <= most - first:
            raise invalid(f"blocks has {len(blocks)} entries from token {start} on; it must have 1 to {most - first}")
        self.check(blocks)
        behind = pages_for(tokens, self.page_size) * self.per_page - first - len(blocks)
        return (-1,) * first + tuple(blocks) + (-1,) * behind

    def named_by(self, request: wire.Admit) -> LeaseBlocks:
        """INVALID_ARGUMENT."""
        return LeaseBlocks(self.of_admit(request), self.held_of_admit(request))

    def of_admit(self, request: wire.Admit) -> tuple[int, ...]:
        """The blocks of each page of an Admit; -1: the engine's own. INVALID_ARGUMENT."""
        if request.prefill and not request.blocks and request.held_tokens == request.blocks_from == request.tokens:
            # The engine has all of it, and wants the first token.
            return (-1,) * (pages_for(request.tokens, self.page_size) * self.per_page)
        blocks = self.of_pages(request.blocks, request.blocks_from, request.tokens)
        given = hands_in(request)
        held = request.blocks_from // self.page_size * self.page_size
        if not given and request.held_tokens != held:
            raise invalid(f"held_tokens is {request.held_tokens}; with blocks_from {request.blocks_from} it is {held}")
        if (request.prefill or given) and blocks[pages_for(request.tokens, self.block_tokens) - 1] < 0:
            raise invalid(f"blocks has {len(request.blocks)} entries; they must go on to the prompt's end")
        if given and request.blocks_from:
            raise invalid(f"blocks_from is {request.blocks_from}; of what the worker hands in it is 0")
        return blocks

    def held_of_admit(self, request: wire.Admit) -> tuple[int, ...]:
        """The blocks of the pages that the engine of an Admit holds itself, as far as they may be read: all or none.
        INVALID_ARGUMENT."""
        held, own = request.held_blocks, set(request.blocks)
        most = request.held_tokens // self.block_tokens if request.prefill else 0
        if held and len(held) != most:
            why = f"with held_tokens {request.held_tokens}" if request.prefill else "where prefill is empty"
            raise invalid(f"held_blocks has {len(held)} entries; {why} it must have {most}")
        self.check(held, "held_blocks")
        if twice := own.intersection(held):
            raise invalid(f"held_blocks has {min(twice)}, which blocks has, too: it is written")
        return tuple(held)

    def of_begin(self, request: wire.Begin) -> NamedBlocks:
        """The blocks of a Begin, more of which may follow. INVALID_ARGUMENT."""
        named = NamedBlocks(self, request.tokens)
        named.add(request.blocks)
        return named


class NamedBlocks:
    """The blocks of a prompt of `tokens`, as its engine names them, from its beginning on."""

    def __init__(self, shape: BlockShape, tokens: int) -> None:
        self._shape = shape
        self._most = pages_for(tokens, shape.block_tokens)
        self._blocks: list[int] = []
        self._known: set[int] = set()  # the same

    @property
    def tokens(self) -> int:
        """The tokens that there are blocks of."""
        return len(self._blocks) * self._shape.block_tokens

    def add(self, blocks: Sequence[int]) -> range:
        """More of them: the indexes of the pages that these are of. INVALID_ARGUMENT; then nothing has changed."""
        first, behind = len(self._blocks), len(self._blocks) + len(blocks)
        if behind > self._most:
            raise invalid(f"blocks has {len(blocks)} entries behind {first}; the prompt has {self._most}")
        if not blocks:
            return range(0)
        self._shape.check(blocks)
        if twice := self._known.intersection(blocks):
            raise invalid(f"blocks has {min(twice)}, which was named before; a prompt's blocks are distinct")
        self._blocks += blocks
        self._known.update(blocks)
        per_page = self._shape.per_page
        return range(first // per_page, pages_for(behind, per_page))

    def of_pages(self, pages: range, held: int = 0) -> tuple[int, ...]:
        """Those of these pages, in order; -1 where none is named yet, and for those of the first `held` tokens."""
        per_page = self._shape.per_page
        ids = self._blocks[pages.start * per_page : pages.stop * per_page]
        own = max(0, held // self._shape.block_tokens - pages.start * per_page)
        return (-1,) * own + tuple(ids[own:]) + (-1,) * (len(pages) * per_page - len(ids))

    def forget(self) -> None:
        """None is named any more."""
        self._blocks.clear()
        self._known.clear()

    def check_held(self, held: int) -> None:
        """INVALID_ARGUMENT unless so many tokens may be the engine's own."""
        if held % self._shape.block_tokens or held > self.tokens:
            size = self._shape.block_tokens
            raise invalid(f"held_tokens is {held}; it must be a multiple of {size}, and {self.tokens} at most")
