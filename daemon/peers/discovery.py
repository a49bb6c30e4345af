"""Prefill daemons found by a name of DNS, looked up again and again: the headless Service of a cluster. Shell.

Each address is asked for its daemon's name, by which front ends and requests know it. A daemon that comes back with
another address keeps its link, which then dials that one; one whose address is gone from DNS, and which is not
connected, is forgotten after a few rounds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from kvferry.daemon.config.values import is_name, parse_address
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.peers.dialing import Dial, dial_plainly
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.proto.cache_pb2_grpc import CacheStub
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.waiting import complete

log = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
RESOLVE_SECONDS = 5.0
ASK_SECONDS = 2.0
ROUNDS_GONE = 3  # without its address in DNS, after which a daemon that is not connected is forgotten
MAX_ADDRESSES = 1024  # of an answer; the rest is not looked at
ASKS_AT_ONCE = 32
CANCEL_SECONDS = 1.0  # until a link's task is cancelled again
CANCELS = 10  # of a link that is to be forgotten, in one round
MAX_SAID = 64  # different complaints; further ones wait for a round without any


class Link(Protocol):
    """The part of PeerLink that is needed here."""

    address: str
    state: str

    async def run(self) -> None: ...


class Peers(Protocol):
    """The side that has the links."""

    def room_for_peers(self) -> int: ...

    def link_of(self, name: str) -> Link | None: ...

    def add_peer(self, name: str, address: str) -> Link: ...

    def remove_peer(self, name: str, error: RequestError) -> None: ...


Resolve = Callable[[str], Awaitable[list[str]]]
AskName = Callable[[str], Awaitable[str]]


class Discovery:
    """Finds prefill daemons by DNS: `run` until cancelled. `watch` is given each task that it starts, to be told of a
    broken invariant."""

    def __init__(
        self,
        service: str,
        peers: Peers,
        watch: Callable[[asyncio.Task[None]], None],
        *,
        resolve: Resolve | None = None,
        ask_name: AskName | None = None,
        dial: Dial = dial_plainly,
    ) -> None:
        self._service = service
        self._peers = peers
        self._watch = watch
        self._resolve = resolve or resolve_addresses
        self._ask_name = ask_name or (lambda address: prefill_name(address, service, dial))
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of the links found here, by name
        self._missed: dict[str, int] = {}  # rounds without its address
        self._said: set[str] = set()  # since the last round without a complaint
        self._complained = False  # in this round

    async def run(self) -> None:
        try:
            while True:
                await self.look()
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            # Their sessions name the pool's memory until they are torn down: nothing may go before, however often this
            # task is cancelled.
            await complete(_end(list(self._tasks.values())))

    async def look(self) -> None:
        """One round."""
        if not self._complained:
            self._said.clear()
        self._complained = False
        try:
            addresses = (await self._resolve(self._service))[:MAX_ADDRESSES]
        except (OSError, asyncio.TimeoutError) as error:
            self._say(f"{self._service} cannot be looked up: {error or 'no answer in time'}; peers stay as they are")
            return
        connected = {link.address for name in self._tasks if (link := self._link(name)).state == "up"}
        asked = [address for address in addresses if address not in connected]
        gate = asyncio.Semaphore(ASKS_AT_ONCE)
        names = await asyncio.gather(*(self._name_at(address, gate) for address in asked))
        for address, name in zip(asked, names, strict=True):
            if name:
                self._found(name, address)
        await self._forget_gone(addresses, dict(zip(asked, names, strict=True)))

    async def _name_at(self, address: str, gate: asyncio.Semaphore) -> str:
        """Empty, too, where what answers cannot be a name: it would be a key, a label of metrics and part of logs."""
        async with gate:
            name = await self._ask_name(address)
        if name and not is_name(name):
            self._say(
                f"{address} calls itself {name[:MAX_NAME_CHARS]!r} ({len(name)} characters); a daemon's name is 1 to "
                f"{MAX_NAME_CHARS} letters, digits, '_', '.' or '-', the first a letter or digit"
            )
            return ""
        return name

    def _link(self, name: str) -> Link:
        link = self._peers.link_of(name)
        assert link is not None, f"the link of {name} is gone, its task is not"
        return link

    def _found(self, name: str, address: str) -> None:
        link = self._peers.link_of(name)
        if link is None:
            if not self._peers.room_for_peers():
                self._say(f"{name} at {address} would be one peer more than --max-peers or --ucx-ports allow")
                return
            link = self._peers.add_peer(name, address)
            task = self._tasks[name] = asyncio.create_task(link.run())
            self._watch(task)
            log.info("found prefill daemon %s at %s", name, address)
        elif name in self._tasks and link.address != address and link.state != "up":
            log.info("prefill daemon %s is at %s now, no longer at %s", name, address, link.address)
            link.address = address

    async def _forget_gone(self, addresses: list[str], told: dict[str, str]) -> None:
        for name in list(self._tasks):
            link = self._link(name)
            gone = link.state != "up" and (link.address not in addresses or told.get(link.address) not in ("", name))
            self._missed[name] = self._missed.get(name, 0) + 1 if gone else 0
            if self._missed[name] < ROUNDS_GONE:
                continue
            for _ in range(CANCELS):
                if not await _cancel([self._tasks[name]]):
                    break
            else:
                log.error("the link to %s at %s does not end; it is forgotten in a later round", name, link.address)
                continue
            del self._tasks[name], self._missed[name]
            self._peers.remove_peer(name, unavailable(f"prefill daemon {name!r} is no longer at {self._service}"))
            log.info("prefill daemon %s at %s is forgotten", name, link.address)

    def _say(self, words: str) -> None:
        """Once, until a round has no complaint: others choose the names in it."""
        self._complained = True
        if words not in self._said and len(self._said) < MAX_SAID:
            self._said.add(words)
            log.warning("%s", words)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    while await _cancel(tasks):
        pass


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Whether any still runs after some time. To be called again: before Python 3.12 wait_for can lose a cancellation
    that meets its result."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    return bool(running) and bool((await asyncio.wait(running, timeout=CANCEL_SECONDS))[1])


async def resolve_addresses(service: str) -> list[str]:
    """The HOST:PORT of each address of `service`, sorted. OSError, asyncio.TimeoutError."""
    host, port = parse_address(service)
    looking = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = await asyncio.wait_for(looking, RESOLVE_SECONDS)
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


async def prefill_name(address: str, service: str, dial: Dial) -> str:
    """The name of the prefill daemon there; empty where none answers, or over TLS not in the service's name."""
    async with dial(address, service) as channel:
        try:
            stats: cache.StatsReply = await CacheStub(channel).Stats(cache.StatsRequest(), timeout=ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.debug("%s: %s", address, error.details())
            return ""
    return stats.daemon if any(side.role == common.ROLE_PREFILL for side in stats.sides) else ""
