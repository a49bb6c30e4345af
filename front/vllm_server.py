"""The process of the front end before vLLM servers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from kvferry.front.connections import most_connections
from kvferry.front.edge.metrics import begin_in_child, forget, shared_by_children
from kvferry.front.edge.settings import METRICS_CONNECTIONS, EdgeSettings, edged, metrics_app
from kvferry.front.processes import Processes
from kvferry.front.server import Served, Sockets, address_of, listen_all, serve_apps
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import ROUTES, create_app
from kvferry.front.vllm_places import DNS
from kvferry.signals import end_signals

PROBE_SECONDS = 0.5

Under = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class VllmServing:
    """How a front end before vLLM servers is served."""

    host: str
    port: int
    wait_s: float = 60.0
    grace_s: float = 30.0
    processes: int = 1
    edge: EdgeSettings = field(default_factory=EdgeSettings)


def run(config: VllmConfig, serving: VllmServing, *, under: Under) -> int:
    """The exit code. Prints `ready: front HOST:PORT` when all servers answer, or after `wait_s`. processes: that share
    the requests, and of each of which the bound of requests is a share; `under`: what each of them serves under."""
    try:
        sockets = listen_all(serving.host, serving.port, serving.edge)
    except OSError as error:
        print(f"kvferry front: {error.strerror}", file=sys.stderr)
        return 2
    address = address_of(sockets.front)
    processes = serving.processes
    each = replace(config, max_requests=-(-config.max_requests // processes))

    def serve(ready: Callable[[], None]) -> int:
        if processes > 1:
            begin_in_child()
        with under():
            asyncio.run(_serve(each, sockets, serving, ready))
        return 0

    def ready() -> None:
        print(f"ready: front {address}", flush=True)

    if processes == 1:
        return serve(ready)
    with under():  # what it refuses ends this process, and not one after the other of those
        pass
    with shared_by_children():
        return Processes(processes, serve, ready, sockets.close, serving.grace_s, ended=forget).run()


async def _serve(config: VllmConfig, sockets: Sockets, serving: VllmServing, ready: Callable[[], None]) -> None:
    stop = asyncio.Event()
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    front = VllmFront(config)
    front.start()

    async def tell() -> None:
        await _answering(front, serving.wait_s)
        ready()

    app = edged(create_app(front), front.metrics, ROUTES, serving.edge)
    apps = [Served(app, sockets.front, most_connections(config.max_requests))]
    if sockets.metrics is not None:
        apps.append(Served(metrics_app(front.metrics), sockets.metrics, METRICS_CONNECTIONS))
    await serve_apps(apps, tell, front.close, stop=stop, grace_s=serving.grace_s)


async def _answering(front: VllmFront, wait_s: float) -> None:
    """Waits until all servers do, and each name of DNS has one that does, or for so long."""
    until = time.monotonic() + wait_s
    waiting = list(dict.fromkeys(place.url for place in (*front.config.prefill, *front.config.decode)))
    while waiting and time.monotonic() < until:
        if await _answers(front, waiting[0]):
            waiting.pop(0)
        else:
            await asyncio.sleep(PROBE_SECONDS)
    if waiting:
        print(f"kvferry front: after {wait_s:g} s no answer of {', '.join(waiting)}", file=sys.stderr, flush=True)


async def _answers(front: VllmFront, url: str) -> bool:
    if any(server.place.name == url for server in (*front.prefill, *front.decode)):
        return True
    return not url.startswith(DNS) and await front.healthy(url)
