"""A connector's tools over a scripted daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.client.client import DaemonClient
from kvferry.connectors.daemon_requests import RequestTools
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import OpenSession, Sessions
from kvferry.connectors.worker_state import Reports
from kvferry.proto import common_pb2
from kvferry.threads import CallThread
from tests.client.requests import FACTS, GEOMETRY
from tests.connectors.engine_memory import EngineMemory
from tests.support.fake_daemon import FakeDaemon


@asynccontextmanager
async def tools_at(folder: Path, role: common_pb2.Role) -> AsyncIterator[tuple[FakeDaemon, DaemonClient, RequestTools]]:
    """Those of a worker half in this role, with a session and an engine of four blocks."""

    async def nobody() -> None: ...

    async with FakeDaemon(folder, GEOMETRY) as daemon:
        client = await DaemonClient.connect(daemon.socket, role, FACTS, "w", deadline_s=10)
        connect: OpenSession = DaemonClient.connect  # type: ignore[assignment]  # never called
        sessions = Sessions(connect, quiet=nobody, changed=lambda there: None, settled=asyncio.Event())
        sessions.client = client
        engine, thread = EngineMemory(4), CallThread("copies")
        try:
            yield (
                daemon,
                client,
                RequestTools(Settings(daemon.socket), engine.map, engine.mover, sessions, thread, Reports()),
            )
        finally:
            assert thread.close(10.0)
            await client.close()
