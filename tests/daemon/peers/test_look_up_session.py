"""Look-ups between daemons that have a session: who agrees on them, who answers whom, and what breaks a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.effects import FailAsk, LookUp
from kvferry.daemon.peers.handshake import LOOK_UP, WAY_BACK, hello_of, looks_up
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import OUTGOING_BYTES, SessionBroken, SessionMeters
from kvferry.daemon.sides.fetching import _FetchEvents
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_LOOKED_UP_PAGES
from kvferry.radix.digests import DIGEST_BYTES
from tests.limits.limit_cases import session_setup
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimDecode, SimPrefill
from tests.simulation.faults import Faults

NAME = common.RequestName(request_id=bytes(16), attempt=1)


class Session:
    """It notes what it is to send."""

    number, remote, looks_up = 1, "p", True

    fetching = None

    def __init__(self) -> None:
        self.sent: list[peer.PeerMessage] = []

    def send(self, message: peer.PeerMessage) -> None:
        self.sent.append(message)

    def look_up(self, message: peer.Lookup) -> None:
        self.send(peer.PeerMessage(lookup=message))


class Sending:
    """The decode daemon's direction of a way back."""

    number = 1

    def __init__(self) -> None:
        self.session, self.failed = Session(), list[Any]()

    def fail(self, transfer: int, error: Exception) -> None:
        self.failed.append((transfer, str(error)))

    def perform(self, effect: FailAsk) -> None:
        self.fail(effect.transfer, effect.error)


def decode(**settings: Any) -> tuple[SimDecode, Any]:
    """With a page of each of three prompts, and a session."""
    words = {"role": "decode", "name": "d", "page_size": 4, "way_back": "always", **settings}
    side = SimDecode(Clock(1), DaemonConfig(**words), PLAIN, Faults())
    side.tiers.has_pool.set()
    sending = cast(Any, Sending())
    side.returns._sendings[sending.number] = sending, "as-configured"
    namespace = side.cache.namespaces[side.tenants[0].id]
    pages = side.cache.take(namespace, 1)
    assert pages is not None
    side.cache.name(namespace, pages, b"1" * DIGEST_BYTES)
    namespace.tree.insert(b"1" * DIGEST_BYTES, pages)
    side.cache.publish(namespace, 1)
    return side, sending


def prefill(**settings: Any) -> SimPrefill:
    words = {"role": "prefill", "name": "p", "page_size": 4, "way_back": "always", **settings}
    side = SimPrefill(Clock(1), DaemonConfig(**words), PLAIN, Faults())
    side.tiers.has_pool.set()
    return side


def lookup(side: SimDecode, **fields: Any) -> peer.Lookup:
    words = {"lookup": 5, "namespace_id": side.tenants[0].id, "digests": b"1" * DIGEST_BYTES, **fields}
    return peer.Lookup(**words)


def answer(side: SimDecode, sending: Any) -> int:
    side.returns.on_lookup(sending, lookup(side))
    (message,) = sending.session.sent
    assert message.found.lookup == 5
    return int(message.found.pages)


def hello(*capabilities: str) -> peer.PeerHello:
    return peer.PeerHello(capabilities=capabilities)


