"""A decode request's hold on the pool: locks on its matched path, pages of its own, a promise of more."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.daemon.limits import Name
from kvferry.radix.tree import Lock, PagedRadixTree


class LeaseState(enum.Enum):
    WAITING = "waiting"  # for admission: holds nothing
    FILLING = "filling"  # admitted, not every prompt page is readable yet
    READY = "ready"  # the worker decodes
    FAILED = "failed"  # the worker was told; its Abort or Finish, or its proven end, is awaited
    ENDING = "ending"  # waits only for copies into its pages


@dataclass(slots=True, eq=False)
class Lease:
    name: Name
    worker: int
    namespace_id: bytes
    tree: PagedRadixTree
    digests: bytes
    tokens: int
    tail_digest: bytes
    prefill: str
    max_new_tokens: int
    arrived_at: float
    deadline: float
    order: int  # of admission requests: the oldest follower takes over
    state: LeaseState = LeaseState.WAITING
    lock: Lock | None = None
    pages: list[int] = field(default_factory=list)  # of prompt and output, in order
    matched: int = 0  # pages
    tree_pages: int = 0  # leading pages of `pages` that belong to the tree
    promised: int = 0  # pages promised and not yet given
    missing: set[int] = field(default_factory=set)  # page ids of the prompt that are not readable yet
    filling: set[int] = field(default_factory=set)  # of them (or others' too), those this request's transfers bring
    transfers: set[int] = field(default_factory=set)  # open or draining
    asks: int = 0
    aux: bytes | None = None
    aux_at: float = 0.0
    admitted_at: float = 0.0
    filled_at: float = 0.0
    delta_pages: int = 0
    acknowledge: bool = False  # the worker waits for Ended

    @property
    def local(self) -> bool:
        """The worker computes the missing part of the prompt itself."""
        return self.prefill == ""

    @property
    def live(self) -> bool:
        return self.state in (LeaseState.FILLING, LeaseState.READY)


@dataclass(slots=True)
class Transfer:
    """A run of prompt pages on its way to one lease's pool pages."""

    number: int
    lease: Lease
    first_page: int
    page_ids: tuple[int, ...]
    draining: bool = False
    retry: bool = False  # ask again for what is missing once it has drained
