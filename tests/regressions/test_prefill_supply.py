"""Found by the simulation: promises of the prefill side that others took away."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import FailAsk, StartCopy, ToWorker
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Quota, slack
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire

PAGE = 4
NAMESPACE, OTHER = bytes(32), b"t" * 32
DEADLINE = 60.0


class Prefill:
    """A core with one worker and one session."""

    def __init__(self, pages: int, *, host_pages: int = 0, quotas: dict[bytes, Quota] | None = None) -> None:
        self.cache = Cache(pages, PAGE, host_pages=host_pages, limits=CacheLimits(quotas=quotas))
        self.core = PrefillCore(self.cache, PrefillLimits(table=64))
        for namespace in (NAMESPACE, OTHER):
            self.cache.namespace(namespace)
        self.begun: set[Name] = set()
        self.ended: list[Name] = []
        self.failed_asks: list[FailAsk] = []
        self.copies: list[CopyStarted] = []
        self._transfers = 0

    def begin(self, number: int, symbol: str, pages: int, *, asked: bool, namespace: bytes = NAMESPACE) -> Name:
        name = Name(number.to_bytes(16, "big"), 1)
        digests = b"".join(hashlib.sha256(f"{symbol}{i}".encode()).digest() for i in range(pages))
        if asked:
            self._transfers += 1
            ask = peer.Ask(
                transfer=self._transfers,
                name=name.to_proto(),
                namespace_id=namespace,
                pages=pages,
                tokens=pages * PAGE,
                last_full_digest=digests[-32:],
            )
            self.core.ask(1, name, ask, DEADLINE, 0.0)
        begin = wire.Begin(name=name.to_proto(), digests=digests, tokens=pages * PAGE)
        self.core.begin(1, namespace, name, begin, DEADLINE, 0.0)
        self.hear()
        return name

    def compute(self, name: Name, pages: int) -> None:
        self.core.progress(1, name, pages * PAGE, 0.0)
        self.core.aux(1, name, b"first token", 0.0)
        self.hear()

    def sent(self, name: Name, pages: int, transfer: int) -> None:
        """All of it has reached the decode daemon, which does not say Done: it waits for another's page."""
        self.compute(name, pages)
        self.core.send_completed(1, transfer, 0.0)
        self.hear()

    def tick(self, now: float) -> None:
        self.core.tick(now)
        self.hear()

    def hear(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, StartCopy):
                self.copies.append(effect.started)
            elif isinstance(effect, ToWorker) and effect.event.WhichOneof("kind") == "begun":
                name = effect.event.begun.name
                self.begun.add(Name(name.request_id, name.attempt))
            elif isinstance(effect, ToWorker) and effect.event.WhichOneof("kind") == "ended":
                name = effect.event.ended.name
                self.ended.append(Name(name.request_id, name.attempt))
            elif isinstance(effect, FailAsk):
                self.failed_asks.append(effect)

    def end_copies(self) -> None:
        while self.copies:
            self.core.copy_ended(self.copies.pop().number, [], 0, 0.0, 0.0)
            self.hear()

    def spare(self) -> int:
        return slack(self.cache.pool.free, self.cache.namespaces.values())


def test_pages_that_are_promised_are_not_locked_by_who_publishes_the_same_ones() -> None:
    """Two compute the same prompt; the first one's pages are on their way out, promised to a third, when the second
    publishes its own and so meets them in the tree.
    """
    side = Prefill(8, host_pages=8)
    first = side.begin(1, "x", 3, asked=True)
    second = side.begin(2, "x", 3, asked=True)
    side.compute(first, 3)
    side.core.send_completed(1, 1, 0.0)
    side.core.done(1, first, 0.0)
    third = side.begin(3, "y", 5, asked=True)
    assert side.copies, "its pages come from a spill"
    side.compute(second, 3)
    assert side.spare() >= 0, "a promise cannot be kept"
    side.end_copies()
    assert third in side.begun


def test_prompts_that_nobody_asks_for_leave_room_beside_soft_quotas() -> None:
    """What a tenant's soft quota protects cannot be evicted for others: the bound of unasked prompts is half of the
    rest. Else a prefill pool full of unasked prompts and a decode pool full of asked ones wait for each other.
    """
    side = Prefill(48, quotas={OTHER: Quota(8, 40)})
    theirs = side.cache.namespace(OTHER)
    protected = side.cache.pool.allocate(8)
    digests = b"".join(hashlib.sha256(f"o{i}".encode()).digest() for i in range(8))
    theirs.tree.insert(digests, protected)
    side.begin(1, "a", 14, asked=False)
    side.begin(2, "b", 10, asked=False)
    large = side.begin(3, "c", 17, asked=True)
    assert large in side.begun


