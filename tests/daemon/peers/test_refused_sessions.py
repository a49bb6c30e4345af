"""A session that is refused again and again: one line in the log of each side, then one a minute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import count
from typing import Any, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError, exhausted, precondition, unavailable
from kvferry.daemon.peers import link as peer_link
from kvferry.daemon.peers.log_throttle import MOST, Said
from kvferry.daemon.services import peer as peer_service
from kvferry.daemon.services.peer import PeerService
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import peer_pb2_grpc
from tests.daemon.peers.hellos import hello_from


def test_a_text_is_due_when_it_is_new_and_once_a_minute() -> None:
    said = Said()
    refusal = "p0 refuses: page_size: 'd' at ipv4:127.0.0.1:{} has 32"
    assert said.due(refusal.format(40001), 0.0)
    assert not said.due(refusal.format(40002), 59.0)  # the same but for the caller's port
    assert said.due(refusal.format(40001).replace("32", "64"), 59.5)
    assert said.due(refusal.format(40003), 60.0)
    assert said.due("a %5B ipv6:%5B::1%5D:1", 60.0) and not said.due("a %5B ipv6:%5B::1%5D:2", 60.0)
    for number in range(MOST):
        assert said.due(f"text {number}", 61.0)
    assert said.due(refusal.format(40001), 61.0)  # no more than MOST are remembered
    said.forget()
    assert said.due("text 5", 61.0)


def test_the_decode_side_says_a_refusal_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    tries = 0

    async def story() -> None:
        nonlocal now, tries
        side = DecodeSide(DaemonConfig(role="decode", peers={"p0": "127.0.0.1:1"}), bytes(16), lambda: now)
        side.tiers.has_pool.set()
        link = side.links["p0"]
        enough = asyncio.Event()

        async def refused() -> None:
            nonlocal now, tries
            tries, now = tries + 1, now + 15.0
            if tries == 8:
                enough.set()
            raise precondition(f"page_size: 'd' at ipv4:127.0.0.1:{40000 + tries} has 32")

        monkeypatch.setattr(peer_link, "BACKOFF_SECONDS", (0.001, 0.001))
        monkeypatch.setattr(link, "_connect_and_serve", refused)
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(enough.wait(), 10)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert link.error.endswith("has 32") and link.state == "down"
        await side.close()

    asyncio.run(story())
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2  # at 15 s and at 75 s, of 8 tries


class Call:
    """Of a decode daemon that says hello."""

    async def read(self) -> peer.PeerMessage:
        return peer.PeerMessage(hello=peer.PeerHello(daemon="d\n0"))

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40001"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(f"{code.name}: {details}")


def test_the_prefill_side_warns_of_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: list[RequestError] = [
        precondition("page_size: 16 and 32"),
        precondition("page_size: 16 and 32"),
        unavailable("no worker yet"),
        exhausted("64 peers are connected"),
    ]

    async def story() -> None:
        side = PrefillSide(DaemonConfig(role="prefill"), bytes(16), lambda: 0.0)
        service = PeerService(side)
        for error in refusals:

            def refuse(_: object, error: RequestError = error) -> peer.PeerHello:
                raise error

            monkeypatch.setattr(peer_service, "hello_of", refuse)
            with pytest.raises(PermissionError, match=error.message):
                await service.Session(None, cast(Any, Call()))
        await side.close()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        r"refuses a session to decode daemon 'd\n0': page_size: 16 and 32",
        r"refuses a session to decode daemon 'd\n0': 64 peers are connected",
    ]


class Older(peer_pb2_grpc.PeerServicer):
    """A prefill daemon of a release without the key; its words are those of today's."""

    async def Session(self, request_iterator: object, context: Any) -> None:
        del request_iterator
        await context.read()
        await context.abort(grpc.StatusCode.UNAVAILABLE, WAITS)


WAITS = "daemon 'p' has no prefill worker yet, so its model is not known"


@pytest.mark.parametrize(
    ("older", "said", "level"),
    [
        (False, "waits for prefill daemon 'p0' at {}: " + WAITS, logging.INFO),
        (True, "prefill daemon 'p0' at {}{}: UNAVAILABLE: " + WAITS, logging.WARNING),
    ],
)
def test_a_peer_that_waits_for_its_worker_says_so_by_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, older: bool, said: str, level: int
) -> None:
    """Without the key it is as unreachable as for any other reason, whatever its message."""

    async def story() -> tuple[str, str]:
        server = grpc.aio.server()
        prefill = PrefillSide(DaemonConfig(role="prefill", name="p"), bytes(16), lambda: 0.0)
        peer_pb2_grpc.add_PeerServicer_to_server(Older() if older else PeerService(prefill), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        side = DecodeSide(DaemonConfig(role="decode", peers={"p0": address}), bytes(16), lambda: 0.0)
        side.tiers.has_pool.set()
        monkeypatch.setattr(peer_link, "hello_of", lambda side: peer.PeerHello(daemon="d"))
        link = side.links["p0"]
        running = asyncio.create_task(link.run())
        while not link.error:
            await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await side.close()
        await prefill.close()
        await server.stop(None)
        return address, link.error

    with caplog.at_level(logging.INFO):
        address, error = asyncio.run(asyncio.wait_for(story(), 20))
    assert error in (said.format(address, how) for how in (" cannot be reached", ": no hello came"))
    assert [record.levelno for record in caplog.records if record.getMessage() == error] == [level]


class Twin:
    """A call of a decode daemon whose session lasts."""

    def __init__(self, incarnation: int) -> None:
        self._hello = hello_from("d", common.ROLE_DECODE, {"incarnation": bytes([incarnation] * 16)})

    async def read(self) -> peer.PeerMessage:
        return peer.PeerMessage(hello=self._hello)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40001"

    async def write(self, message: peer.PeerMessage) -> None:
        assert message.HasField("hello")


class LastingSession:
    def __init__(self, number: int) -> None:
        self.number, self.remote = number, "d"

    async def run(self, call: object) -> None:
        await asyncio.Event().wait()


def test_the_prefill_side_warns_of_two_decode_daemons_of_one_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    async def story() -> None:
        nonlocal now
        side = PrefillSide(DaemonConfig(role="prefill"), bytes(16), lambda: now)
        service = PeerService(side)
        numbers = count(1)

        def new_session(own: peer.PeerHello, hello: peer.PeerHello) -> LastingSession:
            session = LastingSession(next(numbers))
            side.sessions[session.number] = cast(Any, session)
            return session

        monkeypatch.setattr(peer_service, "hello_of", lambda _: peer.PeerHello())
        monkeypatch.setattr(peer_service, "check_hello", lambda *_: None)
        monkeypatch.setattr(side, "new_session", new_session)
        monkeypatch.setattr(side, "session_over", lambda session: side.sessions.pop(session.number))

        async def opened(incarnation: int) -> asyncio.Task[None]:
            call = asyncio.create_task(service.Session(None, cast(Any, Twin(incarnation))))
            await asyncio.sleep(0.01)
            return call

        async def over(call: asyncio.Task[None]) -> None:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

        def warned() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

        first, again = await opened(1), await opened(1)
        assert warned() == []  # it is one daemon
        await over(again)
        twin = await opened(2)
        assert warned() == [
            "two decode daemons are called 'd': give each a --name of its own, unless one has just died"
        ]
        await over(twin)
        twin = await opened(2)
        assert len(warned()) == 1, "so soon again"
        await over(first)
        now = 120.0
        await over(twin)
        last = await opened(3)
        assert len(warned()) == 1, "it is alone"
        await over(last)
        assert service._heard == []
        await side.close()

    asyncio.run(story())
