"""The bodies of a front end's requests while they are read: so many at a time, so long, so many bytes together."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.requests import Request

BODY_SECONDS = 60.0  # for a client to send its body
MAX_BYTES_TOGETHER = 1 << 30  # of all bodies that are read at a time
CONNECTIONS_PER_REQUEST = 4  # idle ones that clients keep among them
MORE_CONNECTIONS = 1024  # of anybody: health, statistics, models


class BodyRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Bodies:
    """Belongs to one event loop. Those that are read count as requests: no more are begun than may run."""

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self._max_bytes = max_bytes  # of one
        self._max_requests = max_requests
        self.reading = 0
        self.bytes = 0  # read so far of those that are not complete

    async def read(self, request: Request, running: int) -> bytes:
        """BodyRefused 408, 413, 429 or, from who left, ClientDisconnect; `running` requests have their body."""
        if self.reading + running >= self._max_requests:
            raise BodyRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{running} requests are running, the bound is {self._max_requests}; {self.reading} are being read",
            )
        self.reading += 1
        body = bytearray()
        try:
            await asyncio.wait_for(self._read(request, body), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise BodyRefused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s") from None
        finally:
            self.reading -= 1
            self.bytes -= len(body)
        return bytes(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.bytes += len(chunk)
            if len(body) > self._max_bytes:
                raise BodyRefused(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {self._max_bytes} bytes"
                )
            if self.bytes > MAX_BYTES_TOGETHER:
                raise BodyRefused(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"the bodies of {self.reading} requests have more than {MAX_BYTES_TOGETHER} bytes together",
                )


def most_connections(max_requests: int) -> int:
    """Of a front end at a time; more are answered with 503."""
    return CONNECTIONS_PER_REQUEST * max_requests + MORE_CONNECTIONS
