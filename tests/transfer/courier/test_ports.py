"""Ports that couriers with real NIXL listen on, and the memory that they map."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transfer.courier import link as courier_link
from kvferry.transfer.courier.link import CourierError
from tests.transfer.courier import ends as courier_ends
from tests.transfer.courier.ends import PORTS, SECONDS, End, children, ends, run


def listening(pid: int) -> set[tuple[str, int]]:
    """(address in hex, port) of every TCP socket of the process that listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                found.add((host, int(port, 16)))
    return found


def mappings(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("bind_host", ["127.0.0.1", "localhost"])
def test_listens_on_loopback_inside_the_port_range(bind_host: str) -> None:
    async def test() -> None:
        async with ends({"bind_host": bind_host}) as pair:
            for end in pair:
                sockets = listening(end.link.pid)
                assert sockets
                assert {host for host, _ in sockets} == {"0100007F"}
                assert all(PORTS[0] <= port <= PORTS[1] for _, port in sockets)

    run(test())


def test_maps_its_slots_only_and_imports_little() -> None:
    async def test() -> None:
        async with ends() as pair:
            for end in pair:
                maps = mappings(end.link.pid)
                assert maps.count("memfd:kvferry-slots") == 1
                assert "/dev/shm" not in maps
                assert "libtorch" not in maps

    run(test())
    heavy = "{'grpc', 'numpy', 'torch', 'asyncio', 'kvferry.daemon', 'kvferry.proto'}"
    check = f"import sys, kvferry.transfer.courier.main; assert not {heavy} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=SECONDS)


@pytest.fixture
def taken_ports() -> Iterator[tuple[int, int]]:
    """A range of which every port is listened on."""
    with contextlib.ExitStack() as stack:
        for first in range(21200, 21300, 2):
            with contextlib.ExitStack() as both:
                try:
                    for port in (first, first + 1):
                        listener = both.enter_context(socket.socket())
                        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        listener.bind(("127.0.0.1", port))
                        listener.listen()
                except OSError:
                    continue
                stack.push(both.pop_all())
                break
        else:
            pytest.fail("no two free ports in 21200..21299")
        yield first, first + 1


def test_port_range_exhausted(taken_ports: tuple[int, int]) -> None:
    first, last = taken_ports
    with pytest.raises(CourierError, match=f"no port of {first} to {last} is free on 127.0.0.1"):
        run(End().start(port_range=taken_ports))


def test_ports_taken_at_the_last_moment(taken_ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX then looks for a port for ever; the deadline ends it."""
    monkeypatch.setattr(courier_link, "check_free_port", lambda *_: None)
    monkeypatch.setattr(courier_ends, "START_SECONDS", 3.0)
    processes = children()

    async def test() -> None:
        with pytest.raises(CourierError, match=r"did not start within 3.0 s \(ports \d+ to \d+ may all be taken\)"):
            await End().start(port_range=taken_ports)
        assert children() == processes

    run(test())
