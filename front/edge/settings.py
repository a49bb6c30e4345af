"""The edge's flags, and an application with its edge around it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry import flags, listening
from kvferry.front.edge.exchange import HEADER, Edge
from kvferry.front.edge.metrics import CONTENT_TYPE, FrontMetrics
from kvferry.secret_files import ApiKeys, BearerToken

OPEN_PATHS = ("/health",)  # asked by load balancers, which have no key
METRICS_CONNECTIONS = 16  # at a port of their own
_ORIGIN = re.compile(r"\*|https?://[^\s/*?#]+")
_PATH = re.compile(r"/[A-Za-z0-9._/-]{0,200}")

MetricsAt = str | listening.Listen
"""A path on the front end's own port, an address of their own, or "": none."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    metrics: MetricsAt = "/metrics"
    keys: ApiKeys | None = None
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False
    engine_token: BearerToken | None = None  # sent to the servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    edge = parser.add_argument_group("clients and operators")
    edge.add_argument(
        "--api-keys", metavar="FILE", help="one key a line, read again when it changes (default: no keys)"
    )
    edge.add_argument("--engine-token", metavar="FILE", help="sent to the servers as a bearer token")
    edge.add_argument(
        "--cors-origin",
        nargs="+",
        action="extend",
        default=[],
        type=flags.parsed(_origin),
        metavar="ORIGIN",
        help="web pages that may ask: https://HOST[:PORT], or * (default: none)",
    )
    edge.add_argument(
        "--metrics",
        type=flags.parsed(_metrics),
        default="/metrics",
        metavar="/PATH|HOST:PORT|off",
        help="for Prometheus, on --listen's port or on one of their own (default %(default)s)",
    )
    edge.add_argument("--access-log", action="store_true", help="one line a request")


def settings_of(args: argparse.Namespace) -> EdgeSettings:
    """SecretFileError where a file cannot be used."""
    return EdgeSettings(
        metrics=args.metrics,
        keys=ApiKeys(args.api_keys) if args.api_keys else None,
        cors_origins=tuple(args.cors_origin),
        access_log=args.access_log,
        engine_token=BearerToken(args.engine_token) if args.engine_token else None,
    )


def problem(args: argparse.Namespace) -> str:
    """The objection to these flags; empty: none."""
    at = args.metrics
    if isinstance(at, listening.Listen) and not args.insecure and not listening.is_loopback(at.host):
        return listening.needs("--metrics", at, "metrics are plain HTTP, without a login")
    return ""


def edged(app: Starlette, metrics: FrontMetrics, routes: Iterable[str], settings: EdgeSettings) -> ASGIApp:
    """The application as clients are to reach it. `routes`: the paths that are counted by name."""
    if isinstance(settings.metrics, str) and settings.metrics:
        app.add_route(settings.metrics, _scraped(metrics))
    around: ASGIApp = app
    if settings.keys is not None:
        around = KeyedApp(around, settings.keys)
    if settings.cors_origins:
        around = CORSMiddleware(
            around,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(HEADER,),
        )
    return Edge(around, metrics, routes, access_log=settings.access_log)


def metrics_app(metrics: FrontMetrics) -> Starlette:
    """The metrics alone, for a port of their own."""
    app = Starlette()
    app.add_route("/metrics", _scraped(metrics))
    return app


class KeyedApp:
    """Lets in who has a key, in `authorization: Bearer KEY`; asks nobody at OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if asked and not self._keys.hold(Headers(scope=scope).get("authorization", "")):
            await _unknown_key()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _unknown_key() -> Response:
    message = "authorization: an API key that is known here is required, as Bearer KEY"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    return JSONResponse({"error": error}, 401, {"www-authenticate": "Bearer"})


def _scraped(metrics: FrontMetrics):  # type: ignore[no-untyped-def]  # as Starlette has its endpoints
    def scrape(request: Request) -> Response:  # on a thread: with many processes their files are read
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return scrape


def _origin(text: str) -> str:
    if _ORIGIN.fullmatch(text) is None:
        raise ValueError(f"must be http://HOST[:PORT], https://HOST[:PORT] or *, got {text!r}")
    return text


def _metrics(text: str) -> MetricsAt:
    if text == "off":
        return ""
    if text.startswith("/"):
        if _PATH.fullmatch(text) is None:
            raise ValueError(f"a path must have 1 to 201 letters, digits and ./_-, got {text!r}")
        return text
    return listening.listen(text)
