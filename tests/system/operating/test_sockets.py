"""Sockets that the processes of a system listen on: loopback only, in the ports that were given, and 0600."""

from __future__ import annotations

import os
import stat

import grpc
import psutil
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import Replica, start_replicas, start_system
from kvferry.frames import SUFFIX
from kvferry.proto import cache_pb2
from tests.support.devices import UCX_PORTS
from tests.support.engines import OPTIONS, Engines, courier_pids, settled
from tests.support.stacks import SmallSystem

LOOPBACK = ("127.0.0.1", "::1")
EVENTS = ["--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0"]
pytestmark = pytest.mark.timeout(90)


def listening(pid: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP or UDP socket of the process that others may reach."""
    found = []
    for connection in psutil.Process(pid).net_connections("inet"):
        udp = connection.type != 1  # SOCK_STREAM
        if connection.laddr and (connection.status == psutil.CONN_LISTEN or (udp and not connection.raddr)):
            found.append((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return found


def local_sockets(pid: int) -> set[str]:
    """Unix sockets of the process that have a name, by which others could reach it."""
    return {str(connection.laddr) for connection in psutil.Process(pid).net_connections("unix") if connection.laddr}


def statistics(replica: Replica) -> cache_pb2.StatsReply:
    with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
        return fetch(channel)


def sockets_of(replica: Replica) -> tuple[str, str]:
    """gRPC's, and that of workers' frames."""
    return replica.socket, replica.socket + SUFFIX


def listens_where_it_says(stack: Stack, told: dict[str, set[str]], daemons: dict[str, Replica]) -> None:
    """Each process at the addresses that it `told`, and nowhere else; a daemon's couriers for UCX alone, one of each
    daemon, since it has one session; what others have started nowhere."""
    assert {process.name for process in stack.processes} == set(told)
    for process in stack.processes:
        pid, name = process.popen.pid, process.name
        sockets = listening(pid)
        assert sorted(f"{address}:{port}" for address, port in sockets) == sorted(told[name]), name
        assert all(address in LOOPBACK for address, _ in sockets)
        assert local_sockets(pid) == (set(sockets_of(daemons[name])) if name in daemons else set()), name
        started = psutil.Process(pid).children(recursive=True)
        couriers = courier_pids(pid)
        assert len(couriers) == (1 if name in daemons else 0)
        for child in started:
            sockets = listening(child.pid)
            assert (child.pid in couriers) == bool(sockets), f"{name}: {child.cmdline()} listens on {sockets}"
            assert not local_sockets(child.pid)
            for address, port in sockets:
                assert address in LOOPBACK
                assert port in UCX_PORTS, f"a courier listens on port {port}"
    for replica in daemons.values():
        for path in sockets_of(replica):
            mode = os.stat(path)
            assert stat.S_ISSOCK(mode.st_mode)
            assert stat.S_IMODE(mode.st_mode) == 0o600


@pytest.mark.nightly
def test_every_listening_socket(stack: Stack) -> None:
    system = start_system(stack, SmallSystem(page_size=16))
    prefill, decode = system.prefills[0], system.decodes[0]
    with Engines(prefill, decode) as engines:
        assert engines.turn(list(range(100)), 4).error is None
        told = {
            "prefill-0": {prefill.daemon_address, statistics(prefill).metrics},
            "decode-0": {decode.daemon_address, statistics(decode).metrics},
            "prefill-0-worker": {prefill.worker_address},
            "decode-0-worker": {decode.worker_address},
            "front": {system.url.removeprefix("http://")},
        }
        listens_where_it_says(stack, told, {replica.name: replica for replica in (prefill, decode)})
    settled(decode)


def test_those_of_events_of_both_roles_and_of_the_front_of_vllm(stack: Stack) -> None:
    """The second daemon has both roles, each with a worker, and publishes events."""
    (prefill,), (both,) = start_replicas(stack, SmallSystem(page_size=16, decode_flags=["--role", "both", *EVENTS]))
    words = ["worker", "prefill", "--synthetic", "--socket", both.socket, "--listen", "127.0.0.1:0"]
    second = stack.ready(stack.start("second-worker", words))
    words = ["front", "--listen", "127.0.0.1:0", "--vllm-prefill", "prefill-0=http://127.0.0.1:1"]
    words += ["--vllm-decode", "http://127.0.0.1:1", "--wait-seconds", "0.1"]  # they are not asked for anything
    front = stack.ready(stack.start("front", words))
    with Engines(prefill, both) as engines:
        assert engines.turn(list(range(100)), 4).error is None
        stats = statistics(both)
        events = next(side.events for side in stats.sides if side.events.endpoint)
        ends = {endpoint.removeprefix("tcp://") for endpoint in (events.endpoint, events.replay)}
        assert len(ends) == 2
        told = {
            "prefill-0": {prefill.daemon_address, statistics(prefill).metrics},
            "decode-0": {both.daemon_address, stats.metrics, *ends},
            "prefill-0-worker": {prefill.worker_address},
            "decode-0-worker": {both.worker_address},
            "second-worker": {second},
            "front": {front},
        }
        listens_where_it_says(stack, told, {replica.name: replica for replica in (prefill, both)})
    settled(both)
