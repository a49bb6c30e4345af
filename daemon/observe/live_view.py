"""One moment of a daemon, and of those it knows, as the live page shows it: plain numbers out of the statistics, the
requests on their way, the largest runs of the tree. Prefixes and requests are digests and ids cut short: nothing here
has a token, a text or a secret.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.daemon.core.limits import Name
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import cache_pb2 as wire
from kvferry.proto import common_pb2 as common

STATES = ("free", "cached", "leased", "arriving", "spilling", "restoring", "orphaned")
SHOWN_REQUESTS = 50  # of a side, the oldest
SHOWN_PREFIXES = 40  # of a side, those with most pages
LOOKED_AT = 2000  # nodes of a side's trees, among which the largest are found
SHOWN_PEERS = 64  # of a side of the daemon that is asked
PEERS_OF_OTHERS = 16  # of a side of another: with all of them a view still fits a connection's buffer
SHOWN_CHARACTERS = 80  # of a session's error
SHOWN_DIGITS = 12  # of a digest or an id


@dataclass(frozen=True, slots=True)
class PoolView:
    pages: int
    page_bytes: int
    states: dict[str, int]


@dataclass(frozen=True, slots=True)
class SessionView:
    peer: str
    state: str
    slots: int
    free_credits: int
    busy_slots: int
    moved_bytes: int
    error: str


@dataclass(frozen=True, slots=True)
class RequestView:
    request: str
    stage: str
    seconds: float
    tokens: int
    peer: str


@dataclass(frozen=True, slots=True)
class PrefixView:
    """One run of pages in the tree, `depth` pages behind the prompt's beginning."""

    digest: str
    depth: int
    pages: int
    hits: int
    locks: int
    device: bool
    host: bool


@dataclass(frozen=True, slots=True)
class TreeView:
    nodes: int = 0
    looked_at: int = 0
    prefixes: list[PrefixView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoleView:
    role: str
    pool: PoolView
    host: PoolView
    running: int
    waiting: int
    finished: int
    failed: int
    queried_tokens: int
    hit_tokens: int
    recent_hit_rate: float
    saved_bytes: int
    delta_bytes: int
    ready_p50_ms: float
    ready_p99_ms: float
    sessions: list[SessionView]
    requests: list[RequestView]  # of the daemon that is asked alone
    tree: TreeView


@dataclass(frozen=True, slots=True)
class ShownDaemon:
    name: str
    version: str
    uptime_seconds: float
    error: str  # why nothing is known of it
    stalled: list[str]
    roles: list[RoleView]


@dataclass(frozen=True, slots=True)
class PageView:
    """What one answer to the page says. The daemon that is asked is the first."""

    seconds: float  # of the daemon's own clock
    daemons: list[ShownDaemon]


def unknown(name: str, error: str) -> ShownDaemon:
    return ShownDaemon(name, "", 0.0, error, [], [])


def daemon_view(
    reply: wire.StatsReply,
    requests: Mapping[str, list[RequestView]] | None = None,
    trees: Mapping[str, TreeView] | None = None,
    peers: int = SHOWN_PEERS,
) -> ShownDaemon:
    """A daemon by its statistics; requests and trees by role, where they are known."""
    return ShownDaemon(
        name=reply.daemon,
        version=reply.build.version,
        uptime_seconds=reply.uptime_seconds,
        error="",
        stalled=list(reply.stalled),
        roles=[_role(side, requests or {}, trees or {}, peers) for side in reply.sides],
    )


def _role(
    side: wire.SideStats, requests: Mapping[str, list[RequestView]], trees: Mapping[str, TreeView], peers: int
) -> RoleView:
    role = common.Role.Name(side.role).removeprefix("ROLE_").lower()
    asked = side.requests
    return RoleView(
        role=role,
        pool=_pool(side.pool),
        host=_pool(side.host),
        running=asked.running,
        waiting=asked.waiting,
        finished=asked.finished,
        failed=asked.failed,
        queried_tokens=asked.queried_tokens,
        hit_tokens=asked.hit_tokens,
        recent_hit_rate=asked.recent_hit_rate,
        saved_bytes=side.transfers.saved_bytes,
        delta_bytes=side.transfers.delta_bytes,
        ready_p50_ms=side.admit_to_ready.p50_ms,
        ready_p99_ms=side.admit_to_ready.p99_ms,
        sessions=[_session(each) for each in side.peers[:peers]],
        requests=requests.get(role, []),
        tree=trees.get(role, TreeView(nodes=side.pool.tree_nodes)),
    )


def _pool(pool: wire.PoolStats) -> PoolView:
    return PoolView(pool.pages, pool.page_bytes, {state: int(getattr(pool, state)) for state in STATES})


def _session(each: wire.PeerStats) -> SessionView:
    return SessionView(
        peer=each.name,
        state=each.state,
        slots=each.slots,
        free_credits=each.free_credits,
        busy_slots=each.busy_slots,
        moved_bytes=each.moved_bytes,
        error=each.error[:SHOWN_CHARACTERS],
    )


def requests_of(side: AnySide) -> list[RequestView]:
    """The side's oldest requests that are not over, on the event loop's thread."""
    if side.core is None:
        return []
    now = side.now()
    if isinstance(side, DecodeSide):
        leases = heapq.nsmallest(SHOWN_REQUESTS, side.ready_core.leases.values(), key=lambda each: each.arrived_at)
        return [
            _request(each.name, each.state.value, now - each.arrived_at, each.tokens, each.prefill) for each in leases
        ]
    assert isinstance(side, PrefillSide)
    alive = [entry for entry in side.ready_core.entries.values() if not entry.done]
    entries = heapq.nsmallest(SHOWN_REQUESTS, alive, key=lambda each: each.arrived_at)
    tokens = [0 if each.prompt is None else each.prompt.tokens for each in entries]
    return [
        _request(each.name, each.state.value, now - each.arrived_at, count, "")
        for each, count in zip(entries, tokens, strict=True)
    ]


def _request(name: Name, stage: str, seconds: float, tokens: int, peer: str) -> RequestView:
    return RequestView(_short(name.request_id), stage, seconds, tokens, peer)


def tree_of(side: AnySide) -> TreeView:
    """The largest runs of the side's trees, in the trees' order, on the event loop's thread."""
    if side.core is None:
        return TreeView()
    nodes, left, found = 0, LOOKED_AT, []
    for namespace in side.cache.namespaces.values():
        nodes += namespace.tree.nodes
        if left:
            views = namespace.tree.dump(left)
            left -= len(views)
            found += views
    places = heapq.nlargest(SHOWN_PREFIXES, range(len(found)), key=lambda i: found[i].pages)
    largest = [found[i] for i in sorted(places)]
    return TreeView(
        nodes=nodes,
        looked_at=len(found),
        prefixes=[
            PrefixView(_short(view.last_digest), view.depth, view.pages, view.hits, view.locks, view.device, view.host)
            for view in largest
        ],
    )


def _short(name: bytes) -> str:
    return name.hex()[:SHOWN_DIGITS]