def test_prompts_that_nobody_asks_for_leave_half_of_the_pool_whoever_they_are_of() -> None:
    side = Prefill(16)
    side.begin(1, "a", 8, asked=False)
    side.begin(2, "b", 8, asked=False, namespace=OTHER)
    large = side.begin(3, "c", 8, asked=True)
    assert large in side.begun


def test_prompts_that_nobody_asks_for_leave_half_of_a_hard_quota() -> None:
    side = Prefill(48, quotas={NAMESPACE: Quota(0, 20)})
    side.begin(1, "a", 10, asked=False)
    side.begin(2, "b", 10, asked=False)
    large = side.begin(3, "c", 10, asked=True)
    assert large in side.begun


def test_prompts_that_were_sent_yield_to_one_whose_pages_they_wait_for() -> None:
    """At the decode daemon they follow a page that the third is to bring, so nobody says Done; here the third waits for
    what they hold. One is enough.
    """
    side = Prefill(16)
    first, second = side.begin(1, "a", 7, asked=True), side.begin(2, "b", 7, asked=True)
    side.sent(first, 7, 1)
    side.sent(second, 7, 2)
    third = side.begin(3, "c", 9, asked=True)
    side.tick(0.9 * REST_SECONDS)
    assert third not in side.begun and not side.ended, "Done, or an Ask for what came wrong, may be on its way"
    side.tick(REST_SECONDS)
    assert third in side.begun
    assert side.ended == [second], "of the oldest one missing pages are asked for first"
    side.core.done(1, first, REST_SECONDS)
    side.hear()
    assert side.ended == [second, first]
    assert side.core.counters.finished == 2


def test_who_asks_again_for_pages_that_were_given_away_is_told_to_try_again() -> None:
    side = Prefill(16)
    first = side.begin(1, "a", 8, asked=True)
    side.sent(first, 8, 1)
    side.begin(2, "b", 9, asked=True)
    side.tick(REST_SECONDS)
    assert side.ended == [first]
    begin = wire.Begin(name=first.to_proto(), digests=bytes(32), tokens=PAGE)
    with pytest.raises(RequestError, match="already in use"):
        side.core.begin(1, NAMESPACE, first, begin, DEADLINE, REST_SECONDS)
    side.core.ask(1, first, peer.Ask(transfer=9, name=first.to_proto(), namespace_id=NAMESPACE, pages=2), DEADLINE, 0.0)
    side.hear()
    (failed,) = side.failed_asks
    assert (failed.transfer, failed.error.code) == (9, common.ERROR_UNAVAILABLE)
    assert "given to others; try again" in failed.error.message
    side.core.done(1, first, 0.0)
    assert first not in side.core.entries


@pytest.mark.parametrize("how", ["computed", "sent"])
def test_pages_of_what_was_sent_are_kept_while_others_still_move(how: str) -> None:
    side = Prefill(16)
    first, second = side.begin(1, "a", 7, asked=True), side.begin(2, "b", 7, asked=True)
    side.sent(first, 7, 1)
    if how == "sent":
        side.compute(second, 7)
    third = side.begin(3, "c", 9, asked=True)
    side.tick(5 * REST_SECONDS)
    assert third not in side.begun and not side.ended
    if how == "computed":
        side.compute(second, 7)
    side.core.done(1, second, 0.0)
    side.core.send_completed(1, 2, 0.0)
    side.hear()
    assert third in side.begun
    assert side.ended == [second]


def test_pages_of_what_was_sent_are_kept_where_nobody_asks_for_what_waits() -> None:
    side = Prefill(16)
    first = side.begin(1, "a", 12, asked=True)
    side.sent(first, 12, 1)
    side.begin(2, "b", 8, asked=False)
    side.tick(5 * REST_SECONDS)
    assert not side.ended


def test_a_tenant_at_its_own_quota_gets_nobody_elses_pages() -> None:
    side = Prefill(32, quotas={NAMESPACE: Quota(0, 10)})
    theirs = [side.begin(number, symbol, 6, asked=True, namespace=OTHER) for number, symbol in ((1, "a"), (2, "b"))]
    for transfer, name in enumerate(theirs, 1):
        side.sent(name, 6, transfer)
    own = side.begin(3, "c", 6, asked=True)
    side.sent(own, 6, 3)
    waiter = side.begin(4, "d", 8, asked=True)
    side.tick(REST_SECONDS)
    assert side.ended == [own]
    assert waiter in side.begun


def test_a_tenant_at_its_own_quota_gets_nobody_elses_younger_pages() -> None:
    side = Prefill(32, quotas={NAMESPACE: Quota(0, 10)})
    own = side.begin(1, "c", 6, asked=True)
    side.sent(own, 6, 1)
    theirs = side.begin(2, "a", 6, asked=True, namespace=OTHER)
    side.sent(theirs, 6, 2)
    waiter = side.begin(3, "d", 8, asked=True)
    side.tick(REST_SECONDS)
    assert side.ended == [own]
    assert waiter in side.begun
