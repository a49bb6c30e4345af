"""The health of the daemon and of its engines, as grpc.health.v1 has it, for probes and for who watches it.

A change is there at once, for whoever asks. Each watcher is told of the last one as fast as it reads, and waited for by
its own call alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.proto.health import ENGINE_SERVICE, HEALTH_WHY

if TYPE_CHECKING:
    from kvferry.daemon.services.worker import Context

STATUS = health_pb2.HealthCheckResponse.ServingStatus
MAX_WHY_BYTES = 4096
DAEMON = ""  # the service that stands for the whole server


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    def __init__(self) -> None:
        self._why: dict[str, tuple[str, ...]] = {DAEMON: (), ENGINE_SERVICE: ("no engine has come",)}
        self._draining = False
        self._changes: set[asyncio.Event] = set()  # of each watcher

    def set(self, service: str, why: Sequence[str]) -> None:
        """Says why a service does not serve; no reason: it does. Changes nothing while the daemon drains."""
        if self._draining or self._why[service] == tuple(why):
            return
        self._why[service] = tuple(why)
        self._tell()

    def drain(self) -> None:
        """No service serves, for good."""
        self._why = dict.fromkeys(self._why, ("it drains",))
        self._draining = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Answers, with the reasons in its trailing metadata."""
        if request.service not in self._why:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"services are {', '.join(map(repr, self._why))}")
        if why := "; ".join(self._why[request.service]):
            context.set_trailing_metadata(((HEALTH_WHY, why.encode()[:MAX_WHY_BYTES]),))
        return health_pb2.HealthCheckResponse(status=self._status_of(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        changed, told = asyncio.Event(), None
        self._changes.add(changed)
        try:
            while True:
                changed.clear()
                if (status := self._status_of(request.service)) != told:
                    told = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self._changes.discard(changed)

    def _status_of(self, service: str) -> int:
        why = self._why.get(service)
        if why is None:
            return int(STATUS.Value("SERVICE_UNKNOWN"))
        return int(STATUS.Value("NOT_SERVING" if why else "SERVING"))

    def _tell(self) -> None:
        for changed in self._changes:
            changed.set()
