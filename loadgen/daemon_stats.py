"""What the decode daemons counted during a run, from their gRPC statistics before and after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields

import grpc
import grpc.aio

from kvferry.channels import ClientTls, open_aio_channel
from kvferry.proto import cache_pb2, common_pb2

DEADLINE_S = 5.0


class StatsError(Exception):
    """A daemon gave no statistics."""


@dataclass(frozen=True, slots=True)
class DaemonCounts:
    """Sums over the decode sides."""

    moved_bytes: int = 0  # page payload over NIXL
    wire_bytes: int = 0  # with slot headers
    moved_pages: int = 0
    saved_bytes: int = 0  # matched: what a system without reuse would have moved too
    saved_pages: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    host_hit_tokens: int = 0  # of the hit tokens, those that came back from the host tier
    spilled_pages: int = 0
    restored_pages: int = 0

    def since(self, before: DaemonCounts) -> DaemonCounts:
        return DaemonCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def plus(self, other: DaemonCounts) -> DaemonCounts:
        return DaemonCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


async def read_counts(addresses: Sequence[str], tls: ClientTls | None = None) -> DaemonCounts:
    """Raises StatsError naming the daemon, ChannelError naming a file of `tls`."""
    total = DaemonCounts()
    for counts in await asyncio.gather(*(_read(address, tls) for address in addresses)):
        total = total.plus(counts)
    return total


async def _read(address: str, tls: ClientTls | None) -> DaemonCounts:
    async with open_aio_channel(address, tls) as channel:
        stats = channel.unary_unary(
            "/kvferry.v1.Cache/Stats",
            request_serializer=cache_pb2.StatsRequest.SerializeToString,
            response_deserializer=cache_pb2.StatsReply.FromString,
        )
        try:
            reply = await stats(cache_pb2.StatsRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise StatsError(f"daemon {address}: {error.code().name}: {error.details()}") from error
    total = DaemonCounts()
    for side in reply.sides:
        if side.role == common_pb2.ROLE_DECODE:
            total = total.plus(_counts(side))
    return total


def _counts(side: cache_pb2.SideStats) -> DaemonCounts:
    return DaemonCounts(
        moved_bytes=side.transfers.delta_bytes,
        wire_bytes=side.transfers.wire_bytes,
        moved_pages=side.transfers.delta_pages,
        saved_bytes=side.transfers.saved_bytes,
        saved_pages=side.transfers.saved_pages,
        queried_tokens=side.requests.queried_tokens,
        hit_tokens=side.requests.hit_tokens,
        evicted_pages=side.pool.evicted,
        host_hit_tokens=side.requests.host_hit_tokens,
        spilled_pages=side.tiers.spilled_pages,
        restored_pages=side.tiers.restored_pages,
    )
