"""The prefill daemon's rendezvous table: its requests, their states, the prompts that workers began. Core: no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.daemon.core.errors import RequestError, exhausted, precondition
from kvferry.daemon.core.limits import Name, NamedBlocks
from kvferry.daemon.core.reservations import Hold
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire

UNASKED = 1 << 16  # added to the priority of what nobody asked for: it goes behind all that was


class EntryState(enum.Enum):
    EXPECTED = "expected"  # asked for; its worker's Begin is awaited
    PARKED = "parked"  # larger than what nobody asks for may be: it waits until somebody does, and holds nothing
    WAITING = "waiting"  # for pages: holds nothing
    RESERVED = "reserved"  # what it matched is locked and its pages are promised, but not free yet
    RESTORING = "restoring"  # has its pages; matched ones are on their way from the host tier
    LOOKING = "looking"  # an Ask that says what its decode daemon holds is waited for, briefly
    OFFERED = "offered"  # the decode daemon holds some of it, for which its engine is to name blocks
    FETCHING = "fetching"  # the decode daemon sends back what it holds
    COMPUTING = "computing"  # the worker knows its pages
    COMPUTED = "computed"  # the worker has said its last word, and touches the pages no more
    SERVED = "served"  # its aux blob is sent; parts still are, or may be asked for again
    RECEIVED = "received"  # the decode daemon needs nothing more of it: it waits only for copies of its pages
    FAILED = "failed"  # the worker was told, or is lost; its Abort, or its proven end, is awaited
    FAILED_ENDING = "failed, ending"  # the worker was told, and touches the pages no more: it waits only for copies
    ABORTED = "aborted"  # by its worker, or with it: it waits only for copies
    OVER = "over"  # the decode daemon ended it before its worker began it: only the name is kept
    YIELDED = "yielded"  # it was computed and sent, and others got its pages: only the name is kept


# Tuples: an enum's member is found in them faster than in a set.
_ENDS = (EntryState.FAILED_ENDING, EntryState.ABORTED)
_BEGINS = (EntryState.LOOKING, EntryState.OFFERED, EntryState.FETCHING, EntryState.COMPUTING)
_MOVES: dict[EntryState, tuple[EntryState, ...]] = {
    EntryState.EXPECTED: (EntryState.PARKED, EntryState.WAITING, EntryState.OVER),
    EntryState.PARKED: (EntryState.WAITING, *_ENDS),
    # To itself: asked for meanwhile, it goes before all that nobody asked for.
    EntryState.WAITING: (EntryState.WAITING, EntryState.RESERVED, *_ENDS),
    EntryState.RESERVED: (EntryState.PARKED, EntryState.WAITING, EntryState.RESTORING, *_ENDS),
    EntryState.RESTORING: (EntryState.PARKED, EntryState.WAITING, *_BEGINS, *_ENDS),
    EntryState.LOOKING: (EntryState.OFFERED, EntryState.FETCHING, EntryState.COMPUTING, *_ENDS),
    EntryState.OFFERED: (EntryState.FETCHING, EntryState.COMPUTING, *_ENDS),
    # Back, where another decode daemon sent nothing.
    EntryState.FETCHING: (EntryState.LOOKING, EntryState.FETCHING, EntryState.COMPUTING, *_ENDS),
    EntryState.COMPUTING: (EntryState.COMPUTED, EntryState.FAILED, EntryState.ABORTED),
    EntryState.COMPUTED: (EntryState.SERVED, EntryState.RECEIVED, *_ENDS),
    EntryState.SERVED: (EntryState.RECEIVED, EntryState.YIELDED, *_ENDS),
    EntryState.RECEIVED: (EntryState.ABORTED,),
    EntryState.FAILED: (EntryState.FAILED_ENDING,),
    EntryState.FAILED_ENDING: (),
    EntryState.ABORTED: (),
    EntryState.OVER: (),
    EntryState.YIELDED: (),
}
_QUEUED = (
    EntryState.PARKED,
    EntryState.WAITING,
    EntryState.RESERVED,
    EntryState.RESTORING,
    EntryState.LOOKING,
    EntryState.OFFERED,
    EntryState.FETCHING,
)
_MOVING = (EntryState.RESTORING, EntryState.FETCHING, EntryState.COMPUTING)
_ENDING = (EntryState.RECEIVED, EntryState.FAILED_ENDING, EntryState.ABORTED)
_DONE = (EntryState.FAILED, EntryState.OVER, EntryState.YIELDED, *_ENDING)


@dataclass(slots=True, eq=False)
class BegunPrompt:
    """The worker's half: its Begin and, once admitted, its pages."""

    worker: int
    hold: Hold
    digests: bytes  # of all full pages
    tokens: int
    tail_digest: bytes
    keep: bool  # its pages enter the tree
    blocks: NamedBlocks | None = None  # of an engine's, that its pages are
    # Of its pages, those that are not the tree's: where another was first, then all behind `tree_pages`.
    private: list[int] = field(default_factory=list)
    tree_pages: int = 0  # leading digests that are in the tree and under the lock
    computed: int = 0  # tokens, before there are pages, too, where it `is_ahead`
    pages_ready: int = 0
    aux: bytes | None = None
    rows: list[int] = field(default_factory=list)  # of the host tier, that have all of it: no page of the pool does
    unasked: int = 0  # pages counted as held by what nobody asked for
    begun_at: float = 0.0
    patience: wire.Patience = wire.PATIENCE_PAGES
    engine_held: int = 0  # leading full pages that its engine has itself
    followed: bool = False  # it has waited for another's fetch
    fetched: int = 0  # tokens of its own fetches

    @property
    def is_ahead(self) -> bool:
        """Whether its worker, which computes in blocks of its own, waits for no Begun."""
        return self.blocks is not None and self.patience == wire.PATIENCE_NONE

    @property
    def pages(self) -> list[int]:
        return self.hold.pages

    @property
    def namespace_id(self) -> bytes:
        return self.hold.namespace.id


