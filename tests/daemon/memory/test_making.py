"""Memory that is made in a thread for somebody who has left meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory.making import make_in_thread, registration_of
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)
FILE, ALLOCATION = SharedFile("engine"), GpuAllocation(bytes(64), bytes(16))


def hello(source: SharedFile | GpuAllocation | None, page_size: int = GEOMETRY.page_size) -> wire.WorkerHello:
    """Of a worker that registers a page of memory there, or none."""
    message = wire.WorkerHello()
    message.facts.geometry.CopyFrom(GEOMETRY.to_proto())
    message.facts.geometry.page_size = page_size
    if source is not None:
        nbytes = GEOMETRY.page_bytes
        rank = RegisteredRank((RegisteredMemory(source, nbytes),), (RegisteredTensor(0, 0, nbytes, nbytes),))
        message.pool.CopyFrom(Registration(1, StorageOrder.PAGE_MAJOR, (rank,)).to_proto())
    return message


def test_what_nobody_has_is_undone_in_a_thread() -> None:
    """To let it go may take as long as to make it."""
    began, go_on = threading.Event(), threading.Event()
    undone: list[tuple[str, int]] = []

    def make() -> str:
        began.set()
        assert go_on.wait(20)
        return "made"

    async def story() -> None:
        making = asyncio.create_task(make_in_thread(make, lambda made: undone.append((made, threading.get_ident()))))
        assert await asyncio.to_thread(began.wait, 20)
        making.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(story())
    ((made, thread),) = undone
    assert made == "made" and thread != threading.get_ident()


def test_memory_is_registered_where_it_is_to_be_and_of_its_kind() -> None:
    own = DaemonConfig(role="decode")
    engines, on_a_gpu = (DaemonConfig(role="decode", pool="engine", device=device) for device in ("cpu", "cuda:0"))
    assert registration_of(own, hello(None)) is None
    for config, source in ((engines, FILE), (on_a_gpu, ALLOCATION)):
        registration = registration_of(config, hello(source))
        assert registration is not None and registration.ranks[0].memories[0].source == source
    for config, message, words in (
        (own, hello(FILE), "the pool is this daemon's"),
        (engines, hello(None), "registers no memory"),
        (engines, hello(ALLOCATION), "the memories are a GPU's"),
        (on_a_gpu, hello(FILE), "the memories are files"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            registration_of(config, message)
        assert refused.value.code == common.ERROR_FAILED_PRECONDITION
    with pytest.raises(RequestError, match="page_size is 0") as refused:
        registration_of(engines, hello(FILE, 0))
    assert refused.value.code == common.ERROR_INVALID_ARGUMENT
