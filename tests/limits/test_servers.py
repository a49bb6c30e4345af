"""Bounds of servers themselves, over real gRPC: messages, workers, peers, calls at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client.client import DaemonClient
from kvferry.client.requests import HandshakeFailed, RequestName
from kvferry.client.stream import MAX_RECEIVED_MESSAGE_BYTES
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.daemon.grpc_servers import most_calls
from kvferry.daemon.services.worker_events import MAX_LATE_MS
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, peer_pb2, peer_pb2_grpc
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_MESSAGE_BYTES, MAX_NAME_CHARS, MAX_REASON_CHARS
from kvferry.proto.worker_pb2_grpc import WorkerStub
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.workers.server import CALLS_PER_REQUEST, MORE_CALLS
from tests.support.engines import OPTIONS, Engines, stats
from tests.support.fake_daemon import FakeDaemon
from tests.support.stacks import SmallSystem

pytestmark = pytest.mark.timeout(120)
PAGE = 16
LONG = [*OPTIONS, ("grpc.max_send_message_length", -1)]
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=4, dtype="float32", page_size=4)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Replica, Replica]]:
    """Prefill and decode: with one peer, two workers and two requests of a worker at most."""
    spec = SmallSystem(
        page_size=PAGE,
        prefill_flags=["--max-peers", "1", "--max-workers", "2"],
        decode_flags=["--max-workers", "2"],
        worker_flags=["--max-requests", "2"],
    )
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, spec)
        deadline = time.monotonic() + 20
        while stats(decodes[0]).peers[0].state != "up":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield prefills[0], decodes[0]


def facts_of(replica: Replica) -> common_pb2.NamespaceFacts:
    with grpc.insecure_channel(replica.worker_address, OPTIONS) as channel:
        return engine_pb2_grpc.EngineStub(channel).Describe(engine_pb2.DescribeRequest(), timeout=5).facts


def code_of(call: grpc.RpcError) -> grpc.StatusCode:
    return call.code()


def lookup_of(nbytes: int) -> cache_pb2.LookupRequest:
    """A request of so many bytes."""
    request = cache_pb2.LookupRequest(namespace_id=bytes(32), digests=bytes(MAX_MESSAGE_BYTES))
    request.digests = bytes(2 * MAX_MESSAGE_BYTES - request.ByteSize() + nbytes - MAX_MESSAGE_BYTES)
    assert request.ByteSize() == nbytes
    return request


def test_a_message_of_a_byte_too_many_is_refused(pair: tuple[Replica, Replica]) -> None:
    prefill, decode = pair
    for address in (prefill.daemon_address, decode.daemon_address, f"unix:{decode.socket}"):
        with grpc.insecure_channel(address, LONG) as channel:
            for nbytes, code in (
                (MAX_MESSAGE_BYTES, grpc.StatusCode.INVALID_ARGUMENT),  # of its digests, by the service
                (MAX_MESSAGE_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    cache_pb2_grpc.CacheStub(channel).Lookup(lookup_of(nbytes), timeout=20)
                assert refused.value.code() is code, refused.value.details()
    with grpc.insecure_channel(decode.worker_address, LONG) as channel:
        for nbytes, code in (
            (MAX_MESSAGE_BYTES, grpc.StatusCode.UNIMPLEMENTED),  # of a decode worker
            (MAX_MESSAGE_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            name = common_pb2.RequestName(request_id=bytes(nbytes - 10))
            request = engine_pb2.PrefillRequest(name=name)
            assert request.ByteSize() == nbytes
            with pytest.raises(grpc.RpcError) as refused:
                engine_pb2_grpc.EngineStub(channel).Prefill(request, timeout=20)
            assert refused.value.code() is code, refused.value.details()


def test_one_worker_more_than_allowed_is_refused(pair: tuple[Replica, Replica]) -> None:
    facts = facts_of(pair[1])

    async def come() -> None:
        second = await DaemonClient.connect(pair[1].socket, common_pb2.ROLE_DECODE, facts, "second")
        with pytest.raises(HandshakeFailed, match=r"RESOURCE_EXHAUSTED: 2 workers are here.*--max-workers is 2"):
            await DaemonClient.connect(pair[1].socket, common_pb2.ROLE_DECODE, facts, "third")
        await second.close()

    asyncio.run(come())


def test_a_workers_name_has_a_length(pair: tuple[Replica, Replica]) -> None:
    facts = facts_of(pair[1])

    async def come() -> None:
        long = "w" * MAX_NAME_CHARS
        await (await DaemonClient.connect(pair[1].socket, common_pb2.ROLE_DECODE, facts, long)).close()
        with pytest.raises(HandshakeFailed, match="INVALID_ARGUMENT: worker has 129 characters; the bound is 128"):
            await DaemonClient.connect(pair[1].socket, common_pb2.ROLE_DECODE, facts, long + "w")

    asyncio.run(come())


def test_one_peer_more_than_allowed_is_refused(pair: tuple[Replica, Replica]) -> None:
    facts = facts_of(pair[0])
    hello = peer_pb2.PeerHello(
        protocol=1,
        protocol_min=1,
        daemon="second",
        incarnation=bytes(16),
        role=common_pb2.ROLE_DECODE,
        facts=facts,
        epoch=1,
        page_bytes=KVGeometry.from_proto(facts.geometry).page_bytes,
    )
    with grpc.insecure_channel(pair[0].daemon_address, OPTIONS) as channel:
        call = peer_pb2_grpc.PeerStub(channel).Session(iter([peer_pb2.PeerMessage(hello=hello)]), timeout=10)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details() == "1 peers are connected; --max-peers is 1"


@pytest.mark.parametrize("of", ["tcp", pytest.param("unix", marks=pytest.mark.nightly), "worker"])
def test_so_many_calls_at_a_time(pair: tuple[Replica, Replica], of: str) -> None:
    """Watches of health beside what is there: one too many is refused, and what was there goes on."""
    prefill, decode = pair
    target, most, there = {
        "tcp": (prefill.daemon_address, most_calls(1), 1),  # the session of the decode daemon
        "unix": (f"unix:{decode.socket}", most_calls(2), 0),  # workers speak frames beside it
        "worker": (decode.worker_address, 2 * CALLS_PER_REQUEST + MORE_CALLS, 0),
    }[of]

    async def watch() -> None:
        async with grpc.aio.insecure_channel(target, OPTIONS) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            calls: list[grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]] = []
            while len(calls) < most - there:  # gRPC itself refuses bursts of a thousand
                some = [health.Watch(request) for _ in range(min(200, most - there - len(calls)))]
                assert {(await call.read()).status for call in some} == {health_pb2.HealthCheckResponse.SERVING}
                calls += some
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health.Check(request, timeout=10)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.value.details() == "Concurrent RPC limit exceeded!"
            calls.pop().cancel()
            for _ in range(100):  # the server hears of it a moment later
                try:
                    await health.Check(request, timeout=10)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
            else:
                raise AssertionError("a call that has ended counts on")
            for call in calls:
                call.cancel()

    asyncio.run(watch())
    with Engines(prefill, decode) as engines:
        assert engines.turn(list(range(100)), 4).error is None
    assert stats(decode).peers[0].state == "up"


class RawWorker:
    """A worker's stream with nothing behind it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._facts = facts_of(replica)
        self._facts.geometry.page_size = 0

    async def __aenter__(self) -> RawWorker:
        self._channel = grpc.aio.insecure_channel(f"unix:{self._replica.socket}", options=LONG)
        self.call = WorkerStub(self._channel).Session()
        hello = wire.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker="raw", facts=self._facts)
        await self.call.write(wire.WorkerMessage(hello=hello))
        self._file = os.open((await self.call.read()).welcome.session_file, os.O_RDWR)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        await self.call.write(wire.WorkerMessage(attached=wire.Attached()))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        os.close(self._file)
        await self._channel.close()


