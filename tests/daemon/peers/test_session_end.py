"""The end of a session whose courier is still starting: nobody waits for the start."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.session import Session, SessionBroken, SessionSetup, SessionTimes
from kvferry.daemon.services import peer as peer_service
from kvferry.daemon.services.peer import PeerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierError


class Closed:
    """A stream that the peer has closed."""

    async def read(self) -> object:
        return None

    async def write(self, message: object) -> None:
        pass


class Unread:
    """A decode daemon's call: it says hello, and never takes the end."""

    def __init__(self) -> None:
        self.aborting = asyncio.Event()

    async def read(self) -> peer.PeerMessage:
        return peer.PeerMessage(hello=peer.PeerHello(daemon="d0"))

    async def write(self, message: object) -> None:
        pass

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40001"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert (code, details) == (grpc.StatusCode.OUT_OF_RANGE, "slot 99")
        self.aborting.set()
        await asyncio.Event().wait()


class Serving:
    """A prefill side whose session is broken by what its peer says."""

    draining, remote = False, "d0"

    def __init__(self) -> None:
        self.config = DaemonConfig(role="prefill")
        self.sessions: list[Serving] = []
        self.opened = self.ended = 0

    def new_session(self, own: peer.PeerHello, hello: peer.PeerHello) -> Serving:
        self.sessions.append(self)
        self.opened += 1
        return self

    async def run(self, context: object) -> None:
        raise SessionBroken("slot 99", common.ERROR_OUT_OF_RANGE)

    def session_over(self, session: Serving) -> None:
        self.sessions.remove(session)
        self.ended += 1


class Link:
    def __init__(self, ends: bool = True) -> None:
        self.ends = ends
        self.stops = 0

    async def stop(self, deadline_s: float) -> None:
        self.stops += 1
        if not self.ends:
            raise CourierError("courier 7 did not end within 10 s of SIGKILL")


class Starting:
    """In place of `CourierLink`: never up, but maybe in the moment in which it is cancelled."""

    def __init__(self, link: Link | None) -> None:
        self.link = link
        self.cancelled = False

    async def start(self, *_: object) -> Link:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            if self.link is None:
                raise
        assert self.link is not None
        return self.link


async def end_of_a_session(monkeypatch: pytest.MonkeyPatch, starting: Starting) -> None:
    monkeypatch.setattr(session_module, "CourierLink", starting)
    unused = cast(Any, None)
    session = Session(
        SessionSetup(
            remote="peer",
            courier=unused,
            memory=unused,
            lanes=(),
            remote_ranks=1,
            checksums=False,
            times=SessionTimes(1.0, 5.0),
        )
    )
    with pytest.raises(SessionBroken, match="peer closed the stream"):
        await asyncio.wait_for(session.run(cast(Any, Closed())), 10)


def test_a_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(None)
    asyncio.run(end_of_a_session(monkeypatch, starting))
    assert starting.cancelled


def test_a_courier_that_came_up_all_the_same_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    asyncio.run(end_of_a_session(monkeypatch, Starting(link)))
    assert link.stops == 1


def test_a_courier_that_cannot_be_reaped_ends_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still write: the error goes where the daemon's broken invariants go, since nothing may be given back."""
    broken: list[BaseException] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context["exception"]))
        await end_of_a_session(monkeypatch, Starting(Link(ends=False)))

    asyncio.run(story())
    (error,) = broken
    assert isinstance(error, CourierError)
    assert "did not end within 10 s of SIGKILL" in str(error)


def test_a_session_is_over_though_its_abort_waits_for_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not read keeps the call, and neither the session's place nor its requests."""
    side = Serving()
    monkeypatch.setattr(peer_service, "hello_of", lambda side: peer.PeerHello())
    monkeypatch.setattr(peer_service, "check_hello", lambda side, hello, address: None)

    async def story() -> None:
        call = Unread()
        serving = asyncio.create_task(PeerService(cast(Any, side)).Session(None, cast(Any, call)))
        await asyncio.wait_for(call.aborting.wait(), 20)
        assert not side.sessions
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()

    asyncio.run(story())
    assert side.opened == side.ended == 1