@pytest.mark.parametrize("own", [(), (WAY_BACK,), (LOOK_UP,), (WAY_BACK, LOOK_UP)])
@pytest.mark.parametrize("theirs", [(), (WAY_BACK,), (LOOK_UP,), (WAY_BACK, LOOK_UP)])
def test_both_must_have_both_capabilities(own: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    """A daemon of a release without look-ups is never sent one."""
    both = {WAY_BACK, LOOK_UP}
    assert looks_up(hello(*own), hello(*theirs)) is (set(own) == set(theirs) == both)


def test_the_hello_says_it_where_it_is_set() -> None:
    for settings, says in (({}, True), ({"look_ups": "off"}, False), ({"way_back": "off"}, False)):
        for side in (prefill(**settings), decode(**settings)[0]):
            assert (LOOK_UP in hello_of(side).capabilities) is says


def test_what_is_held_is_told_to_who_may_know() -> None:
    side, sending = decode()
    assert answer(side, sending) == 1


@pytest.mark.parametrize(
    "settings",
    [{"closed_peers": "as-configured"}, {"closed_peers": ["q", "p"]}, {"closed_namespaces": "namespace"}],
)
def test_who_is_excluded_learns_and_gets_nothing(settings: dict[str, Any]) -> None:
    if "closed_namespaces" in settings:
        settings = {"closed_namespaces": [decode()[0].tenants[0].id.hex()]}
    side, sending = decode(**settings)
    assert answer(side, sending) == 0
    ask = peer.Ask(transfer=1, name=NAME, namespace_id=side.tenants[0].id, pages=1, digests=b"1" * DIGEST_BYTES)
    side.returns.on_ask(sending, ask)
    assert len(sending.failed) == 1 and side.cache.locks == 0


@pytest.mark.parametrize("can", [True, False])
def test_below_an_engines_blocks_a_host_tier_is_lent_from_if_it_can_be_sent(
    can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, sending = decode()
    side.cache.limits = replace(side.cache.limits, in_blocks=True)
    monkeypatch.setattr(SideTiers, "can_be_sent", property(lambda tiers: can))
    assert (LOOK_UP in hello_of(side).capabilities) is can
    assert answer(side, sending) == can


def test_a_daemon_that_drains_lends_nothing() -> None:
    side, sending = decode()
    side.draining = True
    assert answer(side, sending) == 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"digests": b""}, "digests has 0 bytes"),
        ({"digests": bytes(DIGEST_BYTES + 1)}, "digests has 33 bytes"),
        ({"digests": bytes((MAX_LOOKED_UP_PAGES + 1) * DIGEST_BYTES)}, "digests has 524320 bytes"),
        ({"namespace_id": bytes(DIGEST_BYTES + 1)}, "namespace_id has 33 bytes"),
        ({"namespace_id": b""}, "namespace_id has 0 bytes"),
    ],
)
def test_a_look_up_that_cannot_be_ends_the_session(fields: dict[str, Any], why: str) -> None:
    side, sending = decode()
    with pytest.raises(SessionBroken, match=why):
        side.returns.on_lookup(sending, lookup(side, **fields))
    side.returns.on_lookup(sending, lookup(side, digests=bytes(MAX_LOOKED_UP_PAGES * DIGEST_BYTES)))
    assert sending.session.sent[-1].found.pages == 0


def test_look_ups_that_were_not_agreed_on_end_the_session() -> None:
    side, sending = decode()
    sending.session.looks_up = False
    with pytest.raises(SessionBroken, match="not agreed on"):
        side.returns.on_lookup(sending, lookup(side))
    with pytest.raises(SessionBroken, match="not agreed on"):
        side.returns.on_ask(sending, peer.Ask(transfer=1, name=NAME, pages=1, digests=bytes(DIGEST_BYTES)))


def test_a_prefill_daemon_asks_who_agreed_and_is_not_excluded() -> None:
    for settings, agreed, asks in (({}, True, True), ({}, False, False), ({"closed_peers": "d"}, True, False)):
        side, session = prefill(**settings), cast(Any, Session())
        session.remote, session.looks_up = "d", agreed
        _FetchEvents(side, session).on_session_up()
        assert bool(side.ready_core.fetches.look_ups._sessions) is asks
        assert side.ready_core.fetches._sessions == {1}


def test_a_look_up_is_sent_by_its_session() -> None:
    side, session = prefill(), cast(Any, Session())
    side.sessions[1] = session
    for number in (1, 2):  # the second is over
        side.perform(LookUp(number, peer.Lookup(lookup=7)))
    assert [message.lookup.lookup for message in session.sent] == [7]


def test_look_ups_never_break_a_session_off() -> None:
    async def waiting() -> tuple[int, bool]:
        setup = session_setup("d")
        meters = SessionMeters(TransferCounters(), cast(Any, None))
        session = SendingSession(setup, meters, number=1, send_slots=1, remote_epoch=1, events=cast(Any, None))
        for number in range(64):
            session.look_up(peer.Lookup(lookup=number, digests=bytes(MAX_LOOKED_UP_PAGES * DIGEST_BYTES)))
        return session._outgoing_bytes, session._broken.done()

    nbytes, broken = asyncio.run(waiting())
    assert OUTGOING_BYTES // 4 < nbytes < OUTGOING_BYTES // 3 and not broken


def test_neither_role_takes_the_others_words() -> None:
    side, sending = decode(peers={"p0": "127.0.0.1:9"})
    with pytest.raises(SessionBroken, match="the peer sent found"):
        side.links["p0"].on_found(peer.Found())
    with pytest.raises(SessionBroken, match="the peer sent lookup"):
        prefill().on_lookup(sending, peer.Lookup())
