"""The KV events that a side publishes, replayed as a router does, against the pages that its pools hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.daemon.core.kv_events import Cleared, KvEvent, Medium, Removed, Stored
from kvferry.radix.digests import DIGEST_BYTES, DigestChain
from kvferry.radix.pool import PagePool, PageState
from tests.simulation.clock import Clock, expect
from tests.simulation.prompts import PAGE, content

if TYPE_CHECKING:
    from kvferry.daemon.core.limits import Name
    from tests.simulation.storage.memory import Memory
    from tests.simulation.storage.tier import SimTier

READABLE = (PageState.CACHED, PageState.SPILLING)
_READABLE_ROWS = (PageState.CACHED, PageState.RESTORING)


class Published:
    """The sink of one side's events (`EventSink`), and what follows from them."""

    endpoint = replay = ""
    queue_dropped = subscriber_dropped = 0

    def __init__(self, clock: Clock, memory: Memory, root: bytes, lies: float) -> None:
        self.blocks: Counter[tuple[str, Medium]] = Counter()
        self.replays_cut_off: Counter[str] = Counter()
        self.batches = 0
        self._clock, self._memory, self._root, self._lies = clock, memory, root, lies
        self._held: dict[Medium, set[bytes]] = {"GPU": set(), "CPU": set()}
        self._liars: set[Name] = set()  # requests whose worker has said other tokens

    # -- what is published -----------------------------------------------------------------------------------------

    def publish(self, events: Sequence[KvEvent]) -> None:
        """(EventSink)"""
        if not events:
            return
        self.batches += 1
        moved: set[bytes] = set()  # off the device in this batch, while no row had them
        for event in events:
            if isinstance(event, Cleared):
                expect(self.batches == 1 and event is events[0], f"{self._memory.who}: cleared, though it has begun")
            elif isinstance(event, Stored):
                self._stored(event, moved)
            else:
                self._removed(event, moved)

    def _stored(self, event: Stored, moved: set[bytes]) -> None:
        held, who = self._held[event.medium], self._memory.who
        self._clock.counts[f"{event.medium} blocks published"] += len(event.digests)
        for digest in event.digests:
            expect(digest not in held, f"{who}: {event.medium} page {digest.hex()[:8]} is stored twice")
        held.update(event.digests)
        if event.medium == "CPU":
            expect(event.parent is None and not event.tokens, f"{who}: tokens of rows are published")
            late = moved.intersection(event.digests)
            expect(not late, f"{who}: pages are said to have left the device before they are said to be on the host")
            return
        expect(event.parent is None or event.parent in held, f"{who}: pages are stored behind one that nobody has")
        chain = DigestChain(page_size=PAGE, parent=event.parent or self._root)
        chain.extend(event.tokens)
        expect(chain.digests == b"".join(event.digests), f"{who}: pages are published with tokens of others")

    def _removed(self, event: Removed, moved: set[bytes]) -> None:
        held, who = self._held[event.medium], self._memory.who
        self._clock.counts[f"{event.medium} blocks withdrawn"] += len(event.digests)
        for digest in event.digests:
            expect(digest in held, f"{who}: {event.medium} page {digest.hex()[:8]} is removed, and was not stored")
            held.remove(digest)
            if event.medium == "GPU" and digest not in self._held["CPU"]:
                moved.add(digest)

    # -- what is held ----------------------------------------------------------------------------------------------

    def check(self, tier: SimTier | None, rows: PagePool | None) -> None:
        """Between two steps of the core: the pages' bytes say what they are. What is on the device is published only
        once somebody has sent its tokens."""
        memory, who = self._memory, self._memory.who
        there = {memory.read(page) for page in readable(memory.pool, READABLE)}
        gone = {content(digest) for digest in self._held["GPU"]} - there
        expect(not gone, f"{who}: {len(gone)} pages are published, and not on the device")
        if rows is not None and tier is not None:
            kept = {tier.row(row) for row in readable(rows, _READABLE_ROWS)}
            said = {content(digest) for digest in self._held["CPU"]}
            expect(kept == said, f"{who}: {len(said - kept)} rows too many are published, {len(kept - said)} are not")
        self._clock.counts["published pages compared"] += len(there)

    def check_empty(self) -> None:
        left = {medium: len(held) for medium, held in self._held.items() if held}
        expect(not left, f"{self._memory.who}: nothing is held, and still published: {left}")

    # -- what workers say of tokens --------------------------------------------------------------------------------

    def said(self, name: Name, tokens: Sequence[int]) -> list[int]:
        """By the worker of this request: some have other tokens than the digests are of."""
        said = list(tokens)
        if said and self._clock.chance(self._lies):
            self._clock.counts["tokens that were wrong"] += 1
            self._liars.add(name)
            said[self._clock.random.randrange(len(said))] ^= 1 << 20
        return said

    def check_told(self, pages: Sequence[int], generations: Sequence[int], digests: bytes) -> None:
        """No tokens are wanted of these pages: all are published, as far as they are in the tree."""
        self._expect_published(pages, generations, digests, 0)

    def check_announced(
        self, name: Name, first: int, pages: Sequence[int], generations: Sequence[int], digests: bytes
    ) -> None:
        """The daemon has read the tokens of these pages from index `first` on, which this request's worker sent."""
        if name not in self._liars:
            self._expect_published(pages, generations, digests, first)

    def _expect_published(self, pages: Sequence[int], generations: Sequence[int], digests: bytes, first: int) -> None:
        pool, held = self._memory.pool, self._held["GPU"]
        for index in range(first, len(digests) // DIGEST_BYTES):
            if pool.generation(pages[index]) != generations[index] or pool.state(pages[index]) not in READABLE:
                return
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            expect(digest in held, f"{self._memory.who}: page {index} of a prompt was told, and is not published")


def readable(pool: PagePool, states: tuple[PageState, ...]) -> list[int]:
    return [page for page, state in enumerate(pool.states(range(pool.pages))) if state in states]
