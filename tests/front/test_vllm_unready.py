"""Decode servers whose daemons are not ready: what they are sent, and what their daemons are asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.daemon.services.health import HealthService
from kvferry.front.upstream import daemons
from kvferry.front.upstream.daemons import DecodeDaemons
from kvferry.front.upstream.legs import Server
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_places import Place
from kvferry.proto.health import ENGINE_SERVICE
from tests.front.test_vllm_front import CHAT, ask, until, world


def test_nothing_is_handed_over_to_a_server_that_computes_all_itself() -> None:
    async def run() -> None:
        async with world() as w:
            w.front.decode[0].unready = "it drains"
            assert (await w.client.post(CHAT, json=ask())).status_code == 200
            assert "kv_transfer_params" not in w.decode.asked[0] and not w.prefill.asked
            assert w.front.counts.alone == 1
            assert 'kvferry_front_decode_alone_total{reason="no_daemon"} 1.0' in w.front.metrics.text().decode()
            w.front.decode[0].unready = ""
            assert (await w.client.post(CHAT, json=ask())).status_code == 200
            assert "kv_transfer_params" in w.decode.asked[1] and len(w.prefill.asked) == 1

    asyncio.run(run())


def test_a_server_that_is_ready_goes_before_one_that_is_not_and_that_before_one_that_is_gone() -> None:
    front = VllmFront(VllmConfig(prefill=(), decode=tuple(Place(f"http://{name}") for name in "abc")))
    a, b, c = front.decode
    heads = [b"%d" % i for i in range(30)]

    def chosen() -> set[str]:
        return {front.choose_decode(head).url for head in heads}

    assert len(chosen()) == 3
    a.unready = "no engine"
    assert chosen() == {b.url, c.url}
    b.down_until = c.down_until = front.clock() + 60
    assert chosen() == {a.url}
    assert front.choose_decode(b"", [a, b]) is c
    asyncio.run(front.close())


def test_one_that_is_ready_does_not_get_all_there_is_to_do() -> None:
    front = VllmFront(VllmConfig(prefill=(), decode=tuple(Place(f"http://{name}") for name in "abcd")))
    for server in front.decode[1:]:
        server.unready = "no engine"
    for i in range(100):
        front.choose_decode(b"%d" % i).running += 1
    assert 25 < front.decode[0].running <= 1.5 * 25 + 3  # --load-factor x the mean + --load-slack
    assert all(server.running > 5 for server in front.decode)
    asyncio.run(front.close())


class Slow(HealthService):
    """Answers late as many times as it is told."""

    late = 0
    asked = 0

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        self.asked += 1
        if self.late:
            self.late -= 1
            await asyncio.sleep(5)
        return await super().Check(request, context)


@contextlib.asynccontextmanager
async def daemon_with(health: Slow, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_one_late_answer_changes_nothing_and_two_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemons, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(daemons, "ANSWER_SECONDS", 1.0)

    async def run() -> None:
        health = Slow()
        async with daemon_with(health) as address:
            server, other = Server(Place("http://a", daemon_address=address)), Server(Place("http://b"))
            watch = DecodeDaemons(lambda: [server, other])
            watch.start()
            await until(lambda: server.unready == "no engine has come")
            health.set(ENGINE_SERVICE, [])
            await until(lambda: not server.unready)
            asked, health.late = health.asked, 1
            await until(lambda: health.asked > asked + 4 and not health.late)
            assert not server.unready and "DEADLINE_EXCEEDED" not in caplog.text
            health.late = 2
            await until(lambda: f"decode server http://a: its daemon at {address}: DEADLINE_EXCEEDED" in caplog.text)
            await until(lambda: not server.unready)
            health.drain()
            await until(lambda: server.unready == "it drains")
            assert not other.unready
            await watch.close()

    asyncio.run(run())


async def falls_silent(health: Slow) -> bool:
    """Whether there is a time of many rounds in which it is not asked."""
    for _ in range(20):
        asked = health.asked
        await asyncio.sleep(0.3)
        if health.asked == asked:
            return True
    return False


def test_daemons_are_asked_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def run() -> None:
        async with daemon_with(Slow()) as address:
            server = Server(Place("http://a", daemon_address=address))
            watch = DecodeDaemons(lambda: [server])
            watch.start()
            await until(lambda: bool(server.unready))
            assert server.unready == "no engine has come"
            await watch.close()

    asyncio.run(run())


def test_a_daemon_that_comes_again_and_one_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "ROUND_SECONDS", 0.02)

    async def run() -> None:
        servers: list[Server] = []
        watch = DecodeDaemons(lambda: servers)
        watch.start()
        async with daemon_with(Slow()) as address:
            servers.append(Server(Place("http://a", daemon_address=address)))
            await until(lambda: servers[0].unready == "no engine has come")
        await until(lambda: servers[0].unready.startswith("UNAVAILABLE"))
        ready = Slow()
        ready.set(ENGINE_SERVICE, [])
        async with daemon_with(ready, int(address.rpartition(":")[2])):
            await until(lambda: not servers[0].unready)
            servers.clear()  # DNS has it no more
            assert await falls_silent(ready)
        await watch.close()

    asyncio.run(run())
