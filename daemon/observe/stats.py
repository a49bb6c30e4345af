"""One snapshot of a daemon, as the wire's StatsReply: the gRPC statistics and the Prometheus endpoint both show it.
Everything is read in one go on the event loop's thread, so the counts agree.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata

import kvferry
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import BOUNDS, Histogram, LookUpCounters, TransferCounters
from kvferry.daemon.observe.health import HealthWatch
from kvferry.daemon.observe.room import RoomWatch
from kvferry.daemon.observe.rpc_times import RpcTimes
from kvferry.daemon.peers.handshake import no_way_back
from kvferry.daemon.peers.tls import Identity, TlsWatch
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import cache_pb2 as wire
from kvferry.proto import common_pb2 as common
from kvferry.proto.versions import PROTOCOL
from kvferry.radix.pool import PagePool
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics


class Snapshots:
    """Snapshots of one daemon. `now` is a clock in seconds."""

    def __init__(
        self, name: str, sides: dict[str, AnySide], now: Callable[[], float], tls: TlsWatch | None = None
    ) -> None:
        self.rpcs = RpcTimes(now)
        self.loop_lag = Histogram()
        self.watch: HealthWatch | None = None  # once the daemon starts
        self.room: RoomWatch | None = None  # likewise
        self.metrics = ""  # the Prometheus endpoint's HOST:PORT, once it listens
        self._name = name
        self._sides = sides
        self._now = now
        self._tls = tls
        self._started = now()
        self._build = wire.BuildInfo(
            version=kvferry.__version__,
            protocol=PROTOCOL,
            nixl=_nixl_version(),
            python=platform.python_version(),
        )

    def take(self) -> wire.StatsReply:
        """Takes one, on the event loop's thread."""
        return wire.StatsReply(
            daemon=self._name,
            uptime_seconds=self._now() - self._started,
            sides=[side_stats(side) for side in self._sides.values()],
            build=self._build,
            loop_lag=_histogram(self.loop_lag),
            rpcs=[
                wire.RpcStats(method=method, code=code, seconds=_histogram(histogram))
                for (method, code), histogram in sorted(self.rpcs.histograms.items())
            ],
            metrics=self.metrics,
            tls=_tls(self._tls.current(), self._tls.broken) if self._tls is not None else None,
            stalled=self.watch.stalled if self.watch is not None else (),
            lacks=self.room.lacks if self.room is not None else (),
        )


def _tls(identity: Identity, broken: str) -> wire.TlsStats:
    return wire.TlsStats(expires=identity.expires, broken=broken)


