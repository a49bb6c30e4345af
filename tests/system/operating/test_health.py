"""A daemon that does not move says that it does not serve; a courier that does not move is replaced."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from tests.support.engines import OPTIONS, Engines, courier_pids, settled, standing_still, stats, wait_until
from tests.support.stacks import SmallSystem
from tests.system.clients import client_with_pages

PAGE = 16
pytestmark = pytest.mark.timeout(90)


def health(replica: Replica, timeout: float = 5.0) -> str:
    with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_a_stopped_courier_is_replaced_and_a_stopped_daemon_is_not_healthy(stack: Stack) -> None:
    """Although nothing is under way that could fail."""
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decode_flags=["--stalled-seconds", "1"]))
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(list(range(100)), 4).error is None
        assert health(decodes[0]) == "SERVING"
        (courier,) = courier_pids(decodes[0].daemon.popen.pid)
        with grpc.insecure_channel(decodes[0].daemon_address, OPTIONS) as channel:
            said = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert next(said).status == health_pb2.HealthCheckResponse.SERVING
            os.kill(courier, signal.SIGSTOP)
            assert next(said).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert next(said).status == health_pb2.HealthCheckResponse.SERVING
            said.cancel()
        wait_until(lambda: courier_pids(decodes[0].daemon.popen.pid) not in ([], [courier]), 15)
        wait_until(lambda: health(decodes[0]) == "SERVING" and stats(decodes[0]).peers[0].state == "up", 15)
        turn = engines.turn(list(range(100)), 4)
        assert turn.error is None and turn.matched == 96
    with standing_still([decodes[0].daemon.popen.pid]):
        assert health(decodes[0], 0.5) == "DEADLINE_EXCEEDED"
    wait_until(lambda: health(decodes[0]) == "SERVING", 15)
    settled(decodes[0])
    settled(prefills[0])


def test_pages_of_lost_workers_are_bounded(stack: Stack) -> None:
    """Behind the bound a request is refused, with the reason; the proof that the worker is gone makes room again."""
    spec = SmallSystem(page_size=PAGE, prefills=0, decode_flags=["--orphaned-share", "0"])
    _, decodes = start_replicas(stack, spec)
    decode = decodes[0]
    assert stats(decode).quarantine.orphaned_bound == 0

    async def break_the_stream() -> None:
        client = await client_with_pages(decode)
        client._stream.frames.abort()
        await asyncio.to_thread(wait_until, lambda: stats(decode).pool.orphaned > 0, 15)
        waiting = stats(decode).quarantine
        assert (waiting.orphaned_pages, waiting.lost_workers) == (7, 1)
        with Engines(None, decode) as engines:
            refused = await asyncio.to_thread(engines.turn, list(range(100)), 2)
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "7 pages of workers that are lost (1) or do not answer are orphaned" in refused.details
            await client.close()  # lets the file lock go
            await asyncio.to_thread(wait_until, lambda: stats(decode).pool.orphaned == 0, 15)
            served = await asyncio.to_thread(engines.turn, list(range(100)), 2)
            assert served.error is None, served.details

    asyncio.run(break_the_stream())
    settled(decode)
