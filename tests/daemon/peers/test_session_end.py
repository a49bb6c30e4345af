"""The end of a session: nobody waits for a courier that is still starting, and all wait for what still copies."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import Session, SessionBroken, SessionSetup, SessionTimes
from kvferry.daemon.services import peer as peer_service
from kvferry.daemon.services.peer import PeerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierError
from tests.daemon.peers.played_sessions import common as common_words


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


def new_session(monkeypatch: pytest.MonkeyPatch, starting: Starting) -> Session:
    monkeypatch.setattr(session_module, "CourierLink", starting)
    unused = cast(Any, None)
    return Session(
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


async def end_of_a_session(monkeypatch: pytest.MonkeyPatch, starting: Starting) -> None:
    session = new_session(monkeypatch, starting)
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


# -- what the end waits for ----------------------------------------------------------------------------------------


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def ended(running: asyncio.Task[None], why: str) -> None:
    with pytest.raises(SessionBroken, match=why):
        await asyncio.wait_for(running, 10)


def test_the_end_waits_for_each_copy_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read or write the slots, which go with the courier, and pages, which are given back behind the end."""
    link = Link()

    async def story() -> None:
        session = new_session(monkeypatch, Starting(link))
        for _ in range(3):
            session.copy_begins()
        running = asyncio.create_task(session.run(cast(Any, Closed())))
        for _ in range(3):
            await settle()
            assert session.closed and not running.done() and not link.stops
            session.copy_ends()
        await ended(running, "peer closed the stream")
        assert link.stops == 1

    asyncio.run(story())


def test_a_cancelled_session_ends_as_a_whole_however_often_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()

    async def story() -> None:
        session = new_session(monkeypatch, Starting(link))
        session.copy_begins()
        running = asyncio.create_task(session.run(cast(Any, Closed())))
        for _ in range(3):
            await settle()
            running.cancel()
        await settle()
        assert not running.done() and not link.stops
        session.copy_ends()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled() and link.stops == 1

    asyncio.run(story())


class Up(Link):
    """A courier that has started, and never hears of the other one."""

    metadata, receive_address, receive_ranks, pid, oldest_post = b"m", 1, (), 1, None

    async def start(self, *_: object) -> Up:
        return self


class Silent:
    """A stream on which the peer says nothing."""

    async def read(self) -> object:
        return await asyncio.Event().wait()

    async def write(self, message: object) -> None:
        pass


class Opening:
    """The pool's memory, whose parts take long to open."""

    def __init__(self) -> None:
        self.opening, self.may_open = threading.Event(), threading.Event()
        self.closed = False

    def sending(self, *_: object) -> Opening:
        self.opening.set()
        assert self.may_open.wait(20)
        return self

    def close(self) -> None:
        self.closed = True


def sending_of(memory: Opening) -> SendingSession:
    setup = common_words(0, 2, cast(Any, None))
    setup["setup"] = replace(setup["setup"], memory=cast(Any, memory))
    return SendingSession(number=1, send_slots=2, remote_epoch=1, **setup)


def test_the_end_waits_for_parts_that_are_being_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long: their thread uses the pool's memory, and the courier's slots."""
    monkeypatch.setattr(session_module, "STOP_SECONDS", 0.01)
    link, memory = Up(), Opening()
    monkeypatch.setattr(session_module, "CourierLink", link)

    async def story() -> None:
        session = sending_of(memory)
        running = asyncio.create_task(session.run(cast(Any, Silent())))
        try:
            await asyncio.to_thread(memory.opening.wait, 20)
            session.break_off("enough")
            while "waits for the pool's devices" not in caplog.text:
                await asyncio.sleep(0.005)
            await settle()
            assert not running.done() and not link.stops
        finally:
            memory.may_open.set()  # else a failed test waits for its thread
        await ended(running, "enough")
        assert memory.closed and link.stops == 1

    asyncio.run(asyncio.wait_for(story(), 20))


def test_couriers_that_do_not_meet_in_time_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "START_SECONDS", 0.05)
    link, memory = Up(), Opening()
    monkeypatch.setattr(session_module, "CourierLink", link)
    memory.may_open.set()

    async def story() -> None:
        running = asyncio.create_task(sending_of(memory).run(cast(Any, Silent())))
        await ended(running, r"the couriers were not connected within 0\.05 s")
        assert memory.closed and link.stops == 1

    asyncio.run(story())
