"""Peers as operators see them: those that nobody serves, and why a session is not to be had."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import pytest
from rich.console import Console

from kvferry.daemon.cli import top as top_main
from kvferry.daemon.cli.stats import render
from kvferry.daemon.cli.top import Shot
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.observe.metrics import families
from kvferry.daemon.observe.stats import side_stats
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import cache_pb2 as cache


def drawn(what: object, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_peers_are_shown_before_the_first_worker_and_not_dialled() -> None:
    dialled: list[str] = []

    def dial(address: str, expected: str) -> grpc.aio.Channel:
        dialled.append(address)
        raise OSError(expected)

    async def story() -> cache.StatsReply:
        side = DecodeSide(DaemonConfig(role="decode", peers={"p0": "127.0.0.1:1"}), bytes(16), time.monotonic, dial)
        running = asyncio.create_task(side.links["p0"].run())
        await asyncio.sleep(0.01)
        told = cache.StatsReply(daemon="d", sides=[side_stats(side)])
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await side.close()
        return told

    told = asyncio.run(story())
    assert not dialled
    (peer,) = told.sides[0].peers
    assert (peer.name, peer.address, peer.state) == ("p0", "127.0.0.1:1", "waits for a worker")
    up = [sample for family in families(told) for sample in family.samples if sample.name == "kvferry_peer_up"]
    assert [(sample.labels["peer"], sample.value) for sample in up] == [("p0", 0)]
    assert "waits for a worker" in drawn(render(told))
    shots = [Shot("127.0.0.1:7070", 1.0, told)]
    assert "p0 waits for a worker  " in drawn(top_main.frame(shots, shots, Console(width=1000)), 1000)


def test_a_peer_that_calls_itself_otherwise_is_known_by_the_configured_name(caplog: pytest.LogCaptureFixture) -> None:
    side = DecodeSide(DaemonConfig(role="decode", peers={"p0": "127.0.0.1:1"}), bytes(16), time.monotonic, no_channel)
    for name in ("p0", "other", "other"):  # a session that does not come up is tried again and again
        side.links["p0"].check_name(name)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith(
        "is 'p0' by --peer and 'other' by its own --name: requests must name it 'p0'; give it one name"
    )
    asyncio.run(side.close())


def no_channel(address: str, expected: str) -> grpc.aio.Channel:
    raise OSError(expected)


def test_errors_of_peers_stand_below_the_table_in_short() -> None:
    names = {"p0": "127.0.0.1:1", "p1": "10.0.0.1:7071", "p2": "10.0.0.2:7071", "p3": "127.0.0.1:2"}
    grpcs = (
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
        "Failed to connect to remote host: connect: Connection refused (111)"
    )
    tls = (
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:2: Ssl handshake failed "
        "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED"
        ": self signed certificate"
    )
    refusal = "refuses the session: page_size: [a] has 16, 'd' has 32; start both daemons with the same --page-size"
    errors = {"p0": f"cannot be reached: {grpcs}", "p1": refusal, "p2": "", "p3": f"cannot be reached: {tls}"}
    side = cache.SideStats(
        peers=[
            cache.PeerStats(
                name=name,
                address=address,
                state="down",
                error=f"prefill daemon {name!r} at {address} {errors[name]}" if errors[name] else "",
            )
            for name, address in names.items()
        ]
    )
    lines = [line.rstrip() for line in drawn(render(cache.StatsReply(daemon="d", sides=[side])), 200).splitlines()]
    end = next(number for number, line in enumerate(lines) if line.startswith("└"))
    assert lines[end + 1 : end + 5] == [
        "peer p0 127.0.0.1:1: cannot be reached: Connection refused (111)",
        f"peer p1 10.0.0.1:7071: {refusal}",
        "peer p3 127.0.0.1:2: cannot be reached: CERTIFICATE_VERIFY_FAILED: self signed certificate",
        "metrics: off",
    ]
    assert not [line for line in lines[:end] if "refuses the" in line]
