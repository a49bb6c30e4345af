"""How the worker's half of a connector comes to a session with the daemon."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.connectors.settings import Settings
from kvferry.proto import common_pb2
from kvferry.workers.client import DaemonClient
from kvferry.workers.requests import HandshakeFailed


class Connect(Protocol):
    def __call__(self, *, deadline_s: float) -> Coroutine[Any, Any, DaemonClient]: ...


class Refused(RuntimeError):
    """The daemon is there, and will not have this engine."""


def pool_of(client: DaemonClient) -> NDArray[np.uint8]:
    """uint8 (pages, page_bytes): the daemon's pool, writable."""
    memory = client.pools.memories[0]
    assert isinstance(memory, np.ndarray)
    return memory.reshape(client.pools.pages, -1)


def connector_of(settings: Settings, role: common_pb2.Role, facts: common_pb2.NamespaceFacts, worker: str) -> Connect:
    async def connect(*, deadline_s: float) -> DaemonClient:
        client = await DaemonClient.connect(settings.socket, role, facts, worker, deadline_s=deadline_s)
        memories = client.pools.memories
        if len(memories) != 1 or not isinstance(memories[0], np.ndarray):
            await client.close()
            raise HandshakeFailed("the daemon's pool is no shared memory of one rank: start it without --device")
        return client

    return connect