@dataclass(slots=True, eq=False)
class Entry:
    """One request of the rendezvous; either half may be missing."""

    name: Name
    deadline: float
    arrived_at: float
    order: int
    prompt: BegunPrompt | None = None
    session: int | None = None  # of the decode daemon that asked
    asks: list[peer.Ask] = field(default_factory=list)  # waiting for the prompt to begin; of no pages: for its end
    sends: set[int] = field(default_factory=set)  # transfers open or ending
    fetch: int | None = None  # the transfer by which pages come back, open or draining
    state: EntryState = EntryState.EXPECTED  # changed by `move` alone
    failure: str = ""  # why its worker was told Failed, as a counter's key
    zeroing: bool = False  # the last page's tail is being cleared
    stowing: bool = False  # its pages are being copied to the host tier
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
        """Whether its worker has begun it, and knows no page of it."""
        return self.state in _QUEUED

    @property
    def told(self) -> bool:
        """Whether its worker was told Failed, or is lost: what it says crosses that."""
        return self.state is EntryState.FAILED or self.state is EntryState.FAILED_ENDING

    @property
    def failed(self) -> bool:
        return self.told or self.state is EntryState.ABORTED

    @property
    def worker_done(self) -> bool:
        """Whether its worker touches the pages no more."""
        return self.ending or self.state is EntryState.COMPUTED or self.state is EntryState.SERVED

    @property
    def ending(self) -> bool:
        """Whether it waits only for copies of its pages."""
        return self.state in _ENDING

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted of it."""
        return self.state in _DONE

    @property
    def rests(self) -> bool:
        """Whether all that was asked for is sent: it keeps its pages only in case some of it is asked for again."""
        return self.state is EntryState.SERVED and not (self.asks or self.sends or self.zeroing or self.stowing)

    @property
    def moves(self) -> bool:
        """Whether it is asked for and restored, fetched, computed or sent, which waits for nobody else's pages."""
        return bool(self.sends) or (self.asked and self.state in _MOVING)

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


class Rendezvous:
    """All requests by name, from either side, at most `bound` of them."""

    def __init__(self, bound: int) -> None:
        self.entries: dict[Name, Entry] = {}
        self._bound = bound
        # Of them, those kept for who comes late, oldest first: ended by Done, and yielded.
        self._over: dict[Name, None] = {}
        self._yielded: dict[Name, None] = {}
        self._next_order = 1

    @property
    def kept(self) -> int:
        """Names whose requests are over."""
        return len(self._over) + len(self._yielded)

    def make_room(self) -> RequestError | None:
        """Makes room for one more, in the place of a name that is only kept if need be; RESOURCE_EXHAUSTED where there
        is none."""
        kept = self._over or self._yielded  # who asks again for what was yielded waits, and is to hear of it at once
        if len(self.entries) >= self._bound and kept:
            self.drop(self.entries[next(iter(kept))])
        if len(self.entries) < self._bound:
            return None
        return exhausted(f"{len(self.entries)} requests are in the rendezvous table; the bound is {self._bound}")

    def add(self, name: Name, deadline: float, now: float) -> Entry:
        entry = self.entries[name] = Entry(name, deadline, now, self._next_order)
        self._next_order += 1
        return entry

    def keep_name(self, entry: Entry, state: EntryState) -> None:
        """Keeps the name of a request that is over and holds nothing; until its deadline, or until its place is needed,
        who comes late is told."""
        entry.move(state)
        (self._yielded if state is EntryState.YIELDED else self._over)[entry.name] = None

    def drop(self, entry: Entry) -> None:
        del self.entries[entry.name]
        self._over.pop(entry.name, None)
        self._yielded.pop(entry.name, None)

    def unless_over(self, worker: int, name: Name) -> Entry | None:
        """The entry that the worker began; None where it is over, of which the worker was told."""
        entry = self.entries.get(name)
        return None if entry is None or entry.prompt is None else self.prompt_of(worker, name)[0]

    def of_worker(self, worker: int) -> list[tuple[Entry, BegunPrompt]]:
        return [(e, e.prompt) for e in self.entries.values() if e.prompt is not None and e.prompt.worker == worker]

    def prompt_of(self, worker: int, name: Name) -> tuple[Entry, BegunPrompt]:
        """Raises FAILED_PRECONDITION unless that worker began it."""
        entry = self.entries.get(name)
        if entry is None or entry.prompt is None:
            raise precondition(f"name {name} is not a running request")
        if entry.prompt.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        return entry, entry.prompt
