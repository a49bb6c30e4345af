"""Retractions that meet another end of the request on the way: each ends once, and nothing stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvferry.proto import common_pb2, worker_pb2
from tests.support.fake_daemon import Event, FakeDaemon, Message
from tests.support.worker_stack import WorkerStack
from tests.workers.retracting import Retracting
from tests.workers.retraction_stack import admits, decode, finishes, order, output_of, run, tokens_of


def test_a_retraction_that_crosses_finish_is_ignored(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        def cross(message: Message) -> list[Event]:
            return [Event(retract=worker_pb2.Retract(name=message.finish.name)), *daemon._on_finish(message)]

        daemon.override["finish"] = cross
        for _ in range(3):
            assert tokens_of(await decode(stack, order([1, 2], 9))) == output_of([1, 2], 9)
        daemon.retract(admits(daemon)[-1].name)  # and one behind Ended
        assert tokens_of(await decode(stack, order([1, 2], 9))) == output_of([1, 2], 9)
        assert len(admits(daemon)) == len(finishes(daemon)) == 4

    run(tmp_path, scenario, at=set())


def test_two_retractions_before_the_finish_are_one(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        def cross(message: Message) -> list[Event]:
            return [Event(retract=worker_pb2.Retract(name=message.finish.name)), *daemon._on_finish(message)]

        daemon.override["finish"] = cross
        assert tokens_of(await decode(stack, order([1, 2], 20))) == output_of([1, 2], 20)
        assert len(admits(daemon)) == len(finishes(daemon)) == 2

    run(tmp_path, scenario, at={9})


def test_a_retraction_that_crosses_abort_is_ignored(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        only_admitted = daemon._on_admit
        daemon.override["admit"] = lambda message: only_admitted(message)[:1]

        def cross(message: Message) -> list[Event]:
            return [Event(retract=worker_pb2.Retract(name=message.abort.name)), *daemon._on_abort(message)]

        daemon.override["abort"] = cross
        call = stack.engine.Decode(order([1, 2], 20, prefill="p"))
        reading = asyncio.ensure_future(call.read())
        await daemon.wait_for("admit")
        call.cancel()
        await daemon.wait_for("abort")
        await asyncio.wait({reading})
        assert not finishes(daemon)

    run(tmp_path, scenario, at=set())


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 6])
@pytest.mark.parametrize("retract_first", [False, True])
def test_a_reader_that_leaves_and_a_retraction_cross(tmp_path: Path, retract_first: bool, delay_ms: int) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        request = order([1, 2, 3], 2000)
        call = stack.engine.Decode(request)
        read = 0
        async for reply in call:
            read += len(reply.generated.tokens)
            if read >= 12:
                break
        words = [lambda: daemon.retract(request.name), call.cancel]
        for word in words if retract_first else reversed(words):
            word()
            await asyncio.sleep(delay_ms / 1000)
        while len(stack.jobs):
            await asyncio.sleep(0.005)
        kinds = [kind for kind in daemon.kinds() if kind in ("admit", "finish", "abort")]
        stays = kinds.count("admit")
        assert kinds in (["admit", "finish"] * stays, [*["admit", "finish"] * (stays - 1), "admit", "abort"])
        assert stays <= 2
        assert tokens_of(await decode(stack, order([9], 5))) == output_of([9], 5)  # the worker goes on

    run(tmp_path, scenario, at=set(), step_s=0.002)


def test_a_reader_that_leaves_before_the_end_of_the_stay(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        ended: list[Event] = []

        def later(message: Message) -> list[Event]:
            ended.extend(daemon._on_finish(message))
            return []

        daemon.override["finish"] = later
        call = stack.engine.Decode(order([1, 2, 3], 40))
        reading = asyncio.ensure_future(call.read())
        await daemon.wait_for("finish")
        call.cancel()
        await asyncio.wait({reading})
        await asyncio.sleep(0.1)
        assert stack.client.open_requests == 1
        daemon.events.put_nowait(ended[0])
        while len(stack.jobs):
            await asyncio.sleep(0.005)
        assert daemon.kinds()[-1] == "finish"
        assert len(admits(daemon)) == 1

    run(tmp_path, scenario, at={9})


def test_a_reader_that_leaves_while_it_is_paused(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        daemon.override["admit"] = lambda message: daemon._on_admit(message) if len(admits(daemon)) == 0 else []
        call = stack.engine.Decode(order([1, 2, 3], 40))
        async for reply in call:
            if reply.HasField("paused"):
                break
        await daemon.wait_for("admit", 2)
        call.cancel()
        await daemon.wait_for("abort")
        assert len(finishes(daemon)) == 1

    run(tmp_path, scenario, at={9})


def test_a_second_admission_that_fails_fails_the_request(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        def refuse(message: Message) -> list[Event]:
            if not admits(daemon):
                return daemon._on_admit(message)
            error = common_pb2.Error(code=common_pb2.ERROR_DEADLINE_EXCEEDED, message="waited 30 s for admission")
            return [Event(failed=worker_pb2.Failed(name=message.admit.name, error=error))]

        daemon.override["admit"] = refuse
        output: list[int] = []

        async def read() -> None:
            async for reply in stack.engine.Decode(order([1, 2, 3], 40)):
                output.extend(reply.generated.tokens)

        with pytest.raises(grpc.aio.AioRpcError, match="waited 30 s for admission") as failed:
            await read()
        assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert output == output_of([1, 2, 3], 7)
        await daemon.wait_for("abort")

    run(tmp_path, scenario, at={8})


def test_a_failure_that_crosses_the_finish_of_a_retraction_fails_the_request(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack, retracting: Retracting) -> None:
        def fail(message: Message) -> list[Event]:
            error = common_pb2.Error(code=common_pb2.ERROR_INTERNAL, message="the pool is gone")
            failed = Event(failed=worker_pb2.Failed(name=message.finish.name, error=error))
            return [failed, *daemon._on_finish(message)]

        daemon.override["finish"] = fail
        with pytest.raises(grpc.aio.AioRpcError, match="the pool is gone"):
            await decode(stack, order([1, 2, 3], 40))
        await daemon.wait_for("abort")
        assert len(admits(daemon)) == 1

    run(tmp_path, scenario, at={8})