def test_how_late_a_worker_may_hear_has_a_bound(pair: tuple[Replica, Replica]) -> None:
    facts = facts_of(pair[1])

    async def come(late_ms: int) -> None:
        client = await DaemonClient.connect(
            pair[1].socket, common_pb2.ROLE_DECODE, facts, "late", deadline_s=10, late_ms=late_ms
        )
        await client.close()

    asyncio.run(come(MAX_LATE_MS))
    with pytest.raises(HandshakeFailed, match=f"late_ms is {MAX_LATE_MS + 1}; it may be {MAX_LATE_MS} at most"):
        asyncio.run(come(MAX_LATE_MS + 1))


def abort_of(number: int, reason: str = "") -> wire.WorkerMessage:
    name = common_pb2.RequestName(request_id=number.to_bytes(16, "big"), attempt=1)
    return wire.WorkerMessage(abort=wire.Abort(name=name, reason=reason))


def test_a_reason_of_any_length_ends_the_request_and_is_not_kept(pair: tuple[Replica, Replica]) -> None:
    """An abort is never refused: its pages would stay. Nobody reads why."""

    async def abort() -> None:
        async with RawWorker(pair[1]) as worker:
            for number, length in enumerate((MAX_REASON_CHARS, MAX_REASON_CHARS + 1, MAX_MESSAGE_BYTES - 64), 1):
                await worker.call.write(abort_of(number, "x" * length))
                assert (await worker.call.read()).ended.name == abort_of(number).abort.name

    asyncio.run(abort())


def test_a_reason_is_cut_where_it_is_made(tmp_path: Path) -> None:
    async def abort() -> None:
        facts = common_pb2.NamespaceFacts(model="synthetic", geometry=GEOMETRY.to_proto())
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, facts, "w")
            for length in (MAX_REASON_CHARS, MAX_REASON_CHARS + 1):
                name = RequestName(os.urandom(16), 1)
                await client.admit(
                    name, digests=b"", tokens=1, tail_digest=bytes(32), prefill="", max_new_tokens=1, deadline_s=5
                )
                await client.abort(name, "x" * length)
                assert len(daemon.last("abort").abort.reason) == MAX_REASON_CHARS
            await client.close()

    asyncio.run(abort())


def test_a_message_of_the_daemon_has_a_length_too(tmp_path: Path) -> None:
    ready = wire.Ready(name=abort_of(1).abort.name)
    ready.aux = bytes(MAX_RECEIVED_MESSAGE_BYTES - wire.WorkerEvent(ready=ready).ByteSize() - 8)  # tags and lengths
    within = wire.WorkerEvent(ready=ready)
    assert within.ByteSize() == MAX_RECEIVED_MESSAGE_BYTES
    ready.aux += b"x"

    async def hear() -> None:
        facts = common_pb2.NamespaceFacts(model="synthetic", geometry=GEOMETRY.to_proto())
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, facts, "w")
            daemon.events.put_nowait(within)  # of a request that is not open: passed over
            daemon.events.put_nowait(wire.WorkerEvent(ready=ready))
            gone = await asyncio.wait_for(asyncio.shield(client.gone), 20)
            assert f"a message of {MAX_RECEIVED_MESSAGE_BYTES + 1} bytes came; it may have" in str(gone)
            await client.close()

    asyncio.run(hear())