def _nixl_version() -> str:
    """The version of the metapackage, or of one of the packages that it chooses from."""
    for package in ("kvferry-nixl", "nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _histogram(histogram: Histogram) -> wire.Histogram:
    return wire.Histogram(bounds=BOUNDS, counts=histogram.counts, sum=histogram.sum)


def _reasons(counts: Counter[str]) -> Iterable[wire.ReasonCount]:
    return [wire.ReasonCount(reason=reason, count=count) for reason, count in sorted(counts.items())]


def side_stats(side: AnySide) -> wire.SideStats:
    """Zeros before the first worker has come, but for the peers."""
    stats = wire.SideStats(role=common.ROLE_DECODE if side.role == "decode" else common.ROLE_PREFILL)
    stats.workers = side.workers.may_write
    _digests(side, stats.digests)
    _peers(side, stats)
    if side.core is None:
        return stats
    side.cache.settle()
    _requests(side, stats.requests)
    _device(side.cache, side.tiers.page_bytes, stats.pool)
    stats.pool.block_tokens = side.tiers.block_tokens
    _host(side.cache, side.tiers.row_bytes, stats.host)
    _tiers(side, stats.tiers)
    _copies(side.tiers.copy_statistics(), stats.copies)
    _namespaces(side.cache, stats)
    stats.policy = side.cache.limits.policy
    _transfers(side, stats.transfers)
    _way_back(side, stats.way_back)
    _events(side, stats.events)
    stats.quarantine.orphaned_pages = side.orphaned_pages
    stats.quarantine.orphaned_bound = side.orphaned_bound
    stats.quarantine.lost_workers, stats.quarantine.workers_bound = side.workers.lost, side.config.max_workers
    stats.quarantine.draining_transfers = side.ready_core.draining_transfers
    latencies = side.latencies
    stats.admit_to_ready.count = latencies.count
    stats.admit_to_ready.p50_ms = latencies.quantile(0.50) * 1e3
    stats.admit_to_ready.p99_ms = latencies.quantile(0.99) * 1e3
    stats.admit_to_ready.seconds.CopyFrom(_histogram(latencies.whole))
    for stage, values in latencies.stages.items():
        mean_ms = sum(values) / len(values) * 1e3
        stats.admit_to_ready.stages.add(stage=stage, mean_ms=mean_ms, seconds=_histogram(latencies.histograms[stage]))
    return stats


def _events(side: AnySide, stats: wire.KvEventStats) -> None:
    sink = side.event_sink
    if sink is None:
        return
    stats.endpoint, stats.replay = sink.endpoint, sink.replay
    stats.batches = sink.batches
    stats.queue_dropped, stats.subscriber_dropped = sink.queue_dropped, sink.subscriber_dropped
    for reason, cut_off in sorted(sink.replays_cut_off.items()):
        stats.cut_off_replays.add(reason=reason, count=cut_off)
    for (event, medium), count in sorted(sink.blocks.items()):
        stats.blocks.add(event=event, medium=medium, count=count)


def _peers(side: AnySide, stats: wire.SideStats) -> None:
    if isinstance(side, DecodeSide):
        for link in side.links.values():
            peer = stats.peers.add(name=link.name, address=link.address, state=link.state, error=link.error)
            if link.session is not None:
                peer.slots = side.config.slots * side.config.ranks
                receiver = link.session.receiving.receiver
                peer.free_credits, peer.busy_slots = receiver.free_credits, receiver.busy_slots
                peer.withheld_slots = receiver.withheld_slots
                peer.checksums, peer.moved_bytes = link.session.checksums, link.session.moved_bytes
    elif isinstance(side, PrefillSide):
        for session in side.sessions.values():
            peer = stats.peers.add(name=session.remote, state="up" if session.up else "connecting")
            peer.slots, peer.checksums = session.remote_slots, session.checksums
            peer.moved_bytes = session.moved_bytes
            if (sender := session.sending.sender) is not None:
                peer.free_credits = sender.free_credits


def _digests(side: AnySide, stats: wire.DigestFacts) -> None:
    stats.page_size = side.config.page_size
    facts = side.tiers.facts
    if facts is not None:
        stats.algorithm, stats.root_digest = facts.digest_algorithm, facts.root_digest
        stats.digest_tokens = facts.digest_tokens


def _requests(side: AnySide, stats: wire.RequestStats) -> None:
    counters = side.ready_core.counters
    stats.admitted, stats.finished = counters.admitted, counters.finished
    stats.aborted, stats.failed, stats.refused = counters.aborted, counters.failed, counters.refused
    stats.queried_tokens, stats.hit_tokens = counters.queried_tokens, counters.hit_tokens
    stats.hit_rate, stats.recent_hit_rate = counters.hit_rate, counters.recent_hit_rate
    stats.recent_requests = len(counters.recent)
    stats.host_hit_tokens = counters.host_hit_tokens
    stats.retracted, stats.overtaken = counters.retracted, counters.overtaken
    stats.reserved = side.ready_core.reserved
    stats.waiting, stats.running = load_of(side)
    stats.failures.extend(_reasons(counters.failures))
    oldest = oldest_of(side)
    stats.oldest_seconds = side.now() - oldest if oldest is not None else 0.0


def oldest_of(side: AnySide) -> float | None:
    """The time at which the oldest request came that holds pages or locks; None: there is none."""
    if isinstance(side, DecodeSide):
        return min((lease.arrived_at for lease in side.ready_core.leases.values() if not lease.queued), default=None)
    assert isinstance(side, PrefillSide)
    entries = side.ready_core.entries.values()
    return min((e.arrived_at for e in entries if e.prompt is not None and not e.queued), default=None)


def load_of(side: AnySide) -> tuple[int, int]:
    """(waiting, running) requests."""
    if side.core is not None:
        return side.core.waiting_requests, side.core.running
    return 0, 0


def _device(cache: Cache, page_bytes: int, stats: wire.PoolStats) -> None:
    _pages(cache.pool, page_bytes, stats)
    stats.asked_pages = cache.pool.pages
    stats.evictable, stats.promised, stats.locks = cache.evictable, cache.promised, cache.locks
    stats.tree_nodes = sum(namespace.tree.nodes for namespace in cache.namespaces.values())
    stats.evicted, stats.zeroed = cache.evicted, cache.zeroed


def _host(cache: Cache, page_bytes: int, stats: wire.PoolStats) -> None:
    """Zeros where there is none. Locks and nodes are those of the trees: the device pool's statistics have them."""
    stats.SetInParent()
    if cache.host is not None:
        _pages(cache.host, page_bytes, stats)
        stats.asked_pages = cache.host_asked
        stats.evictable = sum(namespace.tree.host_evictable for namespace in cache.namespaces.values())
        stats.evicted = cache.tiers.host_evicted


def _pages(pool: PagePool, page_bytes: int, stats: wire.PoolStats) -> None:
    counts = pool.counts()
    stats.pages, stats.page_bytes = pool.pages, page_bytes
    stats.free, stats.leased, stats.arriving = counts.free, counts.leased, counts.arriving
    stats.cached, stats.spilling = counts.cached, counts.spilling
    stats.restoring, stats.orphaned = counts.restoring, counts.orphaned


def _tiers(side: AnySide, stats: wire.TierStats) -> None:
    cache: Cache = side.cache
    tiers = cache.tiers
    stats.spilled_pages, stats.restored_pages, stats.backup_pages = tiers.spilled, tiers.restored, tiers.backed_up
    stats.spill_failed_pages, stats.restore_failed_pages = tiers.spill_failed, tiers.restore_failed
    stats.mismatched_pages = tiers.mismatched
    stats.dropped_pages, stats.host_evicted_pages = tiers.dropped, tiers.host_evicted
    stats.spill_seconds, stats.restore_seconds = tiers.spill_seconds, tiers.restore_seconds
    stats.copies = cache.copies.running
    stats.recovered_pages, stats.discarded_entries = tiers.recovered, tiers.discarded_entries
    stats.orphan_pages = sum(namespace.tree.orphans for namespace in cache.namespaces.values())
    stats.unverified_pages = side.tiers.unverified_pages
    stats.unstored.extend(_reasons(tiers.unstored))
    stats.host_stays = side.tiers.host_stays


def _copies(copies: CopyStatistics, stats: wire.CopyStats) -> None:
    stats.forced = copies.forced
    for strategy, counts in copies.strategies.items():
        stats.strategies.add(
            strategy=strategy, copies=counts.copies, descriptors=counts.descriptors, bytes=counts.bytes
        )
    for reason, count in sorted(copies.fallbacks.items()):
        stats.fallbacks.add(reason=reason, count=count)


def _namespaces(cache: Cache, stats: wire.SideStats) -> None:
    for namespace in cache.namespaces.values():
        stats.namespaces.add(
            namespace_id=namespace.id,
            device_pages=namespace.used,
            host_pages=namespace.tree.host_pages,
            evictable=namespace.tree.evictable,
            promised=namespace.promised,
            soft_quota=namespace.quota.soft,
            hard_quota=namespace.quota.hard,
            queried_tokens=namespace.queried_tokens,
            hit_tokens=namespace.hit_tokens,
            host_hit_tokens=namespace.host_hit_tokens,
            evicted=namespace.evicted,
            pinned_pages=namespace.pinned_pages,
        )


def _transfers(side: AnySide, stats: wire.TransferStats) -> None:
    _counted(side.ready_core.transfer_counters, stats)
    stats.saved_pages = side.ready_core.counters.saved_pages
    stats.saved_bytes = stats.saved_pages * side.tiers.page_bytes
    if isinstance(side, DecodeSide):
        stats.asked_again = side.ready_core.asked_again
    stats.active = side.ready_core.active_transfers


def _way_back(side: AnySide, stats: wire.WayBackStats) -> None:
    stats.setting = side.config.way_back
    if stats.setting != "off":
        stats.off_because = no_way_back(side.config)
    if isinstance(side, DecodeSide):
        returns = side.ready_core.returns
        _counted(returns.counters, stats.transfers)
        _look_ups(returns.look_ups, stats.look_ups)
        stats.transfers.active = returns.active
        return
    assert isinstance(side, PrefillSide)
    fetches = side.ready_core.fetches
    _counted(fetches.counters, stats.transfers)
    stats.transfers.active, stats.fetched_tokens = len(fetches), fetches.fetched_tokens
    stats.elsewhere_tokens, stats.followed_tokens = fetches.elsewhere_tokens, fetches.followed_tokens
    _look_ups(fetches.look_ups.counters, stats.look_ups)
    judge = fetches.judge
    stats.choices.extend(_reasons(judge.choices))
    stats.tokens_per_second = judge.speed.per_second
    stats.compute_seconds, stats.fetch_seconds = judge.compute_seconds, judge.fetch_seconds


def _look_ups(counters: LookUpCounters, stats: wire.LookUpStats) -> None:
    stats.found, stats.nothing, stats.late, stats.pages = (
        counters.found,
        counters.nothing,
        counters.late,
        counters.pages,
    )


def _counted(counters: TransferCounters, stats: wire.TransferStats) -> None:
    stats.completed, stats.failed, stats.aborted = counters.completed, counters.failed, counters.aborted
    stats.delta_pages, stats.delta_bytes, stats.wire_bytes = counters.pages, counters.payload_bytes, counters.wire_bytes
    stats.copied_bytes = counters.copied_bytes
    stats.parts, stats.dropped_parts = counters.parts, counters.dropped_parts
    stats.stale_notifications = counters.stale_notifications
    stats.mismatched_parts = counters.mismatched_parts
    stats.failures.extend(_reasons(counters.failures))
    stats.aborts.extend(_reasons(counters.aborts))
