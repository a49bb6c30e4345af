"""A worker process from its daemon's Welcome to its last word."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.client.client import DaemonClient
from kvferry.client.engine_pools import MakePools
from kvferry.client.requests import DaemonEnded, DaemonGone, HandshakeFailed
from kvferry.pauses import short_collections
from kvferry.proto import common_pb2, engine_pb2, engine_pb2_grpc
from kvferry.secret_files import ApiKeys
from kvferry.signals import end_signals
from kvferry.workers.decode import DecodeWorker
from kvferry.workers.engine_service import MAX_MESSAGE_BYTES, EngineService
from kvferry.workers.jobs import Jobs
from kvferry.workers.login import Login
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import BatchCompute, Compute
from kvferry.workers.models.pacing import Pace
from kvferry.workers.models.step_batches import StepBatches
from kvferry.workers.orders import Bounds
from kvferry.workers.prefill import PrefillWorker
from kvferry.workers.record import Record
from kvferry.workers.warm_up import warm_up

CALLS_PER_REQUEST = 4  # its call, an abort, and the same again of one that is refused
MORE_CALLS = 1024  # of anybody: descriptions, health and watches of it

_log = logging.getLogger(__name__)


class WorkerConfig(NamedTuple):
    role: common_pb2.Role
    name: str  # for logs
    socket: str  # the daemon's Unix socket
    listen: str  # host:port of the engine service
    facts: common_pb2.NamespaceFacts  # geometry.page_size 0: the daemon's
    tokenizer: str  # path of the model's folder, or "synthetic"
    model_max_tokens: int  # what the model or the operator allows for prompt + output
    chunk_tokens: int
    local_prefill_max_tokens: int
    max_requests: int
    grace_s: float  # for running requests after SIGTERM
    connect_deadline_s: float
    warmups: int = 0  # requests of its own before it is ready
    max_running: int = 0  # decode: requests with the daemon at a time; 0: any number
    stream_interval: int = 1  # tokens of a reply that travel together, behind the first
    make_pools: MakePools | None = None  # of its own, that it registers as the daemon's pool
    max_batch: int = 1  # decode: steps that are computed together; above 1 the compute is a BatchCompute
    make_pace: Callable[[DaemonClient], Pace] | None = None  # of an engine whose time is modelled
    make_record: Callable[[DaemonClient], Record] | None = None
    keys: ApiKeys | None = None  # of front ends; None: whoever reaches it may call it


async def serve(config: WorkerConfig, make_compute: Callable[[DaemonClient], Compute]) -> int:
    """Serves until SIGTERM or SIGINT (returns 0 after draining) or until the daemon is gone (returns 1)."""
    stop = asyncio.Event()
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        client = await _connect(config, stop)
    except HandshakeFailed as error:
        _log.error("%s", error)
        return 1
    if client is None:
        return 0
    client.gone.add_done_callback(_say_gone)
    thread = ComputeThread()
    jobs = Jobs(config.max_requests)
    try:
        try:
            compute = make_compute(client)
            worker = _worker(config, client, compute, thread)
        except ValueError as error:
            _log.error("the pool of daemon %r does not fit: %s", client.welcome.daemon, error)
            return 1
        bounds = Bounds(
            max_tokens=min(config.model_max_tokens, client.welcome.max_tokens),
            vocabulary=compute.vocabulary,
            page_size=client.geometry.page_size,
        )
        description = describe(config, client, bounds.max_tokens)
        service = EngineService(description, bounds, worker, jobs, stream_interval=config.stream_interval)
        stopped = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopped, client.gone}
        if config.warmups:
            await _until(ends, warm_up(worker, bounds, config.warmups))
        if not any(end.done() for end in ends):
            serving = await _listen(config, service)
            with short_collections():
                host = config.listen.rpartition(":")[0]
                print(f"ready: {_what(config.role)} worker {host}:{serving.port}", flush=True)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await serving.enter_graceful_shutdown()
            await jobs.drain(config.grace_s if not client.gone.done() else 0)
            await worker.close()
            await serving.server.stop(5)
        stopped.cancel()
    finally:
        thread.close()  # from here on nothing of this process touches a page
        await client.close()
    return 1 if client.gone.done() else 0


def _say_gone(gone: asyncio.Future[DaemonGone]) -> None:
    why = gone.result()
    _log.log(logging.WARNING if isinstance(why, DaemonEnded) else logging.ERROR, "%s", why)


def describe(config: WorkerConfig, client: DaemonClient, max_tokens: int) -> engine_pb2.DescribeReply:
    """The worker's description of itself for a front end."""
    facts = common_pb2.NamespaceFacts()
    facts.CopyFrom(config.facts)
    facts.geometry.CopyFrom(client.welcome.geometry)
    return engine_pb2.DescribeReply(
        role=config.role,
        model=config.facts.model,
        daemon=client.welcome.daemon,
        daemon_address=client.welcome.peer_address,
        facts=facts,
        namespace_id=client.welcome.namespace_id,
        max_tokens=max_tokens,
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        chunk_tokens=config.chunk_tokens,
        tokenizer=config.tokenizer,
    )


async def _connect(config: WorkerConfig, stop: asyncio.Event) -> DaemonClient | None:
    """None when the worker is told to stop before the daemon is there."""
    try:
        own = None if config.make_pools is None else await asyncio.to_thread(config.make_pools)
    except (OSError, ValueError) as error:
        raise HandshakeFailed(f"the worker's own pool cannot be made: {error}") from error
    connecting = asyncio.create_task(
        DaemonClient.connect(
            config.socket, config.role, config.facts, config.name, deadline_s=config.connect_deadline_s, own=own
        )
    )
    stopped = asyncio.create_task(stop.wait())
    ends: set[asyncio.Future[Any]] = {connecting, stopped}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not connecting.done():
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        return None
    return connecting.result()


async def _until(ends: set[asyncio.Future[Any]], work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, cancelled when one of `ends` is done before it."""
    task: asyncio.Future[Any] = asyncio.create_task(work)
    await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def _worker(
    config: WorkerConfig, client: DaemonClient, compute: Compute, thread: ComputeThread
) -> PrefillWorker | DecodeWorker:
    pace = None if config.make_pace is None else config.make_pace(client)
    record = None if config.make_record is None else config.make_record(client)
    if config.role == common_pb2.ROLE_PREFILL:
        return PrefillWorker(client, compute, thread, chunk_tokens=config.chunk_tokens, pace=pace, record=record)
    if pace is None and config.max_batch > 1:
        pace = StepBatches(thread, cast(BatchCompute, compute), config.max_batch)
    return DecodeWorker(
        client,
        compute,
        thread,
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        pace=pace,
        record=record,
    )


class _Serving(NamedTuple):
    server: grpc.aio.Server
    port: int
    enter_graceful_shutdown: Callable[[], Awaitable[None]]  # of the health service


async def _listen(config: WorkerConfig, service: EngineService) -> _Serving:
    server = grpc.aio.server(
        interceptors=() if config.keys is None else (Login(config.keys),),
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # two workers on one port is a mistake: the second must hear of it
        ),
        maximum_concurrent_rpcs=CALLS_PER_REQUEST * config.max_requests + MORE_CALLS,
    )
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    status = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    port = server.add_insecure_port(config.listen)
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    return _Serving(server, port, status.enter_graceful_shutdown)


def _what(role: common_pb2.Role) -> str:
    return "prefill" if role == common_pb2.ROLE_PREFILL else "decode"
