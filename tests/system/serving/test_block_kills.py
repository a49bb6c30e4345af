"""Daemons, couriers and engines that stand still or are killed while copies between blocks run: every block that nobody
has keeps its canaries, and what is whole again serves. A copy is under way each time: right before it happens some of
the prompt's bytes are seen to be scattered, and others not to be."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import pytest

from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.block_engine import PAGE, BlockEngine, Prompt, Share, new_name
from tests.support.standstill import is_stopped
from tests.system.serving.block_pairs import BLOCK_TOKENS, Pair, need
from tests.system.serving.test_engine_blocks import DEVICES

LATE_WRITES_SECONDS = 0.3
UP_SECONDS = 40.0
START_SECONDS = 120.0  # of an engine in a process of its own
HERE = 0
SEEN, TRIES = 3, 15  # hand-overs in which a copy was under way, of so many at most
ROLES = ("prefill", "decode")
Victim = Callable[[Pair], int]


@dataclass(frozen=True)
class Size:
    """Prompts, and the slots in which they travel: each part fills one."""

    tokens: int
    geometry: KVGeometry
    slot_bytes: int

    @property
    def share(self) -> Share:
        return Share(self.geometry)

    @property
    def blocks(self) -> tuple[int, int]:
        """Of each engine: half of them are beside a prompt's."""
        return 2 * self.tokens // BLOCK_TOKENS[0], 2 * self.tokens // BLOCK_TOKENS[1]

    @property
    def copied_first(self) -> int:
        """Bytes of the pages before the last one, which is computed when it has happened."""
        return (self.tokens - PAGE) * self.geometry.token_bytes

    def pair(self, stack: Stack, devices: tuple[str, str]) -> Pair:
        flags = ("--checksums", "on", "--slot-bytes", str(self.slot_bytes))
        return Pair(stack, *flags, devices=devices, shares=(self.share, self.share), blocks=self.blocks)


SIZES = {
    "2 MiB in 512 parts": Size(512, KVGeometry(4, 4, 32, "float32", PAGE, Layout.ENGINE), 4096 + 64),
    "64 MiB in 64 parts": Size(2048, KVGeometry(8, 8, 128, "bfloat16", PAGE, Layout.ENGINE), (1 << 20) + 64),
}
ALL_SIZES = pytest.mark.parametrize(
    "size",
    [SIZES["2 MiB in 512 parts"], pytest.param(SIZES["64 MiB in 64 parts"], marks=pytest.mark.nightly)],
    ids=SIZES,
)


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


def by_night(*names: str) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.nightly) for each in names]


class Copies:
    """How much decode's daemon has scattered since this began."""

    def __init__(self, pair: Pair) -> None:
        self._channel = grpc.insecure_channel(f"unix:{pair.decode.socket}")
        self._before = self._scattered()

    def _scattered(self) -> int:
        return fetch(self._channel).sides[0].transfers.copied_bytes

    async def under_way(self, whole: int, half: asyncio.Future[Any], lives: Callable[[], bool] = lambda: True) -> bool:
        """Returns once it is seen that some of so many bytes are scattered: whether others are not. `half` is decode's,
        or prefill's: neither goes well before all are. `lives`: whether the other one's process does."""

        def look() -> bool:
            copied = 0
            while copied == 0 and not half.done() and lives():
                copied = self._scattered() - self._before
            return 0 < copied < whole

        seen = await asyncio.to_thread(look)
        self._channel.close()
        assert not half.done() or half.exception() is not None, "it has ended before all of it was computed"
        return seen and not half.done()


async def released(engine: BlockEngine, name: RequestName, late: float = LATE_WRITES_SECONDS) -> None:
    """The request has ended and its engine has its blocks again: nobody else's was written, nor is one within `late`
    seconds from now on."""
    await asyncio.wait_for(engine.client.release(name, "over"), UP_SECONDS)
    engine.give_back([block for block in range(engine.blocks) if block not in engine.free])
    await asyncio.sleep(late)
    assert not engine.touched(), "written when it was nobody's"


async def ended(*halves: Awaitable[object]) -> bool:
    """Waits for both; whether one failed, as requests may whose daemon or session goes."""
    errors = [each for each in await asyncio.gather(*halves, return_exceptions=True) if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, RequestFailed | DaemonGone):
            raise error
    return bool(errors)


async def pull(pair: Pair, prompt: Prompt, name: RequestName) -> None:
    """Decode's half of a hand-over."""
    blocks = pair.decode.take(prompt.tokens)
    await pair.decode.fetch(prompt, name, blocks, 0, "p")
    assert pair.decode.wrong(prompt, blocks, 0, prompt.tokens) == [], "a wrong byte was said to be ready"


