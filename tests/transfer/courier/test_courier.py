"""Couriers with real NIXL, in real processes, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvferry.transfer.courier import link as courier_link
from kvferry.transfer.courier.link import CourierConfig, CourierError, CourierLink
from kvferry.transfer.courier.messages import (
    Connected,
    CourierDied,
    CourierEvent,
    MessageError,
    Notification,
    PostDone,
    PostFailed,
)

SLOT = 1 << 16
PORTS = (21100, 21163)
START_SECONDS = 60.0
SECONDS = 30.0  # for what should take milliseconds, on a busy machine

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 150))


class End:
    """A link and what it said."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[CourierEvent] = asyncio.Queue()
        self.handler: Callable[[CourierEvent], None] = self.events.put_nowait
        self.link: CourierLink

    async def start(self, **fields: Any) -> End:
        values: dict[str, Any] = {"slot_bytes": SLOT, "receive_slots": 2, "send_slots": 2, "port_range": PORTS}
        config = CourierConfig(**{**values, **fields})
        self.link = await CourierLink.start(config, lambda event: self.handler(event), START_SECONDS)
        self.config = config
        return self

    def connect(self, other: End) -> None:
        self.link.connect(
            other.link.metadata, other.link.receive_address, other.config.receive_slots, other.config.slot_bytes
        )

    async def next(self) -> CourierEvent:
        return await asyncio.wait_for(self.events.get(), SECONDS)


@contextlib.asynccontextmanager
async def ends(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> AsyncIterator[list[End]]:
    """Two connected couriers; neither is left behind."""
    pair = [End(), End()]
    try:
        for end, fields in zip(pair, (first, second), strict=True):
            await end.start(**(fields or {}))
        for end, other in (pair, reversed(pair)):
            end.connect(other)
        for end in pair:
            assert await end.next() == Connected()
        yield pair
    finally:
        for end in pair:
            if hasattr(end, "link"):
                await end.link.stop(SECONDS)
                assert not alive(end.link.pid)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3])
def test_a_start_that_is_given_up_leaves_nothing(seconds: float) -> None:
    async def test() -> None:
        before, descriptors = children(), open_files()
        starting = asyncio.create_task(End().start())
        await asyncio.sleep(seconds)
        starting.cancel()
        await asyncio.wait([starting], timeout=SECONDS)
        assert starting.cancelled()
        assert children() == before
        for _ in range(1000):  # slots that a thread still makes are closed when it has
            if open_files() <= descriptors:
                return
            await asyncio.sleep(0.01)
        assert open_files() <= descriptors

    run(test())


def open_files() -> set[str]:
    """Slots and sockets; a link's file is its name."""
    found: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(path)
            if name.startswith(("/memfd", "socket:")):
                found.add(f"{path.name} {name}")
    return found


# -- what lands ----------------------------------------------------------------------------------------------------


def test_bytes_before_notification_and_neighbours_intact() -> None:
    async def test() -> None:
        slot_bytes = 8 << 20
        receiving = {"slot_bytes": slot_bytes, "receive_slots": 3, "send_slots": 0}
        sending = {"slot_bytes": slot_bytes, "receive_slots": 0, "send_slots": 2}
        async with ends(receiving, sending) as (receiver, sender):
            whole, part = os.urandom(slot_bytes), os.urandom(5000)
            for slot in range(3):
                receiver.link.receive_slot(slot)[:] = b"\xa5" * slot_bytes
            sender.link.send_slot(0)[:] = whole
            sender.link.send_slot(1)[: len(part)] = part
            seen: asyncio.Queue[tuple[CourierEvent, bytes]] = asyncio.Queue()
            receiver.handler = lambda event: seen.put_nowait((event, bytes(receiver.link.receive_slot(1))))
            receiver.link.expect(1)

            sender.link.post(7, 0, 1, slot_bytes, b"whole")
            event, landed = await asyncio.wait_for(seen.get(), SECONDS)
            assert event == Notification(b"whole")
            assert landed == whole
            assert await sender.next() == PostDone(7)

            sender.link.post(8, 1, 1, len(part), b"part")
            event, landed = await asyncio.wait_for(seen.get(), SECONDS)
            assert event == Notification(b"part")
            assert landed == part + whole[len(part) :]
            assert await sender.next() == PostDone(8)
            for slot in (0, 2):
                assert receiver.link.receive_slot(slot) == b"\xa5" * slot_bytes

    run(test())


