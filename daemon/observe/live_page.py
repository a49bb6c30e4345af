"""The live page: one HTML file, and what it asks for every few seconds. Shell.

It costs nothing while nobody looks: a view is made when a page asks, at most once in VIEW_SECONDS however many do, one
of many daemons less often, and the trees are looked at less often. Other daemons are asked for their statistics over
gRPC, over channels that are closed once nobody looks any more.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from kvferry.channels import ChannelError
from kvferry.daemon.observe.live_view import (
    PEERS_OF_OTHERS,
    PageView,
    TreeView,
    daemon_view,
    requests_of,
    tree_of,
    unknown,
)
from kvferry.daemon.observe.stats import Snapshots
from kvferry.daemon.peers.dialing import Dial
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import cache_pb2 as wire
from kvferry.proto.cache_pb2_grpc import CacheStub

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

PAGE_PATH, DATA_PATH = "/ui", "/ui/data"
VIEWERS_AT_ONCE = 2  # of the metrics' threads: scrapers have the others
VIEW_SECONDS = 1.0  # that a view is shown again, and where it has many daemons
SECONDS_A_DAEMON = 0.125  # for each of them: to ask one and to write down what it says takes up to a millisecond
TREE_SECONDS = 10.0  # that what was seen of the trees is
ASK_SECONDS = 1.0  # for another daemon's statistics
MADE_SECONDS = 4.0  # for a view, on the event loop
IDLE_SECONDS = 15.0  # without a viewer, after which channels to others are closed
MAX_DAEMONS = 32  # in one view, this one included
_HTML = Path(__file__).with_name("live_page.html")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class OtherDaemon(NamedTuple):
    """A daemon that is shown beside this one: its name here, and how it is dialled."""

    name: str
    address: str
    expected: str = ""  # of its certificate


def others_of(sides: Mapping[str, AnySide], told: Mapping[str, str]) -> list[OtherDaemon]:
    """The daemons of the settings, and those that the decode side dials."""
    found = {address: OtherDaemon(name, address) for name, address in told.items()}
    decode = sides.get("decode")
    if isinstance(decode, DecodeSide):
        for link in decode.links.values():
            found.setdefault(link.address, OtherDaemon(link.name, link.address, link.expected))
    return list(found.values())[: MAX_DAEMONS - 1]


class LivePage:
    """Answers for both paths, on threads of the metrics. `close` is for the event loop's end."""

    def __init__(
        self,
        snapshots: Snapshots,
        sides: Mapping[str, AnySide],
        others: Callable[[], list[OtherDaemon]],
        dial: Dial,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._snapshots = snapshots
        self._sides = sides
        self._others = others
        self._dial = dial
        self._loop = loop
        self._html = _HTML.read_bytes()
        self._headers = _headers(self._html.decode())
        self._serving = threading.BoundedSemaphore(VIEWERS_AT_ONCE)
        self._making = threading.Lock()  # over the two below
        self._made = b""
        self._stale_at = 0.0
        self._trees: dict[str, TreeView] = {}  # this and all below: the event loop's
        self._trees_at = -TREE_SECONDS
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """One request. A viewer more than may be served at once gets 503, and asks again by itself."""
        if environ["REQUEST_METHOD"] != "GET":
            start("405 Method Not Allowed", [("Content-Type", "text/plain")])
            return [b"GET alone is answered\n"]
        if not self._serving.acquire(blocking=False):
            start("503 Service Unavailable", [("Content-Type", "text/plain"), ("Retry-After", "1")])
            return [b"others are being answered\n"]
        try:
            return _Body(self._body(environ["PATH_INFO"], start), self._serving.release)
        except BaseException:
            self._serving.release()
            raise

    def _body(self, path: str, start: StartResponse) -> list[bytes]:
        if path == PAGE_PATH:
            start("200 OK", [("Content-Type", "text/html; charset=utf-8"), *self._headers])
            return [self._html]
        try:
            made = self._view()
        except (TimeoutError, concurrent.futures.TimeoutError):  # two classes before Python 3.11
            start("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"the daemon gave no view within {MADE_SECONDS:g} s\n".encode()]
        start("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [made]

    def _view(self) -> bytes:
        """The view as JSON; all who ask before it is stale get the same."""
        with self._making:
            if time.monotonic() >= self._stale_at:
                future = asyncio.run_coroutine_threadsafe(self._make(), self._loop)
                try:
                    view = future.result(MADE_SECONDS)
                finally:
                    future.cancel()
                self._made = json.dumps(dataclasses.asdict(view), separators=(",", ":")).encode()
                self._stale_at = time.monotonic() + max(VIEW_SECONDS, SECONDS_A_DAEMON * len(view.daemons))
            return self._made

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _make(self) -> PageView:
        now = time.monotonic()
        reply = self._snapshots.take()
        requests = {role: requests_of(side) for role, side in self._sides.items()}
        if now - self._trees_at >= TREE_SECONDS:
            self._trees_at = now
            self._trees = {role: tree_of(side) for role, side in self._sides.items()}
        own = daemon_view(reply, requests, self._trees)
        others = self._others()
        self._keep({other.address for other in others})
        told = await asyncio.gather(*map(self._ask, others))
        views = [
            daemon_view(each, peers=PEERS_OF_OTHERS) if isinstance(each, wire.StatsReply) else unknown(other.name, each)
            for other, each in zip(others, told, strict=True)
        ]
        return PageView(now, [own, *views])

    async def _ask(self, other: OtherDaemon) -> wire.StatsReply | str:
        """Another daemon's statistics, or why there are none."""
        try:
            channel = self._channels.get(other.address)
            if channel is None:
                channel = self._channels[other.address] = self._dial(other.address, other.expected)
            reply: wire.StatsReply = await CacheStub(channel).Stats(wire.StatsRequest(), timeout=ASK_SECONDS)
            return reply
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details() or 'no details'}"[:300]
        except ChannelError as error:
            return str(error)[:300]

    def _keep(self, addresses: set[str]) -> None:
        """Closes channels that nobody needs, and all of them once nobody has looked for a while."""
        for address in self._channels.keys() - addresses:
            self._let_go(address)
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self._loop.call_later(IDLE_SECONDS, self._nobody_looks)

    def _nobody_looks(self) -> None:
        self._idle = None
        for address in list(self._channels):
            self._let_go(address)

    def _let_go(self, address: str) -> None:
        task = asyncio.ensure_future(self._channels.pop(address).close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes the channels, once no request is answered any more."""
        if self._idle is not None:
            self._idle.cancel()
        self._nobody_looks()
        await asyncio.gather(*self._closing, return_exceptions=True)


class _Body(list[bytes]):
    """A whole body; `close` is called by the server once it is sent, or cannot be."""

    def __init__(self, parts: list[bytes], close: Callable[[], None]) -> None:
        super().__init__(parts)
        self.close = close


def _headers(html: str) -> list[tuple[str, str]]:
    """Headers by which a browser runs the page's own script alone, and lets it ask its own daemon alone."""
    script = _SCRIPT.search(html)
    assert script is not None, "the live page has no script"
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'"
    return [
        ("Content-Security-Policy", f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    ]
