"""`kvferry worker` as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.proto import common_pb2, engine_pb2, engine_pb2_grpc, worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from tests.support.fake_daemon import Event, FakeDaemon, Message

GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=16, dtype="float32", page_size=64, layout=Layout.PAGE_NHD)


@asynccontextmanager
async def worker(
    daemon: FakeDaemon, *flags: str, role: str = "decode"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, killed in the end if it still runs, and the address of its ready line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry", "worker", role, "--synthetic", "--listen", "127.0.0.1:0"),
        *("--socket", daemon.socket, *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        assert line[:3] == ["ready:", role, "worker"]
        yield process, line[3]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def request(tokens: int, new_tokens: int) -> engine_pb2.DecodeRequest:
    name = common_pb2.RequestName(request_id=os.urandom(16), attempt=1)
    return engine_pb2.DecodeRequest(name=name, tokens=range(tokens), max_new_tokens=new_tokens)


async def decode(address: str, order: engine_pb2.DecodeRequest) -> list[int]:
    async with grpc.aio.insecure_channel(address) as channel:
        replies = [reply async for reply in engine_pb2_grpc.EngineStub(channel).Decode(order)]
    assert replies[-1].HasField("ending")
    return [token for reply in replies for token in reply.generated.tokens]


def test_terminated_while_it_decodes_it_finishes_and_says_quiesced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeDaemon(tmp_path, GEOMETRY) as daemon,
            worker(daemon, "--synthetic-decode-us", "5000") as (process, address),
        ):
            await decode(address, request(100, 3))
            running = asyncio.create_task(decode(address, request(200, 100)))
            await daemon.wait_for("admit", 2)
            process.send_signal(signal.SIGTERM)
            assert len(await running) == 100
            assert await asyncio.wait_for(process.wait(), 30) == 0
            assert daemon.kinds()[-2:] == ["finish", "quiesced"]
            assert not daemon.lock_is_held()
            assert np.count_nonzero(daemon.pool[0]) > 0

    asyncio.run(scenario())


def test_grace_is_bounded_and_what_still_runs_is_cut_short(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeDaemon(tmp_path, GEOMETRY) as daemon,
            worker(daemon, "--synthetic-decode-us", "10000", "--grace", "0.2") as (process, address),
        ):
            running = asyncio.create_task(decode(address, request(10, 3000)))
            await daemon.wait_for("admit")
            process.send_signal(signal.SIGTERM)
            (error,) = await asyncio.gather(running, return_exceptions=True)
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert await asyncio.wait_for(process.wait(), 30) == 0
            assert daemon.kinds()[-2:] == ["finish", "quiesced"]  # what was computed is kept

    asyncio.run(scenario())


def test_warm_up_is_done_before_it_is_ready_and_enters_no_cache(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon, worker(daemon, "--warmup", "3") as (_, address):
            assert daemon.kinds() == ["hello", "attached", *["admit", "finish"] * 3]
            admits = [message.admit for message in daemon.received[2::2]]
            assert {(admit.warmup, admit.prefill) for admit in admits} == {(True, "")}
            await decode(address, request(100, 3))
            assert not daemon.last("admit").admit.warmup

    asyncio.run(scenario())


def test_warm_up_of_a_prefill_worker_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon, worker(daemon, "--warmup", "2", role="prefill"):
            assert daemon.kinds() == ["hello", "attached", *["begin", "progress", "abort"] * 2]
            assert daemon.last("begin").begin.warmup

    asyncio.run(scenario())


def test_a_warm_up_that_fails_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:

            def refuse(message: Message) -> list[Event]:
                error = common_pb2.Error(code=common_pb2.ERROR_RESOURCE_EXHAUSTED, message="the pool is small")
                return [Event(failed=worker_pb2.Failed(name=message.admit.name, error=error))]

            daemon.override["admit"] = refuse
            async with worker(daemon, "--warmup", "3") as (_, address):
                assert daemon.kinds().count("admit") == 1
                del daemon.override["admit"]
                assert len(await decode(address, request(100, 3))) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("told", [True, False])
def test_it_ends_while_it_warms_up(tmp_path: Path, told: bool) -> None:
    """Told so, or because its daemon does; it never says that it is ready."""

    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            daemon.override["admit"] = lambda message: []
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvferry", "worker", "decode", "--synthetic", "--listen", "127.0.0.1:0"),
                *("--socket", daemon.socket, "--warmup", "1"),
                stdout=asyncio.subprocess.PIPE,
            )
            await asyncio.wait_for(daemon.wait_for("admit"), 60)
            if told:
                process.send_signal(signal.SIGTERM)
            else:
                daemon.events.put_nowait(None)
            output, _ = await asyncio.wait_for(process.communicate(), 30)
            assert (process.returncode, output) == (0 if told else 1, b"")
            if told:
                assert daemon.kinds()[-2:] == ["abort", "quiesced"]

    asyncio.run(scenario())


def test_told_so_it_listens_on_every_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeDaemon(tmp_path, GEOMETRY) as daemon,
            worker(daemon, "--listen", "0.0.0.0:0", "--insecure") as (_, address),
        ):
            assert address.startswith("0.0.0.0:")
            assert len(await decode(address.replace("0.0.0.0", "127.0.0.1"), request(100, 3))) == 3

    asyncio.run(scenario())


def test_killed_its_lock_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon, worker(daemon) as (process, _):
            assert daemon.lock_is_held()
            process.kill()
            await process.wait()
            assert not daemon.lock_is_held()

    asyncio.run(scenario())


def test_it_ends_with_its_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon, worker(daemon) as (process, _):
            daemon.events.put_nowait(None)
            assert await asyncio.wait_for(process.wait(), 30) == 1

    asyncio.run(scenario())


def test_without_a_daemon_it_ends_with_a_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry", "worker", "prefill", "--synthetic", "--listen", "127.0.0.1:0"),
            *("--socket", str(tmp_path / "none"), "--connect-timeout", "0.2"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert b"no daemon answered" in errors

    asyncio.run(scenario())


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry", "worker", "prefill", "--model", str(tmp_path)),
            *("--listen", "127.0.0.1:0", "--socket", str(tmp_path / "none")),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 2
        assert f"{tmp_path} has no config.json".encode() in errors

    asyncio.run(scenario())


def test_an_address_in_use_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--listen", address, "--model", str(tmp_path), "--socket", str(tmp_path / "none"))
        command = (sys.executable, "-m", "kvferry", "worker", "decode", *flags)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == f"kvferry worker: --listen {address}: Address already in use\n"


@pytest.mark.nightly
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    flags = ("--random-weights", "tiny", "--device", "cuda:0", "--socket", str(tmp_path / "none"))
    command = (sys.executable, "-m", "kvferry", "worker", "decode", "--listen", "127.0.0.1:0", *flags)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--device is cuda:0, but torch" in ended.stderr and "Traceback" not in ended.stderr


def test_with_keys_only_calls_that_carry_one_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "keys").write_text("token-of-a-front-end\n")
        async with (
            FakeDaemon(tmp_path, GEOMETRY) as daemon,
            worker(daemon, "--api-keys", str(tmp_path / "keys")) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            engine = engine_pb2_grpc.EngineStub(channel)
            known = (("authorization", "Bearer token-of-a-front-end"),)
            described = await engine.Describe(engine_pb2.DescribeRequest(), metadata=known)
            assert described.role == common_pb2.ROLE_DECODE
            for wrong in ((), (("authorization", "Bearer another-token"),)):
                with pytest.raises(grpc.aio.AioRpcError, match="a token that this worker's --api-keys"):
                    await engine.Describe(engine_pb2.DescribeRequest(), metadata=wrong)
                with pytest.raises(grpc.aio.AioRpcError, match="a token that this worker's --api-keys"):
                    await engine.Decode(request(4, 1), metadata=wrong).read()
            health = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest())
            assert status.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(scenario())
