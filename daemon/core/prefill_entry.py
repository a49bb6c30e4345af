"""One request in the prefill daemon's rendezvous table, and the prompt that its worker began."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.reservations import Hold
from kvferry.proto import peer_pb2 as peer

UNASKED = 1 << 16  # added to the priority of what nobody asked for: it goes behind all that was


class EntryState(enum.Enum):
    EXPECTED = "expected"  # asked for; its worker's Begin is awaited
    PARKED = "parked"  # larger than what nobody asks for may be: it waits until somebody does, and holds nothing
    WAITING = "waiting"  # for pages: holds nothing
    RESERVED = "reserved"  # what it matched is locked and its pages are promised, but not free yet
    RESTORING = "restoring"  # has its pages; matched ones are on their way from the host tier
    COMPUTING = "computing"  # the worker knows its pages
    COMPUTED = "computed"  # the worker has said its last word, and touches the pages no more
    SERVED = "served"  # its aux blob is sent; parts still are, or may be asked for again
    RECEIVED = "received"  # the decode daemon needs nothing more of it: it waits only for copies of its pages
    FAILED = "failed"  # the worker was told, or is lost; its Abort, or its proven end, is awaited
    FAILED_ENDING = "failed, ending"  # the worker was told, and touches the pages no more: it waits only for copies
    ABORTED = "aborted"  # by the worker, or by its proven end: it waits only for copies
    OVER = "over"  # the decode daemon ended it before its worker began it: only the name is kept
    YIELDED = "yielded"  # it was computed and sent, and others got its pages: only the name is kept


_ENDS = {EntryState.FAILED_ENDING, EntryState.ABORTED}
_MOVES = {
    EntryState.EXPECTED: {EntryState.PARKED, EntryState.WAITING, EntryState.OVER},
    EntryState.PARKED: {EntryState.WAITING, *_ENDS},
    # To itself: asked for meanwhile, it goes before all that nobody asked for.
    EntryState.WAITING: {EntryState.WAITING, EntryState.RESERVED, *_ENDS},
    EntryState.RESERVED: {EntryState.PARKED, EntryState.WAITING, EntryState.RESTORING, *_ENDS},
    EntryState.RESTORING: {EntryState.PARKED, EntryState.WAITING, EntryState.COMPUTING, *_ENDS},
    EntryState.COMPUTING: {EntryState.COMPUTED, EntryState.FAILED, EntryState.ABORTED},
    EntryState.COMPUTED: {EntryState.SERVED, EntryState.RECEIVED, *_ENDS},
    EntryState.SERVED: {EntryState.RECEIVED, EntryState.YIELDED, *_ENDS},
    EntryState.RECEIVED: {EntryState.ABORTED},
    EntryState.FAILED: {EntryState.FAILED_ENDING},
    EntryState.FAILED_ENDING: set(),
    EntryState.ABORTED: set(),
    EntryState.OVER: set(),
    EntryState.YIELDED: set(),
}
_QUEUED = {EntryState.PARKED, EntryState.WAITING, EntryState.RESERVED, EntryState.RESTORING}
_ENDING = {EntryState.RECEIVED, EntryState.FAILED_ENDING, EntryState.ABORTED}
_DONE = {EntryState.FAILED, EntryState.OVER, EntryState.YIELDED, *_ENDING}


@dataclass(slots=True, eq=False)
class BegunPrompt:
    """The worker's half: its Begin and, once admitted, its pages."""

    worker: int
    hold: Hold
    digests: bytes  # of all full pages
    tokens: int
    tail_digest: bytes
    keep: bool  # its pages enter the tree
    # Of its pages, those that are not the tree's: where another was first, then all behind `tree_pages`.
    private: list[int] = field(default_factory=list)
    tree_pages: int = 0  # leading digests that are in the tree and under the lock
    computed: int = 0  # tokens
    pages_ready: int = 0
    aux: bytes | None = None
    unasked: int = 0  # pages counted as held by what nobody asked for

    @property
    def pages(self) -> list[int]:
        return self.hold.pages

    @property
    def namespace_id(self) -> bytes:
        return self.hold.namespace.id


@dataclass(slots=True, eq=False)
class Entry:
    """Either half may be missing."""

    name: Name
    deadline: float
    arrived_at: float
    order: int
    prompt: BegunPrompt | None = None
    session: int | None = None  # of the decode daemon that asked
    asks: list[peer.Ask] = field(default_factory=list)  # waiting for the prompt to begin; of no pages: for its end
    sends: set[int] = field(default_factory=set)  # transfers open or ending
    state: EntryState = EntryState.EXPECTED  # changed by `move` alone
    failure: str = ""  # why its worker was told Failed, as a counter's key
    zeroing: bool = False  # the last page's tail is being cleared
    acknowledge: bool = False  # its worker waits for Ended, though it failed or was aborted
    overtaken: int = 0
    missing: set[int] = field(default_factory=set)  # page ids that are being restored
    filling: set[int] = field(default_factory=set)  # always empty: nothing is asked for on this side

    def move(self, state: EntryState) -> None:
        assert state in _MOVES[self.state], f"{self.name} cannot go from {self.state.value} to {state.value}"
        self.state = state

    @property
    def asked(self) -> bool:
        return self.session is not None

    @property
    def queued(self) -> bool:
        """Its worker has begun it, and knows no page of it."""
        return self.state in _QUEUED

    @property
    def told(self) -> bool:
        """Its worker was told Failed, or is lost: what it says crosses that."""
        return self.state is EntryState.FAILED or self.state is EntryState.FAILED_ENDING

    @property
    def failed(self) -> bool:
        return self.told or self.state is EntryState.ABORTED

    @property
    def worker_done(self) -> bool:
        """Its worker touches the pages no more."""
        return self.ending or self.state is EntryState.COMPUTED or self.state is EntryState.SERVED

    @property
    def ending(self) -> bool:
        """It waits only for copies of its pages."""
        return self.state in _ENDING

    @property
    def done(self) -> bool:
        """Nothing more is wanted of it."""
        return self.state in _DONE

    @property
    def rests(self) -> bool:
        """All that was asked for is sent: it keeps its pages only in case some of it is asked for again."""
        return self.state is EntryState.SERVED and not (self.asks or self.sends or self.zeroing)

    @property
    def moves(self) -> bool:
        """It is asked for and restored, computed or sent, which waits for nobody else's pages."""
        computed = self.state is EntryState.RESTORING or self.state is EntryState.COMPUTING
        return bool(self.sends) or (self.asked and computed)

    @property
    def can_ask(self) -> bool:
        return False

    @property
    def hold(self) -> Hold:
        assert self.prompt is not None
        return self.prompt.hold

    @property
    def scope(self) -> object:
        return self.hold.namespace

    @property
    def priority(self) -> int:
        return self.hold.priority + (0 if self.asked else UNASKED)