@contextlib.asynccontextmanager
async def under_way(pair: Pair, number: int, size: Size) -> AsyncIterator[bool]:
    """A hand-over that cannot end meanwhile, and whether a copy of it is under way; behind it both engines have their
    blocks again, as they were."""
    prompt, name, gate = Prompt(size.tokens, number), new_name(), asyncio.Event()
    copies = Copies(pair)
    pushing = pair.prefill.push(prompt, name, chunk=size.tokens - PAGE, end=False, before_last=gate.wait)
    halves = [asyncio.ensure_future(each) for each in (pull(pair, prompt, name), pushing)]
    yield await copies.under_way(size.copied_first, halves[0])
    gate.set()
    await ended(*halves)
    for engine in (pair.decode, pair.prefill):
        await released(engine, name)


async def serves_again(pair: Pair, number: int) -> None:
    """A hand-over goes well, within some seconds: sessions come up anew."""
    until = time.monotonic() + UP_SECONDS
    while time.monotonic() < until:
        prompt, name = Prompt(70, number), new_name()
        failed = await ended(pull(pair, prompt, name), pair.prefill.push(prompt, name, end=False))
        for engine in (pair.decode, pair.prefill):
            await released(engine, name, late=0)
        if not failed:
            return
    raise AssertionError("no hand-over goes well any more")


