"""The making of a side's pool: memory of its own, or what an engine has registered. Blocking calls go to threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvferry.daemon.config.model import STORAGES, DaemonConfig
from kvferry.daemon.core.errors import exhausted, invalid, precondition
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.registration import Registration
from kvferry.waiting import complete

_T = TypeVar("_T")


def registration_of(config: DaemonConfig, hello: wire.WorkerHello) -> Registration | None:
    """The memory that the worker registers, judged as far as it can be before it is mapped; None: it registers none,
    the pool is the daemon's. RequestError."""
    registers = hello.HasField("pool")
    if config.pool == "daemon":
        if registers:
            raise precondition(
                "pool: the worker registers memory of its own; the pool is this daemon's: start it with --pool engine"
            )
        return None
    if not registers:
        raise precondition(
            "pool: the worker registers no memory, which is to be this daemon's pool (--pool engine): "
            "start it with `kvferry worker --pool engine`"
        )
    if hello.facts.geometry.page_size == 0:
        raise invalid(f"page_size is 0; with memory of the worker's own it must be said: {config.page_size}")
    try:
        geometry = KVGeometry.from_proto(hello.facts.geometry)
        registration = Registration.from_proto(hello.pool, geometry, config.ranks)
    except ValueError as error:
        raise invalid(str(error)) from error
    if registration.on_gpus != bool(config.devices):
        there = "a GPU's" if registration.on_gpus else "files"
        raise precondition(f"pool: the memories are {there}; this daemon's --device is {config.device!r}")
    return registration


async def map_pool(config: DaemonConfig, geometry: KVGeometry, registration: Registration) -> PoolMemory:
    """An engine's. RequestError where it cannot be mapped, or is not what was registered."""

    def work() -> PoolMemory:
        if config.devices:
            return GpuPoolMemory.map(registration, geometry, config.devices)
        return SharedPoolMemory.map(registration, geometry, config.shm_dir, config.copy_threads)

    try:
        return await make_in_thread(work, lambda memory: memory.close())
    except ValueError as error:
        raise invalid(str(error)) from error
    except OSError as error:
        raise precondition(f"pool: memory that cannot be mapped: {error}") from error


async def make_pool(config: DaemonConfig, geometry: KVGeometry, pages: int, name: str) -> PoolMemory:
    """The daemon's own; `name`: of its shared memory. RESOURCE_EXHAUSTED: there is too little, or no such device;
    FAILED_PRECONDITION: this daemon cannot make such a pool."""

    def work(shape: PoolShape) -> PoolMemory:
        # The kernel clears the memory, which takes seconds for a large pool.
        if config.devices:
            return GpuPoolMemory.create(shape, config.devices)
        return SharedPoolMemory.create(shape, config.shm_dir, name, config.copy_threads)

    try:
        shape = PoolShape(geometry, config.ranks, STORAGES[config.storage], pages)
        return await make_in_thread(partial(work, shape), lambda memory: memory.close())
    except ValueError as error:
        raise precondition(f"pool: this daemon cannot make it: {error}") from error
    except OSError as error:
        place, flag = (config.device, "--device") if config.devices else (config.shm_dir, "--shm-dir")
        message = f"pool of {pages * shape.page_bytes} bytes in {place}: {error}; change --pool-bytes or {flag}"
        raise exhausted(message) from error


async def make_in_thread(make: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """The result of `make`. A thread cannot be cancelled: where the waiting task is, it waits on, and undoes what
    came."""
    loop = asyncio.get_running_loop()
    making = loop.run_in_executor(None, make)
    try:
        return await complete(making)
    except asyncio.CancelledError:
        if making.done() and not making.cancelled() and making.exception() is None:
            await complete(loop.run_in_executor(None, undo, making.result()))
        raise
