"""A decode daemon's link and its sessions: what a session is made of, and which one a transfer belongs to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import StartTransfer
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.limits import Name
from kvferry.daemon.peers import link as peer_link
from kvferry.daemon.peers.link import PeerLink
from kvferry.daemon.peers.session import SessionBroken
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from tests.daemon.peers.hellos import hello_from
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimDecode
from tests.simulation.faults import Faults

NAME = Name(bytes(16), 1)


def decode() -> SimDecode:
    config = DaemonConfig(role="decode", name="d", peers={"p0": "127.0.0.1:1", "p1": "127.0.0.1:2"}, page_size=4)
    side = SimDecode(Clock(1), config, PLAIN, Faults())
    side.tiers.has_pool.set()
    return side


def hello(**fields: Any) -> peer.PeerHello:
    """A prefill daemon's."""
    return hello_from("p0", common.ROLE_PREFILL, fields)


def ask(transfer: int) -> StartTransfer:
    return StartTransfer("p0", peer.Ask(transfer=transfer, name=NAME.to_proto(), pages=1), (transfer,))


class Session:
    """In place of a receiving session: it notes what it is made of and asked, and is over once `while_it_runs` is."""

    made: list[Session]
    while_it_runs: Callable[[], None]

    def __init__(self, *setup: object, **parts: Any) -> None:
        self.up, self.parts = True, parts
        self.receiving, self.returning = self, None
        self.asked: list[int] = []
        self.stopped: list[int] = []
        Session.made.append(self)

    def ask(self, ask: peer.Ask, page_ids: object) -> None:
        self.asked.append(ask.transfer)

    def stop(self, transfer: int, reason: str) -> bool:
        self.stopped.append(transfer)
        return False

    async def run(self, stream: object) -> None:
        Session.while_it_runs()
        raise SessionBroken("it has run")


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    Session.made, Session.while_it_runs = [], staticmethod(lambda: None)
    monkeypatch.setattr(peer_link, "ReceivingSession", Session)
    return Session.made


def connect(
    monkeypatch: pytest.MonkeyPatch,
    link: PeerLink,
    answer: peer.PeerHello,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """One try of the link's. `meanwhile` happens here while the Hello is answered. However it ends, its call ends: the
    peer has a session behind it."""
    ended: list[Call] = []

    class Call:
        async def write(self, message: object) -> None:
            pass

        async def read(self) -> peer.PeerMessage:
            await asyncio.sleep(0)
            meanwhile()
            return peer.PeerMessage(hello=answer)

        def cancel(self) -> None:
            ended.append(self)

    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Session(self, wait_for_ready: bool) -> Call:
            return Call()

    monkeypatch.setattr(peer_link, "PeerStub", Stub)
    monkeypatch.setattr(link._side, "dial", lambda *address: contextlib.nullcontext())
    try:
        asyncio.run(link._connect_and_serve())
    finally:
        assert len(ended) == 1


def test_a_session_is_of_the_pool_that_the_hello_named(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Session]
) -> None:
    side = decode()
    with pytest.raises(SessionBroken, match="it has run"):
        connect(monkeypatch, side.links["p0"], hello())
    (session,) = sessions
    assert session.parts["receiver"]._epoch == side.tiers.epoch
    assert side.links["p0"].session is None


@pytest.mark.parametrize("what", ["gone", "another"])
def test_no_session_begins_on_a_pool_that_went_while_the_hello_was_answered(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Session], what: str
) -> None:
    """The peer was told an epoch whose memory is an ended engine's; so parts of it would land in the next one's."""
    side = decode()

    def goes() -> None:
        if what == "gone":
            side.tiers.has_pool.clear()
        else:
            side.tiers.epoch += 1

    with pytest.raises(SessionBroken, match="the engine whose memory the pool was has ended"):
        connect(monkeypatch, side.links["p0"], hello(), goes)
    assert not sessions


def test_a_peer_that_cannot_work_with_this_daemon_gets_no_session(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Session]
) -> None:
    with pytest.raises(RequestError, match="role: decode daemon 'd' needs ROLE_PREFILL"):
        connect(monkeypatch, decode().links["p0"], hello(role=common.ROLE_DECODE))
    assert not sessions


def test_another_daemon_at_a_found_ones_address_gets_no_session(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Session]
) -> None:
    link = decode().add_peer("found", "10.0.0.7:7071")
    with pytest.raises(RequestError, match=r"10\.0\.0\.7:7071 was 'found''s and is 'p0''s now"):
        connect(monkeypatch, link, hello())
    assert not sessions
    with pytest.raises(SessionBroken, match="it has run"):
        connect(monkeypatch, link, hello(daemon="found"))


def test_a_peer_fails_no_transfer_that_it_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of the session before."""
    side, failed = decode(), list[int]()
    link = side.links["p0"]
    monkeypatch.setattr(side, "on_ask_failed", lambda transfer, error: failed.append(transfer))
    link.session = cast(Any, Session())
    link.start_transfer(ask(1))
    for transfer in (2, 1):
        link.on_ask_failed(transfer, unavailable("no"))
    assert failed == [1]
    link.session = None
    Session.while_it_runs = staticmethod(lambda: link.on_ask_failed(1, unavailable("no")))
    with pytest.raises(SessionBroken, match="it has run"):
        connect(monkeypatch, link, hello())
    assert failed == [1]


def test_a_transfer_is_stopped_at_the_session_that_was_asked_for_it() -> None:
    """It knows what it copies. The next session has never heard of the transfer, nor has the peer there."""
    link = decode().links["p0"]
    first, second = Session(), Session()
    link.session = cast(Any, first)
    link.start_transfer(ask(1))
    link.session = cast(Any, second)
    assert not link.stop_transfer(1, "enough"), "on_drained follows"
    assert (first.stopped, second.stopped) == ([1], [])
    assert link.stop_transfer(1, "enough"), "it is forgotten"


def test_what_is_asked_for_waits_until_the_session_is_up() -> None:
    link = decode().links["p0"]
    session = Session()
    link.session, session.up = cast(Any, session), False
    link.start_transfer(ask(1))
    assert link.stop_transfer(1, "enough")
    link.start_transfer(ask(2))
    assert not session.asked
    session.up = True

    async def comes_up() -> None:
        link.on_session_up()

    asyncio.run(comes_up())
    assert session.asked == [2]


def test_what_waited_for_a_session_that_never_came_is_not_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request was told that it failed, and its pages may be another's."""
    side = decode()
    link = side.links["p0"]
    session, tries = Session(), list[int]()

    async def story() -> None:
        up = asyncio.Event()

        async def connect_and_serve() -> None:
            tries.append(len(tries))
            if len(tries) == 1:
                link.start_transfer(ask(1))
                raise SessionBroken("not yet")
            link.session = cast(Any, session)
            link.on_session_up()
            up.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(peer_link, "BACKOFF_SECONDS", (0.001, 0.001))
        monkeypatch.setattr(link, "_connect_and_serve", connect_and_serve)
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(up.wait(), 20)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    assert len(tries) == 2 and not session.asked


def test_a_blob_is_of_the_daemon_that_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side, heard = decode(), list[str]()
    monkeypatch.setattr(side, "on_aux", lambda prefill, name, blob: heard.append(prefill))
    for name, link in side.links.items():
        link.on_aux(NAME, b"first token")
        assert heard.pop() == name
