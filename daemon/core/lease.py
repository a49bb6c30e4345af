"""A decode request, its hold on the pool, and its transfers."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.reservations import Hold


class LeaseState(enum.Enum):
    WAITING = "waiting"  # for admission: holds nothing
    RESERVED = "reserved"  # admitted: its path is locked and its pages are promised, but not free yet
    FILLING = "filling"  # has its pages, not every prompt page is readable yet
    READY = "ready"  # the worker decodes
    RETRACTING = "retracting"  # the worker was told to give it back; its Finish or Abort is awaited
    FAILED = "failed"  # the worker was told; its Abort or Finish, or its proven end, is awaited
    ENDING = "ending"  # waits only for copies into its pages


@dataclass(slots=True, eq=False)
class Lease:
    name: Name
    worker: int
    hold: Hold
    digests: bytes  # of the prompt's full pages
    tokens: int
    tail_digest: bytes
    prefill: str
    max_new_tokens: int
    arrived_at: float
    deadline: float
    order: int  # of admission requests: the oldest follower takes over, the youngest is retracted
    keep: bool  # its pages enter the tree
    held_pages: int = 0  # of the prompt, that the worker has in memory of its own
    blocks: tuple[int, ...] = ()  # of an engine's, that its pages are to be written to; -1: they are not
    held_blocks: tuple[int, ...] = ()  # those of its held pages, which may be read; none: they are not known
    held_written: bool = False  # what the worker holds itself is all there, it has said
    stores: bool = False  # they are there to be copied to the host tier
    store_waits: bool = False  # for a copy to the host tier
    store_flushed: bool = False  # since it was admitted: what it hands in enters no tree
    ends_itself: bool = False  # it is over once it is ready: its worker says no more
    copies: set[int] = field(default_factory=set)  # of them, between the tiers, that run
    resumed: bool = False  # it was retracted before
    looked_up: bool = False  # it is in the hit rate
    overtaken: int = 0
    state: LeaseState = LeaseState.WAITING
    tree_pages: int = 0  # leading pages that belong to the tree
    missing: set[int] = field(default_factory=set)  # page ids of the prompt that are not readable yet
    filling: set[int] = field(default_factory=set)  # of them (or others' too), those this request's transfers bring
    transfers: set[int] = field(default_factory=set)  # open or draining
    returns: int = 0  # of its pages, to the prefill daemon, open or ending
    runs: deque[tuple[int, int]] = field(default_factory=deque)  # (first page, pages) still to be asked for again
    asks: int = 0  # rounds of asking
    quiet_since: float = 0.0  # when it last asked for pages, or some came
    brings: bool = False  # pages have come of what it asked for
    served_at: float | None = None  # since when its prefill daemon is known to have computed what others bring
    taken: dict[int, Lease] = field(default_factory=dict)  # page ids that it took over, and from whom
    take_overs: int = 0  # of pages that were coming for others
    hands: int = 0  # through which what it brings has gone
    waiting_since: float = 0.0
    aux: bytes | None = None
    aux_at: float = 0.0
    admitted_at: float = 0.0
    filled_at: float = 0.0
    delta_pages: int = 0
    failure: str = ""  # why it failed, if it did, as a counter's key
    acknowledge: bool = False  # the worker waits for Ended

    @property
    def local(self) -> bool:
        """The worker computes the missing part of the prompt itself."""
        return self.prefill == ""

    @property
    def can_ask(self) -> bool:
        return not self.local

    @property
    def queued(self) -> bool:
        """Whether it waits still: its worker knows no page of it."""
        return self.state in (LeaseState.WAITING, LeaseState.RESERVED)

    @property
    def live(self) -> bool:
        return self.state in (LeaseState.FILLING, LeaseState.READY, LeaseState.RETRACTING)

    @property
    def decoding(self) -> bool:
        return self.state in (LeaseState.READY, LeaseState.RETRACTING)

    @property
    def priority(self) -> int:
        return self.hold.priority

    @property
    def scope(self) -> object:
        return self.hold.namespace

    @property
    def namespace_id(self) -> bytes:
        return self.hold.namespace.id

    @property
    def pages(self) -> list[int]:
        """Pages of prompt and output, in order."""
        return self.hold.pages

    @property
    def matched(self) -> int:
        return self.hold.matched

    @property
    def promised(self) -> int:
        """Pages that prefill need not send."""
        return max(self.hold.matched, self.held_pages)

    @property
    def to_fill(self) -> list[int]:
        """Pages that the worker itself fills (or has filled), from memory of its own."""
        return [] if self.blocks else self.hold.pages[self.hold.matched : self.held_pages]

    def is_whole(self, page: int) -> bool:
        """Whether all blocks of this page of the prompt are to be written: what its engine holds may end within it."""
        return self.blocks[page * (len(self.blocks) // len(self.pages))] >= 0

    @property
    def bound_blocks(self) -> tuple[int, ...]:
        """The blocks that its pages are, `blocks_per_page` each; -1: not the daemon's to read or write."""
        return self.held_blocks + self.blocks[len(self.held_blocks) :]

    @property
    def own(self) -> list[int]:
        """Pages that are not the tree's."""
        return self.hold.pages[self.tree_pages :]


@dataclass(slots=True)
class Transfer:
    """A run of prompt pages on its way to one lease's pool pages."""

    number: int
    lease: Lease
    first_page: int
    page_ids: tuple[int, ...]
    draining: bool = False
    retry: bool = False  # ask again for what is missing once it has drained
    problem: str = ""  # why, where parts of it were wrong
    taker: Lease | None = None  # who then asks for what it waits for of these pages, in place of the lease
    refusal: RequestError | None = None  # the prefill daemon's, while it drains for its taker

    def pool_pages(self, prompt_pages: Sequence[int]) -> Sequence[int]:
        """The pool's pages in which these prompt pages, ascending, are to lie."""
        first = self.first_page
        if prompt_pages and prompt_pages[-1] - prompt_pages[0] + 1 == len(prompt_pages):  # no gap, as almost always
            return self.page_ids[prompt_pages[0] - first : prompt_pages[-1] - first + 1]
        return [self.page_ids[page - first] for page in prompt_pages]
