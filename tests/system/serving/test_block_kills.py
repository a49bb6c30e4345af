"""Daemons, couriers and engines that stand still or are killed while copies between blocks run: every block that nobody
has keeps its canaries, and what is whole again serves."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.daemon.cli.stack import Stack
from tests.support.block_engine import BlockEngine, Prompt, new_name
from tests.system.serving.block_pairs import Pair, need
from tests.system.serving.test_engine_blocks import DEVICES

TOKENS = 200
LATE_WRITES_SECONDS = 0.3
UP_SECONDS = 40.0
Victim = Callable[[Pair], int]


def courier_of(pid: int) -> int:
    """The child of a daemon that has come last: one that was killed may not have been waited for yet."""
    children = []
    for each in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{each}/stat") as file:
            state, parent = file.read().rpartition(") ")[2].split()[:2]
            children += [int(each)] if int(parent) == pid and state != "Z" else []
    return max(children)


VICTIMS: dict[str, Victim] = {
    "decode daemon": lambda pair: pair.decode_daemon.popen.pid,
    "prefill daemon": lambda pair: pair.prefill_daemon.popen.pid,
    "decode's courier": lambda pair: courier_of(pair.decode_daemon.popen.pid),
    "prefill's courier": lambda pair: courier_of(pair.prefill_daemon.popen.pid),
}


BY_NIGHT = [pytest.param(each, marks=pytest.mark.nightly) for each in ("prefill daemon", "prefill's courier")]


@contextlib.asynccontextmanager
async def under_way(pair: Pair, number: int, seconds: float) -> AsyncIterator[None]:
    """A hand-over that has run for so long; behind it both engines have their blocks again, as they were."""
    prompt, name = Prompt(TOKENS, number), new_name()
    blocks = pair.decode.take(TOKENS)
    halves = [
        asyncio.ensure_future(pair.decode.fetch(prompt, name, blocks, 0, "p")),
        asyncio.ensure_future(pair.prefill.push(prompt, name, end=False)),
    ]
    await asyncio.sleep(seconds)
    yield
    done = await asyncio.gather(*halves, return_exceptions=True)
    for error in done:
        assert not isinstance(error, BaseException) or isinstance(error, RequestFailed | DaemonGone), error
    if not isinstance(done[0], BaseException):
        assert pair.decode.wrong(prompt, blocks, 0, TOKENS) == [], "a wrong byte was said to be ready"
    for engine in (pair.decode, pair.prefill):
        await asyncio.wait_for(engine.client.release(name, "over"), UP_SECONDS)
    pair.decode.give_back(blocks)
    pair.prefill.give_back([block for block in range(pair.prefill.blocks) if block not in pair.prefill.free])
    await asyncio.sleep(LATE_WRITES_SECONDS)
    assert not pair.decode.touched() and not pair.prefill.touched(), "written when it was nobody's"


async def serves_again(pair: Pair, number: int) -> None:
    """A hand-over goes well, within some seconds: sessions come up anew."""
    for _ in range(round(UP_SECONDS / 0.2)):
        try:
            blocks, _ = await pair.hand_over(Prompt(70, number))
            pair.decode.give_back(blocks)
            return
        except RequestFailed:
            for engine in (pair.decode, pair.prefill):
                engine.give_back([block for block in range(engine.blocks) if block not in engine.free])
            await asyncio.sleep(0.2)
    raise AssertionError("no hand-over goes well any more")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "victim", ["decode daemon", pytest.param("decode's courier", marks=pytest.mark.nightly), *BY_NIGHT]
)
@pytest.mark.parametrize("devices", DEVICES)
def test_one_that_stands_still_and_goes_on(stack: Stack, devices: tuple[str, str], victim: str) -> None:
    need(*devices)
    chosen = random.Random(victim)

    async def run() -> None:
        async with Pair(stack, "--checksums", "on", devices=devices) as pair:
            await serves_again(pair, 1)
            for number in range(2, 7):
                async with under_way(pair, number, chosen.choice([0.0, 0.002, 0.01])):
                    pid = VICTIMS[victim](pair)
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(0.3)
                    os.kill(pid, signal.SIGCONT)
            await serves_again(pair, 100)

    asyncio.run(run())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode's courier", BY_NIGHT[1]])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_courier_that_is_killed(stack: Stack, devices: tuple[str, str], victim: str) -> None:
    need(*devices)
    chosen = random.Random(victim)

    async def run() -> None:
        async with Pair(stack, "--checksums", "on", devices=devices) as pair:
            for number in range(2, 5):
                await serves_again(pair, 100 + number)
                async with under_way(pair, number, chosen.choice([0.0, 0.002, 0.01])):
                    os.kill(VICTIMS[victim](pair), signal.SIGKILL)
            await serves_again(pair, 200)

    asyncio.run(run())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", DEVICES)
def test_a_decode_daemon_that_is_killed(stack: Stack, devices: tuple[str, str]) -> None:
    need(*devices)
    chosen = random.Random(5)

    async def run() -> None:
        async with Pair(stack, "--checksums", "on", devices=devices) as pair:
            for number in range(2, 5):
                await serves_again(pair, 100 + number)
                async with under_way(pair, number, chosen.choice([0.0, 0.002, 0.01])):
                    stack.kill(pair.decode_daemon)
                await pair.decode.client.close()
                pair.decode_daemon = stack.start("decode", pair.decode_words)
                stack.ready(pair.decode_daemon)
                await pair.decode.connect()
            await serves_again(pair, 200)

    asyncio.run(run())


def name_of(number: int) -> RequestName:
    return RequestName(number.to_bytes(16, "big"), 1)


def engine_of_its_own(socket: str, block_tokens: int, device: str, first: int, told: object) -> None:
    """A decode engine in a process that will be killed: it fetches one prompt behind the other."""

    async def run() -> None:
        engine = await BlockEngine("decode", socket, block_tokens, 96, device).connect()
        for number in range(first, first + 1000):
            prompt, blocks = Prompt(TOKENS, number), engine.take(TOKENS)
            await engine.fetch(prompt, name_of(number), blocks, 0, "p")
            assert engine.wrong(prompt, blocks, 0, TOKENS) == []
            engine.give_back(blocks)
            told.send(number)  # type: ignore[attr-defined]

    asyncio.run(run())


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", DEVICES)
def test_an_engine_that_is_killed_and_another(stack: Stack, devices: tuple[str, str]) -> None:
    """Its memory goes with it, once the daemon's copies have ended; prefill's blocks come back each time."""
    need(*devices)
    context = multiprocessing.get_context("spawn")

    async def run() -> None:
        pair = Pair(stack, "--checksums", "on", devices=devices)
        await pair.prefill.connect()
        for life in range(3):
            here, there = context.Pipe()
            first = 1000 * life + 1
            words = (pair.decode.socket, pair.decode.block_tokens, devices[1], first, there)
            engine = context.Process(target=engine_of_its_own, args=words)
            engine.start()
            for number in range(first, first + 4):
                pushing = asyncio.ensure_future(pair.prefill.push(Prompt(TOKENS, number), name_of(number), end=False))
                if number == first + 3:
                    await asyncio.sleep(0.004)
                    engine.kill()
                elif not await asyncio.to_thread(here.poll, UP_SECONDS):
                    raise AssertionError("the engine fetches nothing")
                else:
                    assert here.recv() == number
                await asyncio.gather(pushing, return_exceptions=True)
                await asyncio.wait_for(pair.prefill.client.release(name_of(number), "over"), UP_SECONDS)
                pair.prefill.give_back([block for block in range(40) if block not in pair.prefill.free])
                assert not pair.prefill.touched()
            await asyncio.to_thread(engine.join)
        await pair.decode.connect()
        await serves_again(pair, 9000)
        await pair.decode.client.close()
        await pair.prefill.client.close()

    asyncio.run(run())
