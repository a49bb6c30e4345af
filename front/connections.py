"""The connections of a front end: so many at a time, and so long without a request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_SECONDS = 10.0  # for a client to send the head of a request
CONNECTIONS_PER_REQUEST = 4  # idle ones that clients keep among them
MORE_CONNECTIONS = 1024  # of anybody: health, statistics, models

_log = logging.getLogger(__name__)


def most_connections(max_requests: int) -> int:
    """The most connections of a front end at a time; one more is closed."""
    return CONNECTIONS_PER_REQUEST * max_requests + MORE_CONNECTIONS


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with `limit_concurrency` as a bound of connections. uvicorn itself refuses every request
    while there are so many, and lets a connection be silent for ever."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._max_connections = self.limit_concurrency
        self.limit_concurrency = None
        self._awaiting_head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            _log.info("a connection is closed at once: there are %d", self._max_connections)
            self.connections.discard(self)
            transport.close()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # some of a head, or of a body that nobody reads
            self._await_head()
        else:
            self._head_is_there()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._awaiting_head is None and not self.transport.is_closing():
            self._awaiting_head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_is_there(self) -> None:
        if self._awaiting_head is not None:
            self._awaiting_head.cancel()
            self._awaiting_head = None
