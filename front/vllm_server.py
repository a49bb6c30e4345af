"""The process of the front end before vLLM servers."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import httpx

from kvferry.front.connections import most_connections
from kvferry.front.server import address_of, listen, serve_app
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app

PROBE_SECONDS = 0.5


def run(config: VllmConfig, *, host: str, port: int, wait_s: float, grace_s: float) -> int:
    """The exit code. Prints `ready: front HOST:PORT` when all servers answer, or after `wait_s`."""
    try:
        asyncio.run(_serve(config, host, port, wait_s, grace_s))
    except OSError as error:
        print(f"kvferry front: --listen {host}:{port}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: VllmConfig, host: str, port: int, wait_s: float, grace_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = listen(host, port)
    front = VllmFront(config)

    async def tell() -> None:
        await _tell(front, wait_s, address_of(listener))

    await serve_app(
        create_app(front),
        listener,
        tell,
        front.close,
        stop=stop,
        grace_s=grace_s,
        max_connections=most_connections(config.max_requests),
    )


async def _tell(front: VllmFront, wait_s: float, address: str) -> None:
    until = time.monotonic() + wait_s
    waiting = [server.url for server in (*front.prefill, *front.decode)]
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
    print(f"ready: front {address}", flush=True)
