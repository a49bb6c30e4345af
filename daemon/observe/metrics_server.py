"""The Prometheus endpoint: a few threads with one connection each at a time, which is cut off at a deadline, a short
one until its request has come: who stalls, or trickles bytes, costs others no more than that. Nobody is woken while
nobody asks. Shell.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvferry.daemon.config.values import ConfigError, parse_address
from kvferry.daemon.observe.metrics import SnapshotCollector
from kvferry.proto import cache_pb2 as cache
from kvferry.waiting import have_ended

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

PATH = "/metrics"
SNAPSHOT_SECONDS = 5.0  # until the event loop must have given one
THREADS = 4  # connections served at a time
REQUEST_SECONDS = 1.0  # for a scraper to send its request
ANSWER_SECONDS = 6.0  # for it to have the answer, a late snapshot included
STOP_SECONDS = 3.0  # for the threads to end once their connections are cut
BACKLOG = 16
SEND_BUFFER = 256 * 1024  # of a connection: an answer that fits does not wait for who reads it slowly


Page: TypeAlias = "Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]"


class MetricsServer:
    """Listens once made; ConfigError where it cannot. Its threads are joined by `stop`."""

    def __init__(
        self,
        listen: str,
        take: Callable[[], cache.StatsReply],
        loop: asyncio.AbstractEventLoop,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        """pages: what is served at other paths."""
        host, port = parse_address(listen)
        self._loop = loop
        self._take = take
        self._pages = pages or {}
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
        # Daemon threads, though they are joined: should `close` never be reached, the process must end all the same.
        runs = [self._server.watch, *[self._server.run] * THREADS]
        self._threads = [threading.Thread(target=run, name="kvferry-metrics", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Cuts off a scrape under way, too."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """The same, where no event loop runs any more."""
        self._server.stop()
        if not have_ended(self._threads, STOP_SECONDS):
            left = sum(thread.is_alive() for thread in self._threads)
            log.error("%d threads of the metrics have not ended within %g s; they are left behind", left, STOP_SECONDS)
        self._server.server_close()

    def _snapshot(self) -> cache.StatsReply:
        """Takes a snapshot, on a thread of the server. TimeoutError where the event loop does not answer."""

        async def taken() -> cache.StatsReply:
            return self._take()

        future = asyncio.run_coroutine_threadsafe(taken(), self._loop)
        try:
            return future.result(SNAPSHOT_SECONDS)
        finally:
            future.cancel()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if page := self._pages.get(environ["PATH_INFO"]):
            return page(environ, start)
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

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        # `watch` waits here. With its lock held, too: a socket is not closed while another thread shuts it down.
        self._changed = threading.Condition()
        self._deadlines: dict[socket.socket, float] = {}  # of the connections that are served
        self._stopping = threading.Event()
        self._wakes, self._wake = socket.socketpair()  # the first is readable once the second is closed: `run` ends
        super().__init__(address, handler)
        self.socket.setblocking(False)  # all threads hear of a connection, and one gets it

    def run(self) -> None:
        """Serves until `stop`, one of several threads."""
        with selectors.PollSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._stopping.is_set():
                    return
                self.handle_request()  # does not wait

    def watch(self) -> None:
        """Cuts off what is late, until `stop`."""
        with self._changed:
            while not self._stopping.is_set():
                self._cut(time.monotonic())
                earliest = min(self._deadlines.values(), default=math.inf)
                self._changed.wait(earliest - time.monotonic() if earliest < math.inf else None)

    def stop(self) -> None:
        """Takes no further connection, and cuts off those that are. Idempotent."""
        self._stopping.set()
        self._wake.close()
        with self._changed:
            self._changed.notify()
            self._cut(math.inf)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._allow(request, REQUEST_SECONDS)
        request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if self._stopping.is_set():  # `stop` may have come before it was known here
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def has_come(self, request: socket.socket) -> None:
        """Gives a request that was read the time for an answer."""
        self._allow(request, ANSWER_SECONDS)

    def _allow(self, request: socket.socket, seconds: float) -> None:
        with self._changed:
            self._deadlines[request] = time.monotonic() + seconds
            self._changed.notify()

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._deadlines.pop(request, None)
            super().shutdown_request(request)

    def _cut(self, now: float) -> None:
        """Whatever a late connection waits for ends at once: an unlimited number of short reads, too."""
        for connection, deadline in self._deadlines.items():
            if deadline <= now:
                self._deadlines[connection] = math.inf  # once is enough
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        super().server_close()
        self._wake.close()
        self._wakes.close()

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
    server: _Server

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.has_come(self.connection)
        return whole

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
