"""A pool on GPUs as a daemon uses it, over the fake driver: its event loop's thread waits for no device, whatever is
asked of the pool, and when it goes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry._core import GpuCopy, GpuCopyEngine, PinnedBuffer
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.held_pages import HeldPages
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.sides import tiers as side_tiers
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.host_tier.rows import AnonymousRows
from tests.csrc.engine_allocations import NBYTES, registered
from tests.csrc.gpu_orders import Orders
from tests.csrc.gpu_pool import GEOMETRY, MOST, RANKS, Daemon, Pool

NOT_SUPPORTED = 801
FACTS = NamespaceFacts("model", "1", GEOMETRY, "sha256_cbor", root_digest(b"waits"), b"")


# -- what is found -------------------------------------------------------------------------------------------------


def test_calls_that_wait_are_found(fake: ctypes.CDLL, library: str, orders: Orders) -> None:
    engine = GpuCopyEngine(0, library)
    memory, row = engine.allocate(4096), np.zeros(64, np.uint8)
    pages = engine.pages(np.array([memory.address]), np.array([64]), 64, 8)
    handle = int(fake.fake_foreign(64)).to_bytes(8, "little") + bytes([0x5A] * 56)
    copy, two, sizes = engine.zero_pages(pages, np.array([1])), np.array([0, 32]), np.array([16, 16])
    others = np.zeros(64, np.uint8)
    at, here, source = memory.address + two, row.ctypes.data + two, others.ctypes.data + two
    held: dict[str, Any] = {}
    steps: dict[str, tuple[str, Callable[[], object]]] = {
        "a wait": ("event_synchronize", copy.wait),
        "an allocation": ("mem_alloc", lambda: held.update(more=engine.allocate(64))),
        "its end": ("mem_free", held.clear),
        "a mapping": ("ipc_open", lambda: held.update(mapping=engine.open_ipc(handle, 64))),
        "a mapping's end": ("ipc_close", lambda: held.pop("mapping").close()),
        "a list": ("copy_to_host of host", lambda: engine.copy_list_to_host(here, at, sizes, strategy="loop")),
        "a batch": ("copy_batch of host", lambda: engine.copy_list_from_host(at + 64, source, sizes)),
        "pinning": ("host_register", lambda: held.update(pinned=PinnedBuffer(engine, row))),
        "unpinning": ("host_unregister", held.clear),
    }
    for what, (call, step) in steps.items():
        with orders.thread_waits_for_nothing():
            result = step()
        if isinstance(result, GpuCopy):
            result.wait()
        found = orders.take()
        assert found and all(line.startswith(call) and "may wait" in line for line in found), (what, found)
    pinned = PinnedBuffer(engine, row)
    with orders.thread_waits_for_nothing():
        last = engine.copy_list_to_host(here, at, sizes)
        engine.gather_part(pages, np.array([1]), 0, 64, memory.address + 1024)
        waited = threading.Thread(target=copy.wait)
        waited.start()
        waited.join()
    last.wait()
    orders.check()
    del pinned


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [(), ("module_load",), ("module_load", "copy_batch")], ids=str)
def test_the_loop_turns_while_the_gpus_stand_still(
    fake: ctypes.CDLL, library: str, orders: Orders, on_the_fake: None, without: Sequence[str]
) -> None:
    """Whatever is asked of them, and its end is told once they go on. `without`: what their driver does not support."""
    for call in without:
        fake.fake_answer(call.encode(), NOT_SUPPORTED)
    pool = Pool(fake, library, orders)
    daemon = Daemon(pool, 2)
    daemon.sums = pool.memory.can_sum

    async def story() -> None:
        orders.hold()
        sent, arriving, (tail,), cleared = [await daemon.take(count) for count in (MOST, MOST, 1, 2)]
        parts = [daemon.gather(lane, sent) for lane in range(len(pool.lanes))]
        parts += [daemon.scatter(lane, arriving) for lane in range(len(pool.lanes))]
        clearing = daemon.ended("tail", lambda done: pool.memory.zero_tail(tail, 3, done))
        with orders.thread_waits_for_nothing():
            asked = [asyncio.ensure_future(work) for work in (*parts, clearing, daemon.clear(cleared))]
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                await asyncio.sleep(0.001)
            assert not any(each.done() for each in asked)
            orders.release()
            await asyncio.wait_for(asyncio.gather(*asked), 30)

    asyncio.run(story())
    orders.check()
    pool.close()


# -- the pool itself -----------------------------------------------------------------------------------------------


ROWS = 4


async def tiers_of(memory: GpuPoolMemory) -> SideTiers:
    """Grown."""
    rows = AnonymousRows(ROWS, memory.shape.row_bytes)
    config = DaemonConfig(role="decode", host_bytes=ROWS * GEOMETRY.page_bytes)
    tiers = SideTiers("decode", config, bytes(16), cast(Any, SimpleNamespace(flush=lambda: None)))
    cache = Cache(memory.shape.pages, GEOMETRY.page_size, host_pages=ROWS, host_there=0)
    tiers.take(FACTS, cache, memory, HostTier(memory, rows, ROWS, checksums=False))
    await tiers.grow_host()
    assert cache.host is not None and cache.host.free == ROWS
    return tiers


def test_a_pool_goes(fake: ctypes.CDLL, orders: Orders, on_the_fake: None) -> None:
    """The daemon's at its end, an engine's whenever that one ends."""

    async def story() -> None:
        own = GpuPoolMemory.create(PoolShape(GEOMETRY, RANKS, StorageOrder.LAYER_MAJOR, 4), range(RANKS))
        engines = GpuPoolMemory.map(
            registered([int(fake.fake_foreign(NBYTES)) for _ in range(2)], NBYTES), GEOMETRY, [0]
        )
        pages = np.array([1])
        for memory in own, engines:
            ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            pinned, let_go = fake.fake_calls(b"host_register"), fake.fake_calls(b"host_unregister")
            with orders.thread_waits_for_nothing():
                tiers = await tiers_of(memory)
                assert fake.fake_calls(b"host_register") == pinned + 1
                tiers.memory.zero_pages(pages, ended.set_result)
                tiers.memory.zero_tail(2, 3, lambda problem: None)
                assert await asyncio.wait_for(ended, 20) == ""
                if tiers.memory is engines:
                    del engines
                    await tiers.forget_pool()
                else:
                    del own
                assert fake.fake_calls(b"host_unregister") == let_go, "they wait for the next engine's memory"
                del memory
                await tiers.close()
                gc.collect()
            assert fake.fake_calls(b"host_unregister") == let_go + 1
            orders.check()

    gc.collect()
    asyncio.run(story())


def test_an_engines_pool_that_cannot_be_taken_goes(
    fake: ctypes.CDLL, orders: Orders, on_the_fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for the index of what it holds. The one that comes then has the host tier's rows, pinned."""
    registration = registered([int(fake.fake_foreign(NBYTES)) for _ in range(2)], NBYTES)

    def fail(*_: object) -> None:
        raise OSError("injected")

    async def map_pool(*_: object) -> GpuPoolMemory:
        return await asyncio.to_thread(GpuPoolMemory.map, registration, GEOMETRY, [0])

    monkeypatch.setattr(side_tiers, "map_pool", map_pool)

    async def story() -> None:
        tiers = await tiers_of(await map_pool())
        with orders.thread_waits_for_nothing():
            await tiers.forget_pool()
            closed, pinned = fake.fake_calls(b"ipc_close"), fake.fake_calls(b"host_register")
            with monkeypatch.context() as patch:
                patch.setattr(HeldPages, "__init__", fail)
                with pytest.raises(RequestError, match="injected"):
                    await tiers.fit(FACTS, registration)
            assert fake.fake_calls(b"ipc_close") == closed + 2
            await tiers.fit(FACTS, registration)
            await asyncio.to_thread(tiers.memory.spill, np.array([1]), np.array([ROWS - 1]))
            assert fake.fake_calls(b"host_register") == pinned
            await tiers.close()
            gc.collect()

    gc.collect()
    asyncio.run(story())


