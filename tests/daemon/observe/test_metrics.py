"""The Prometheus endpoint of a real daemon, and a snapshot as metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.daemon.config.values import ConfigError
from kvferry.daemon.observe import metrics_server
from kvferry.daemon.observe.metrics import families
from kvferry.daemon.observe.metrics_server import MetricsServer
from kvferry.proto import cache_pb2 as cache
from tests.daemon.observe.snapshots import snapshot
from tests.support.standstill import run_with_standstill

LABELS = {
    "role": {"decode", "prefill"},
    "tier": {"device", "host"},
    "direction": {"spill", "restore"},
    "kind": {"part", "notification", "page"},
}


def samples(reply: cache.StatsReply) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families(reply):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def test_copies_by_strategy() -> None:
    found = samples(snapshot())
    for strategy, counts in (("staged", (3, 12, 4096)), ("batch", (0, 0, 0))):
        labels = (("role", "decode"), ("strategy", strategy))
        names = ("copy_runs", "copy_descriptors", "copy_bytes")
        assert tuple(found[f"kvferry_{name}_total", labels] for name in names) == counts
    assert found["kvferry_copy_fallbacks_total", (("reason", "rows are not pinned"), ("role", "decode"))] == 2
    assert found["kvferry_copy_forced", (("role", "decode"), ("strategy", "staged"))] == 1


def test_names_units_and_labels() -> None:
    names = [family.name for family in families(snapshot())]
    assert len(names) == len(set(names))
    for family in families(snapshot()):
        assert family.name.startswith("kvferry_")
        assert family.documentation
        assert not any(unit in family.name for unit in ("_ms", "millis", "_mib", "_kb")), family.name
        assert family.samples, f"{family.name} has no sample in a snapshot with everything"
        for sample in family.samples:
            assert family.type != "counter" or sample.name.endswith("_total")
            for label, value in sample.labels.items():
                assert value in LABELS.get(label, {value}), f"{sample.name} {label}={value}"
    assert [family.name for family in families(cache.StatsReply())] == names  # all from the start


def test_values_are_those_of_the_snapshot() -> None:
    found = samples(snapshot())
    assert found["kvferry_hit_tokens_total", (("role", "decode"), ("tier", "device"))] == 6
    assert found["kvferry_hit_tokens_total", (("role", "decode"), ("tier", "host"))] == 4
    assert found["kvferry_lease_expiries_total", (("role", "prefill"),)] == 3
    assert found["kvferry_request_failures_total", (("code", "unavailable"), ("role", "decode"))] == 2
    ended = ("outcome", "aborted"), ("reason", "request_ended"), ("role", "decode")
    assert found["kvferry_transfers_ended_total", ended] == 6
    assert found["kvferry_unstored_pages_total", (("reason", "room"), ("role", "decode"))] == 5
    host = ("role", "decode"), ("tier", "host")
    assert (found["kvferry_pool_pages", host], found["kvferry_pool_asked_pages", host]) == (12, 24)
    peer = ("peer", "p"), ("role", "decode")
    assert found["kvferry_peer_up", peer] == 1
    assert found["kvferry_slots", (*peer, ("state", "granted"))] == 13
    assert found["kvferry_slots", (*peer, ("state", "withheld"))] == 1
    assert found["kvferry_namespace_pages", (("namespace", "ab" * 6), ("role", "decode"), ("tier", "device"))] == 7


def test_histograms_are_cumulative() -> None:
    found = samples(snapshot())

    def bucket(bound: str) -> float:
        return found["kvferry_admit_to_ready_seconds_bucket", (("le", bound), ("role", "decode"))]

    assert [bucket(bound) for bound in ("0.0005", "0.25", "0.5", "60.0", "+Inf")] == [2, 2, 3, 3, 4]
    assert found["kvferry_admit_to_ready_seconds_count", (("role", "decode"),)] == 4
    assert found["kvferry_admit_to_ready_seconds_sum", (("role", "decode"),)] == pytest.approx(99.3006)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def served() -> None:
    loop = asyncio.get_running_loop()
    server = MetricsServer("127.0.0.1:0", snapshot, loop)
    try:
        url = f"http://{server.address}"
        stalled = socket.create_connection(server.address.split(":"))  # sends nothing; it costs its time-out only
        status, text = await asyncio.to_thread(fetch, url + "/metrics")
        stalled.close()
        assert status == 200
        names = {family.name for family in text_string_to_metric_families(text)}
        assert "kvferry_pages" in names
        assert (await asyncio.to_thread(fetch, url + "/other"))[0] == 404
        with pytest.raises(ConfigError, match=f"--metrics {server.address}: Address already in use"):
            MetricsServer(server.address, snapshot, loop)
    finally:
        await server.stop()


def test_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.2)
    asyncio.run(served())


async def scraped(idle: int) -> None:
    """Beside so many connections that send nothing."""
    server = MetricsServer("127.0.0.1:0", snapshot, asyncio.get_running_loop())
    stalled = [socket.create_connection(server.address.split(":")) for _ in range(idle)]
    try:
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(fetch, f"http://{server.address}/metrics"))[0] == 200
    finally:
        for connection in stalled:
            connection.close()
        await server.stop()
    assert not any(thread.is_alive() for thread in server._threads)


@pytest.mark.parametrize(("idle", "seconds"), [(metrics_server.THREADS - 1, 60.0), (3 * metrics_server.THREADS, 0.3)])
def test_idle_connections_blind_nobody(idle: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", seconds)
    asyncio.run(scraped(idle))


def test_an_end_that_stands_still_leaves_no_thread_behind() -> None:
    program = """
        import asyncio, os, signal, time
        from kvferry.daemon.observe import metrics_server

        metrics_server.STOP_SECONDS = 1.0
        watch = metrics_server._Server.watch

        def stand_still(server):
            watch(server)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)

        metrics_server._Server.watch = stand_still
        server = metrics_server.MetricsServer("127.0.0.1:0", None, None)
        server.close()
        print(any(thread.is_alive() for thread in server._threads))
    """
    assert run_with_standstill(program, 2.0).stdout == "False\n"


async def come(told: set[str], wakes: list[str]) -> None:
    async with asyncio.timeout(10):
        while not told <= set(wakes):
            await asyncio.sleep(0.01)


async def woken(wakes: list[str]) -> None:
    server = MetricsServer("127.0.0.1:0", snapshot, asyncio.get_running_loop())
    try:
        await come({"cut"}, wakes)  # the one look at the start
        wakes.clear()
        await asyncio.sleep(0.5)
        assert not wakes, "a thread woke while nobody asked"
        assert (await asyncio.to_thread(fetch, f"http://{server.address}/metrics"))[0] == 200
        await come({"select", "cut"}, wakes)
    finally:
        await server.stop()


def counting(wrapped: Callable[..., object], count: Callable[[], None]) -> Callable[..., object]:
    def counted(*given: object) -> object:
        result = wrapped(*given)
        count()
        return result

    return counted


def test_a_server_that_nobody_asks_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[str] = []
    for owner, name, told in (
        (metrics_server.selectors.PollSelector, "select", "select"),
        (metrics_server._Server, "_cut", "cut"),
    ):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name), partial(wakes.append, told)))
    asyncio.run(woken(wakes))


async def held_up() -> None:
    """The event loop does not answer: the scraper is told, and later scrapes work."""
    answer = asyncio.Event()

    def slow() -> cache.StatsReply:
        if answer.is_set():
            return snapshot()
        raise TimeoutError

    server = MetricsServer("127.0.0.1:0", slow, asyncio.get_running_loop())
    try:
        status, text = await asyncio.to_thread(fetch, f"http://{server.address}/metrics")
        assert status == 503
        assert "no snapshot within" in text
        answer.set()
        assert (await asyncio.to_thread(fetch, f"http://{server.address}/metrics"))[0] == 200
    finally:
        await server.stop()


def test_a_loop_that_does_not_answer() -> None:
    asyncio.run(held_up())


async def trickled() -> None:
    server = MetricsServer("127.0.0.1:0", snapshot, asyncio.get_running_loop())
    ended = threading.Event()

    def trickle() -> None:
        """A byte well within each time-out of the socket, without end."""
        with socket.create_connection(server.address.split(":")) as connection, contextlib.suppress(OSError):
            while not ended.wait(0.05):
                connection.sendall(b"G")

    slow = threading.Thread(target=trickle)
    slow.start()
    try:
        await asyncio.sleep(0.15)
        assert (await asyncio.to_thread(fetch, f"http://{server.address}/metrics"))[0] == 200
        ended.set()
        slow.join(5)
        ended.clear()
        metrics_server.REQUEST_SECONDS = 60.0  # put back by monkeypatch
        slow = threading.Thread(target=trickle)
        slow.start()
        await asyncio.sleep(0.15)
        began = time.monotonic()
        await asyncio.wait_for(server.stop(), 10)
        assert time.monotonic() - began < 2 and not any(thread.is_alive() for thread in server._threads)
    finally:
        ended.set()
        slow.join(5)


def test_a_client_that_trickles_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.6)
    monkeypatch.setattr(metrics_server, "THREADS", 1)
    asyncio.run(trickled())


@pytest.mark.parametrize(
    ("within", "past", "status"),
    [
        (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 65_520), b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 65_521), b"414"),
        (
            b"GET /other HTTP/1.1\r\n%s\r\n" % (b"a: b\r\n" * 99),
            b"GET /other HTTP/1.1\r\n%s\r\n" % (b"a: b\r\n" * 100),
            b"431",
        ),
    ],
    ids=["line", "headers"],
)
def test_a_scrape_has_so_long_a_line_and_so_many_headers(within: bytes, past: bytes, status: bytes) -> None:
    def ask(address: str, request: bytes) -> bytes:
        with socket.create_connection(address.split(":"), timeout=10) as connection:
            connection.sendall(request)
            answer = b""
            while b"\r\n" not in answer and (more := connection.recv(4096)):
                answer += more
            return answer.split(b" ")[1]

    async def asked() -> None:
        server = MetricsServer("127.0.0.1:0", snapshot, asyncio.get_running_loop())
        try:
            assert await asyncio.to_thread(ask, server.address, within) == b"404"
            assert await asyncio.to_thread(ask, server.address, past) == status
        finally:
            await server.stop()

    asyncio.run(asked())
