"""One request and its reply as a client sees them: a request id, its times, its line in the access log. ASGI."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.front.edge.metrics import FrontMetrics

HEADER = "x-request-id"
REQUEST_ID_BYTES = 16
LEFT = 499  # as nginx calls it: the client closed the connection before there was an answer
_TAKEN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # of a client's ids; nothing that a log or a header reads otherwise
_KEY = "kvferry.request_id"
_log = logging.getLogger("kvferry.front.access")


@dataclass(slots=True)
class _Exchange:
    request_id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    streamed: bool = False
    complete: bool = False
    sent_bytes: int = 0
    first_seconds: float = -1.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began


def request_id_of(scope: Scope) -> str:
    """The client's own id, or the one made for it."""
    found: str = scope.get(_KEY) or secrets.token_hex(REQUEST_ID_BYTES)
    return found


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(HEADER, "")
    return given if _TAKEN.fullmatch(given) else secrets.token_hex(REQUEST_ID_BYTES)


class Edge:
    """Gives each request its id, counts it, and writes its line. `routes`: paths that have a label of their own."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics, routes: Iterable[str], *, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(_request_id(scope))
        scope[_KEY] = exchange.request_id
        counted = scope["path"] in self._routes
        failed = False

        async def sent(message: Message) -> None:
            _note(exchange, message)
            await send(message)

        if counted:
            self._metrics.running.inc()
        try:
            await self._app(scope, receive, sent)
        except Exception:
            failed = True
            raise
        finally:
            if counted:
                self._metrics.running.dec()
            self._over(scope, exchange, failed)

    def _over(self, scope: Scope, exchange: _Exchange, failed: bool) -> None:
        status = exchange.status or (HTTPStatus.INTERNAL_SERVER_ERROR if failed else LEFT)
        route = scope["path"] if scope["path"] in self._routes else "other"
        seconds = exchange.elapsed()
        self._metrics.requests.labels(route, str(int(status))).inc()
        if route != "other":
            self._metrics.duration.labels(route).observe(seconds)
            if exchange.streamed and exchange.first_seconds >= 0:
                self._metrics.first_token.labels(route).observe(exchange.first_seconds)
        if exchange.status and not exchange.complete:
            self._metrics.broken.labels("server" if failed else "client").inc()
        if self._access_log:
            _log.info("%s", _line(scope, exchange, int(status), seconds))


def _note(exchange: _Exchange, message: Message) -> None:
    if message["type"] == "http.response.start":
        exchange.status = message["status"]
        headers = MutableHeaders(raw=list(message.get("headers", ())))
        headers[HEADER] = exchange.request_id
        message["headers"] = headers.raw
        exchange.streamed = headers.get("content-type", "").startswith("text/event-stream")
    elif message["type"] == "http.response.body":
        if body := message.get("body", b""):
            if not exchange.sent_bytes:
                exchange.first_seconds = exchange.elapsed()
            exchange.sent_bytes += len(body)
        exchange.complete = not message.get("more_body", False)


def _line(scope: Scope, exchange: _Exchange, status: int, seconds: float) -> str:
    """key=value of one request; the path as JSON where it has anything but plain characters. No query, no body, no
    header: nothing secret."""
    path = scope["path"] if _TAKEN.fullmatch(scope["path"]) else json.dumps(scope["path"][:256])
    client = scope.get("client") or ("-",)
    first = f"{1000 * exchange.first_seconds:.1f}" if exchange.streamed and exchange.first_seconds >= 0 else "-"
    return (
        f"id={exchange.request_id} client={client[0]} method={scope['method']} path={path} status={status} "
        f"ms={1000 * seconds:.1f} first_ms={first} bytes={exchange.sent_bytes} "
        f"whole={'yes' if exchange.complete else 'no'}"
    )
