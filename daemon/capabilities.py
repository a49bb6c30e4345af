"""Capabilities of a daemon beside its work, where its settings ask for them: KV events, metrics, discovery. Shell.

The daemon starts them in the order of the list before anybody can reach it, ends them the other way round, and knows
nothing else of them; no floor below imports them. Traces are the process's, as in workers and front ends: they are
configured before a daemon is made, and leave after its end (cli/serve.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError
from kvferry.daemon.observe.live_page import DATA_PATH, PAGE_PATH, LivePage, others_of
from kvferry.daemon.observe.metrics_server import MetricsServer
from kvferry.daemon.observe.stats import Snapshots
from kvferry.daemon.peers.dialing import Dial
from kvferry.daemon.peers.discovery import Discovery
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.side import AnySide

if TYPE_CHECKING:
    from kvferry.daemon.observe.event_publisher import EventPublisher

log = logging.getLogger(__name__)


class Capability:
    """Each moment of a daemon's life; by itself it does nothing at any of them."""

    def start(self) -> None:
        """The addresses are bound, nobody is answered yet. ConfigError where it cannot."""

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Loops that run while the daemon serves, each until cancelled."""
        return []

    async def end(self) -> None:
        """The loops have ended, the sides have not."""

    def close(self) -> None:
        """Last, or after a start that failed anywhere: leaves no thread behind. Idempotent."""


def capabilities(
    config: DaemonConfig,
    sides: Mapping[str, AnySide],
    snapshots: Snapshots,
    dial: Dial,
    watch: Callable[[asyncio.Task[None]], None],
) -> list[Capability]:
    """`watch` is given each task that one starts later, to hear of a broken invariant."""
    found: list[Capability] = []
    decode = sides.get("decode")
    if config.events:
        found.append(KvEventStream(config, sides["decode"]))
    if config.metrics:
        found.append(MetricsEndpoint(config, sides, snapshots, dial))
    if config.peer_service and isinstance(decode, DecodeSide):
        found.append(PeerDiscovery(Discovery(config.peer_service, decode, watch, dial=dial)))
    return found


class KvEventStream(Capability):
    """The events of what a side's cache takes in and lets go, published until the side has ended."""

    def __init__(self, config: DaemonConfig, side: AnySide) -> None:
        self._config = config
        self._side = side
        self._publisher: EventPublisher | None = None

    def start(self) -> None:
        """ConfigError where the endpoint cannot be had, or what it needs is not installed."""
        config = self._config
        try:
            from kvferry.daemon.observe.event_publisher import EventPublisher, PublisherSettings
        except ImportError as error:
            raise ConfigError(f"--events needs pip install 'kvferry[events]': {error}") from error
        settings = PublisherSettings(
            endpoint=config.events,
            replay=config.events_replay,
            topic=config.events_topic,
            buffer=config.events_buffer,
            page_size=config.page_size,
        )
        try:
            self._publisher = self._side.event_sink = EventPublisher(settings)
        except OSError as error:
            raise ConfigError(f"--events {config.events}, --events-replay {config.events_replay}: {error}") from error
        log.info("KV events: %s, replay: %s", self._publisher.endpoint, self._publisher.replay or "none")

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class MetricsEndpoint(Capability):
    """The endpoint for Prometheus, and the live page there; it ends before the sides whose numbers it shows."""

    def __init__(self, config: DaemonConfig, sides: Mapping[str, AnySide], snapshots: Snapshots, dial: Dial) -> None:
        self._config = config
        self._sides = sides
        self._snapshots = snapshots
        self._dial = dial
        self._page: LivePage | None = None
        self._server: MetricsServer | None = None

    def start(self) -> None:
        if self._config.ui:
            others = partial(others_of, self._sides, self._config.ui_daemons)
            self._page = LivePage(self._snapshots, self._sides, others, self._dial, asyncio.get_running_loop())
        self._server = self._listen()
        self._snapshots.metrics = self._server.address
        log.info("metrics: http://%s/metrics", self._server.address)
        if self._page is not None:
            log.info("live page: http://%s%s", self._server.address, PAGE_PATH)

    def _listen(self) -> MetricsServer:
        """ConfigError where the address was asked for and cannot be had. The default one may be another daemon's."""
        config, loop = self._config, asyncio.get_running_loop()
        pages = dict.fromkeys((PAGE_PATH, DATA_PATH), self._page.answer) if self._page is not None else None
        try:
            return MetricsServer(config.metrics, self._snapshots.take, loop, pages)
        except ConfigError as error:
            if "metrics" in config.model_fields_set:
                raise
            log.warning("%s; metrics are at any free port", error)
            return MetricsServer("127.0.0.1:0", self._snapshots.take, loop, pages)

    async def end(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self._page is not None:
            await self._page.close()
            self._page = None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class PeerDiscovery(Capability):
    """Prefill daemons found by a name of DNS."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._discovery.run()]