def test_posts_back_and_forth() -> None:
    async def test() -> None:
        async with ends() as pair:
            for end in pair:
                end.link.expect(1)
            for number in range(64):
                sender, receiver = pair[number % 2], pair[(number + 1) % 2]
                slot, remote, notification = number // 2 % 2, number // 4 % 2, b"%d" % number
                data = os.urandom(SLOT - number)
                sender.link.send_slot(slot)[: len(data)] = data
                sender.link.post(number, slot, remote, len(data), notification)
                assert await receiver.next() == Notification(notification)
                assert receiver.link.receive_slot(remote)[: len(data)] == data
                assert await sender.next() == PostDone(number)

    run(test())


def test_many_posts_in_flight_are_each_answered() -> None:
    async def test() -> None:
        slots = 16
        async with ends({"receive_slots": slots}, {"send_slots": slots}) as (receiver, sender):
            for slot in range(slots):
                sender.link.send_slot(slot)[:] = bytes([slot + 1]) * SLOT
                sender.link.post(100 + slot, slot, slots - 1 - slot, SLOT, bytes([slot]))
            done = [await sender.next() for _ in range(slots)]
            heard = [await receiver.next() for _ in range(slots)]  # without expect: slower, never lost
            assert {event.post_id for event in done if isinstance(event, PostDone)} == set(range(100, 100 + slots))
            assert {event.payload[0] for event in heard if isinstance(event, Notification)} == set(range(slots))
            for slot in range(slots):
                assert receiver.link.receive_slot(slots - 1 - slot) == bytes([slot + 1]) * SLOT

    run(test())


# -- deaths --------------------------------------------------------------------------------------------------------


def test_death_of_the_receiving_courier() -> None:
    async def test() -> None:
        async with ends() as (receiver, sender):
            sender.link.post(1, 0, 0, SLOT, b"first")
            assert await sender.next() == PostDone(1)
            assert await receiver.next() == Notification(b"first")
            os.kill(receiver.link.pid, signal.SIGKILL)
            died = await receiver.next()
            assert isinstance(died, CourierDied)
            assert "killed by signal 9" in died.message
            sender.link.post(2, 0, 0, SLOT, b"second")
            failed = await sender.next()
            assert isinstance(failed, PostFailed)
            assert failed.post_id == 2
            assert failed.message
            receiver.link.expect(1)  # goes nowhere
            assert alive(sender.link.pid)

    run(test())


def test_death_of_the_sending_courier() -> None:
    async def test() -> None:
        async with ends() as (receiver, sender):
            sender.link.post(1, 0, 0, SLOT, b"first")
            assert await receiver.next() == Notification(b"first")
            assert await sender.next() == PostDone(1)
            os.kill(sender.link.pid, signal.SIGKILL)
            assert isinstance(await sender.next(), CourierDied)
            sender.link.post(2, 0, 0, SLOT, b"second")  # goes nowhere
            receiver.link.post(3, 0, 0, SLOT, b"third")
            assert isinstance(await receiver.next(), PostFailed)

    run(test())


def test_a_peer_that_stands_still_fails_the_post() -> None:
    async def test() -> None:
        big = {"slot_bytes": 32 << 20, "tcp_user_timeout_s": 1.0}
        async with ends(big, big) as (receiver, sender):
            sender.link.post(1, 0, 0, 4096, b"first")
            assert await sender.next() == PostDone(1)
            os.kill(receiver.link.pid, signal.SIGSTOP)  # stop() ends it all the same
            sender.link.post(2, 0, 0, 32 << 20, b"second")
            assert isinstance(await sender.next(), PostFailed)

    run(test())


def test_stop_delivers_nothing_more_and_is_idempotent() -> None:
    async def test() -> None:
        async with ends() as (receiver, sender):
            for slot in range(2):
                sender.link.post(slot, slot, slot, SLOT, b"x")
            stops = [end.link.stop(SECONDS) for end in (receiver, sender, receiver)]
            said = receiver.events.qsize() + sender.events.qsize()
            held = sender.link.send_slot(0)
            await asyncio.gather(*stops)
            await receiver.link.stop(SECONDS)
            assert receiver.events.qsize() + sender.events.qsize() == said
            held[0] = 1  # a view that is still held is memory still
            with pytest.raises(CourierError, match="was stopped"):
                sender.link.send_slot(0)
            sender.link.expect(1)

    run(test())


