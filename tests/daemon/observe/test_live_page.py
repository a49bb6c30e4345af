"""The live page's view of statistics, and its answers beside the metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvferry.daemon.observe import live_page
from kvferry.daemon.observe.live_page import MAX_DAEMONS, LivePage, OtherDaemon, others_of
from kvferry.daemon.observe.live_view import (
    PEERS_OF_OTHERS,
    SHOWN_DIGITS,
    SHOWN_PEERS,
    SHOWN_PREFIXES,
    SHOWN_REQUESTS,
    PageView,
    PrefixView,
    RequestView,
    TreeView,
    daemon_view,
)
from kvferry.daemon.observe.metrics_server import SEND_BUFFER, MetricsServer
from kvferry.daemon.observe.stats import Snapshots
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.services.cache import CacheService
from kvferry.proto import cache_pb2_grpc
from tests.daemon.observe.snapshots import snapshot


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Told(Snapshots):
    """Says the same of a daemon each time, and counts how often."""

    def __init__(self) -> None:
        super().__init__("d", {}, time.monotonic)
        self.taken = 0

    def take(self):  # type: ignore[no-untyped-def]
        self.taken += 1
        return snapshot()


@asynccontextmanager
async def page(others: list[OtherDaemon]) -> AsyncIterator[tuple[str, Told, LivePage]]:
    """The address of a metrics server with a live page."""
    loop, told = asyncio.get_running_loop(), Told()
    live = LivePage(told, {}, lambda: others, dial_plainly, loop)
    server = MetricsServer("127.0.0.1:0", told.take, loop, {"/ui": live.answer, "/ui/data": live.answer})
    try:
        yield server.address, told, live
    finally:
        await server.stop()
        await live.close()


def test_a_view_has_what_the_statistics_have_and_no_whole_digest() -> None:
    view = daemon_view(snapshot())
    decode, prefill = view.roles
    assert (decode.role, prefill.role) == ("decode", "prefill")
    assert (decode.hit_tokens, decode.queried_tokens) == (10, 20)
    assert [(each.peer, each.state, each.free_credits) for each in decode.sessions] == [
        ("p", "up", 10),
        ("p", "connecting", 3),
    ]
    text = json.dumps(dataclasses.asdict(view))
    assert not re.search(rf"[0-9a-f]{{{SHOWN_DIGITS + 1},}}", text)


def test_the_largest_view_fits_a_connections_buffer() -> None:
    """Else viewers that read slowly would hold the threads that others need."""
    told = snapshot()
    told.daemon = "a-daemon-with-a-long-name"
    for side in told.sides:
        del side.peers[:]
        for i in range(200):
            side.peers.add(name=f"prefill-of-the-fleet-{i}", state="up", slots=16, free_credits=16, moved_bytes=1 << 45)
            side.peers[-1].error = "the peer's pages are of another size " * 20 if i < 5 else ""
    requests = [RequestView("0" * SHOWN_DIGITS, "arriving", 1.23456789012, 100_000, "prefill-of-the-fleet-1")]
    tree = TreeView(9999, 2000, [PrefixView("0" * SHOWN_DIGITS, 10_000, 100, 10_000, 9, True, True)] * SHOWN_PREFIXES)
    roles = [view.role for view in daemon_view(told).roles]
    own = daemon_view(told, dict.fromkeys(roles, requests * SHOWN_REQUESTS), dict.fromkeys(roles, tree))
    others = [daemon_view(told, peers=PEERS_OF_OTHERS)] * (MAX_DAEMONS - 1)
    assert len(own.roles[0].sessions) == SHOWN_PEERS and len(others[0].roles[0].sessions) == PEERS_OF_OTHERS
    assert len(json.dumps(dataclasses.asdict(PageView(1.0, [own, *others])))) < SEND_BUFFER


def test_several_daemons_are_in_one_view_and_one_that_is_gone_is_named() -> None:
    async def run() -> None:
        server = grpc.aio.server()
        cache_pb2_grpc.add_CacheServicer_to_server(CacheService({}, Told()), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        there, gone = OtherDaemon("there", f"127.0.0.1:{port}"), OtherDaemon("gone", "127.0.0.1:9")
        async with page([there, gone]) as (address, _, live):
            status, body = await asyncio.to_thread(get, f"http://{address}/ui/data")
            daemons = json.loads(body)["daemons"]
            assert status == 200 and [daemon["name"] for daemon in daemons] == ["d", "d", "gone"]
            assert daemons[1]["roles"][0]["hit_tokens"] == 10
            assert daemons[2]["error"].startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")) and not daemons[2]["roles"]
            assert len(live._channels) == 2
            live._nobody_looks()
            assert not live._channels
        await server.stop(None)

    asyncio.run(run())


def test_many_viewers_cost_one_snapshot_a_second_and_none_cost_none() -> None:
    async def run() -> None:
        async with page([]) as (address, told, _):
            await asyncio.sleep(0.3)
            assert told.taken == 0
            urls = [f"http://{address}/ui/data"] * 20
            answers = []
            for url in urls:
                answers.append(await asyncio.to_thread(get, url))
            assert {status for status, _ in answers} == {200}
            assert told.taken <= 2

    asyncio.run(run())


def test_a_view_of_many_daemons_is_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "SECONDS_A_DAEMON", 20.0)

    async def run() -> None:
        async with page([]) as (address, told, _):
            bodies = [await asyncio.to_thread(get, f"http://{address}/ui/data") for _ in range(3)]
            assert told.taken == 1 and len(set(bodies)) == 1

    asyncio.run(run())


def test_viewers_that_do_not_read_hold_up_nobody() -> None:
    def ask_and_wait(address: str) -> socket.socket:
        viewer = socket.socket()
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = address.split(":")
        viewer.connect((host, int(port)))
        viewer.sendall(b"GET /ui HTTP/1.0\r\n\r\n")
        return viewer

    async def run() -> None:
        async with page([]) as (address, _, _):
            slow = [ask_and_wait(address) for _ in range(12)]
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            for path in ("/ui", "/ui/data", "/metrics"):
                status, body = await asyncio.to_thread(get, f"http://{address}{path}")
                assert status == 200 and body
            assert time.monotonic() - begin < 1.0
            for viewer in slow:
                viewer.close()

    asyncio.run(run())


def test_a_third_viewer_at_once_is_sent_away_and_a_scraper_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MADE_SECONDS", 0.5)

    async def run() -> None:
        async with page([]) as (address, _, live):
            hold = asyncio.Event()

            async def held() -> None:
                await hold.wait()

            live._make = held  # type: ignore[method-assign,assignment]
            asking = [asyncio.create_task(asyncio.to_thread(get, f"http://{address}/ui/data")) for _ in range(3)]
            await asyncio.sleep(0.2)
            assert (await asyncio.to_thread(get, f"http://{address}/metrics"))[0] == 200
            said = [body for status, body in await asyncio.gather(*asking) if status == 503]
            assert len(said) == 3 and sum(b"others are being answered" in body for body in said) == 1

    asyncio.run(run())


def test_the_page_may_ask_nobody_but_its_daemon() -> None:
    async def run() -> None:
        async with page([]) as (address, _, _):
            request = urllib.request.Request(f"http://{address}/ui")
            answer = await asyncio.to_thread(urllib.request.urlopen, request)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "script-src 'sha256-" in policy
            text = answer.read().decode()
            assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", text)

    asyncio.run(run())


def test_no_more_daemons_than_the_bound_are_asked() -> None:
    told = {f"d{i}": f"127.0.0.1:{i + 1}" for i in range(100)}
    assert len(others_of({}, told)) == MAX_DAEMONS - 1
