"""The front end's process: a bound socket, uvicorn, and the way to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from kvferry.front.app import create_app
from kvferry.front.connections import BoundedProtocol, most_connections
from kvferry.front.service import FrontService, ServiceConfig

BACKLOG = 2048

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontConfig:
    host: str
    port: int  # 0: any
    service: ServiceConfig
    wait_s: float = 60.0  # for the servers, before `ready` is called all the same
    grace_s: float = 30.0  # for running requests at the end


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
    listener = listen(config.host, config.port)
    service = FrontService(config.service, clock=time.monotonic)
    service.engines.start()

    async def tell() -> None:
        await _tell(service, config.wait_s, address_of(listener), ready)

    await serve_app(
        create_app(service),
        listener,
        tell,
        service.close,
        stop=stop,
        grace_s=config.grace_s,
        max_connections=most_connections(config.service.max_requests),
    )


async def serve_app(
    app: Starlette,
    listener: socket.socket,
    tell: Callable[[], Coroutine[None, None, None]],
    close: Callable[[], Awaitable[None]],
    *,
    stop: asyncio.Event,
    grace_s: float,
    max_connections: int,
) -> None:
    """Serves until `stop` is set and running requests are over, or `grace_s` has passed, then closes the listener.
    `tell` runs beside it from the start on; `close` is called when no request runs any more."""
    settings = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        http=BoundedProtocol,  # whatever else of uvicorn's is installed
        ws="none",
        limit_concurrency=max_connections,
    )
    server = QuietServer(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    telling = asyncio.create_task(tell())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        telling.cancel()
        server.should_exit = True
        await asyncio.wait({serving})
        await close()
        listener.close()
    serving.result()


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
