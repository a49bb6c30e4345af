"""Servers behind a name of DNS: looked up again and again, each address asked for /health."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from kvferry.front.upstream import names
from kvferry.front.upstream.names import MAX_ADDRESSES, NamedServers
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app
from kvferry.front.vllm_places import Place, parse_decode, parse_prefill
from tests.support.front_process import front_process
from tests.support.small_vllm import SmallVllm

HI = {"messages": [{"role": "user", "content": "hi"}]}


async def well(url: str) -> bool:
    return True


def test_a_server_takes_requests_while_its_address_is_known_and_well() -> None:
    known = ["127.0.0.2"]

    async def resolve(host: str, port: int) -> list[str]:
        assert host == "decode.svc"
        if not known:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return known

    async def run(first: SmallVllm, second: SmallVllm) -> None:
        front = VllmFront(VllmConfig(prefill=(), decode=(Place(f"dns+http://decode.svc:{first.port}"),)))
        front.names = NamedServers(front.config.decode, front.healthy, front._found, resolve)

        async def after_a_round() -> set[str]:
            await front.names.look()
            return {server.url for server in front.decode}

        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(front)), base_url="http://front") as asks:
            reply = await asks.post("/v1/chat/completions", json=HI)
            assert reply.status_code == 503 and "no decode server is known" in reply.json()["error"]["message"]
            assert await after_a_round() == {first.url}
            assert (await asks.post("/v1/chat/completions", json=HI)).status_code == 200
        front.decode[0].running = 3
        known.append("127.0.0.3")
        assert await after_a_round() == {first.url, second.url}
        assert front.decode[0].running == 3  # the same server as before
        second.status = 500
        assert await after_a_round() == {first.url}
        second.status = 200
        known.remove("127.0.0.2")
        assert await after_a_round() == {second.url}
        known.clear()
        assert await after_a_round() == {second.url}  # a name that cannot be looked up keeps its addresses
        await front.close()

    with SmallVllm(host="127.0.0.2") as first, SmallVllm(host="127.0.0.3", port=first.port) as second:
        asyncio.run(run(first, second))


def test_each_prefill_server_has_its_daemon_and_its_ranks() -> None:
    found: list[Place] = []

    async def resolve(host: str, port: int) -> list[str]:
        return ["10.0.0.1", "fd00::2"]

    async def run() -> None:
        names = parse_prefill("p-{address}-{dp_rank}=dns+http://prefill.svc:8000,2")
        await NamedServers(names, well, found.extend, resolve).look()

    asyncio.run(run())
    assert [(place.url, place.daemon, place.dp_rank) for place in found] == [
        ("http://10.0.0.1:8000", "p-10.0.0.1-0", 0),
        ("http://[fd00::2]:8000", "p-fd00--2-0", 0),
        ("http://10.0.0.1:8000", "p-10.0.0.1-1", 1),
        ("http://[fd00::2]:8000", "p-fd00--2-1", 1),
    ]
    assert {place.told for place in found} == {"dns+http://prefill.svc:8000"}


def test_each_decode_server_may_have_a_daemon_that_is_asked() -> None:
    found: list[Place] = []

    async def resolve(host: str, port: int) -> list[str]:
        return ["10.0.0.1", "fd00::2"]

    async def run() -> None:
        await NamedServers(
            parse_decode("{address}:707{dp_rank}=dns+http://d:8000,2"), well, found.extend, resolve
        ).look()

    asyncio.run(run())
    assert [(place.url, place.daemon_address, place.dp_rank) for place in found] == [
        ("http://10.0.0.1:8000", "10.0.0.1:7070", 0),
        ("http://[fd00::2]:8000", "[fd00::2]:7070", 0),
        ("http://10.0.0.1:8000", "10.0.0.1:7071", 1),
        ("http://[fd00::2]:8000", "[fd00::2]:7071", 1),
    ]
    assert not any(place.daemon for place in found)
    assert parse_decode("[::1]:7070=http://h:1/") == (Place("http://h:1", daemon_address="[::1]:7070"),)
    assert parse_decode("http://h:1/?a=b") == (Place("http://h:1/?a=b"),)


def test_no_more_addresses_than_the_bound_are_used_and_asked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    asking, most = 0, 0
    found: list[Place] = []

    async def slow(url: str) -> bool:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0.001)
        asking -= 1
        return True

    async def resolve(host: str, port: int) -> list[str]:
        return [f"10.0.{i // 256}.{i % 256}" for i in range(MAX_ADDRESSES + 1)]

    asyncio.run(NamedServers(parse_decode("dns+http://d:1"), slow, found.extend, resolve).look())
    assert len(found) == MAX_ADDRESSES and most == names.ASKS_AT_ONCE
    assert f"d has {MAX_ADDRESSES + 1} addresses; {MAX_ADDRESSES} of them are used" in caplog.text


def test_a_name_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RESOLVE_SECONDS", 0.1)

    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def run() -> None:
        await asyncio.wait_for(NamedServers(parse_decode("dns+http://d:1"), well, lambda _: None, resolve).look(), 5)

    asyncio.run(run())


def test_a_front_end_that_runs_finds_its_servers_by_name() -> None:
    with SmallVllm() as prefill, SmallVllm() as decode:
        names = (f"p-{{address}}=dns+http://localhost:{prefill.port}", f"dns+http://localhost:{decode.port}")
        with front_process("--vllm-prefill", names[0], "--vllm-decode", names[1]) as front:
            assert httpx.post(front.url + "/v1/chat/completions", json=HI).status_code == 200
            servers = httpx.get(front.url + "/stats").json()["servers"]
            assert [server["url"] for server in servers] == [prefill.url, decode.url]
            assert f'server="{names[1]}"' in httpx.get(front.url + "/metrics").text
        assert decode.heard[0][2]["kv_transfer_params"]["kvferry_prefill"] == "p-127.0.0.1"


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_decode, "dns+http://host", "must have HOST:PORT .* behind dns"),
        (parse_decode, "dns+https://host:1", "must be a URL"),
        (parse_prefill, "p=dns+http://host:1", r"must have \{address\} in NAME"),
        (parse_prefill, "h:1=h:2=http://host:1", "must be a URL"),
        (parse_decode, "h=http://host:1", "must have its daemon's HOST:PORT before =, got"),
        (parse_decode, "=http://host:1", "must have its daemon's HOST:PORT before =, got"),
        (parse_decode, "h:0=http://host:1", "must have its daemon's HOST:PORT before =, got"),
        (parse_decode, "h:1=http://host:1,2", r"HOST:PORT, for each of its 2 ranks another by \{dp_rank\} before ="),
        (parse_decode, "h:1=dns+http://host:1", r"must have \{address\} before =, since each server"),
        (parse_decode, "{address}:1=http://host:1", "must have its daemon's HOST:PORT before =, got"),
        (parse_decode, "h-{dp_rank}:1=http://host:1", "must have its daemon's HOST:PORT before =, got"),
        (parse_decode, "h:1=host:1", "must be a URL"),
    ],
)
def test_what_is_no_name(parse: object, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)  # type: ignore[operator]
