"""How the worker's half of a connector comes to a session with the daemon."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from kvferry.connectors.settings import Settings
from kvferry.proto import common_pb2
from kvferry.workers.client import DaemonClient


class Connect(Protocol):
    def __call__(self, *, deadline_s: float) -> Coroutine[Any, Any, DaemonClient]: ...


class Refused(RuntimeError):
    """The daemon is there, and will not have this engine."""


def connector_of(settings: Settings, role: common_pb2.Role, facts: common_pb2.NamespaceFacts, worker: str) -> Connect:
    async def connect(*, deadline_s: float) -> DaemonClient:
        return await DaemonClient.connect(settings.socket, role, facts, worker, deadline_s=deadline_s)

    return connect
