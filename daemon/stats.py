"""One snapshot of a side, as the wire's SideStats. Everything is read in one go on the event loop's thread, so the
counts agree.
"""

from __future__ import annotations

from kvferry.daemon.decode_side import DecodeSide
from kvferry.daemon.prefill_side import PrefillSide
from kvferry.daemon.side import AnySide
from kvferry.daemon.store import Store
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.radix.pool import PagePool


def side_stats(side: AnySide) -> cache.SideStats:
    """Zeros before the first worker has come."""
    stats = cache.SideStats(role=common.ROLE_DECODE if side.role == "decode" else common.ROLE_PREFILL)
    if not side.has_pool.is_set():
        return stats
    side.store.settle()
    _requests(side, stats.requests)
    _device(side.store, side.page_bytes, stats.pool)
    _host(side.store, side.memory.shape.row_bytes, stats.host)
    _tiers(side, stats.tiers)
    _namespaces(side.store, stats)
    stats.policy = side.store.limits.policy
    _transfers(side, stats.transfers)
    stats.quarantine.orphaned_pages = side.store.pool.counts().orphaned
    stats.quarantine.orphaned_bound = int(side.config.orphaned_share * side.store.pool.pages)
    stats.quarantine.lost_workers, stats.quarantine.workers_bound = side.lost_workers, side.config.max_workers
    stats.quarantine.draining_transfers = side.ready_core.draining_transfers
    latencies = side.latencies
    stats.admit_to_ready.count = latencies.count
    stats.admit_to_ready.p50_ms = latencies.quantile(0.50) * 1e3
    stats.admit_to_ready.p99_ms = latencies.quantile(0.99) * 1e3
    for stage, values in latencies.stages.items():
        stats.admit_to_ready.stages.add(stage=stage, mean_ms=sum(values) / len(values) * 1e3)
    if isinstance(side, DecodeSide):
        for link in side.links.values():
            peer = stats.peers.add(name=link.name, address=link.address, state=link.state, error=link.error)
            if link.session is not None:
                peer.slots = side.config.slots * side.config.ranks
                peer.free_credits = link.session.receiver.free_credits
    elif isinstance(side, PrefillSide):
        for session in side.sessions.values():
            peer = stats.peers.add(name=session.remote, state="up" if session.up else "connecting")
            peer.slots = session.remote_slots
            if session.sender is not None:
                peer.free_credits = session.sender.free_credits
    return stats


def _requests(side: AnySide, stats: cache.RequestStats) -> None:
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


def load_of(side: AnySide) -> tuple[int, int]:
    """(waiting, running) requests."""
    if side.core is not None:
        return side.core.waiting_requests, side.core.running
    return 0, 0


def _device(store: Store, page_bytes: int, stats: cache.PoolStats) -> None:
    _pages(store.pool, page_bytes, stats)
    stats.evictable, stats.promised = store.evictable, store.promised
    stats.locks, stats.tree_nodes = store.locks, store.nodes
    stats.evicted = store.evicted


def _host(store: Store, page_bytes: int, stats: cache.PoolStats) -> None:
    """Zeros where there is none. Locks and nodes are those of the trees: the device pool's statistics have them."""
    stats.SetInParent()
    if store.host is not None:
        _pages(store.host, page_bytes, stats)
        stats.evictable = sum(namespace.tree.host_evictable for namespace in store.namespaces.values())
        stats.evicted = store.tiers.host_evicted


def _pages(pool: PagePool, page_bytes: int, stats: cache.PoolStats) -> None:
    counts = pool.counts()
    stats.pages, stats.page_bytes = pool.pages, page_bytes
    stats.free, stats.leased, stats.arriving = counts.free, counts.leased, counts.arriving
    stats.cached, stats.spilling = counts.cached, counts.spilling
    stats.restoring, stats.orphaned = counts.restoring, counts.orphaned


def _tiers(side: AnySide, stats: cache.TierStats) -> None:
    store: Store = side.store
    tiers = store.tiers
    stats.spilled_pages, stats.restored_pages, stats.backup_pages = tiers.spilled, tiers.restored, tiers.backed_up
    stats.spill_failed_pages, stats.restore_failed_pages = tiers.spill_failed, tiers.restore_failed
    stats.mismatched_pages = tiers.mismatched
    stats.dropped_pages, stats.host_evicted_pages = tiers.dropped, tiers.host_evicted
    stats.spill_seconds, stats.restore_seconds = tiers.spill_seconds, tiers.restore_seconds
    stats.copies = store.copies
    stats.recovered_pages, stats.discarded_entries = tiers.recovered, tiers.discarded_entries
    stats.orphan_pages = store.orphans
    stats.unverified_pages = side.unverified_pages


def _namespaces(store: Store, stats: cache.SideStats) -> None:
    for namespace in store.namespaces.values():
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


def _transfers(side: AnySide, stats: cache.TransferStats) -> None:
    counters = side.ready_core.transfer_counters
    stats.completed, stats.failed, stats.aborted = counters.completed, counters.failed, counters.aborted
    stats.delta_pages, stats.delta_bytes, stats.wire_bytes = counters.pages, counters.payload_bytes, counters.wire_bytes
    stats.parts, stats.dropped_parts = counters.parts, counters.dropped_parts
    stats.saved_pages = side.ready_core.counters.saved_pages
    stats.saved_bytes = stats.saved_pages * side.page_bytes
    if isinstance(side, DecodeSide):
        stats.asked_again = side.ready_core.asked_again
    stats.active = side.ready_core.active_transfers
