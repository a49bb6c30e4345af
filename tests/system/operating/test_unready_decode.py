"""A front end before vLLM servers, real daemons beside two of them: nothing is handed over to a server whose daemon is
away, drains, stands still or has no engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kvferry.daemon.cli.stack import Process, Stack, lasting_port
from tests.support.block_engine import PAGE, BlockEngine
from tests.support.certificates import Authority, Folder
from tests.support.engines import standing_still
from tests.support.small_vllm import SmallVllm

CHAT = "/v1/chat/completions"


class World:
    """A prefill server, two decode servers, and a front end that knows the daemon beside each of these."""

    def __init__(self, stack: Stack, prefill: SmallVllm, decode: tuple[SmallVllm, SmallVllm]) -> None:
        self.stack = stack
        self.prefill, self.decode = prefill, decode
        self.addresses = [f"127.0.0.1:{lasting_port()}" for _ in decode]
        self.daemons: list[Process] = [self.started(i) for i in range(2)]
        named = [f"{at}={server.url}" for at, server in zip(self.addresses, decode, strict=True)]
        words = ["front", "--listen", "127.0.0.1:0", "--vllm-prefill", f"p={prefill.url}", "--vllm-decode", *named]
        self.url = f"http://{stack.ready(stack.start('front', words))}"
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False)
        self.asked = 0

    def started(self, number: int) -> Process:
        words = ["serve", "--role", "decode", "--name", f"d{number}", "--listen", self.addresses[number], "--pool"]
        words += ["engine", "--page-size", str(PAGE), "--socket", self.socket(number), "--metrics", "off"]
        process = self.stack.start(f"d{number}", words)
        self.stack.ready(process)
        return process

    def socket(self, number: int) -> str:
        return os.path.join(self.stack.folder, f"d{number}.sock")

    async def engine(self, number: int) -> BlockEngine:
        return await BlockEngine("decode", self.socket(number), 4, 16).connect()

    async def unready(self) -> list[str]:
        servers = (await self.client.get("/stats")).json()["servers"]
        return [server["unready"] for server in servers if server["role"] == "decode"]

    async def until_unready(self, *holds: bool, within_s: float = 15.0) -> list[str]:
        """Waits until those decode servers are, and only those; why they are."""
        deadline = time.monotonic() + within_s
        while True:
            unready = await self.unready()
            if list(map(bool, unready)) == list(holds):
                return unready
            assert time.monotonic() < deadline, unready
            await asyncio.sleep(0.05)

    async def chats(self, count: int = 20) -> tuple[list[int], list[int]]:
        """Hand-offs and prompts alone that each decode server gets of so many conversations."""
        before = [len(server.heard) for server in self.decode]
        for _ in range(count):
            self.asked += 1
            words = [{"role": "user", "content": f"conversation {self.asked}"}]
            assert (await self.client.post(CHAT, json={"messages": words})).status_code == 200
        bodies = [[heard[2] for heard in server.heard[n:]] for server, n in zip(self.decode, before, strict=True)]
        handed = [[bool(body.get("kv_transfer_params")) for body in each] for each in bodies]
        return [sum(each) for each in handed], [len(each) - sum(each) for each in handed]


def in_a_world(stack: Stack, story: Callable[[World], object]) -> None:
    with SmallVllm() as prefill, SmallVllm() as first, SmallVllm() as second:
        world = World(stack, prefill, (first, second))

        async def run() -> None:
            async with world.client:
                await story(world)  # type: ignore[misc]

        asyncio.run(run())


def test_hand_offs_go_to_servers_whose_daemons_are_ready(stack: Stack) -> None:
    async def story(world: World) -> None:
        assert await world.until_unready(True, True) == ["decode: no engine is connected"] * 2
        assert sum(sum(each) for each in await world.chats()) == 20 and not world.prefill.heard
        told = (await world.client.get("/metrics")).text
        assert 'kvferry_front_decode_alone_total{reason="no_daemon"} 20.0' in told
        first = await world.engine(0)
        await world.until_unready(False, True)
        assert await world.chats() == ([20, 0], [0, 0]) and len(world.prefill.heard) == 20
        second = await world.engine(1)
        await world.until_unready(False, False)
        (one, other), alone = await world.chats()
        assert one and other and alone == [0, 0]
        with standing_still([world.daemons[0].popen.pid]):
            (why, _) = await world.until_unready(True, False)
            assert why.startswith("DEADLINE_EXCEEDED")
            assert await world.chats() == ([0, 20], [0, 0])
        await world.until_unready(False, False)
        await first.client.close()
        assert (await world.until_unready(True, False))[0] == "decode: no engine is connected"
        assert await world.chats() == ([0, 20], [0, 0])
        world.stack.kill(world.daemons[1])
        assert (await world.until_unready(True, True))[1].startswith("UNAVAILABLE")
        handed, alone = await world.chats()
        assert handed == [0, 0] and all(alone)
        await second.client.close()
        world.started(1)
        second = await world.engine(1)
        await world.until_unready(True, False)
        assert await world.chats() == ([0, 20], [0, 0])
        await second.client.close()
        assert (await world.client.get("/health")).status_code == 200

    in_a_world(stack, story)


def test_a_daemon_that_drains_gets_nothing_more(stack: Stack) -> None:
    async def story(world: World) -> None:
        engines = [await world.engine(number) for number in range(2)]
        await world.until_unready(False, False)
        world.daemons[0].popen.terminate()
        await world.until_unready(True, False)
        assert await world.chats() == ([0, 20], [0, 0])
        for engine in engines:
            await engine.client.close()

    in_a_world(stack, story)


async def until_said(front: httpx.AsyncClient, begins: str) -> None:
    """Waits until its only server is not ready for a reason that begins so; empty: until it is ready."""
    deadline = time.monotonic() + 15.0
    while True:
        (server,) = (await front.get("/stats")).json()["servers"]
        if server["unready"].startswith(begins) if begins else not server["unready"]:
            return
        assert time.monotonic() < deadline, server
        await asyncio.sleep(0.05)


def test_daemons_are_asked_over_tls(stack: Stack, tmp_path: Path) -> None:
    ca = Authority()
    daemon, client = (Folder(tmp_path / name).put(ca.sign(("127.0.0.1",)), ca) for name in ("daemon", "client"))

    def tls(files: Folder) -> list[str]:
        return ["--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]

    words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--pool", "engine", "--page-size", str(PAGE)]
    words += ["--socket", os.path.join(stack.folder, "d.sock"), "--metrics", "off", *tls(daemon)]
    address = stack.ready(stack.start("d", words))

    async def said(name: str, flags: list[str], decode: SmallVllm, *each: str) -> None:
        """Starts a front end, whose words for why the server is not ready begin so, one after the other; behind the
        first ones an engine comes."""
        words = ["front", "--listen", "127.0.0.1:0", "--vllm-decode", f"{address}={decode.url}", *flags]
        url = f"http://{stack.ready(await asyncio.to_thread(stack.start, name, words))}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as front:
            await until_said(front, each[0])
            for after in each[1:]:
                engine = await BlockEngine("decode", os.path.join(stack.folder, "d.sock"), 4, 16).connect()
                await until_said(front, after)
                await engine.client.close()

    async def run(decode: SmallVllm) -> None:
        await said("plain", [], decode, "UNAVAILABLE")
        await said("tls", tls(client), decode, "decode: no engine is connected", "")

    with SmallVllm() as decode:
        asyncio.run(run(decode))


def test_flags_for_tls_are_whole(capfd: pytest.CaptureFixture[str]) -> None:
    from kvferry.daemon.cli.main import main

    assert main(["front", "--vllm-decode", "http://127.0.0.1:1", "--tls-ca", "/nowhere"]) == 2
    assert "--tls-cert and --tls-key not given" in capfd.readouterr().err
