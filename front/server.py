"""The front end's process: a bound socket, uvicorn, and the way to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from kvferry.front.app import ROUTES, create_app
from kvferry.front.connections import BoundedProtocol, most_connections
from kvferry.front.edge.settings import METRICS_CONNECTIONS, EdgeSettings, edged, metrics_app
from kvferry.front.service import FrontService, ServiceConfig
from kvferry.listening import Listen

BACKLOG = 2048

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontConfig:
    host: str
    port: int  # 0: any
    service: ServiceConfig
    wait_s: float = 60.0  # for the servers, before `ready` is called all the same
    grace_s: float = 30.0  # for running requests at the end
    edge: EdgeSettings = field(default_factory=EdgeSettings)


class Served(NamedTuple):
    """An application and the socket that it is served at."""

    app: ASGIApp
    listener: socket.socket
    max_connections: int


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: FrontConfig, *, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serves until `stop` is set and running requests are over, or `grace_s` has passed.

    The socket listens at once: requests get 503 until the servers are up. `ready` is called with host:port then, or
    after `wait_s` without them. Raises OSError when the address cannot be bound.
    """
    sockets = listen_all(config.host, config.port, config.edge)
    service = FrontService(config.service, clock=time.monotonic)
    service.engines.start()

    async def tell() -> None:
        await _tell(service, config.wait_s, address_of(sockets.front), ready)

    app = edged(create_app(service), service.metrics, ROUTES, config.edge)
    served = [Served(app, sockets.front, most_connections(config.service.max_requests))]
    if sockets.metrics is not None:
        served.append(Served(metrics_app(service.metrics), sockets.metrics, METRICS_CONNECTIONS))
    await serve_apps(served, tell, service.close, stop=stop, grace_s=config.grace_s)


async def serve_apps(
    apps: Sequence[Served],
    tell: Callable[[], Coroutine[None, None, None]],
    close: Callable[[], Awaitable[None]],
    *,
    stop: asyncio.Event,
    grace_s: float,
) -> None:
    """Serves until `stop` is set and running requests are over, or `grace_s` has passed, then closes the listeners.
    `tell` runs beside it from the start on; `close` is called when no request runs any more."""
    servers = [QuietServer(_settings(served, grace_s)) for served in apps]
    serving = [
        asyncio.create_task(server.serve(sockets=[served.listener]))
        for server, served in zip(servers, apps, strict=True)
    ]
    telling = asyncio.create_task(tell())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        telling.cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.wait(serving)
        await close()
        for served in apps:
            served.listener.close()
    for each in serving:
        each.result()


def _settings(served: Served, grace_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        served.app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        http=BoundedProtocol,  # whatever else of uvicorn's is installed
        ws="none",
        limit_concurrency=served.max_connections,
    )


class Sockets(NamedTuple):
    """The front end's own, and that of metrics which have an address of their own."""

    front: socket.socket
    metrics: socket.socket | None

    def close(self) -> None:
        for each in self:
            if each is not None:
                each.close()


def listen_all(host: str, port: int, edge: EdgeSettings) -> Sockets:
    """Raises OSError, whose text names the flag."""
    front = _listen_for("--listen", Listen(host, port))
    try:
        return Sockets(front, _listen_for("--metrics", edge.metrics) if isinstance(edge.metrics, Listen) else None)
    except OSError:
        front.close()
        raise


def _listen_for(flag: str, at: Listen) -> socket.socket:
    try:
        return listen(at.host, at.port)
    except OSError as error:
        raise OSError(error.errno, f"{flag} {at}: {error.strerror or error}") from error


async def _tell(service: FrontService, wait_s: float, address: str, ready: Callable[[str], None]) -> None:
    if not await service.engines.wait_ready(wait_s):
        _log.warning("after %g s the servers are not up: %s", wait_s, service.engines.complaints())
    ready(address)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Of a socket without its protocol's number asyncio does not know that it is TCP, and leaves Nagle's algorithm on:
    # a stream's first event waits behind its headers for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
