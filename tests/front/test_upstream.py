"""The front end's connections to its servers: kept, closed, and never two requests' at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from kvferry.front.upstream import connections
from kvferry.front.upstream.connections import Connections

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Upstream:
    """A server of bytes: it counts its connections, and answers each request by its path."""

    def __init__(self) -> None:
        self.opened = 0
        self.open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1]
                if path == b"/whole":
                    writer.write(WHOLE)
                elif path == b"/then-closed":
                    writer.write(WHOLE)
                    return
                elif path == b"/half":
                    writer.write(CHUNKED + b"2\r\nok\r\n")
                    return
                elif path == b"/endless":
                    writer.write(CHUNKED + b"2\r\nok\r\n")
                elif path == b"/nothing":
                    return
                elif path == b"/once":  # closes what has come before, as a server that stood still does
                    if self.opened == 1:
                        return
                    writer.write(WHOLE)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[tuple[Upstream, httpx.AsyncClient]]:
    up = Upstream()
    server = await asyncio.start_server(up.serve, "127.0.0.1", 0)
    up.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = httpx.AsyncClient(transport=Connections(), base_url=up.url, timeout=5, trust_env=False)
    async with client:
        yield up, client
    await none_open(up)
    server.close()


async def none_open(up: Upstream, left: int = 0) -> None:
    for _ in range(500):
        if up.open == left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{up.open} connections are open")


def test_requests_one_behind_the_other_have_one_connection() -> None:
    async def run() -> None:
        async with world() as (up, client):
            for _ in range(5):
                assert (await client.get("/whole")).text == "ok"
            assert up.opened == 1
            await asyncio.gather(*(client.get("/whole") for _ in range(4)))
            assert up.opened == 4

    asyncio.run(run())


def test_a_connection_that_its_server_has_closed_costs_no_request() -> None:
    async def run() -> None:
        async with world() as (up, client):
            for _ in range(3):
                assert (await client.get("/then-closed")).text == "ok"
                await none_open(up)
            assert up.opened == 3

    asyncio.run(run())


def test_a_kept_connection_that_is_closed_under_a_request_costs_none() -> None:
    async def run() -> None:
        async with world() as (up, client):
            assert (await client.get("/whole")).text == "ok"
            assert (await client.get("/once")).text == "ok"
            assert up.opened == 2

    asyncio.run(run())


def test_what_ends_a_new_connection_is_asked_once() -> None:
    async def run() -> None:
        async with world() as (up, client):
            for opened in (1, 2):
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get("/nothing")
                assert up.opened == opened
            assert (await client.get("/whole")).text == "ok"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/nothing")
            assert up.opened == 4, "the kept one, and a new one"

    asyncio.run(run())


def test_a_reply_that_is_left_ends_its_connection() -> None:
    async def run() -> None:
        async with world() as (up, client):
            async with client.stream("GET", "/endless") as reply:
                assert await anext(reply.aiter_raw()) == b"ok"
            await none_open(up)
            asking = asyncio.create_task(client.get("/endless"))
            while up.opened < 2:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await none_open(up)
            assert (await client.get("/whole")).text == "ok"

    asyncio.run(run())


def test_idle_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)

    async def run() -> None:
        async with world() as (up, client):
            await asyncio.gather(*(client.get("/whole") for _ in range(4)))
            await asyncio.sleep(0.2)
            assert (await client.get("/whole")).text == "ok"  # by a new one: all of those are too old
            await none_open(up, 1)
            assert up.opened == 5

    asyncio.run(run())


def test_a_connection_is_left_long_before_its_server_closes_it() -> None:
    """vLLM's and SGLang's servers close one after 5 s without a request, also with one on its way."""

    async def run() -> None:
        async with world() as (up, client):
            assert (await client.get("/whole")).text == "ok"
            await asyncio.sleep(3.0)
            assert (await client.get("/whole")).text == "ok"
            assert up.opened == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "error"), [("/half", httpx.RemoteProtocolError), ("/nothing", httpx.RemoteProtocolError)]
)
def test_what_breaks_off_is_httpx_own_error(path: str, error: type[Exception]) -> None:
    async def run() -> None:
        async with world() as (up, client):
            with pytest.raises(error):
                await client.get(path)
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/endless", timeout=0.1)
            await none_open(up)

    asyncio.run(run())


def test_who_cannot_be_reached_is_httpx_own_error() -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=Connections(), trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:9/")
            with pytest.raises(httpx.ConnectError):
                await client.get("http://nobody.invalid/")

    asyncio.run(run())


def test_a_standstill_while_it_connects_costs_no_request() -> None:
    async def run() -> None:
        async with world() as (_, client):
            limits = httpx.Timeout(5, connect=0.2)
            asking = asyncio.create_task(client.get("/whole", timeout=limits))
            asyncio.get_running_loop().call_later(0, time.sleep, 0.5)
            assert (await asking).text == "ok"

    asyncio.run(run())


class Expired:
    """A connection that its server has closed; to close it takes a turn of the loop."""

    def __init__(self) -> None:
        self.closed = 0

    def is_idle(self) -> bool:
        return False

    def has_expired(self) -> bool:
        return True

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


def test_servers_that_are_gone_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever server's replies end, and however many at once."""
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.0)

    async def run() -> None:
        kept, here, gone = Connections(), (b"http", b"a", 80), (b"http", b"b", 80)
        there = [Expired() for _ in range(4)]
        idle = cast(Any, kept._idle)
        idle[here], idle[gone] = deque(there[:2]), deque(there[2:])
        await asyncio.gather(*(kept._back(here, cast(Any, Expired())) for _ in range(3)))
        assert [each.closed for each in there] == [1] * 4 and not kept._idle

    asyncio.run(run())
