"""Decode servers' daemons: each is asked again and again, by grpc.health.v1, whether hand-offs to it are of use.

A server whose daemon says no, or nothing, computes prompts itself: it is handed nothing over meanwhile. One that nobody
has named a daemon of is handed all that comes to it, and so is one whose daemon has not been heard of yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from kvferry.channels import ChannelError, ClientTls, open_aio_channel
from kvferry.front.engines import CHANNEL_OPTIONS
from kvferry.front.upstream.legs import Server
from kvferry.proto.health import ENGINE_SERVICE, HEALTH_WHY

ROUND_SECONDS = 0.5
ANSWER_SECONDS = 2.0
TRIES = 2  # that may be late: one of this process's own standstills, or of the daemon's, changes nothing
MAX_WHY_CHARS = 500

_log = logging.getLogger(__name__)


class DecodeDaemons:
    """The daemons beside those of the servers that have one named. Their words are kept in `Server.unready`."""

    def __init__(self, servers: Callable[[], Sequence[Server]], tls: ClientTls | None = None) -> None:
        self._servers = servers
        self._tls = tls
        self._daemons: dict[str, _Daemon] = {}  # by address
        self._asking: dict[str, asyncio.Task[None]] = {}  # by address: a question that is not answered
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="health of decode daemons")

    async def close(self) -> None:
        tasks = [*self._asking.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keep(())

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                _log.exception("a round of asking decode daemons failed; the next one comes")
            await asyncio.sleep(ROUND_SECONDS)

    async def look(self) -> None:
        """Asks those that have no question to answer."""
        addresses = dict.fromkeys(each.place.daemon_address for each in self._servers() if each.place.daemon_address)
        await self._keep([*addresses, *self._asking])
        for address in addresses:
            if address not in self._asking:
                task = self._asking[address] = asyncio.create_task(self._ask(address), name=f"health of {address}")
                task.add_done_callback(partial(self._answered, address))

    def _answered(self, address: str, task: asyncio.Task[None]) -> None:
        del self._asking[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the daemon at %s could not be asked; it is asked again", address, exc_info=error)

    async def _keep(self, addresses: Collection[str]) -> None:
        for address in [address for address in self._daemons if address not in addresses]:
            await self._daemons.pop(address).close()

    async def _ask(self, address: str) -> None:
        daemon = self._daemons.setdefault(address, _Daemon(address, self._tls))
        why = await daemon.unready()
        for server in self._servers():
            if server.place.daemon_address != address or server.unready == why:
                continue
            if not why:
                _log.info("decode server %s: its daemon at %s is ready", server.place.label, address)
            elif not server.unready:
                told = "others get what comes, or it computes all of it"
                _log.warning("decode server %s: its daemon at %s: %s; %s", server.place.label, address, why, told)
            server.unready = why


class _Daemon:
    """One address, by a channel that is opened anew where a call fails: with the certificates as they are by then."""

    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self._address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def unready(self) -> str:
        """Why hand-offs are of no use; empty: they are."""
        for late in range(1, TRIES + 1):
            try:
                return await self._asked()
            except grpc.aio.AioRpcError as error:
                await self.close()
                if late == TRIES or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    return f"{error.code().name}: {error.details() or 'no details'}"[:MAX_WHY_CHARS]
            except ChannelError as error:
                return str(error)
        raise AssertionError("the last try says why")

    async def _asked(self) -> str:
        if self._channel is None:
            self._channel = open_aio_channel(self._address, self._tls, CHANNEL_OPTIONS)
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        call = check(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE), timeout=ANSWER_SECONDS)
        reply = await call
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        for key, value in await call.trailing_metadata():
            if key == HEALTH_WHY and isinstance(value, bytes):
                return value.decode(errors="replace")[:MAX_WHY_CHARS]
        return "it does not serve"

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
