"""One request in the prefill daemon's rendezvous table, and the prompt that its worker began."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.reservations import Hold
from kvferry.proto import peer_pb2 as peer

UNASKED = 1 << 16  # added to the priority of what nobody asked for: it goes behind all that was


@dataclass(slots=True, eq=False)
class BegunPrompt:
    """The worker's half: its Begin and, once admitted, its pages."""

    worker: int
    hold: Hold
    digests: bytes  # of all full pages
    tokens: int
    tail_digest: bytes
    keep: bool  # its pages enter the tree
    queued: bool = False  # waits for pages
    begun: bool = False  # the worker knows its pages
    # Of its pages, those that are not the tree's: where another was first, then all behind `tree_pages`.
    private: list[int] = field(default_factory=list)
    tree_pages: int = 0  # leading digests that are in the tree and under the lock
    computed: int = 0  # tokens
    pages_ready: int = 0
    aux: bytes | None = None
    worker_done: bool = False  # it touches the pages no more
    told_failed: bool = False  # the worker's Abort is awaited
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
    done: bool = False  # nothing more is wanted of it
    yielded: bool = False  # it was computed and sent, and others got its pages
    failed: bool = False
    failure: str = ""  # why its worker was told Failed, as a counter's key
    aux_sent: bool = False
    zeroing: bool = False  # the last page's tail
    acknowledge: bool = False  # a failed one's worker waits for Ended
    overtaken: int = 0
    missing: set[int] = field(default_factory=set)  # page ids that are being restored
    filling: set[int] = field(default_factory=set)  # always empty: nothing is asked for on this side

    @property
    def asked(self) -> bool:
        return self.session is not None

    @property
    def rests(self) -> bool:
        """All that was asked for is sent: it keeps its pages only in case some of it is asked for again."""
        prompt = self.prompt
        return prompt is not None and self.aux_sent and not (self.done or self.asks or self.sends or self.zeroing)

    @property
    def moves(self) -> bool:
        """It is asked for and restored, computed or sent, which waits for nobody else's pages."""
        prompt = self.prompt
        if prompt is None:
            return False
        computed = prompt.hold.claimed and not (prompt.worker_done or prompt.told_failed)
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
