"""Read-only look-ups at the decode servers' daemons: how much of a prompt each holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from kvferry.channels import ChannelError, ClientTls, open_aio_channel
from kvferry.front.engines import CHANNEL_OPTIONS, EngineLink, ServedModel
from kvferry.front.routing import Lookup
from kvferry.proto import cache_pb2
from kvferry.radix.prompt_cache import PromptCache

SKIP_AFTER_FAILURE_S = 2.0


@dataclass(slots=True)
class LookupCounts:
    asked: int = 0
    failed: int = 0
    skipped: int = 0


class _DaemonLink:
    """One channel. ChannelError where a file of `tls` cannot be read."""

    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self._channel = open_aio_channel(address, tls, CHANNEL_OPTIONS)
        self.lookup = self._channel.unary_unary(
            "/kvferry.v1.Cache/Lookup",
            request_serializer=cache_pb2.LookupRequest.SerializeToString,
            response_deserializer=cache_pb2.LookupReply.FromString,
        )

    async def close(self, grace_s: float | None = None) -> None:
        await self._channel.close(grace_s)


class Lookups:
    """A look-up that fails or is late counts as none, and its daemon is not asked again for a while; then over a new
    channel, with the certificates as they are by then.
    """

    def __init__(self, *, deadline_s: float, clock: Callable[[], float], tls: ClientTls | None = None) -> None:
        self._deadline_s = deadline_s
        self._tls = tls
        self._skip_until: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._daemons: dict[str, _DaemonLink] = {}
        self._hashing = threading.Lock()  # over the prompts: threads use them
        self._prompts: tuple[ServedModel, PromptCache] | None = None  # recent ones of the model that is served
        self.counts = LookupCounts()

    async def ask(self, links: Sequence[EngineLink], served: ServedModel, tokens: Sequence[int]) -> list[Lookup | None]:
        """Asks each server's daemon about this prompt; the digests are computed once, outside the event loop."""
        digests = await asyncio.to_thread(self._digests, tokens, served)
        request = cache_pb2.LookupRequest(namespace_id=served.namespace_id, digests=digests)
        return list(await asyncio.gather(*(self._ask(link, request) for link in links)))

    async def close(self) -> None:
        for daemon in self._daemons.values():
            await daemon.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _retire(self, address: str) -> None:
        """Takes the daemon's channel out of use; look-ups that are under way on it end first."""
        daemon = self._daemons.pop(address, None)
        if daemon is not None:
            task = asyncio.create_task(daemon.close(self._deadline_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _digests(self, tokens: Sequence[int], served: ServedModel) -> bytes:
        with self._hashing:
            if self._prompts is None or self._prompts[0] is not served:
                self._prompts = (served, PromptCache(page_size=served.page_size, parent=served.root_digest))
            return self._prompts[1].digests(tokens).digests

    async def _ask(self, link: EngineLink, request: cache_pb2.LookupRequest) -> Lookup | None:
        assert link.facts is not None, f"{link.label} is asked before it was described"
        address = link.facts.daemon_address
        if self._clock() < self._skip_until.get(address, 0.0):
            self.counts.skipped += 1
            return None
        self.counts.asked += 1
        try:
            daemon = self._daemons.get(address)
            if daemon is None:
                daemon = self._daemons[address] = _DaemonLink(address, self._tls)
            reply = await daemon.lookup(request, timeout=self._deadline_s)
        except (grpc.aio.AioRpcError, ChannelError) as error:
            self.counts.failed += 1
            self._skip_until[address] = self._clock() + SKIP_AFTER_FAILURE_S
            if self._tls is not None and not _late(error):
                self._retire(address)
            return None
        return Lookup(reply.matched_tokens, reply.running, reply.waiting, reply.free_pages)


def _late(error: grpc.aio.AioRpcError | ChannelError) -> bool:
    """The daemon may be there all the same; others' look-ups go over the same channel."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
