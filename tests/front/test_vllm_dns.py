"""Names of DNS that gain and lose addresses, by the operating system's resolver as the front end calls it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from kvferry.front.upstream import names
from kvferry.front.upstream.names import resolve
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app
from kvferry.front.vllm_places import Place
from tests.support.small_vllm import SmallVllm

NAME = "decode.svc"
CHAT = "/v1/chat/completions"


class Dns:
    """What `socket.getaddrinfo` says of NAME; of all else the system is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.asked = 0
        self._system = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host: object, port: object, *rest: object, **named: object) -> object:
        if host != NAME:
            return self._system(host, port, *rest, **named)  # type: ignore[arg-type]
        self.asked += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.addresses]
        tails = [(0, 0) if kind == socket.AF_INET6 else () for kind in kinds]
        return [
            (kind, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, *tail))
            for kind, address, tail in zip(kinds, self.addresses, tails, strict=True)
        ]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    monkeypatch.setattr(names, "ROUND_SECONDS", 0.05)
    return Dns(monkeypatch)


@contextlib.asynccontextmanager
async def front_of(port: int) -> AsyncIterator[tuple[VllmFront, httpx.AsyncClient]]:
    """A front end that looks NAME up again and again, and a client of it."""
    front = VllmFront(VllmConfig(prefill=(), decode=(Place(f"dns+http://{NAME}:{port}"),)))
    front.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(front)), base_url="http://front") as client:
        yield front, client
    await front.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


async def chat(client: httpx.AsyncClient, number: int) -> int:
    words = [{"role": "user", "content": str(number)}]
    return (await client.post(CHAT, json={"messages": words})).status_code


def test_an_address_is_named_once_however_often_the_resolver_says_it(dns: Dns) -> None:
    dns.addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    assert asyncio.run(resolve(NAME, 8000)) == ["10.0.0.1", "10.0.0.2", "fd00::1"]


def test_a_name_gains_and_loses_addresses_and_no_request_fails(dns: Dns) -> None:
    async def run(first: SmallVllm, second: SmallVllm) -> None:
        async with front_of(first.port) as (front, client):

            def urls() -> set[str]:
                return {server.url for server in front.decode}

            await until(lambda: dns.asked > 1, "a name that is not there yet is looked up again")
            assert await chat(client, 0) == 503
            dns.addresses = ["127.0.0.2"]
            await until(lambda: urls() == {first.url}, "it is found")
            assert await chat(client, 1) == 200
            dns.addresses = ["127.0.0.3", "127.0.0.2"]
            await until(lambda: urls() == {first.url, second.url}, "it has another")
            statuses = [await chat(client, number) for number in range(2, 22)]
            assert statuses == [200] * 20 and len(second.heard) > 0
            heard = len(first.heard)
            dns.addresses = ["127.0.0.3"]
            await until(lambda: urls() == {second.url}, "the first is gone")
            assert [await chat(client, number) for number in range(22, 32)] == [200] * 10
            assert len(first.heard) == heard
            dns.addresses = []  # NXDOMAIN: the last addresses stand
            asked = dns.asked
            await until(lambda: dns.asked > asked + 1, "it is looked up")
            assert urls() == {second.url} and await chat(client, 32) == 200

    with SmallVllm(host="127.0.0.2") as first, SmallVllm(host="127.0.0.3", port=first.port) as second:
        asyncio.run(run(first, second))


def test_an_address_that_is_named_and_ill_gets_no_request(dns: Dns) -> None:
    async def run(first: SmallVllm, second: SmallVllm) -> None:
        dns.addresses = ["127.0.0.2", "127.0.0.3"]
        first.status = 503
        async with front_of(first.port) as (front, client):
            await until(lambda: [server.url for server in front.decode] == [second.url], "the well one is found")
            assert [await chat(client, number) for number in range(10)] == [200] * 10
            assert not first.heard
            first.status = 200
            await until(lambda: len(front.decode) == 2, "it is well")

    with SmallVllm(host="127.0.0.2") as first, SmallVllm(host="127.0.0.3", port=first.port) as second:
        asyncio.run(run(first, second))


def test_a_server_that_ends_before_its_address_does_costs_no_request(dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(second: SmallVllm) -> None:
        dns.addresses = ["127.0.0.2", "127.0.0.3"]
        async with front_of(second.port) as (front, client):
            with SmallVllm(host="127.0.0.2", port=second.port):
                await until(lambda: len(front.decode) == 2, "both are found")
                monkeypatch.setattr(names, "ROUND_SECONDS", 60.0)  # nobody looks again
                await asyncio.sleep(0.2)
                assert len(front.decode) == 2
            number = 0
            while not front.counts.moved:
                number += 1
                assert await chat(client, number) == 200

    with SmallVllm(host="127.0.0.3") as second:
        asyncio.run(run(second))
