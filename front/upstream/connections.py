"""Connections to servers, kept from one request to the next. httpx's own pool looks at all that it has four times a
request, which was a quarter of the front end's CPU time at 32 streams, and grows with their number.

How many there are is bounded by the requests that ran within `IDLE_SECONDS`. What has been idle for so long is closed
when another connection, of whichever server, comes back.
"""

from __future__ import annotations

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import httpcore
import httpx

IDLE_SECONDS = 2.5  # half of what uvicorn, the servers' own, keeps one: none is closed while a request is on its way
SWEEP_SECONDS = 1.0
LOOK_SECONDS = 1.0  # for a connection behind a deadline that this process may have stood still for
_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.TimeoutException, httpx.PoolTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.NetworkError, httpx.NetworkError),
    (httpcore.RemoteProtocolError, httpx.RemoteProtocolError),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
    (httpcore.ProtocolError, httpx.ProtocolError),
)
_CAUGHT = tuple(ours for ours, _ in _ERRORS)
_LEFT = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)
_Origin = tuple[bytes, bytes, int]
_PORTS = {"http": 80, "https": 443}


class Connections(httpx.AsyncBaseTransport):
    """A transport that takes the connection that was used last."""

    def __init__(self) -> None:
        self._idle: dict[_Origin, deque[httpcore.AsyncHTTPConnection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._swept = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = (url.raw_scheme, url.raw_host, url.port or _PORTS[url.scheme])
        assert isinstance(request.stream, httpx.AsyncByteStream)
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=origin[0], host=origin[1], port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        kept = await self._kept(origin)
        connection = kept or self._new(origin)
        try:
            answer = await _answered(connection, asked)
        except _LEFT as error:
            if kept is None:
                raise _as_httpx(error) from error
            # A server whose process stood still closes a connection with a request on its way to it.
            connection = self._new(origin)
            try:
                answer = await _answered(connection, asked)
            except _CAUGHT:
                raise _as_httpx(error) from error  # not that it is gone now: another would be asked what ended it
        except httpcore.ConnectTimeout:  # nothing was sent
            connection = self._new(origin)
            asked.extensions = {**asked.extensions, "timeout": {**asked.extensions["timeout"], "connect": LOOK_SECONDS}}
            try:
                answer = await _answered(connection, asked)
            except _CAUGHT as error:
                raise _as_httpx(error) from error
        except _CAUGHT as error:
            raise _as_httpx(error) from error
        stream = _Answer(answer, connection, lambda: self._back(origin, connection))
        return httpx.Response(answer.status, headers=answer.headers, stream=stream, extensions=answer.extensions)

    async def _kept(self, origin: _Origin) -> httpcore.AsyncHTTPConnection | None:
        idle = self._idle.get(origin, ())
        while idle:
            connection = idle.pop()
            if not connection.has_expired():  # nor has its server closed it
                return connection
            await connection.aclose()
        return None

    def _new(self, origin: _Origin) -> httpcore.AsyncHTTPConnection:
        scheme, host, port = origin
        if scheme == b"https" and self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme, host, port), ssl_context=self._tls, keepalive_expiry=IDLE_SECONDS
        )

    async def _back(self, origin: _Origin, connection: httpcore.AsyncHTTPConnection) -> None:
        """Keeps the connection if another request can go through it."""
        if connection.is_idle():
            self._idle.setdefault(origin, deque()).append(connection)
        now = time.monotonic()
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            await self._sweep()

    async def _sweep(self) -> None:
        """Closes what has expired, of all servers: some are asked nothing more."""
        expired = []
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].has_expired():
                expired.append(idle.popleft())
            if not idle:
                del self._idle[origin]
        for connection in expired:
            await connection.aclose()

    async def aclose(self) -> None:
        idle, self._idle = [each for kept in self._idle.values() for each in kept], {}
        for connection in idle:
            await connection.aclose()


class _Answer(httpx.AsyncByteStream):
    """A reply's bytes; at its end, whichever, the connection is given back."""

    def __init__(
        self, answer: httpcore.Response, connection: httpcore.AsyncHTTPConnection, back: Callable[[], Awaitable[None]]
    ) -> None:
        self._answer, self._connection, self._back, self._open = answer, connection, back, True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.aiter_stream():
                yield part
        except _CAUGHT as error:
            raise _as_httpx(error) from error

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            try:
                await self._answer.aclose()
            except BaseException:
                await self._connection.aclose()
                raise
            await self._back()


async def _answered(connection: httpcore.AsyncHTTPConnection, request: httpcore.Request) -> httpcore.Response:
    try:
        return await connection.handle_async_request(request)
    except BaseException:
        await connection.aclose()
        raise


def _as_httpx(error: Exception) -> httpx.TransportError:
    """The error that httpx's own transport raises in this one's place."""
    return next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))(str(error))
