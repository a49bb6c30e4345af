"""Copies of every kind on one pool at a time, and a prompt's end while its tail is cleared: no byte is wrong, and no
stream touches a page before another one, or another worker, is done with it. On a GPU beside a process that computes:
there a clearing takes milliseconds. STORM_OPERATIONS: of the storm there.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.memory.interface import CopyEnd
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES, root_digest
from kvferry.radix.pool import PagePool, PageState
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.host_tier.rows import AnonymousRows
from tests.csrc import device_storm
from tests.csrc.device_storm import GEOMETRY, ROW, Bytes, Storm
from tests.csrc.gpu_orders import Orders
from tests.csrc.products import computing_beside

OPERATIONS = int(os.environ.get("STORM_OPERATIONS", "5000"))
KINDS = ("gathers", "scatters", "sums", "spills", "restores", "tails cleared", "pages cleared")
FACTS = NamespaceFacts("model", "1", GEOMETRY, "sha256_cbor", root_digest(b"storm"), b"")
POOL = 4  # pages: what is freed is taken by who comes next, and prompts that nobody asks for have half


def judge(met: Counter[str]) -> None:
    print(f"\n{dict(met)}")
    assert all(met[kind] > 0 for kind in KINDS)


def tell_before_it_has_ended(storm: Storm) -> None:
    zero_tail = storm.memory.zero_tail

    def zero(page: int, tokens: int, done: CopyEnd) -> None:
        zero_tail(page, tokens, lambda problem: None)
        done("")

    cast(Any, storm.memory).zero_tail = zero


# -- the prefill side ----------------------------------------------------------------------------------------------


class Side(PrefillSide):
    """With a pool on a GPU, a host tier, and workers that this test is."""

    def __init__(self, host_pages: int, other: GpuCopyEngine) -> None:
        super().__init__(DaemonConfig(role="prefill", page_size=GEOMETRY.page_size), bytes(16), time.monotonic)
        self.shape = PoolShape(GEOMETRY, 1, StorageOrder.LAYER_MAJOR, POOL)
        self.memory = GpuPoolMemory.create(self.shape, [0])
        self.rows = AnonymousRows(host_pages, ROW)
        cache = Cache(POOL, GEOMETRY.page_size, host_pages=host_pages, host_there=0)
        self.tiers.take(FACTS, cache, self.memory, HostTier(self.memory, self.rows, host_pages, checksums=False))
        self.tiers_made(cache)
        self.other, self.names = other, 0

    async def whole_host(self) -> PagePool:
        host, asked = self.cache.host, self.cache.host_asked
        assert host is not None
        while host.pages < asked:
            await asyncio.sleep(0.001)
        return host

    def begin(self, digests: bytes, tokens: int, *, warmup: bool = False) -> Request:
        return Request(self, digests, tokens, warmup)

    def places(self, page: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        address = self.memory._ranks[0]._base
        return (address + self.shape.storages[0].rows().fragments_of([page])).reshape(-1)

    async def write(self, page: int, row: Bytes) -> None:
        """By a worker, on a stream of its own."""
        to = self.places(page)
        size = ROW // len(to)
        source, sizes = row.ctypes.data + np.arange(len(to)) * size, np.full(len(to), size)
        await asyncio.to_thread(lambda: self.other.copy_list_from_host(to, source, sizes, strategy="loop").wait())

    async def read(self, page: int) -> Bytes:
        places, row = self.places(page), np.zeros(ROW, np.uint8)
        size = ROW // len(places)
        to, sizes = row.ctypes.data + np.arange(len(places)) * size, np.full(len(places), size)
        await asyncio.to_thread(lambda: self.other.copy_list_to_host(to, places, sizes, strategy="loop").wait())
        return row


class Request:
    """One prompt at a worker of its own."""

    def __init__(self, side: Side, digests: bytes, tokens: int, warmup: bool) -> None:
        self.side = side
        side.names += 1
        number = side.workers.new_number()
        self.worker = Worker(number, f"w{number}", FACTS.id, cast(Any, None), asyncio.Queue(), attached=True)
        side.workers.enter(self.worker)
        message = self.message("begin")
        body = message.begin
        body.digests, body.tokens, body.warmup = digests, tokens, warmup
        body.tail_digest = bytes(32) if tokens % GEOMETRY.page_size else b""
        side.handle(self.worker, "begin", message)

    def message(self, kind: str) -> wire.WorkerMessage:
        message = wire.WorkerMessage()
        name = getattr(message, kind).name
        name.request_id, name.attempt = self.worker.number.to_bytes(16, "big"), 1
        return message

    async def heard(self, kind: str) -> Any:
        event = await asyncio.wait_for(self.worker.events.get(), 60)
        assert event.WhichOneof("kind") == kind, event
        return getattr(event, kind)

    def computed(self, tokens: int) -> None:
        message = self.message("progress")
        message.progress.tokens = tokens
        self.side.handle(self.worker, "progress", message)

    def abort(self) -> None:
        self.side.handle(self.worker, "abort", self.message("abort"))


async def a_client_leaves_as_its_prompt_is_computed(side: Side, row: Bytes) -> None:
    """Its one page, of which 5 tokens are used, is free at once, but for the clearing of its tail."""
    request = side.begin(b"", 5, warmup=True)
    (page,) = (await request.heard("begun")).pages
    await side.write(page, row)
    request.computed(5)
    request.abort()


async def others_write(side: Side, rows: list[Bytes]) -> int:
    """Wrong pages, of as many as there are rows."""
    wrong = 0
    for number, row in enumerate(rows):
        await a_client_leaves_as_its_prompt_is_computed(side, row)
        second = side.begin(hashlib.sha256(b"%d" % number).digest(), GEOMETRY.page_size, warmup=True)
        (page,) = (await second.heard("begun")).pages
        await side.write(page, row)
        await asyncio.sleep(0.005)
        wrong += bool((await side.read(page) != row).any())
        second.abort()
        await second.heard("ended")
    return wrong


async def pages_are_restored(side: Side, rows: list[Bytes]) -> int:
    """Likewise, by copies from the host tier."""
    digests = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(len(rows)))
    first = bytes(len(digests))
    host = await side.whole_host()
    host.claim(range(len(rows)), PageState.LEASED)
    side.cache.recover(side.cache.namespace(FACTS.id), digests, first, list(range(len(rows))), bytes(len(rows)))
    memory = np.frombuffer(side.rows.buffer, np.uint8).reshape(len(rows), ROW)
    memory[:] = rows
    wrong = 0
    for number, row in enumerate(rows):
        await a_client_leaves_as_its_prompt_is_computed(side, row)
        own = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        second = side.begin(own, GEOMETRY.page_size + 1)
        begun = await second.heard("begun")
        assert begun.matched_tokens == GEOMETRY.page_size
        await asyncio.sleep(0.005)
        wrong += bool((await side.read(begun.pages[0]) != row).any())
        second.abort()
        await second.heard("ended")
    return wrong


def wrong_pages(other: GpuCopyEngine, count: int, story: Callable[[Side, list[Bytes]], Any]) -> int:
    rows = list(np.random.default_rng(1).integers(1, 256, (count, ROW), np.uint8))

    async def run() -> int:
        side = Side(count, other)
        try:
            return int(await story(side, rows))
        finally:
            await side.tiers.close()

    return asyncio.run(run())


STORIES = [others_write, pages_are_restored]


# -- over the fake device ------------------------------------------------------------------------------------------


# There a copy has moved its bytes at once, and ends late: the judge of orders finds what comes too early.
LAG = 3  # times that an end is asked for in vain


def test_a_storm_on_the_fake(fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None) -> None:
    orders.lag(LAG)
    judge(device_storm.run(GpuCopyEngine(0, library), 1, 3000))


def test_a_storm_on_the_fake_finds_a_clearing_that_nobody_waits_for(
    fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None
) -> None:
    orders.lag(1000)
    device_storm.run(GpuCopyEngine(0, library), 1, 300, tell_before_it_has_ended)
    assert any("which zero_pages" in message for message in orders.take())


@pytest.mark.parametrize("story", STORIES)
def test_pages_whose_tail_is_cleared_on_the_fake(
    fake: ctypes.CDLL,
    library: str,
    orders: Orders,
    on_the_fake: None,
    story: Callable[[Side, list[Bytes]], Any],
) -> None:
    orders.lag(LAG)
    assert wrong_pages(GpuCopyEngine(0, library), 20, story) == 0


@pytest.mark.parametrize("story", STORIES)
def test_a_page_that_is_free_before_its_tail_is_cleared_is_found(
    fake: ctypes.CDLL,
    library: str,
    orders: Orders,
    on_the_fake: None,
    story: Callable[[Side, list[Bytes]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero_tail = GpuPoolMemory.zero_tail

    def zero(memory: GpuPoolMemory, page: int, tokens: int, done: CopyEnd) -> None:
        zero_tail(memory, page, tokens, lambda problem: None)
        asyncio.get_running_loop().call_soon(done, "")

    monkeypatch.setattr(GpuPoolMemory, "zero_tail", zero)
    orders.lag(1000)
    wrong_pages(GpuCopyEngine(0, library), 20, story)
    assert any("which zero_pages" in message for message in orders.take())


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(580)
def test_a_storm_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    other = gpu_engine()
    with computing_beside():
        judge(device_storm.run(other, 1, OPERATIONS))


@pytest.mark.gpu
def test_a_storm_on_a_gpu_finds_a_clearing_that_nobody_waits_for(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    other = gpu_engine()
    with computing_beside(), pytest.raises(AssertionError, match="bytes are wrong"):
        device_storm.run(other, 1, 5000, tell_before_it_has_ended)


@pytest.mark.gpu
@pytest.mark.parametrize("story", STORIES)
def test_pages_whose_tail_is_cleared_on_a_gpu(
    gpu_engine: Callable[..., GpuCopyEngine], story: Callable[[Side, list[Bytes]], Any]
) -> None:
    other = gpu_engine()
    with computing_beside():
        assert wrong_pages(other, 300, story) == 0
