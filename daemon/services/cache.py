"""Read-only questions: statistics and look-ups. Shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.observe.stats import Snapshots, load_of
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import cache_pb2 as wire
from kvferry.proto import cache_pb2_grpc
from kvferry.radix.digests import DIGEST_BYTES

NAMESPACE_BYTES = 32


def most_digest_bytes(config: DaemonConfig) -> int:
    """Bytes of the longest prompt's digests."""
    return config.max_tokens // config.page_size * DIGEST_BYTES


if TYPE_CHECKING:
    from kvferry.daemon.services.worker import Context


class CacheService(cache_pb2_grpc.CacheServicer):
    def __init__(self, sides: dict[str, AnySide], snapshots: Snapshots) -> None:
        self._sides = sides
        self._snapshots = snapshots

    async def Stats(self, request: wire.StatsRequest, context: Context) -> wire.StatsReply:
        return self._snapshots.take()

    async def Lookup(self, request: wire.LookupRequest, context: Context) -> wire.LookupReply:
        """Looks a prompt up, on the decode side where there is one."""
        if len(request.namespace_id) != NAMESPACE_BYTES:
            bytes_ = len(request.namespace_id)
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"namespace_id has {bytes_} bytes; it must have {NAMESPACE_BYTES}"
            )
        side = self._sides.get("decode") or self._sides["prefill"]
        most = most_digest_bytes(side.config)
        if len(request.digests) % DIGEST_BYTES or len(request.digests) > most:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"digests has {len(request.digests)} bytes; it must have {DIGEST_BYTES} for every page, "
                f"and at most {most}",
            )
        reply = wire.LookupReply()
        if not side.tiers.has_pool.is_set():
            return reply
        core, cache = side.ready_core, side.cache
        reply.matched_tokens = core.matched_tokens(request.namespace_id, request.digests)
        reply.waiting, reply.running = load_of(side)
        reply.free_pages = cache.available()
        reply.pages = cache.pool.pages
        return reply
