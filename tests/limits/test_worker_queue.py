"""Events that wait for a worker that does not read."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.workers import WORKER_QUEUE
from kvferry.proto import common_pb2
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import root_digest


class Aborted(Exception):
    pass


class Deaf:
    """A worker's stream that takes the welcome and no more. Each of its aborts is answered."""

    def __init__(self, aborts: int) -> None:
        self._left = aborts
        self._welcome: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()
        self._said = 0
        self._file = -1

    async def read(self) -> object:
        self._said += 1
        if self._said == 1:
            geometry = common_pb2.Geometry(layers=1, kv_heads=1, head_dim=16, dtype="float32")
            facts = common_pb2.NamespaceFacts(
                model="m", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
            )
            hello = wire.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker="deaf", facts=facts)
            return wire.WorkerMessage(hello=hello)
        if self._said == 2:
            self._file = os.open((await self._welcome).session_file, os.O_RDWR)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            return wire.WorkerMessage(attached=wire.Attached())
        await asyncio.sleep(0)
        self._left -= 1
        if self._left < 0:
            return grpc.aio.EOF
        name = common_pb2.RequestName(request_id=self._left.to_bytes(16, "big"), attempt=1)
        return wire.WorkerMessage(abort=wire.Abort(name=name))

    async def write(self, event: wire.WorkerEvent) -> None:
        if self._welcome.done():
            await asyncio.Event().wait()
        self._welcome.set_result(event.welcome)

    async def abort(self, code: grpc.StatusCode, details: str, *metadata: object) -> NoReturn:
        raise Aborted(f"{code.name}: {details}")

    def close(self) -> None:
        os.close(self._file)


async def session(folder: Path, aborts: int) -> None:
    config = DaemonConfig(role="decode", shm_dir=str(folder), page_size=16, pool_bytes=1 << 20)
    side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
    worker = Deaf(aborts)
    try:
        service = WorkerService({"decode": side}, "127.0.0.1:7070")
        await asyncio.wait_for(service.Session(None, cast(Any, worker)), 60)
    finally:
        worker.close()
        await side.close()


def test_a_worker_that_does_not_read_loses_its_stream(tmp_path: Path) -> None:
    most = WORKER_QUEUE + 1  # one is being written
    asyncio.run(session(tmp_path, most))
    with pytest.raises(Aborted, match="RESOURCE_EXHAUSTED: the worker does not read its events"):
        asyncio.run(session(tmp_path, most + 1))
