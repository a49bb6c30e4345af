"""A worker behind its gRPC engine service, in this process, against a daemon's socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from kvferry.client.client import DaemonClient
from kvferry.proto import common_pb2, engine_pb2_grpc
from kvferry.workers.decode import DecodeWorker
from kvferry.workers.engine_service import EngineService
from kvferry.workers.jobs import Jobs
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import Compute
from kvferry.workers.models.synthetic import SimulatedTime, SyntheticCompute
from kvferry.workers.orders import Bounds
from kvferry.workers.prefill import PrefillWorker
from kvferry.workers.server import WorkerConfig, describe

NO_TIME = SimulatedTime()


@dataclass
class WorkerStack:
    client: DaemonClient
    jobs: Jobs
    engine: engine_pb2_grpc.EngineStub


@asynccontextmanager
async def worker_stack(
    socket: str,
    role: common_pb2.Role,
    facts: common_pb2.NamespaceFacts,
    *,
    chunk_tokens: int = 6,
    max_requests: int = 8,
    simulated: SimulatedTime = NO_TIME,
    make_compute: Callable[[DaemonClient], Compute] | None = None,
) -> AsyncIterator[WorkerStack]:
    client = await DaemonClient.connect(socket, role, facts, "test", deadline_s=10)
    compute = make_compute(client) if make_compute else SyntheticCompute(client.pools, simulated)
    thread = ComputeThread()
    jobs = Jobs(max_requests)
    make = PrefillWorker if role == common_pb2.ROLE_PREFILL else DecodeWorker
    worker = make(client, compute, thread, chunk_tokens=chunk_tokens)
    config = WorkerConfig(role, "test", socket, "", facts, "synthetic", 4096, chunk_tokens, 0, max_requests, 1, 10)
    bounds = Bounds(client.welcome.max_tokens, compute.vocabulary, client.geometry.page_size)
    server = grpc.aio.server()
    service = EngineService(describe(config, client, bounds.max_tokens), bounds, worker, jobs)
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield WorkerStack(client, jobs, engine_pb2_grpc.EngineStub(channel))
    finally:
        await channel.close()
        await jobs.drain(0)
        if isinstance(worker, PrefillWorker):
            await worker.close()
        await server.stop(0)
        thread.close()
        await client.close()