def test_parents_death_ends_the_courier() -> None:
    program = f"""
        import asyncio
        from kvferry.transfer.courier.link import CourierConfig, CourierLink

        async def main():
            config = CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1, port_range={PORTS})
            link = await CourierLink.start(config, print, {START_SECONDS})
            print(link.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        os.kill(pid, signal.SIGSTOP)  # it cannot see the end of its socket: the kernel must end it
        parent.kill()
        parent.wait(SECONDS)

    async def gone() -> None:
        while alive(pid):
            await asyncio.sleep(0.02)

    run(asyncio.wait_for(gone(), SECONDS))


def test_signals_to_the_whole_group_do_not_end_it() -> None:
    async def test() -> None:
        async with ends() as (receiver, sender):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(receiver.link.pid, number)
            sender.link.post(1, 0, 0, SLOT, b"x")
            assert await receiver.next() == Notification(b"x")

    run(test())


def test_cycles_leak_nothing() -> None:
    """Also, with daemons around them: tests/faults/test_cycles.py."""

    async def test() -> None:
        async def cycle() -> None:
            async with ends() as (receiver, sender):
                sender.link.post(1, 0, 0, SLOT, b"x")
                assert await receiver.next() == Notification(b"x")

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        await cycle()  # makes what asyncio keeps
        before, processes = descriptors(), children()
        for _ in range(3):
            await cycle()
        assert descriptors() == before
        assert children() == processes

    run(test())


# -- what it opens and maps ----------------------------------------------------------------------------------------


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
    monkeypatch.setattr(sys.modules[__name__], "START_SECONDS", 3.0)
    processes = children()

    async def test() -> None:
        with pytest.raises(CourierError, match=r"did not start within 3.0 s \(ports \d+ to \d+ may all be taken\)"):
            await End().start(port_range=taken_ports)
        assert children() == processes

    run(test())


# -- orders that cannot be -----------------------------------------------------------------------------------------


def test_orders_are_checked() -> None:
    async def test() -> None:
        async with ends({"send_slots": 0}) as (receiver, sender):
            post = sender.link.post
            for arguments, field in (
                ((1, 2, 0, SLOT, b"x"), "send_slot"),
                ((1, -1, 0, SLOT, b"x"), "send_slot"),
                ((1, 0, 2, SLOT, b"x"), "remote_slot"),
                ((1, 0, 0, SLOT + 1, b"x"), "nbytes"),
                ((1, 0, 0, 0, b"x"), "nbytes"),
                ((1, 0, 0, SLOT, b""), "notification's length"),
                ((1, 0, 0, SLOT, b"x" * 257), "notification's length"),
                ((-1, 0, 0, SLOT, b"x"), "post_id"),
            ):
                with pytest.raises(MessageError) as raised:
                    post(*arguments)
                assert raised.value.field == field
            with pytest.raises(MessageError, match="send_slot"):
                receiver.link.post(1, 0, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="receive slot is 2"):
                receiver.link.receive_slot(2)
            with pytest.raises(MessageError, match="send slot is 2"):
                sender.link.send_slot(2)
            with pytest.raises(MessageError, match="called once"):
                sender.connect(receiver)
            with pytest.raises(MessageError, match="active is -1"):
                sender.link.expect(-1)
            post(1, 0, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="post_id is 1"):
                post(1, 1, 0, SLOT, b"x")
            with pytest.raises(MessageError, match="send_slot is 0"):
                post(2, 0, 0, SLOT, b"x")
            assert await sender.next() == PostDone(1)
            post(1, 0, 0, SLOT, b"y")
            assert await sender.next() == PostDone(1)

    run(test())


def test_garbage_metadata_ends_the_courier() -> None:
    async def test() -> None:
        end = await End().start()
        try:
            with pytest.raises(MessageError, match="after Connected"):
                end.link.post(1, 0, 0, SLOT, b"x")
            end.link.connect(b"garbage", 4096, 1, SLOT)
            died = await end.next()
            assert isinstance(died, CourierDied)
            assert "nixl" in died.message
        finally:
            await end.link.stop(SECONDS)

    run(test())
