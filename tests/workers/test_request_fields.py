"""Fields of a request besides its tokens: the front end's reach the daemon, and the daemon's word comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvferry.proto import common_pb2, engine_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.fake_daemon import FakeDaemon
from tests.support.worker_stack import WorkerStack, worker_stack

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_NHD)
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def run(folder: Path, role: common_pb2.Role, scenario: Callable[[FakeDaemon, WorkerStack], Awaitable[None]]) -> None:
    async def session() -> None:
        facts = common_pb2.NamespaceFacts(model="synthetic", geometry=GEOMETRY.to_proto())
        async with (
            FakeDaemon(folder, GEOMETRY) as daemon,
            worker_stack(daemon.socket, role, facts) as stack,
        ):
            await asyncio.wait_for(scenario(daemon, stack), 60)

    asyncio.run(session())


def name() -> common_pb2.RequestName:
    return common_pb2.RequestName(request_id=os.urandom(16), attempt=1)


async def ask(stack: WorkerStack, role: common_pb2.Role, priority: int, warmup: bool) -> None:
    if role == PREFILL:
        await stack.engine.Prefill(
            engine_pb2.PrefillRequest(name=name(), tokens=[1, 2], priority=priority, warmup=warmup)
        )
    else:
        order = engine_pb2.DecodeRequest(name=name(), tokens=[1, 2], max_new_tokens=2, priority=priority, warmup=warmup)
        async for _ in stack.engine.Decode(order):
            pass


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("priority", [-1000, 0, 7, 1000])
@pytest.mark.parametrize("warmup", [False, True])
def test_priority_and_warmup_reach_the_daemon(
    tmp_path: Path, role: common_pb2.Role, priority: int, warmup: bool
) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        await ask(stack, role, priority, warmup)
        opened = daemon.last("begin").begin if role == PREFILL else daemon.last("admit").admit
        assert (opened.priority, opened.warmup) == (priority, warmup)

    run(tmp_path, role, scenario)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("priority", [-1001, 1001, 2**31 - 1, -(2**31)])
def test_priorities_are_bounded(tmp_path: Path, role: common_pb2.Role, priority: int) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=f"priority is {priority}; it must be -1000 to 1000") as error:
            await ask(stack, role, priority, False)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert set(daemon.kinds()) <= {"hello", "attached"}

    run(tmp_path, role, scenario)


def test_tokens_that_come_back_from_the_host_are_told(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.host_tokens = 12
        order = engine_pb2.DecodeRequest(name=name(), tokens=[1, 2], max_new_tokens=2)
        first = await stack.engine.Decode(order).read()
        assert isinstance(first, engine_pb2.DecodeReply)
        assert (first.started.matched_tokens, first.started.host_tokens) == (0, 12)

    run(tmp_path, DECODE, scenario)
