"""Engines whose own memory is a daemon's pool (`--pool engine`): one at a time registers it, by the product's own
registration; it leaves or dies, and the next one brings another memory, of other bytes and another size.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory import held_pages
from kvferry.daemon.sides import tiers, workers
from kvferry.daemon.sides.engine_pool import EnginePool
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from tests.simulation.prompts import GARBAGE, PAGE
from tests.simulation.storage.blocks import BLOCK_PAGES, BLOCK_TOKENS, PLACES, BlockMemory, block_bytes
from tests.simulation.workers import Process, SessionLock

if TYPE_CHECKING:
    from kvferry.daemon.config.model import DaemonConfig
    from kvferry.daemon.memory.interface import PoolMemory
    from kvferry.transfer.geometry.kv_geometry import KVGeometry
    from kvferry.transfer.geometry.registration import Registration
    from tests.simulation.simulator import Simulation

AGAIN_SECONDS = 0.2  # until an engine that was refused tries again


class EngineProcess(Process):
    """An engine and its stream."""

    def come(self) -> None:
        self.side.process.create_task(self._register())

    async def _register(self) -> None:
        """As the workers' service: until it is taken in, or has died."""
        side = cast(AnySide, self.side)
        engine = side._engine
        assert engine is not None
        while True:
            try:
                if not side.tiers.has_pool.is_set() and self.side.unclaimed:
                    self.side.unclaimed = False
                    await self._first(engine)
                else:
                    worker, _ = await side.register(self._hello())
                    worker.events, worker.lock = cast(Any, self), cast(Any, SessionLock(self))
                    self.is_here(worker)
                    self.clock.counts["engines registered again"] += 1
                break
            except RequestError:
                await asyncio.sleep(AGAIN_SECONDS)
                if not self.lives:
                    return
        worker = self.worker
        worker.attached = self.lives
        if not self.lives:
            self.leaves(quiesced=False)

    async def _first(self, engine: EnginePool) -> None:
        """Its memory is the one that the daemon was furnished with."""
        await engine.claim("first")
        self.is_here(self.side.enter(self.tenant, self, SessionLock(self)))
        engine.own(self.worker.number)

    def _hello(self) -> wire.WorkerHello:
        if self.side.setting.blocks:
            return self._hello_with_blocks()
        pages = self.clock.random.choice([40, 48, 64])
        pool = wire.EnginePool(pages=pages, storage=common.STORAGE_PAGE_MAJOR)
        each = rank_geometry(self.side.setting.geometry, self.side.setting.ranks).page_bytes  # of a page, on one rank
        for rank in range(self.side.setting.ranks):
            memory = wire.EngineMemory(file=wire.SharedFile(name=f"engine-{rank}"), nbytes=pages * each)
            tensor = wire.EngineTensor(memory=0, offset=0, page_stride=each, page_bytes=each)
            pool.ranks.add(memories=[memory], tensors=[tensor])
        return self._hello_of(pool)

    def _hello_with_blocks(self) -> wire.WorkerHello:
        """Another number of them, and of another size."""
        random, stows = self.clock.random, self.side.faults.stows > 0
        tokens = random.choice((*BLOCK_TOKENS, PAGE) if stows else BLOCK_TOKENS)
        blocks = random.choice(BLOCK_PAGES[self.side.role]) * PAGE // tokens + random.randrange(2)
        pool = wire.EnginePool(pages=blocks, storage=common.STORAGE_PAGE_MAJOR, block_tokens=tokens, stows=stows)
        size = block_bytes(tokens)
        memory = wire.EngineMemory(file=wire.SharedFile(name="engine-0"), nbytes=PLACES * blocks * size)
        pool.ranks.add(
            memories=[memory],
            tensors=[
                wire.EngineTensor(memory=0, offset=place * blocks * size, page_stride=size, page_bytes=size)
                for place in range(PLACES)
            ],
        )
        return self._hello_of(pool)

    def _hello_of(self, pool: wire.EnginePool) -> wire.WorkerHello:
        facts = self.side.tenants[self.tenant].to_proto()
        return wire.WorkerHello(protocol=1, role=common.ROLE_DECODE, worker="engine", facts=facts, pool=pool)


async def map_pool(
    simulation: Simulation, config: DaemonConfig, geometry: KVGeometry, registration: Registration
) -> PoolMemory:
    """In place of `kvferry.daemon.memory.making.map_pool`."""
    side = next(side for side in simulation.sides if side.config.name == config.name)
    await asyncio.sleep(simulation.clock.between(0.001, 0.1))
    memory = side.pages_memory
    if isinstance(memory, BlockMemory):
        memory.map_blocks(registration.pages, registration.block_tokens)
    else:
        memory.map(registration.pages, GARBAGE)
    return cast("PoolMemory", side.pool_of(side.pages_memory))


class Lock:
    """In place of a session file's lock, until the worker's own takes its place."""

    path = "/nowhere"

    @staticmethod
    def create(path: str) -> Lock:
        return Lock()


class AnonymousSegment:
    """In place of a named one, which a simulation of the same seed in another process would find taken."""

    path = "/nowhere"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.buffer = memoryview(self._map)

    @staticmethod
    def create(directory: str, name: str, nbytes: int) -> AnonymousSegment:
        return AnonymousSegment(nbytes)

    def unlink(self) -> None:
        pass

    def close(self) -> None:
        self.buffer.release()


@contextmanager
def engines_installed(simulation: Simulation) -> Iterator[None]:
    """Engines' memory and the index of what is held are the simulation's, as are the locks of session files."""
    with (
        mock.patch.object(tiers, "map_pool", partial(map_pool, simulation)),
        mock.patch.object(held_pages, "Segment", AnonymousSegment),
        mock.patch.object(workers, "FileLock", Lock),
    ):
        yield
