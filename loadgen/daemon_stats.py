"""Counts of the decode daemons during a run, from their gRPC statistics before and after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import grpc
import grpc.aio

from kvferry.channels import ClientTls, open_aio_channel
from kvferry.proto import cache_pb2, common_pb2

DEADLINE_S = 5.0


class StatsError(Exception):
    """A daemon gave no statistics, or none that can be compared."""


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
        """The counts of one daemon from `before` on. Raises StatsError where a count fell: it began anew meanwhile."""
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if now < then:
                raise StatsError(f"{field.name} is {now}, and was {then} before: it was started anew")
        return DaemonCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def plus(self, other: DaemonCounts) -> DaemonCounts:
        return DaemonCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Reading:
    """The counts of one daemon at one time."""

    address: str
    at_s: float  # of this process's monotonic clock
    uptime_s: float  # 0: the daemon does not say
    counts: DaemonCounts

    def since(self, before: Reading) -> DaemonCounts:
        """Raises StatsError where the daemon was started anew meanwhile: what it counted until then is lost."""
        expected_s = before.uptime_s + self.at_s - before.at_s
        if self.uptime_s and self.uptime_s < expected_s - DEADLINE_S:
            raise StatsError(
                f"daemon {self.address} runs for {self.uptime_s:.1f} s, and would for {expected_s:.1f} s: "
                "it was started anew"
            )
        try:
            return self.counts.since(before.counts)
        except StatsError as error:
            raise StatsError(f"daemon {self.address}: {error}") from None


async def read_daemons(addresses: Sequence[str], tls: ClientTls | None = None) -> tuple[Reading, ...]:
    """Reads the daemons' counts. Raises StatsError naming the daemon, ChannelError naming a file of `tls`."""
    return tuple(await asyncio.gather(*(_read(address, tls) for address in addresses)))


def counted(before: Sequence[Reading], after: Sequence[Reading]) -> DaemonCounts:
    """The counts of all daemons from one reading to the other. Raises StatsError naming one that was started anew."""
    total = DaemonCounts()
    for first, last in zip(before, after, strict=True):
        total = total.plus(last.since(first))
    return total


async def _read(address: str, tls: ClientTls | None) -> Reading:
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
    return Reading(address, time.monotonic(), reply.uptime_seconds, total)


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
