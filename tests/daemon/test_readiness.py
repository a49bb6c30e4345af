"""A daemon that can serve nobody is not ready, and says why, wherever it is asked; and ready once it can."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.channels import open_channel
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import System, start_system
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.observe import room
from kvferry.daemon.observe.room import RoomWatch
from tests.support.commands import kvferry
from tests.support.stacks import SmallSystem


@pytest.fixture(scope="module")
def hangs_up() -> Iterator[None]:
    """Processes end by SIGHUP, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def stack(hangs_up: None) -> Iterator[Stack]:
    """Of a whole system, of which a test may end one process; what others need ends last."""
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def system(stack: Stack) -> System:
    return start_system(stack, SmallSystem(page_size=16))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--pool-bytes", "100TiB"), "shared memory /dev/shm: "),
        pytest.param(
            ("--device", "cuda:0"),
            "--device is cuda:0: no CUDA driver; a machine or a container with NVIDIA's driver, or --device cpu",
            marks=pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver"),
        ),
    ],
)
def test_a_daemon_without_room_is_not_ready(flags: tuple[str, ...], why: str) -> None:
    with Stack() as stack:
        socket = os.path.join(stack.folder, "d.sock")
        words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--metrics", "off", *flags]
        address = stack.ready(stack.start("decode", words))
        asked = kvferry("health", address)
        assert asked.returncode == 1
        assert asked.stdout.startswith(f"NOT_SERVING: {why}")
        assert kvferry("health", address, "--live").returncode == 0
        assert "decode: no engine is connected; " + why in kvferry("health", address, "--engine").stdout
        with open_channel(address, None) as channel:
            (lack,) = fetch(channel).lacks
        assert lack.startswith(why)
        shown = kvferry("stats", address)
        assert shown.returncode == 0 and "no worker can be served" in shown.stdout


def test_a_system_is_ready_whatever_room_its_pools_have_left(system: System) -> None:
    for replica in (*system.prefills, *system.decodes):
        asked = kvferry("health", replica.daemon_address, "--engine")
        assert (asked.returncode, asked.stdout) == (0, "SERVING\n")


class Side:
    """As far as its pool goes."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.tiers = self
        self.has_pool = asyncio.Event()
        self.refused = ""


def test_what_is_lacking_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is made asks for nothing; one that was refused is named with its side until one is made."""
    asked: list[int | None] = []
    free = False

    def lacks(config: DaemonConfig, roles: int | None) -> list[str]:
        asked.append(roles)
        return [] if free else ["shared memory: full"]

    monkeypatch.setattr(room, "pool_lacks", lacks)

    async def story() -> None:
        nonlocal free
        told: list[list[str]] = []
        sides = {role: Side(role) for role in ("decode", "prefill")}
        watch = RoomWatch(DaemonConfig(role="both"), cast(Any, sides), lambda: told.append(watch.lacks))
        await watch.look()
        await watch.look()
        assert told == [["shared memory: full"]]
        free = True
        sides["decode"].refused = "pool of 7 bytes in cuda:0: out of memory"
        await watch.look()
        assert told[1:] == [["decode: pool of 7 bytes in cuda:0: out of memory"]]
        sides["decode"].has_pool.set()
        await watch.look()
        assert told[2:] == [[]]
        sides["prefill"].has_pool.set()
        free = False
        await watch.look()
        assert asked == [2, 2, 2, 1] and watch.lacks == []

    asyncio.run(story())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("front", marks=pytest.mark.nightly),
        "decode-0-worker",
        pytest.param("decode-0", marks=pytest.mark.nightly),
    ],
)
def test_a_terminal_that_closes_drains(stack: Stack, system: System, name: str) -> None:
    """SIGHUP ends in order, as SIGTERM does; whoever was started under nohup goes on."""
    assert system.url
    process = next(each for each in stack.processes if each.name == name)
    process.popen.send_signal(signal.SIGHUP)
    assert process.popen.wait(timeout=30) == 0


@pytest.mark.usefixtures("hangs_up")
def test_who_was_started_under_nohup_goes_on() -> None:
    from kvferry.signals import end_signals

    assert signal.SIGHUP in end_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert end_signals() == (signal.SIGTERM, signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
