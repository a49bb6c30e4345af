"""A snapshot of a daemon as Prometheus metrics: base units, `_total` for counters, labels out of bounded sets.

Every family is there from the start, without samples until there are some, so that a query can be checked against a
daemon that has done nothing. Labels that are no fixed words: `peer` (at most max_peers at a time), `namespace` (at most
64; the first 12 hex digits of its id), `method` (of the services served).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

NAMESPACE_DIGITS = 12
CUT_OFF = ("stalled", "gone")  # event_replay has them; it needs zmq, which this does not
POOL_STATES = ("free", "leased", "arriving", "cached", "spilling", "restoring", "orphaned")

Labels = Sequence[str]
Family = CounterMetricFamily | GaugeMetricFamily


class SnapshotCollector(Collector):
    """`take` gives a snapshot; it is called by whoever scrapes."""

    def __init__(self, take: Callable[[], cache.StatsReply]) -> None:
        self._take = take

    def collect(self) -> Iterable[Metric]:
        return families(self._take())

    def describe(self) -> Iterable[Metric]:
        return families(cache.StatsReply())


def families(reply: cache.StatsReply) -> Iterator[Metric]:
    """All metrics of one snapshot."""
    yield from _daemon(reply)
    sides = [(common.Role.Name(side.role).removeprefix("ROLE_").lower(), side) for side in reply.sides]
    yield from _requests(sides)
    yield from _pools(sides)
    yield from _quarantine(sides)
    yield from _tiers(sides)
    yield from _copies(sides)
    yield from _transfers(sides)
    yield from _way_back(sides)
    yield from _latencies(sides)
    yield from _peers(sides)
    yield from _namespaces(sides)
    yield from _events(sides)


Sides = Sequence[tuple[str, cache.SideStats]]
Samples = Iterable[tuple[Labels, float]]


def _counter(name: str, help_: str, labels: Labels, samples: Samples) -> Metric:
    """`name` without its _total."""
    return _filled(CounterMetricFamily(f"kvferry_{name}", help_, labels=labels), samples)


def _gauge(name: str, help_: str, labels: Labels, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"kvferry_{name}", help_, labels=labels), samples)


def _filled(family: Family, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, help_: str, labels: Labels, found: Iterable[tuple[Labels, cache.Histogram]]) -> Metric:
    family = HistogramMetricFamily(f"kvferry_{name}", help_, labels=labels)
    for values, histogram in found:
        if histogram.counts:
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric(values, buckets=buckets, sum_value=histogram.sum)
    return family


def _daemon(reply: cache.StatsReply) -> Iterator[Metric]:
    build = reply.build
    named = [([reply.daemon, build.version, str(build.protocol), build.nixl, build.python], 1)] if reply.daemon else []
    yield _gauge("build_info", "1, with what runs here", ["daemon", "version", "protocol", "nixl", "python"], named)
    yield _gauge("uptime_seconds", "since the daemon's start", [], [([], reply.uptime_seconds)])
    yield _gauge("stalled_parts", "parts of the daemon that do not move: not healthy", [], [([], len(reply.stalled))])
    tls: Samples = [([], reply.tls.expires)] if reply.HasField("tls") else []
    yield _gauge("tls_certificate_expiry_timestamp_seconds", "end of the certificate in use, since 1970", [], tls)
    broken: Samples = [([], float(bool(reply.tls.broken)))] if reply.HasField("tls") else []
    yield _gauge("tls_files_rejected", "1: new files do not fit, the old certificate stays in use", [], broken)
    lag = "how late a timer of the event loop was, 20 times a second"
    yield _histogram("event_loop_lag_seconds", lag, [], [([], reply.loop_lag)])
    rpcs = [([rpc.method, rpc.code], rpc.seconds) for rpc in reply.rpcs]
    yield _histogram("rpc_seconds", "unary gRPC calls, by method and code", ["method", "code"], rpcs)


def _requests(sides: Sides) -> Iterator[Metric]:
    role = ["role"]
    yield _gauge("workers", "workers attached, and lost ones that may still write", role, _each(sides, "workers"))
    states = ("waiting", "running", "reserved")
    help_ = "requests by state; reserved ones, which wait for pages being spilled, are running or waiting ones, too"
    yield _gauge("requests", help_, ["role", "state"], _fields(sides, "requests", states))
    outcomes = ("finished", "aborted", "failed", "refused")
    help_ = "requests that are over, by outcome; a refused one was never admitted"
    yield _counter("requests_ended", help_, ["role", "outcome"], _fields(sides, "requests", outcomes))
    failures = [([name, reason.reason], reason.count) for name, side in sides for reason in side.requests.failures]
    yield _counter("request_failures", "failed requests, by error code", ["role", "code"], failures)
    expiries = [
        ([name], sum(r.count for r in side.requests.failures if r.reason == "deadline_exceeded"))
        for name, side in sides
    ]
    yield _counter("lease_expiries", "requests whose deadline passed", role, expiries)
    one = _one(sides, "requests")
    yield _counter("admitted_requests", "requests admitted", role, one("admitted"))
    yield _counter(
        "retracted_requests", "requests taken back because more was promised than there was", role, one("retracted")
    )
    yield _counter("overtaken_requests", "times that a waiting request was overtaken", role, one("overtaken"))
    yield _counter("lookup_tokens", "prompt tokens looked up in the tree", role, one("queried_tokens"))
    hits: list[tuple[Labels, float]] = []
    for name, side in sides:
        hits.append(([name, "device"], side.requests.hit_tokens - side.requests.host_hit_tokens))
        hits.append(([name, "host"], side.requests.host_hit_tokens))
    yield _counter("hit_tokens", "of them, those found, by the tier that held them", ["role", "tier"], hits)
    help_ = "age of the oldest request that holds locks or pages; 0: there is none"
    yield _gauge("oldest_lock_seconds", help_, role, one("oldest_seconds"))


def _pools(sides: Sides) -> Iterator[Metric]:
    pools = [(name, tier, pool) for name, side in sides for tier, pool in (("device", side.pool), ("host", side.host))]
    labels = ["role", "tier"]
    pages = [([name, tier, state], getattr(pool, state)) for name, tier, pool in pools for state in POOL_STATES]
    help_ = "pages by state; orphaned ones are in quarantine until their worker answers or is proven gone"
    yield _gauge("pages", help_, [*labels, "state"], pages)
    yield _gauge("pool_pages", "pages of the pool", labels, [([n, t], p.pages) for n, t, p in pools])
    help_ = "pages that it is to have: a host tier grows up to them while its daemon runs"
    yield _gauge("pool_asked_pages", help_, labels, [([n, t], p.asked_pages) for n, t, p in pools])
    yield _gauge("page_bytes", "bytes of a page", labels, [([n, t], p.page_bytes) for n, t, p in pools])
    help_ = "cached pages that could be evicted now"
    yield _gauge("evictable_pages", help_, labels, [([n, t], p.evictable) for n, t, p in pools])
    help_ = "pages evicted; from the device without being spilled, or after it"
    yield _counter("evicted_pages", help_, labels, [([n, t], p.evicted) for n, t, p in pools])
    one = _one(sides, "pool")
    help_ = "pages cleared before they were given to a request"
    yield _counter("zeroed_pages", help_, ["role"], one("zeroed"))
    yield _gauge("promised_pages", "pages promised to running requests and not given yet", ["role"], one("promised"))
    yield _gauge("locks", "lock handles held on the tree", ["role"], one("locks"))
    yield _gauge("tree_nodes", "nodes of the trees", ["role"], one("tree_nodes"))


def _quarantine(sides: Sides) -> Iterator[Metric]:
    role, one = ["role"], _one(sides, "quarantine")
    help_ = "pages that workers may still write whose requests have ended without their word"
    yield _gauge("orphaned_pages", help_, role, one("orphaned_pages"))
    yield _gauge("orphaned_pages_bound", "of them, at which new work is refused", role, one("orphaned_bound"))
    help_ = "workers whose stream broke and whose end is not proven"
    yield _gauge("lost_workers", help_, role, one("lost_workers"))
    help_ = "transfers that ended while copies of them may run"
    yield _gauge("draining_transfers", help_, role, one("draining_transfers"))


def _tiers(sides: Sides) -> Iterator[Metric]:
    role, one = ["role"], _one(sides, "tiers")
    yield _counter("spilled_pages", "pages copied to the host as they were evicted", role, one("spilled_pages"))
    yield _counter("backup_pages", "pages copied to the host before they were evicted", role, one("backup_pages"))
    yield _counter("restored_pages", "pages copied back from the host", role, one("restored_pages"))
    yield _counter(
        "dropped_pages", "pages evicted from the device without a copy on the host", role, one("dropped_pages")
    )
    unstored = [([name, each.reason], each.count) for name, side in sides for each in side.tiers.unstored]
    help_ = "pages of an engine's blocks that were to be stored in the host tier and were not, by why"
    yield _counter("unstored_pages", help_, ["role", "reason"], unstored)
    yield _counter("spill_seconds", "time of copies to the host", role, one("spill_seconds"))
    yield _counter("restore_seconds", "time of copies from the host", role, one("restore_seconds"))
    yield _gauge("tier_copies", "copies between the tiers under way", role, one("copies"))
    failed: list[tuple[Labels, float]] = []
    for name, side in sides:
        failed.append(([name, "spill"], side.tiers.spill_failed_pages))
        failed.append(([name, "restore"], side.tiers.restore_failed_pages))
    help_ = "pages whose copy between the tiers failed"
    yield _counter("failed_copy_pages", help_, ["role", "direction"], failed)
    wrong: list[tuple[Labels, float]] = []
    for name, side in sides:
        wrong.append(([name, "page"], side.tiers.mismatched_pages))
        wrong.append(([name, "part"], side.transfers.mismatched_parts))
    help_ = "restored pages and received parts with a wrong checksum; they were asked for again, or computed"
    yield _counter("checksum_mismatches", help_, ["role", "kind"], wrong)
    yield _counter("recovered_pages", "pages found in the host tier's file at the start", role, one("recovered_pages"))
    help_ = "entries of the file discarded at the start"
    yield _counter("discarded_entries", help_, role, one("discarded_entries"))
    yield _gauge("unverified_pages", "recovered pages not verified yet", role, one("unverified_pages"))


def _copies(sides: Sides) -> Iterator[Metric]:
    labels = ["role", "strategy"]
    by = [(name, each) for name, side in sides for each in side.copies.strategies]
    copies = [([name, each.strategy], float(each.copies)) for name, each in by]
    yield _counter("copy_runs", "copies between the tiers, by what moved them", labels, copies)
    descriptors = [([name, each.strategy], float(each.descriptors)) for name, each in by]
    yield _counter("copy_descriptors", "runs of bytes of them", labels, descriptors)
    yield _counter("copy_bytes", "bytes of them", labels, [([name, e.strategy], float(e.bytes)) for name, e in by])
    reasons = [([name, r.reason], float(r.count)) for name, side in sides for r in side.copies.fallbacks]
    help_ = "times that another strategy than the chosen one moved the bytes, by why"
    yield _counter("copy_fallbacks", help_, ["role", "reason"], reasons)
    forced = [([name, side.copies.forced], 1.0) for name, side in sides if side.copies.forced]
    yield _gauge("copy_forced", "1, with the strategy that KVFERRY_COPY forces; auto: none", labels, forced)


def _transfers(sides: Sides) -> Iterator[Metric]:
    role, one = ["role"], _one(sides, "transfers")
    yield _gauge("transfers", "transfers under way", role, one("active"))
    ended: list[tuple[Labels, float]] = []
    for name, side in sides:
        transfers = side.transfers
        ended.append(([name, "completed", "ok"], transfers.completed))
        ended += [([name, "failed", reason.reason], reason.count) for reason in transfers.failures]
        ended += [([name, "aborted", reason.reason], reason.count) for reason in transfers.aborts]
    yield _counter("transfers_ended", "transfers by outcome and reason", ["role", "outcome", "reason"], ended)
    help_ = "pages that travelled (received by decode, sent by prefill)"
    yield _counter("delta_pages", help_, role, one("delta_pages"))
    yield _counter("delta_bytes", "bytes of them", role, one("delta_bytes"))
    yield _counter("wire_bytes", "bytes over NIXL, slot headers included", role, one("wire_bytes"))
    yield _counter("copied_bytes", "bytes gathered into slots or scattered from them", role, one("copied_bytes"))
    help_ = "pages that did not travel because the decode side held them"
    yield _counter("saved_pages", help_, role, one("saved_pages"))
    yield _counter("saved_bytes", "bytes of them", role, one("saved_bytes"))
    yield _counter("parts", "parts of transfers, one a slot", role, one("parts"))
    yield _counter("asked_again", "transfers asked for a second time or more", role, one("asked_again"))
    stale: list[tuple[Labels, float]] = []
    for name, side in sides:
        stale.append(([name, "part"], side.transfers.dropped_parts))
        stale.append(([name, "notification"], side.transfers.stale_notifications))
    help_ = "what named a transfer, slot, generation or epoch of the past, and was dropped"
    yield _counter("stale_references", help_, ["role", "kind"], stale)


def _way_back(sides: Sides) -> Iterator[Metric]:
    role, transfers = ["role"], [(name, side.way_back.transfers) for name, side in sides]
    pages = [([name], float(each.delta_pages)) for name, each in transfers]
    yield _counter("way_back_pages", "pages that prefill fetched, or decode sent back", role, pages)
    yield _counter("way_back_bytes", "bytes of them", role, [([name], each.delta_bytes) for name, each in transfers])
    ended: list[tuple[Labels, float]] = []
    for name, each in transfers:
        ended.append(([name, "completed", "ok"], each.completed))
        ended += [([name, "aborted", reason.reason], reason.count) for reason in each.aborts]
    help_ = "transfers of the way back by outcome and reason"
    yield _counter("way_back_transfers_ended", help_, ["role", "outcome", "reason"], ended)
    choices = [([name, choice.reason], choice.count) for name, side in sides for choice in side.way_back.choices]
    help_ = "decisions about prompts of which pages were lacking: fetched, in time or not, or computed and why"
    yield _counter("way_back_choices", help_, ["role", "choice"], choices)
    one = _one(sides, "way_back")
    yield _counter(
        "way_back_tokens", "tokens that were fetched in place of being computed", role, one("fetched_tokens")
    )
    help_ = "of them, those of another decode daemon than the one that asked for the prompt"
    yield _counter("way_back_elsewhere_tokens", help_, role, one("elsewhere_tokens"))
    help_ = "tokens that another prompt's fetch brought while it was waited for"
    yield _counter("way_back_followed_tokens", help_, role, one("followed_tokens"))
    answers: list[tuple[Labels, float]] = []
    for name, side in sides:
        looked = side.way_back.look_ups
        answers += [([name, "found"], looked.found), ([name, "nothing"], looked.nothing), ([name, "late"], looked.late)]
    help_ = "look-ups at decode daemons, by what was found"
    yield _counter("way_back_look_ups", help_, ["role", "outcome"], answers)
    estimates = ("compute_seconds", "fetch_seconds")
    help_ = "the last choice's estimates, of computing what decode held and of fetching it"
    yield _gauge("way_back_estimate_seconds", help_, ["role", "of"], _fields(sides, "way_back", estimates))


def _latencies(sides: Sides) -> Iterator[Metric]:
    whole = [([name], side.admit_to_ready.seconds) for name, side in sides if name == "decode"]
    help_ = "from a request's arrival until every page of its prompt and its first token are there"
    yield _histogram("admit_to_ready_seconds", help_, ["role"], whole)
    stages = [([name, s.stage], s.seconds) for name, side in sides for s in side.admit_to_ready.stages]
    yield _histogram("stage_seconds", "parts of it, by stage", ["role", "stage"], stages)


def _peers(sides: Sides) -> Iterator[Metric]:
    """Two sessions with a peer of one name, of which one is just ending, are one sample."""
    up: dict[tuple[str, str], float] = {}
    slots: dict[tuple[str, str, str], float] = {}
    for name, side in sides:
        for peer in side.peers:
            up[name, peer.name] = max(up.get((name, peer.name), 0.0), float(peer.state == "up"))
            granted, busy, withheld = peer.free_credits, peer.busy_slots, peer.withheld_slots
            for state, count in (("granted", granted), ("busy", busy), ("withheld", withheld)):
                slots[name, peer.name, state] = slots.get((name, peer.name, state), 0.0) + count
    help_ = "1: the session with this peer is up; 0: it is not, or waits for the first worker"
    yield _gauge("peer_up", help_, ["role", "peer"], [(list(key), value) for key, value in up.items()])
    help_ = "receive slots of a session: granted (credits not spent), busy, or withheld until the session's end"
    yield _gauge("slots", help_, ["role", "peer", "state"], [(list(key), value) for key, value in slots.items()])


def _namespaces(sides: Sides) -> Iterator[Metric]:
    all_ = [(n, s.namespace_id.hex()[:NAMESPACE_DIGITS], s) for n, side in sides for s in side.namespaces]
    labels = ["role", "namespace"]
    pages: list[tuple[Labels, float]] = []
    for name, namespace, stats in all_:
        pages.append(([name, namespace, "device"], stats.device_pages))
        pages.append(([name, namespace, "host"], stats.host_pages))
    yield _gauge("namespace_pages", "pages of a namespace by tier", [*labels, "tier"], pages)
    pinned = [([name, namespace], float(stats.pinned_pages)) for name, namespace, stats in all_]
    yield _gauge("namespace_pinned_pages", "pages that a pin holds", labels, pinned)
    looked_up = [([name, namespace], float(stats.queried_tokens)) for name, namespace, stats in all_]
    yield _counter("namespace_lookup_tokens", "prompt tokens looked up, by namespace", labels, looked_up)
    hits = [([name, namespace], float(stats.hit_tokens)) for name, namespace, stats in all_]
    yield _counter("namespace_hit_tokens", "of them, those found, in either tier", labels, hits)
    evicted = [([name, namespace], float(stats.evicted)) for name, namespace, stats in all_]
    yield _counter("namespace_evicted_pages", "device pages evicted, by namespace", labels, evicted)


def _events(sides: Sides) -> Iterator[Metric]:
    """Only the decode side publishes; zeros where it does not."""
    decode = [(name, side.events) for name, side in sides if name == "decode"]
    blocks: list[tuple[Labels, float]] = []
    dropped: list[tuple[Labels, float]] = []
    for name, events in decode:
        told = {(b.event, b.medium): b.count for b in events.blocks}
        blocks += [([name, *key], told.get(key, 0)) for key in product(("stored", "removed"), ("GPU", "CPU"))]
        dropped.append(([name, "queue"], events.queue_dropped))
        dropped.append(([name, "subscriber"], events.subscriber_dropped))
    help_ = "pages that KV events told of, by event and medium"
    yield _counter("kv_event_blocks", help_, ["role", "event", "medium"], blocks)
    yield _counter("kv_event_batches", "batches of KV events", ["role"], [([n], float(e.batches)) for n, e in decode])
    help_ = "of them, those dropped: for all (queue), or for a subscriber that reads too slowly"
    yield _counter("kv_event_dropped_batches", help_, ["role", "where"], dropped)
    told_off = [(name, {r.reason: r.count for r in events.cut_off_replays}) for name, events in decode]
    cut_off = [([name, reason], float(told.get(reason, 0))) for name, told in told_off for reason in CUT_OFF]
    help_ = "replays of KV events that were not finished, by reason"
    yield _counter("kv_event_cut_off_replays", help_, ["role", "reason"], cut_off)


def _each(sides: Sides, field: str) -> Samples:
    return [([name], getattr(side, field)) for name, side in sides]


def _one(sides: Sides, part: str) -> Callable[[str], Samples]:
    """One field of a part of each side's statistics."""
    return lambda field: [([name], getattr(getattr(side, part), field)) for name, side in sides]


def _fields(sides: Sides, part: str, fields: Sequence[str]) -> Samples:
    return [([name, field], getattr(getattr(side, part), field)) for name, side in sides for field in fields]
