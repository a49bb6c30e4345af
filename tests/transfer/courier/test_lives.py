"""Lives of couriers with real NIXL: starts that are given up, deaths, stops, signals; nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from kvferry.transfer.courier.link import CourierError
from kvferry.transfer.courier.messages import CourierDied, Notification, PostDone, PostFailed
from tests.transfer.courier.ends import PORTS, SECONDS, SLOT, START_SECONDS, End, alive, children, ends, open_files, run


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
            held = sender.link.host_slots.send_slot(0)
            await asyncio.gather(*stops)
            await receiver.link.stop(SECONDS)
            assert receiver.events.qsize() + sender.events.qsize() == said
            held[0] = 1  # a view that is still held is memory still
            with pytest.raises(CourierError, match="was stopped"):
                sender.link.host_slots.send_slot(0)
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
