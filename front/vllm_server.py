"""The process of the front end before vLLM servers."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import httpx

from kvferry.front.connections import most_connections
from kvferry.front.processes import Processes
from kvferry.front.server import address_of, listen, serve_app
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app
from kvferry.signals import end_signals

PROBE_SECONDS = 0.5

Under = Callable[[], AbstractContextManager[object]]


def run(
    config: VllmConfig, *, host: str, port: int, wait_s: float, grace_s: float, processes: int, under: Under
) -> int:
    """The exit code. Prints `ready: front HOST:PORT` when all servers answer, or after `wait_s`. processes: that share
    the requests, and of each of which the bound of requests is a share; `under`: what each of them serves under."""
    try:
        listener = listen(host, port)
    except OSError as error:
        print(f"kvferry front: --listen {host}:{port}: {error}", file=sys.stderr)
        return 1
    address = address_of(listener)
    each = replace(config, max_requests=-(-config.max_requests // processes))

    def serve(ready: Callable[[], None]) -> int:
        with under():
            asyncio.run(_serve(each, listener, wait_s, grace_s, ready))
        return 0

    def ready() -> None:
        print(f"ready: front {address}", flush=True)

    if processes == 1:
        return serve(ready)
    with under():  # what it refuses ends this process, and not one after the other of those
        pass
    return Processes(processes, serve, ready, listener.close, grace_s).run()


async def _serve(
    config: VllmConfig, listener: socket.socket, wait_s: float, grace_s: float, ready: Callable[[], None]
) -> None:
    stop = asyncio.Event()
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    front = VllmFront(config)

    async def tell() -> None:
        await _answering(front, wait_s)
        ready()

    await serve_app(
        create_app(front),
        listener,
        tell,
        front.close,
        stop=stop,
        grace_s=grace_s,
        max_connections=most_connections(config.max_requests),
    )


async def _answering(front: VllmFront, wait_s: float) -> None:
    """Waits until all servers do, or for so long."""
    until = time.monotonic() + wait_s
    waiting = list({server.url: None for server in (*front.prefill, *front.decode)})
    while waiting and time.monotonic() < until:
        try:
            reply = await front.client.get(waiting[0] + "/health", timeout=5.0)
        except httpx.TransportError:
            reply = None
        if reply is not None and reply.status_code == 200:
            waiting.pop(0)
        else:
            await asyncio.sleep(PROBE_SECONDS)
    if waiting:
        print(f"kvferry front: after {wait_s:g} s no answer of {', '.join(waiting)}", file=sys.stderr, flush=True)
