"""Statistics of a daemon with something in every field."""

from __future__ import annotations

from kvferry.daemon.core.counters import BOUNDS, Histogram
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common


def snapshot() -> cache.StatsReply:
    """Of a daemon with both roles, with something in every repeated field."""
    reply = cache.StatsReply(daemon="d", uptime_seconds=5, rpcs=[cache.RpcStats(method="Cache/Stats", code="OK")])
    histogram = Histogram()
    for seconds in (0.0001, 0.0005, 0.3, 99.0):
        histogram.add(seconds)
    wire = cache.Histogram(bounds=BOUNDS, counts=histogram.counts, sum=histogram.sum)
    reply.rpcs[0].seconds.CopyFrom(wire)
    reply.loop_lag.CopyFrom(wire)
    reply.tls.expires = 2e9
    for role in (common.ROLE_DECODE, common.ROLE_PREFILL):
        side = reply.sides.add(role=role)
        side.requests.hit_tokens, side.requests.host_hit_tokens, side.requests.queried_tokens = 10, 4, 20
        side.requests.failures.add(reason="deadline_exceeded", count=3)
        side.requests.failures.add(reason="unavailable", count=2)
        side.transfers.failures.add(reason="wrong_parts", count=1)
        side.transfers.aborts.add(reason="request_ended", count=6)
        side.tiers.unstored.add(reason="room", count=5)
        side.host.pages, side.host.asked_pages = 12, 24
        side.way_back.choices.add(reason="fetched", count=2)
        side.admit_to_ready.seconds.CopyFrom(wire)
        side.admit_to_ready.stages.add(stage="queue").seconds.CopyFrom(wire)
        side.peers.add(name="p", state="up", slots=16, free_credits=10, busy_slots=2, withheld_slots=1)
        side.peers.add(name="p", state="connecting", slots=16, free_credits=3)
        side.namespaces.add(namespace_id=b"\xab" * 32, device_pages=7, hit_tokens=10)
        side.copies.strategies.add(strategy="staged", copies=3, descriptors=12, bytes=4096)
        side.copies.strategies.add(strategy="batch")
        side.copies.fallbacks.add(reason="rows are not pinned", count=2)
        side.copies.forced = "staged"
    return reply
