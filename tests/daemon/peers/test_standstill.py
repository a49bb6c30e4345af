"""A daemon that stood still takes nobody for dead whose word it has not read yet. Its clock jumps in place of that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers import link as peer_link
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import Session, SessionBroken, SessionTimes
from kvferry.daemon.services.peer import PeerService
from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.engine_pool import EnginePool
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.daemon.daemons import config_of, started
from tests.daemon.peers.played_sessions import EPOCH, Link, common, met
from tests.support.standstill import StandStill, jumping_clock

LONG = 1000.0  # of a standstill
LATER = 0.2  # seconds behind it that what is waited for comes: more than a last look takes
BEAT = peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=1))


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


# -- sessions ------------------------------------------------------------------------------------------------------


class Events:
    def on_session_up(self) -> None:
        pass


class Peer:
    """Says one word after the other, each when it has done what comes before it, and closes the stream."""

    def __init__(self, *words: tuple[Callable[[], Coroutine[Any, Any, None]], peer.PeerMessage]) -> None:
        self._words = list(words)

    async def read(self) -> object:
        if not self._words:
            return None
        before, word = self._words.pop(0)
        await before()
        return word

    async def write(self, message: peer.PeerMessage) -> None:
        pass


async def at_once() -> None:
    await asyncio.sleep(0.001)


async def later() -> None:
    await asyncio.sleep(LATER)


def session_of(lost: float = 10 * LONG) -> Session:
    own = common(0, 2, cast(Any, Events()), SessionTimes(heartbeat=0.05, lost=lost))
    return SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **own)


def test_a_session_comes_up_behind_a_standstill(monkeypatch: pytest.MonkeyPatch, stand_still: StandStill) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def stands_still() -> None:
        await asyncio.sleep(0.01)
        stand_still(LONG)

    async def story() -> None:
        up, connected = met(2)
        session = session_of()
        with pytest.raises(SessionBroken, match="other closed the stream"):
            await session.run(Peer((at_once, up), (stands_still, BEAT), (later, connected)))
        assert session._up.done()

    run(story())


def test_a_peer_is_heard_behind_a_standstill(monkeypatch: pytest.MonkeyPatch, stand_still: StandStill) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def stands_still() -> None:
        stand_still(LONG)
        await asyncio.sleep(LATER)

    async def story() -> None:
        words = [(at_once, word) for word in met(2)]
        with pytest.raises(SessionBroken, match="other closed the stream"):
            await session_of(lost=10.0).run(Peer(*words, (stands_still, BEAT), (later, BEAT)))

    run(story())


def test_a_write_ends_behind_a_standstill(monkeypatch: pytest.MonkeyPatch, stand_still: StandStill) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def stands_still() -> None:
        cast(Any, Link.now).oldest_post = 1
        await asyncio.sleep(0.01)
        stand_still(LONG)
        await asyncio.sleep(LATER)
        cast(Any, Link.now).oldest_post = None

    async def story() -> None:
        words = [(at_once, word) for word in met(2)]
        with pytest.raises(SessionBroken, match="other closed the stream"):
            await session_of().run(Peer(*words, (stands_still, BEAT), (later, BEAT)))

    run(story())


def test_a_write_that_does_not_end_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)
    monkeypatch.setattr(session_module, "POST_SECONDS", 0.2)

    async def posts() -> None:
        cast(Any, Link.now).oldest_post = 1
        await asyncio.Event().wait()

    async def story() -> None:
        words = [(at_once, word) for word in met(2)]
        with pytest.raises(SessionBroken, match=r"a write to other has not ended for 0\.2 s"):
            await asyncio.wait_for(session_of().run(Peer(*words, (posts, BEAT))), 20)

    run(story())


# -- hellos --------------------------------------------------------------------------------------------------------


class Call:
    """A stream to a prefill daemon, on which this word comes behind a standstill, or is taken then."""

    def __init__(self, late: str, stand_still: StandStill) -> None:
        self._late, self._stand_still = late, stand_still

    async def _when(self, word: str) -> None:
        if word == self._late:
            await asyncio.sleep(0.01)
            self._stand_still(LONG)
            await asyncio.sleep(LATER)

    async def write(self, message: peer.PeerMessage) -> None:
        await self._when("write")

    async def read(self) -> object:
        await self._when("read")
        return None  # the stream has ended

    def cancel(self) -> None:
        pass

    async def code(self) -> grpc.StatusCode:
        await self._when("code")
        return grpc.StatusCode.UNKNOWN

    async def details(self) -> str:
        await self._when("details")
        return "why"


@pytest.mark.parametrize("late", ["write", "read", "code", "details"])
def test_an_answer_to_a_hello_comes_behind_a_standstill(
    monkeypatch: pytest.MonkeyPatch, stand_still: StandStill, late: str
) -> None:
    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Session(self, wait_for_ready: bool) -> Call:
            return Call(late, stand_still)

    @contextlib.asynccontextmanager
    async def dial(address: str, expected: str) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(peer_link, "PeerStub", Stub)
    monkeypatch.setattr(peer_link, "hello_of", lambda side: peer.PeerHello())

    async def story() -> None:
        side = DecodeSide(DaemonConfig(role="decode", peers={"p0": "127.0.0.1:1"}), bytes(16), lambda: 0.0, dial)
        with pytest.raises(SessionBroken, match="no hello came: UNKNOWN: why"):
            await side.links["p0"]._connect_and_serve()
        await side.close()

    run(story())


class Client:
    """Of a service: what it says first comes behind a standstill."""

    def __init__(self, stand_still: StandStill, says: object) -> None:
        self._stand_still, self._says = stand_still, says

    async def read(self) -> object:
        await asyncio.sleep(0.01)
        self._stand_still(LONG)
        await asyncio.sleep(LATER)
        return self._says

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(f"{code.name}: {details}")


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (PeerService(cast(Any, None)), BEAT),
        (WorkerService({}, ""), wire.WorkerMessage(attached=wire.Attached())),
    ],
)
def test_a_hello_comes_behind_a_standstill(stand_still: StandStill, service: Any, says: object) -> None:
    async def story() -> None:
        with pytest.raises(PermissionError, match="INVALID_ARGUMENT: the first message must be hello"):
            await service.Session(None, Client(stand_still, says))

    run(story())


# -- an engine's memory --------------------------------------------------------------------------------------------


class Using:
    """A side that uses the memory until it is told not to."""

    def __init__(self) -> None:
        self.uses = "a copy"

    def end_sessions(self, reason: str) -> None:
        pass

    def drop_requests(self) -> None:
        pass

    def in_use(self) -> str:
        return self.uses


@pytest.mark.parametrize("who", ["the next worker", "the one that left"])
def test_memory_is_let_go_behind_a_standstill(stand_still: StandStill, who: str) -> None:
    async def unmap() -> None:
        pass

    async def story() -> None:
        using = Using()
        pool = EnginePool("decode", using, unmap)
        await pool.claim("first")
        pool.own(1)
        pool.owner_leaves()
        letting_go = asyncio.create_task(pool.let_go())
        waiting = asyncio.create_task(pool.claim("second") if who == "the next worker" else pool.released(60.0))
        await asyncio.sleep(0.01)
        stand_still(LONG)
        await asyncio.sleep(LATER)
        using.uses = ""
        await letting_go
        assert await waiting in (None, True)

    run(story())


def test_memory_that_is_not_let_go_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.daemon.sides.engine_pool.RELEASE_SECONDS", 0.1)

    async def story() -> None:
        pool = EnginePool("decode", Using(), cast(Any, None))
        await pool.claim("first")
        pool.owner_leaves()
        with pytest.raises(RequestError, match=r"still mapped after 0\.1 s: a copy; try again"):
            await pool.claim("second")
        assert not await pool.released(0.1)

    run(story())


# -- the daemon's end ----------------------------------------------------------------------------------------------


def test_the_memory_of_sessions_stays_until_they_end_behind_a_standstill(
    tmp_path: Path, stand_still: StandStill
) -> None:
    async def story() -> None:
        async with started(config_of(tmp_path, role="prefill")) as daemon:
            side = cast(Any, daemon.sides["prefill"])
            left: list[int] = []
            ending: list[asyncio.Task[None]] = []
            close = side.close

            async def session_ends() -> None:
                await asyncio.sleep(0.01)
                stand_still(LONG)
                await asyncio.sleep(LATER)
                side.sessions.clear()

            def end_sessions() -> None:
                side.sessions[1] = object()

            async def stopped(grace: float) -> None:
                ending.append(asyncio.create_task(session_ends()))

            async def closes() -> None:
                left.append(len(side.sessions))
                await close()

            running = cast(Any, daemon._running)
            side.close, running.workers.end_sessions = closes, end_sessions
            stop, running.servers.tcp.stop = running.servers.tcp.stop, stopped
            daemon.stop()
            await daemon.run_until_stopped()
            assert left == [0]
            await stop(None)

    run(story())
