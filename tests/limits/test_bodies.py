"""Bounds of the front ends, over real HTTP: one body, all bodies that are read, how long, and connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import TypeVar

import httpx
import pytest

from kvferry.front import app as front
from kvferry.front import bodies as front_bodies
from kvferry.front import connections as front_connections
from kvferry.front import vllm_body as front_vllm_body
from kvferry.front.server import Served, address_of, listen, serve_apps
from kvferry.front.service import FrontService, ServiceConfig
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app as create_vllm_app
from kvferry.front.vllm_places import Place

HOST = "Host: front\r\n"
KINDS = ["kvferry", "vllm"]
HEALTH = {"kvferry": "/kvferry/stats", "vllm": "/stats"}
Self = TypeVar("Self", bound="Connected")
MOST = {"kvferry": front.MAX_BODY_BYTES, "vllm": front_vllm_body.MAX_BODY_BYTES}


@contextlib.asynccontextmanager
async def serving(kind: str, max_requests: int = 4, max_connections: int = 100) -> AsyncIterator[str]:
    """HOST:PORT of a front end whose servers are not there: what is complete is refused with 503 or 400."""
    listener = listen("127.0.0.1", 0)
    if kind == "kvferry":
        service = FrontService(
            ServiceConfig(prefill=("127.0.0.1:9",), decode=("127.0.0.1:9",), max_requests=max_requests),
            clock=time.monotonic,
        )
        app, close = front.create_app(service), service.close
    else:
        proxy = VllmFront(VllmConfig(prefill=(), decode=(Place("http://127.0.0.1:9"),), max_requests=max_requests))
        app, close = create_vllm_app(proxy), proxy.close
    stop = asyncio.Event()
    address = address_of(listener)

    async def tell() -> None: ...

    running = asyncio.create_task(
        serve_apps([Served(app, listener, max_connections)], tell, close, stop=stop, grace_s=1.0)
    )
    try:
        await answered(address, kind)
        yield address
    finally:
        stop.set()
        await running


async def answered(address: str, kind: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://{address}{HEALTH[kind]}", headers={"connection": "close"})).status_code


async def post(address: str, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(f"http://{address}/v1/completions", content=body)


class Connected:
    """A client that has sent these bytes."""

    def __init__(self, address: str, sent: bytes = b"") -> None:
        self._address, self._sent = address, sent

    async def __aenter__(self: Self) -> Self:
        host, port = self._address.split(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        self.writer.write(self._sent)
        await self.writer.drain()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def end(self) -> bytes:
        """All until the front end closes the connection."""
        return await asyncio.wait_for(self.reader.read(), 4)


class Sending(Connected):
    """A client that has sent the head of a request and some of its body."""

    def __init__(self, address: str, length: int, part: bytes = b"{") -> None:
        head = f"POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: {length}\r\n\r\n"
        super().__init__(address, head.encode() + part)

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readline(), 20)).split()[1])


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it does not come: {what}")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[front_bodies.Bodies]:
    """Of front ends made in the test."""
    made: list[front_bodies.Bodies] = []
    make = front_bodies.Bodies.__init__

    def noted(self: front_bodies.Bodies, max_bytes: int, max_requests: int) -> None:
        make(self, max_bytes, max_requests)
        made.append(self)

    monkeypatch.setattr(front_bodies.Bodies, "__init__", noted)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_a_byte_too_many(kind: str) -> None:
    async def story() -> None:
        async with serving(kind) as address:
            within = await post(address, b"x" * MOST[kind])
            assert within.status_code == HTTPStatus.BAD_REQUEST and "is not JSON" in within.text
            past = await post(address, b"x" * (MOST[kind] + 1))
            assert past.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            assert f"the body has more than {MOST[kind]} bytes" in past.json()["error"]["message"]

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_one_body_more_than_requests_may_run_is_not_read(kind: str, read: list[front_bodies.Bodies]) -> None:
    async def story() -> None:
        async with serving(kind, max_requests=2) as address, Sending(address, 2), Sending(address, 2):
            await until(lambda: read[0].reading == 2, "two bodies are read")
            async with Sending(address, 1 << 20) as third:
                assert await third.status() == HTTPStatus.TOO_MANY_REQUESTS
            refused = await post(address, b"{}")
            assert "0 requests are running, the bound is 2; 2 are being read" in refused.json()["error"]["message"]
        assert (read[0].reading, read[0].bytes) == (0, 0)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_all_bodies_together_have_a_bound(
    kind: str, read: list[front_bodies.Bodies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_bodies, "MAX_BYTES_TOGETHER", 100)
    monkeypatch.setattr(front_bodies, "SMALLEST_SHARE", 10)

    async def story() -> None:
        async with serving(kind) as address, Sending(address, 1000, b"x" * 40):
            await until(lambda: read[0].bytes == 40, "the first part is read")
            assert "is not JSON" in (await post(address, b"x" * 60)).text
            past = await post(address, b"x" * 61)
            assert past.status_code == HTTPStatus.TOO_MANY_REQUESTS
            assert "the bodies of 2 requests have more than 100 bytes together" in past.json()["error"]["message"]
            assert (read[0].reading, read[0].bytes) == (1, 40)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_who_holds_most_of_the_bytes_is_refused_and_not_who_sends_next(
    kind: str, read: list[front_bodies.Bodies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_bodies, "MAX_BYTES_TOGETHER", 100)
    monkeypatch.setattr(front_bodies, "SMALLEST_SHARE", 10)

    async def story() -> None:
        async with (
            serving(kind) as address,
            Sending(address, 1000, b"x" * 45),
            Sending(address, 1000, b"x" * 55) as most,
        ):
            await until(lambda: read[0].bytes == 100, "what two clients hold is all there may be")
            assert "is not JSON" in (await post(address, b"x")).text
            assert await most.status() == HTTPStatus.TOO_MANY_REQUESTS
            await until(lambda: read[0].reading == 1, "the longest gives its place back")
            assert read[0].bytes == 45

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_within_the_smallest_share_is_read_whatever_others_hold(
    kind: str, read: list[front_bodies.Bodies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_bodies, "MAX_BYTES_TOGETHER", 100)
    monkeypatch.setattr(front_bodies, "SMALLEST_SHARE", 100)

    async def story() -> None:
        async with serving(kind) as address, Sending(address, 1000, b"x" * 100), Sending(address, 1000, b"x" * 100):
            await until(lambda: read[0].bytes == 200, "both have their share")
            assert "is not JSON" in (await post(address, b"x" * 100)).text
            assert (read[0].reading, read[0].bytes) == (2, 200)

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_does_not_come_gives_its_place_back(
    kind: str, read: list[front_bodies.Bodies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_bodies, "BODY_SECONDS", 0.2)

    async def story() -> None:
        async with serving(kind, max_requests=1) as address, Sending(address, 2) as slow:
            assert await slow.status() == HTTPStatus.REQUEST_TIMEOUT
            assert read[0].reading == 0
            assert (await post(address, b"{")).status_code == HTTPStatus.BAD_REQUEST

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_one_connection_too_many_is_closed_and_those_before_are_served(kind: str) -> None:
    async def story() -> None:
        async with serving(kind, max_connections=2) as address, Sending(address, 2) as first:
            assert await answered(address, kind) == HTTPStatus.OK
            async with Connected(address):
                with pytest.raises(httpx.TransportError):
                    await answered(address, kind)
                first.writer.write(b"x")
                assert await first.status() == HTTPStatus.BAD_REQUEST
            for _ in range(100):  # the server hears of the end of the second connection
                with contextlib.suppress(httpx.TransportError):
                    assert await answered(address, kind) == HTTPStatus.OK
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("a connection that has ended still counts")

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_request_is_closed(kind: str, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_connections, "HEAD_SECONDS", 0.3)

    async def story() -> None:
        async with serving(kind, max_connections=2) as address, Sending(address, 2) as older:
            async with Connected(address, head) as silent:
                assert await silent.end() == b""
            assert await answered(address, kind) == HTTPStatus.OK
            older.writer.write(b"x")
            assert await older.status() == HTTPStatus.BAD_REQUEST, "whose request was there has all its time"

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_stops_in_its_second_head_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_connections, "HEAD_SECONDS", 0.3)

    async def story() -> None:
        whole = f"GET {HEALTH[kind]} HTTP/1.1\r\n{HOST}\r\n".encode()
        async with serving(kind) as address, Connected(address, whole) as client:
            assert b" 200 " in await client.reader.readline()
            client.writer.write(b"G")  # ends what uvicorn allows an idle connection
            assert (await client.end()).endswith(b"}"), "behind its first reply"

    asyncio.run(story())


def test_connections_follow_the_requests() -> None:
    assert front_connections.most_connections(1024) == 4 * 1024 + 1024
