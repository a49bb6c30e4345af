"""The Prometheus endpoint: one thread with one connection at a time, each cut off at a deadline, so a scraper that
stalls, or trickles its bytes, costs nobody else more than that. Shell.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvferry.daemon.config_values import ConfigError, parse_address
from kvferry.daemon.metrics import SnapshotCollector
from kvferry.proto import cache_pb2 as cache

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

PATH = "/metrics"
SNAPSHOT_SECONDS = 5.0  # until the event loop must have given one
SOCKET_SECONDS = 5.0  # for a scraper to send its request, and to take a part of the answer
CONNECTION_SECONDS = 6.0  # for all of a connection, a late snapshot included
POLL_SECONDS = 0.1  # until a stop is seen
STOP_SECONDS = 3.0  # for the thread to end once its connection is cut
BACKLOG = 16


class MetricsServer:
    """Listens once made; ConfigError where it cannot. Its thread is joined by `stop`."""

    def __init__(self, listen: str, take: Callable[[], cache.StatsReply], loop: asyncio.AbstractEventLoop) -> None:
        host, port = parse_address(listen)
        self._loop = loop
        self._take = take
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SnapshotCollector(self._snapshot))
        self._app = make_wsgi_app(registry)
        server_class = _Server6 if ":" in host else _Server
        try:
            self._server = server_class((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--metrics {listen}: {error.strerror or error}") from error
        self._server.set_app(self._answer)
        bound = self._server.server_address[1]
        self.address = f"{host if ':' not in host else f'[{host}]'}:{bound}"
        # A daemon thread, though it is joined: should `close` never be reached, the process must end all the same.
        self._thread = threading.Thread(target=self._server.run, name="kvferry-metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Cuts off a scrape under way, too."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """The same, where no event loop runs any more."""
        self._server.stop()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the metrics' thread has not ended within %g s; it is left behind", STOP_SECONDS)
        self._server.server_close()

    def _snapshot(self) -> cache.StatsReply:
        """On the server's thread. TimeoutError where the event loop does not answer."""

        async def taken() -> cache.StatsReply:
            return self._take()

        future = asyncio.run_coroutine_threadsafe(taken(), self._loop)
        try:
            return future.result(SNAPSHOT_SECONDS)
        finally:
            future.cancel()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in (PATH, "/"):
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [f"metrics are at {PATH}\n".encode()]
        try:
            answer: Iterable[bytes] = self._app(environ, start)
            return answer
        except (TimeoutError, concurrent.futures.TimeoutError):  # two classes before Python 3.11
            start("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"the daemon gave no snapshot within {SNAPSHOT_SECONDS:g} s\n".encode()]


class _Server(WSGIServer):
    request_queue_size = BACKLOG
    timeout = POLL_SECONDS  # of handle_request: until a connection comes

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._cutting = threading.Lock()  # a socket is not closed while another thread shuts it down
        self._connection: socket.socket | None = None
        self._stopping = False
        super().__init__(address, handler)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            self.handle_request()

    def stop(self) -> None:
        """Takes no further connection, and cuts off the one that is."""
        self._stopping = True
        self._cut(self._connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._cutting:
            self._connection = request
        timer = threading.Timer(CONNECTION_SECONDS, self._cut, (request,))
        timer.daemon = True
        timer.start()
        try:
            if self._stopping:  # `stop` may have come before it was known here
                self.shutdown_request(request)
            else:
                super().process_request(request, client_address)
        finally:
            timer.cancel()

    def shutdown_request(self, request: Any) -> None:
        with self._cutting:
            self._connection = None
            super().shutdown_request(request)

    def _cut(self, connection: socket.socket | None) -> None:
        """Whatever it waits for ends at once: an unlimited number of short reads, too."""
        with self._cutting:
            if connection is not None and connection is self._connection:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        # As http.server's, without its reverse look-up of the host's name, which may take seconds.
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a scrape by %s broke off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SOCKET_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