async def stands_still(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    assert is_stopped(pid)
    os.kill(pid, signal.SIGCONT)


def each_time(pair: Pair, size: Size, happens: Callable[[], Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, None]:
    """Has it happen under hand-overs until a copy was under way often enough."""

    async def run() -> None:
        seen = 0
        for number in range(2, 2 + TRIES):
            await serves_again(pair, 1000 + number)
            async with under_way(pair, number, size) as copying:
                seen += copying
                await happens()
            if seen == SEEN:
                break
        assert seen == SEEN, f"a copy was under way in {seen} of {TRIES} hand-overs"
        await serves_again(pair, 2000)

    return run()


@pytest.mark.timeout(600)
@pytest.mark.nightly
@ALL_SIZES
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("devices", DEVICES)
def test_one_that_stands_still_and_goes_on(stack: Stack, devices: tuple[str, str], victim: str, size: Size) -> None:
    need(*devices)

    async def run() -> None:
        async with size.pair(stack, devices) as pair:
            await each_time(pair, size, lambda: stands_still(VICTIMS[victim](pair), 0.3))

    asyncio.run(run())


@pytest.mark.timeout(600)
@ALL_SIZES
@pytest.mark.parametrize("victim", ["decode's courier", *by_night("prefill's courier")])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_courier_that_is_killed(stack: Stack, devices: tuple[str, str], victim: str, size: Size) -> None:
    need(*devices)

    async def run() -> None:
        async with size.pair(stack, devices) as pair:

            async def killed() -> None:
                os.kill(VICTIMS[victim](pair), signal.SIGKILL)

            await each_time(pair, size, killed)

    asyncio.run(run())


@pytest.mark.timeout(600)
@ALL_SIZES
@pytest.mark.parametrize("role", ["decode", *by_night("prefill")])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_daemon_that_is_killed(stack: Stack, devices: tuple[str, str], role: str, size: Size) -> None:
    """Its engine has its blocks again once that is proven, and goes on with the next daemon; the other side's loses
    the request alone."""
    need(*devices)

    async def run() -> None:
        seen = 0
        async with size.pair(stack, devices) as pair:
            for number in range(2, 2 + TRIES):
                await serves_again(pair, 1000 + number)
                engine = pair.decode if role == "decode" else pair.prefill
                async with under_way(pair, number, size) as copying:
                    seen += copying
                    stack.kill(pair.decode_daemon if role == "decode" else pair.prefill_daemon)
                await engine.client.close()
                daemon = stack.start(role, pair.words[role])
                stack.ready(daemon)
                if role == "decode":
                    pair.decode_daemon = daemon
                else:
                    pair.prefill_daemon = daemon
                await engine.connect()
                if seen == SEEN:
                    break
            assert seen == SEEN, f"a copy was under way in {seen} of {TRIES} hand-overs"
            await serves_again(pair, 2000)

    asyncio.run(run())


def name_of(number: int) -> RequestName:
    return RequestName(number.to_bytes(16, "big"), 1)


def engine_of_its_own(role: str, socket: str, device: str, size: Size, first: int, pipe: Connection) -> None:
    """An engine in a process that will be stopped or killed: it takes its part in one hand-over behind the other, on
    prefill the last page of each when it is told to."""

    async def run() -> None:
        at = ROLES.index(role)
        engine = BlockEngine(role, socket, BLOCK_TOKENS[at], size.blocks[at], device, size.share)
        await engine.connect()
        pipe.send(HERE)
        for number in range(first, first + TRIES):
            prompt, name = Prompt(size.tokens, number), name_of(number)
            if role == "prefill":
                told = partial(asyncio.to_thread, pipe.recv)
                await engine.push(prompt, name, chunk=size.tokens - PAGE, before_last=told)
            else:
                blocks = engine.take(size.tokens)
                await engine.fetch(prompt, name, blocks, 0, "p")
                assert engine.wrong(prompt, blocks, 0, size.tokens) == []
                engine.give_back(blocks)
            await asyncio.sleep(LATE_WRITES_SECONDS)
            assert not engine.touched()
            pipe.send(number)

    asyncio.run(run())


class EngineOfItsOwn:
    """That process, and the other side's half of the hand-overs in this one."""

    def __init__(self, pair: Pair, role: str, size: Size, first: int) -> None:
        self.pair, self.role, self.size = pair, role, size
        self.pipe, theirs = (context := multiprocessing.get_context("spawn")).Pipe()
        own, self.other = (pair.prefill, pair.decode) if role == "prefill" else (pair.decode, pair.prefill)
        words = (role, own.socket, own.device, size, first, theirs)
        self.process = context.Process(target=engine_of_its_own, args=words)
        self.process.start()
        theirs.close()  # its end is then heard

    async def here(self) -> EngineOfItsOwn:
        assert await self.heard() == HERE, "the engine does not come up"
        return self

    async def heard(self) -> int | None:
        """What it says next; None: nothing, since it has ended, or in so long."""
        try:
            return self.pipe.recv() if await asyncio.to_thread(self.pipe.poll, START_SECONDS) else None
        except (EOFError, OSError):  # killed, maybe with words that it has not read
            return None

    async def hand_over(self, number: int, happens: Callable[[int], Coroutine[Any, Any, None]]) -> tuple[bool, bool]:
        """Whether a copy was under way when it happened to the process, and whether the hand-over went well."""
        prompt, name, gate = Prompt(self.size.tokens, number), name_of(number), asyncio.Event()
        copies = Copies(self.pair)
        if self.role == "prefill":
            half = asyncio.ensure_future(pull(self.pair, prompt, name))
        else:
            chunk = self.size.tokens - PAGE
            pushing = self.pair.prefill.push(prompt, name, chunk=chunk, end=False, before_last=gate.wait)
            half = asyncio.ensure_future(pushing)  # type: ignore[arg-type]
        seen = await copies.under_way(self.size.copied_first, half, self.process.is_alive)
        assert self.process.pid is not None
        await happens(self.process.pid)
        gate.set()
        with contextlib.suppress(OSError):  # it is gone
            self.pipe.send("go on")
        try:
            await half
            well = await self.heard() == number
        except RequestFailed:
            well = False
        await released(self.other, name)
        return seen, well


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("devices", DEVICES)
def test_an_engine_that_is_killed_and_another(stack: Stack, devices: tuple[str, str], role: str, size: Size) -> None:
    """Its memory goes with it, once the daemon's copies have ended; the other engine's blocks come back each time."""
    need(*devices)

    async def killed(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    async def run() -> None:
        pair = size.pair(stack, devices)
        await (pair.decode if role == "prefill" else pair.prefill).connect()
        seen = 0
        for number in range(1, 1 + TRIES):
            engine = await EngineOfItsOwn(pair, role, size, number).here()
            copying, well = await engine.hand_over(number, killed)
            assert not well, "a hand-over went well without its last page"
            seen += copying
            await asyncio.to_thread(engine.process.join)
            if seen == SEEN:
                break
        assert seen == SEEN, f"a copy was under way in {seen} of {TRIES} hand-overs"
        await (pair.prefill if role == "prefill" else pair.decode).connect()
        await serves_again(pair, 2000)
        await pair.decode.client.close()
        await pair.prefill.client.close()

    asyncio.run(run())


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("devices", DEVICES)
def test_an_engine_that_stands_still_and_goes_on(stack: Stack, devices: tuple[str, str], role: str, size: Size) -> None:
    """Copies go on meanwhile, and its requests are as good as others."""
    need(*devices)

    async def run() -> None:
        pair = size.pair(stack, devices)
        await (pair.decode if role == "prefill" else pair.prefill).connect()
        engine, seen = EngineOfItsOwn(pair, role, size, 1), 0
        try:
            await engine.here()
            for number in range(1, 1 + TRIES):
                copying, well = await engine.hand_over(number, lambda pid: stands_still(pid, 1.0))
                assert well, f"hand-over {number} failed"
                seen += copying
                if seen == SEEN:
                    break
            assert seen == SEEN, f"a copy was under way in {seen} of {TRIES} hand-overs"
        finally:
            engine.process.kill()
            await asyncio.to_thread(engine.process.join)
        await engine.other.client.close()

    asyncio.run(run())
