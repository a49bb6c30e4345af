"""Refusals of a worker without a word to its daemon, and what it makes of a daemon's errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import MAX_FINISH_DIGEST_BYTES, NotOpened, RequestName
from kvferry.proto import common_pb2, engine_pb2, limits, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.engine_service import MAX_DETAILS_BYTES
from kvferry.workers.jobs import Jobs
from kvferry.workers.models.synthetic import SimulatedTime
from tests.support.fake_daemon import Event, FakeDaemon, Message
from tests.support.worker_stack import NO_TIME, WorkerStack, worker_stack

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_NHD)
ONE_TOKEN_PAGES = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float32", page_size=1, layout=Layout.PAGE_NHD)
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STEPS = SimulatedTime(prefill_token_s=0.001, decode_step_s=0.003)
Scenario = Callable[[FakeDaemon, WorkerStack], Awaitable[None]]


def run(
    folder: Path,
    role: common_pb2.Role,
    scenario: Scenario,
    *,
    geometry: KVGeometry = GEOMETRY,
    max_tokens: int = 4096,
    simulated: SimulatedTime = NO_TIME,
) -> None:
    async def session() -> None:
        facts = common_pb2.NamespaceFacts(model="synthetic", geometry=geometry.to_proto())
        async with (
            FakeDaemon(folder, geometry, pages=1100, max_tokens=max_tokens) as daemon,
            worker_stack(daemon.socket, role, facts, simulated=simulated) as stack,
        ):
            await asyncio.wait_for(scenario(daemon, stack), 60)

    asyncio.run(session())


def name() -> common_pb2.RequestName:
    return common_pb2.RequestName(request_id=os.urandom(16), attempt=1)


async def decode_all(stack: WorkerStack, request: engine_pb2.DecodeRequest) -> list[int]:
    return [token async for reply in stack.engine.Decode(request) for token in reply.generated.tokens]


async def refused(call: Awaitable[object], code: grpc.StatusCode, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
        await call
    assert error.value.code() == code


def test_a_running_decode_is_untouched_by_a_second_of_its_name(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.DecodeRequest(name=name(), tokens=[1, 2, 3], max_new_tokens=60)
        first = asyncio.create_task(decode_all(stack, request))
        await daemon.wait_for("grow")
        for _ in range(3):
            await refused(decode_all(stack, request), grpc.StatusCode.FAILED_PRECONDITION, "already in use")
        assert not first.done()
        assert len(await first) == 60
        assert daemon.kinds().count("admit") == 1
        assert "abort" not in daemon.kinds()
        assert stack.client.open_requests == len(stack.jobs) == 0

    run(tmp_path, DECODE, scenario, simulated=STEPS)


def test_a_running_prefill_is_untouched_by_a_second_of_its_name(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.PrefillRequest(name=name(), tokens=list(range(300)))
        first = asyncio.ensure_future(stack.engine.Prefill(request))
        await daemon.wait_for("progress")
        for _ in range(3):
            await refused(stack.engine.Prefill(request), grpc.StatusCode.FAILED_PRECONDITION, "already in use")
        assert not first.done()
        assert (await first).chunk_ends[-1] == 300
        assert daemon.kinds().count("begin") == 1
        assert "abort" not in daemon.kinds()

    run(tmp_path, PREFILL, scenario, simulated=STEPS)


def test_a_prefill_that_is_handed_over_is_untouched_by_a_second_of_its_name(tmp_path: Path) -> None:
    """The call has returned, but decode daemons still read its pages."""

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.override["aux"] = lambda message: []
        request = engine_pb2.PrefillRequest(name=name(), tokens=[1, 2, 3])
        await stack.engine.Prefill(request)
        await refused(stack.engine.Prefill(request), grpc.StatusCode.FAILED_PRECONDITION, "already in use")
        assert stack.client.open_requests == 1
        daemon.events.put_nowait(Event(ended=worker_pb2.Ended(name=request.name)))
        while stack.client.open_requests:
            await asyncio.sleep(0.01)
        assert (daemon.kinds().count("begin"), daemon.kinds().count("abort")) == (1, 0)

    run(tmp_path, PREFILL, scenario)


def test_client_refuses_a_name_that_is_open(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = RequestName(os.urandom(16), 1)

        def admit(client: DaemonClient) -> Coroutine[object, object, object]:
            return client.admit(
                request, digests=b"", tokens=1, tail_digest=bytes(32), prefill="p", max_new_tokens=8, deadline_s=5
            )

        await admit(stack.client)
        with pytest.raises(NotOpened, match="already in use") as error:
            await admit(stack.client)
        assert error.value.code == common_pb2.ERROR_FAILED_PRECONDITION
        await stack.client.ready(request)  # of the first
        await stack.client.abort(request, "enough")

    run(tmp_path, DECODE, scenario)


def test_a_name_is_free_again_when_its_job_is_over() -> None:
    async def session() -> None:
        jobs = Jobs(8)
        request = RequestName(os.urandom(16), 1)
        cleaning = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await cleaning.wait()

        first = jobs.start(request, work())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        with pytest.raises(NotOpened):  # it still cleans up
            jobs.start(request, work())
        cleaning.set()
        await asyncio.wait({first})
        await asyncio.sleep(0)
        second = jobs.start(request, asyncio.sleep(0, "second"))
        assert await second == "second"

    asyncio.run(session())


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_attempts_are_bounded(tmp_path: Path, role: common_pb2.Role) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        def call(attempt: int) -> Awaitable[object]:
            request_name = common_pb2.RequestName(request_id=os.urandom(16), attempt=attempt)
            if role == PREFILL:
                return stack.engine.Prefill(engine_pb2.PrefillRequest(name=request_name, tokens=[1]))
            return decode_all(stack, engine_pb2.DecodeRequest(name=request_name, tokens=[1], max_new_tokens=1))

        await call(65536)
        for attempt in (0, 65537, 2**32 - 1):
            message = f"name.attempt is {attempt}; it must be 1 to 65536"
            await refused(call(attempt), grpc.StatusCode.INVALID_ARGUMENT, message)

    run(tmp_path, role, scenario)


@pytest.mark.parametrize("code", [0, 1, 2, 7, 16, 99, -1])
def test_codes_that_no_daemon_sends_are_internal(tmp_path: Path, code: int) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        def fail(message: Message) -> list[Event]:
            error = common_pb2.Error(code=code, message="odd")  # type: ignore[arg-type]
            return [Event(failed=worker_pb2.Failed(name=message.begin.name, error=error))]

        daemon.override["begin"] = fail
        request = engine_pb2.PrefillRequest(name=name(), tokens=[1])
        await refused(stack.engine.Prefill(request), grpc.StatusCode.INTERNAL, "odd")

    run(tmp_path, PREFILL, scenario)


@pytest.mark.parametrize("character", ["x", "\N{EURO SIGN}", "%"])
def test_long_messages_of_a_daemon_are_cut(tmp_path: Path, character: str) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        def fail(message: Message) -> list[Event]:
            error = common_pb2.Error(code=common_pb2.ERROR_ABORTED, message=character * 100_000)
            return [Event(failed=worker_pb2.Failed(name=message.begin.name, error=error))]

        daemon.override["begin"] = fail
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=[1]))
        assert error.value.code() == grpc.StatusCode.ABORTED
        assert error.value.details() == character * (MAX_DETAILS_BYTES // len(character.encode()))

    run(tmp_path, PREFILL, scenario)


def test_a_finish_with_the_most_digests_fits() -> None:
    most = common_pb2.RequestName(request_id=bytes(16), attempt=limits.MAX_ATTEMPT)
    finish = worker_pb2.Finish(name=most, tokens=2**32 - 1, digests=bytes(MAX_FINISH_DIGEST_BYTES))
    assert worker_pb2.WorkerMessage(finish=finish).ByteSize() <= limits.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_prompt_whose_digests_do_not_fit_is_refused(tmp_path: Path, role: common_pb2.Role) -> None:
    tokens = np.zeros(limits.MAX_MESSAGE_BYTES // 32, dtype=np.uint32)

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        call: Awaitable[object]
        if role == PREFILL:
            call = stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=tokens))
        else:
            order = engine_pb2.DecodeRequest(name=name(), tokens=tokens, max_new_tokens=1, prefill="p")
            call = decode_all(stack, order)
        await refused(
            call,
            grpc.StatusCode.INVALID_ARGUMENT,
            f"tokens has {len(tokens)} tokens: .* may have {limits.MAX_MESSAGE_BYTES}",
        )
        assert daemon.kinds() == ["hello", "attached"]
        assert stack.client.open_requests == 0
        if role == PREFILL:  # the session goes on
            await stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=[1]))

    run(tmp_path, role, scenario, geometry=ONE_TOKEN_PAGES, max_tokens=1 << 20)


def test_an_output_whose_digests_will_not_fit_is_refused(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        count = limits.MAX_MESSAGE_BYTES // 32
        order = engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=count, prefill="p")
        await refused(
            decode_all(stack, order), grpc.StatusCode.INVALID_ARGUMENT, f"max_new_tokens is {count}: .* may have"
        )
        assert daemon.kinds() == ["hello", "attached"]

    run(tmp_path, DECODE, scenario, geometry=ONE_TOKEN_PAGES, max_tokens=1 << 20)


def test_a_caller_that_leaves_before_begun_aborts(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.override["begin"] = lambda message: []
        call = stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=[1, 2, 3]))
        waiting = asyncio.ensure_future(call)
        await daemon.wait_for("begin")
        call.cancel()
        await daemon.wait_for("abort")
        await asyncio.wait({waiting})
        while len(stack.jobs):
            await asyncio.sleep(0.01)
        assert stack.client.open_requests == 0

    run(tmp_path, PREFILL, scenario)
