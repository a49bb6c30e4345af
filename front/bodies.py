"""The bodies of a front end's requests while they are read: so many at a time, so long, so many bytes together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import Request

BODY_SECONDS = 60.0  # for a client to send its body
MAX_BYTES_TOGETHER = 1 << 30  # of all bodies that are read at a time
SMALLEST_SHARE = 1 << 20  # of it, for each


class BodyRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Body:
    came: bytearray = field(default_factory=bytearray)
    reading: asyncio.Task[None] | None = None
    refused: BodyRefused | None = None


class Bodies:
    """Reads request bodies, on one event loop. Those that are read count as requests: no more are begun than may run.

    Where they have too many bytes together the longest is refused, which has more than its share: many clients that
    send slowly, or stop, take nothing from those that come later.
    """

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self._max_bytes = max_bytes  # of one
        self._max_requests = max_requests
        self._bodies: set[_Body] = set()
        self.bytes = 0  # read so far of those that are not complete

    @property
    def reading(self) -> int:
        return len(self._bodies)

    async def read(self, request: Request, running: int) -> bytes:
        """Reads one. BodyRefused 408, 413, 429 or, from who left, ClientDisconnect; `running` requests have their
        body."""
        if self.reading + running >= self._max_requests:
            raise BodyRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{running} requests are running, the bound is {self._max_requests}; {self.reading} are being read",
            )
        body = _Body()
        self._bodies.add(body)
        body.reading = asyncio.create_task(self._read(request, body))
        try:
            await asyncio.wait({body.reading}, timeout=BODY_SECONDS)
            if body.refused is not None:
                raise body.refused
            if not body.reading.done():
                raise BodyRefused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s")
            body.reading.result()
            return bytes(body.came)
        finally:
            body.reading.cancel()
            self._bodies.remove(body)
            self.bytes -= len(body.came)

    async def _read(self, request: Request, body: _Body) -> None:
        async for chunk in request.stream():
            body.came += chunk
            self.bytes += len(chunk)
            if len(body.came) > self._max_bytes:
                raise BodyRefused(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {self._max_bytes} bytes"
                )
            self._keep_bound()
            if body.refused is not None:
                return

    def _keep_bound(self) -> None:
        while self.bytes > (most := max(MAX_BYTES_TOGETHER, self.reading * SMALLEST_SHARE)):
            longest = max(self._bodies, key=lambda body: len(body.came))
            longest.refused = BodyRefused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the bodies of {self.reading} requests have more than {most} bytes together, this one most of them",
            )
            self.bytes -= len(longest.came)
            longest.came.clear()
            if longest.reading is not None and longest.reading is not asyncio.current_task():
                longest.reading.cancel()
