"""Sessions of a connector's worker half with the daemon, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvferry.client.client import DaemonClient
from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonAbsent, HandshakeFailed, RequestName
from kvferry.connectors.blocks import PoolPages
from kvferry.connectors.movers import Mover
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_state import UNWANTED
from kvferry.proto import common_pb2
from kvferry.waiting import complete, within

RETRY_SECONDS = 0.5
REFUSED_RETRY_SECONDS = 5.0
CONNECT_SECONDS = 10.0  # of one try, for the daemon
LATE_MS = 500  # an engine with a daemon's pool waits for no answer but Ready, and each wakes a thread of it
GIVE_BACK_MS = 10  # Ended gives an engine its own blocks back, for which other prompts may wait
MOST_MISSED, MISSED_SECONDS = 1024, 10.0  # requests; so long a daemon waits for a rank
SETTLED_SECONDS = 600.0  # that an engine without requests may take to start

_log = logging.getLogger(__name__)


class OpenSession(Protocol):
    def __call__(self, *, deadline_s: float) -> Coroutine[Any, Any, DaemonClient]: ...


class DaemonRefused(RuntimeError):
    """The daemon is there, and will not have this engine."""


def pool_of(client: DaemonClient) -> PoolPages:
    return PoolPages.of(client.pools.memories[0], client.pools.pages)


def connector_of(
    settings: Settings,
    role: common_pb2.Role,
    facts: common_pb2.NamespaceFacts,
    worker: str,
    mover: Mover,
    own: Callable[[], EnginePools] | None = None,
    rank: OneRank | None = None,
) -> OpenSession:
    """`own`: registers the engine's blocks anew; None: the pool is the daemon's. `rank`: of an engine with several."""

    async def connect(*, deadline_s: float) -> DaemonClient:
        client = await DaemonClient.connect(
            settings.socket,
            role,
            facts,
            worker,
            deadline_s=deadline_s,
            late_ms=LATE_MS if own is None else GIVE_BACK_MS,
            own=None if own is None else own(),
            rank=rank,
        )
        if own is not None:
            return client
        if misfit := mover.misfit(client.pools.memories):
            await client.close()
            raise HandshakeFailed(misfit)
        return client

    return connect


def greeting(client: DaemonClient, meanwhile: str) -> str:
    """What an operator reads of a new session. `meanwhile`: what becomes of requests while there is none."""
    told = client.welcome
    way = "straight from and into this engine's blocks" if client.pools.in_blocks else "by way of its pool"
    return (
        f"connected to kvferry's daemon {told.daemon!r}: namespace {told.namespace_id.hex()[:12]}, pages of "
        f"{told.geometry.page_size} tokens, {way}; while it is away {meanwhile}"
    )


class Sessions:
    """The sessions, one behind the other until `close`. `quiet` ends all that uses the one that is over; `changed`
    hears whether there is one. All of it on one event loop."""

    def __init__(
        self,
        connect: OpenSession,
        *,
        quiet: Callable[[], Coroutine[Any, Any, None]],
        changed: Callable[[bool], None],
        settled: asyncio.Event,
        meanwhile: str = "prompts are computed here",
    ) -> None:
        """`settled`: until it is set none but the first is opened, and none is ended. `meanwhile`: what becomes of
        requests while there is no session."""
        self.client: DaemonClient | None = None
        self._settled = settled
        self._meanwhile = meanwhile
        self._connect = connect
        self._quiet = quiet
        self._changed = changed
        self._keeping: asyncio.Task[None] | None = None
        self._unproven: list[DaemonClient] = []  # that are over, and whose daemons may still touch the engine's blocks
        self._missed: deque[tuple[float, RequestName]] = deque(maxlen=MOST_MISSED)  # since when: wanted without one

    async def open(self, deadline_s: float) -> None:
        """The first; HandshakeFailed where it is refused. Where no daemon is there it is tried again and again."""
        try:
            self.client = await self._connect(deadline_s=deadline_s)
            _log.info("%s", greeting(self.client, self._meanwhile))
        except DaemonAbsent as error:
            self._changed(False)
            _log.warning("%s; until it comes %s", error, self._meanwhile)
        self._keeping = asyncio.create_task(self._keep_open(), name="kvferry sessions")

    def decline(self, name: RequestName) -> None:
        """Tells the other ranks of the engine, which may have opened a request, that this one does not: as soon as
        there is a session."""
        if self.client is not None and not self.client.gone.done():
            self.client.decline(name, UNWANTED)
        else:
            self._missed.append((asyncio.get_running_loop().time(), name))

    def _decline_missed(self, client: DaemonClient) -> None:
        least = asyncio.get_running_loop().time() - MISSED_SECONDS
        for since, name in self._missed:
            if since > least:
                client.decline(name, UNWANTED)
        self._missed.clear()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end()

    async def _keep_open(self) -> None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # one class from Python 3.11 on
            # Before Python 3.12 asyncio's own wait may take a cancellation for an end that comes with it.
            await within(SETTLED_SECONDS, self._settled.wait())
        while True:
            try:
                await self._one()
            except Exception:  # without a session everything is computed here, for good
                _log.exception("the session with the daemon ended unexpectedly; another is tried")
                await asyncio.sleep(RETRY_SECONDS)

    async def _one(self) -> None:
        client = self.client
        if client is None:
            client = await self._reopen()
        gone = await asyncio.shield(client.gone)
        _log.warning("the daemon is gone (%s); meanwhile %s", gone, self._meanwhile)
        await complete(self._end())

    async def _end(self) -> None:
        client, self.client = self.client, None
        self._changed(False)
        await self._quiet()
        if client is not None:
            await client.close()  # no copy of ours runs: the memory and the lock may go
            if client.end is not None and not client.end.proven:
                self._unproven.append(client)

    def _prove(self, client: DaemonClient) -> None:
        """A daemon that maps blocks anew has let go of what it had mapped."""
        for before in self._unproven:
            if before.end is not None and before.welcome.incarnation == client.welcome.incarnation:
                before.end.prove()
        self._unproven = [each for each in self._unproven if each.end is not None and not each.end.proven]

    async def _reopen(self) -> DaemonClient:
        while True:
            try:
                self.client = await self._connect(deadline_s=CONNECT_SECONDS)
                self._prove(self.client)
                self._decline_missed(self.client)
                self._changed(True)
                _log.info("again %s", greeting(self.client, self._meanwhile))
                return self.client
            except DaemonAbsent:
                await asyncio.sleep(RETRY_SECONDS)
            except HandshakeFailed as error:
                _log.error("%s", error)
                await asyncio.sleep(REFUSED_RETRY_SECONDS)
