"""Servers behind names of DNS: each name is looked up again and again, and each of its addresses asked for /health.

A server takes requests from its first 200 on, none while it gives another answer, or none, and is forgotten when its
address is gone from DNS. Where a name cannot be looked up, its last addresses stand.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from kvferry.front.vllm_places import Place
from kvferry.waiting import within

ROUND_SECONDS = 3.0
RESOLVE_SECONDS = 5.0
MAX_ADDRESSES = 256  # of a name; more are left out, which is logged
ASKS_AT_ONCE = 32

Healthy = Callable[[str], Awaitable[bool]]
"""Whether the server at a URL says that it is well; never raises, and has a deadline."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A name's addresses. OSError where it cannot be looked up."""

_log = logging.getLogger(__name__)


async def resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class NamedServers:
    """The servers that are well behind some names. `changed` is called with all of them after each change."""

    def __init__(
        self,
        names: Sequence[Place],
        healthy: Healthy,
        changed: Callable[[list[Place]], None],
        resolve: Resolve = resolve,
    ) -> None:
        self._names = list(names)
        self._healthy = healthy
        self._changed = changed
        self._resolve = resolve
        self._addresses: dict[str, list[str]] = {}  # by host, as last found
        self._well: list[Place] = []
        self._asking = asyncio.Semaphore(ASKS_AT_ONCE)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._names:
            self._task = asyncio.create_task(self._run(), name="names of DNS")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                _log.exception("a round of looking up names failed; the next one comes")
            await asyncio.sleep(ROUND_SECONDS)

    async def look(self) -> None:
        """One round."""
        for host, port in dict.fromkeys(place.host_and_port for place in self._names):
            await self._look_up(host, port)
        servers = [
            name.at(address) for name in self._names for address in self._addresses.get(name.host_and_port[0], ())
        ]
        urls = list(dict.fromkeys(server.url for server in servers))
        answers = await asyncio.gather(*map(self._ask, urls))
        answered = dict(zip(urls, answers, strict=True))
        well = [server for server in servers if answered[server.url]]
        if well != self._well:
            for server in sorted(set(self._well) ^ set(well), key=lambda server: server.label):
                _log.info("server %s is %s", server.label, "well" if answered.get(server.url) else "left out")
            self._well = well
            self._changed(well)

    async def _look_up(self, host: str, port: int) -> None:
        try:
            found = await within(RESOLVE_SECONDS, self._resolve(host, port))
        except (OSError, asyncio.TimeoutError) as error:
            _log.warning("%s cannot be looked up: %s %s", host, type(error).__name__, error)
            return
        if len(found) > MAX_ADDRESSES:
            _log.warning("%s has %d addresses; %d of them are used", host, len(found), MAX_ADDRESSES)
        self._addresses[host] = list(found[:MAX_ADDRESSES])

    async def _ask(self, url: str) -> bool:
        async with self._asking:
            return await self._healthy(url)