# -- other threads -------------------------------------------------------------------------------------------------


def turns_during(step: Callable[[], object]) -> int:
    """Of another thread."""
    turns, over = [0, 0], threading.Event()

    def turn() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0.002)

    turning = threading.Thread(target=turn)
    turning.start()
    time.sleep(0.02)
    turns[1] = turns[0]
    step()
    turns[1] = turns[0] - turns[1]
    over.set()
    turning.join()
    return turns[1]


def test_other_threads_run_while_one_waits_for_a_device(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    row, memory = np.zeros(64, np.uint8), engine.allocate(4096)
    layout = np.array([memory.address]), np.array([64]), 64, 8
    handle = int(fake.fake_foreign(64)).to_bytes(8, "little") + bytes([0x5A] * 56)
    held: dict[str, Any] = {"memory": engine.allocate(64), "mapping": engine.open_ipc(handle, 64)}
    pages = engine.pages(*layout)
    part = pages, np.array([1]), 0, 64, memory.address + 1024
    steps: list[tuple[bytes, Callable[[], object]]] = [
        (b"host_register", lambda: held.update(pinned=PinnedBuffer(engine, row))),
        (b"host_unregister", lambda: held.pop("pinned")),
        (b"mem_alloc", lambda: held.update(table=engine.pages(*layout))),
        (b"mem_free", lambda: held.pop("table")),
        (b"mem_free", lambda: held.pop("memory")),
        (b"ipc_close", lambda: held.pop("mapping")),
        (
            b"host_register",
            lambda: engine.scatter_part_summed(*part).wait(),
        ),
    ]
    for call, step in steps:
        fake.fake_answer(call + b"_pause_ms", 400)
        calls = fake.fake_calls(call)
        assert turns_during(step) > 20, call
        assert fake.fake_calls(call) > calls
