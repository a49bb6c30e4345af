"""The cache of one role: a device pool, perhaps a host pool under it, and a radix tree for every namespace over both.
Core: no I/O. `Cache.copies` has the copies between the tiers, `Cache.eviction` decides who gives pages back.

Device pages are had by `take`: free ones at once, else evicted ones. Where those must be spilled first, `take` answers
None and is to be asked again when a copy has ended. Frees are batched: `release` collects, and the next `take`,
`settle` or statistic frees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.daemon.core.counters import TierCounters
from kvferry.daemon.core.errors import exhausted
from kvferry.daemon.core.eviction import Eviction
from kvferry.daemon.core.kv_events import KvEventLog, TokenChain
from kvferry.daemon.core.namespaces import Namespace, Quota, slack, soft_pages
from kvferry.daemon.core.tier_copies import TierCopies
from kvferry.radix.pool import HeldIndex, PagePool, PageState, leading_readable
from kvferry.radix.tree import Clock, Lock, PagedRadixTree, Policy

MAX_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class CacheLimits:
    policy: str = "lru"
    evict_output_first: bool = False
    write_through_hits: int = 0  # 0: write-back only
    write_ahead: float = 0.0  # of the device's pages, how many are free, or in the host tier as well
    zero_freed: bool = False  # pages that were used before are cleared before a request has them
    used_before: bool = False  # the memory is somebody else's: every page may hold something already
    in_blocks: bool = False  # device pages are blocks that an engine names for a request: see `block_tier`
    quotas: Mapping[bytes, Quota] | None = None  # by namespace id
    default_quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class FlushCount:
    """Counts of a flush: pages freed of each tier, and left because something holds them."""

    device: int
    host: int
    skipped: int


class Stores(Protocol):
    def flush(self, namespace: Namespace) -> tuple[int, int]:
        """Has what is stored, and is in no tree yet, enter none: rows that were freed, rows that a copy has."""

    def copies(self, namespace: Namespace) -> int:
        """Copies of them under way."""


class Cache:
    """`pages` device pages of `page_size` tokens; `host_pages` 0: no host tier. `host_there`: how many of those there
    are at first, where the tier has yet to grow; None: all."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        host_pages: int = 0,
        host_there: int | None = None,
        limits: CacheLimits | None = None,
    ) -> None:
        self.page_size = page_size
        self.limits = limits if limits is not None else CacheLimits()
        self.pool = PagePool(pages)
        self.host_asked = host_pages
        self.host = PagePool(host_pages if host_there is None else host_there, "host") if host_pages else None
        if self.host is not None:
            self.host.expect(host_pages)
        self.clock = Clock()  # one for all trees, so that their eviction keys compare
        self.namespaces: dict[bytes, Namespace] = {}
        self._recovers = False  # pages of an earlier run come in
        self.tiers = TierCounters()
        self.copies = TierCopies(self.pool, self.host, self.tiers)
        hits, ahead = self.limits.write_through_hits, int(self.limits.write_ahead * pages)
        self.eviction = Eviction(self.pool, self.host, self.namespaces, self.copies, self.tiers, hits, ahead)
        self.stores: Stores | None = None  # of pages that are in no tree yet
        self.events: KvEventLog | None = None
        self.zeroed = 0  # device pages, that `take_unclean` gave out
        # By device page: whether a request has had it, or somebody else before.
        self._used = self._used_at_first(pages)
        self._unclean: list[int] = []
        self._policy = Policy(self.limits.policy, self.limits.evict_output_first)
        self._policy.on_pool(pages + host_pages)
        self._released: list[int] = []

    def log_events(self, chain: TokenChain | None = None) -> None:
        """Logs events from the start, before anything is held: `events` says what enters and leaves each tier. `chain`:
        of the digests, where tokens are to be judged by them.
        """
        self.events = self.copies.events = KvEventLog(self.page_size, self.pool, self.host, chain)

    def index_held(self, index: HeldIndex | None) -> None:
        """Has what is readable, in either tier, in `index` from now on; None: in none. What leaves a tree is in it
        until it is freed: when the step settles, or a copy of it ends.
        """
        for pool in (self.pool, self.host):
            if pool is not None:
                pool.publish(index)

    # -- namespaces ----------------------------------------------------------------------------------------------

    def namespace(self, namespace_id: bytes) -> Namespace:
        """The namespace of this id, made when it is first named. RESOURCE_EXHAUSTED beyond MAX_NAMESPACES."""
        found = self.namespaces.get(namespace_id)
        if found is None:
            if len(self.namespaces) >= MAX_NAMESPACES:
                raise exhausted(f"namespace {namespace_id.hex()[:16]} would be one more than {MAX_NAMESPACES}")
            tree = PagedRadixTree(self.pool, self.host, self._policy, self.clock, self.limits.write_through_hits)
            if self._recovers:
                tree.begin_recovery()
            quotas = self.limits.quotas or {}
            quota = quotas.get(namespace_id, self.limits.default_quota)
            if self.limits.in_blocks:  # how many a request has is the engine's to say
                quota = replace(quota, soft=0, hard=0)
            found = self.namespaces[namespace_id] = Namespace(namespace_id, tree, quota)
        return found

    @property
    def evictable(self) -> int:
        return sum(namespace.tree.evictable for namespace in self.namespaces.values())

    @property
    def locks(self) -> int:
        return sum(namespace.tree.locks for namespace in self.namespaces.values())

    @property
    def promised(self) -> int:
        return sum(namespace.promised for namespace in self.namespaces.values())

    @property
    def evicted(self) -> int:
        """Device pages, ever."""
        return sum(namespace.evicted for namespace in self.namespaces.values())

    @property
    def host_pages(self) -> int:
        """Pages of the host tier that are in use."""
        return self.host.pages - self.host.free if self.host is not None else 0

    # -- promises ------------------------------------------------------------------------------------------------

    def available(self) -> int:
        """Pages that could still be promised to a namespace without quotas."""
        return max(0, self._slack())

    def readable(self, namespace: Namespace, digests: bytes) -> int:
        """Leading pages of these that can be read now: on the device, or below an engine's blocks, where nothing else
        is cached, in the host tier. Changes nothing."""
        tree = namespace.tree
        if self.limits.in_blocks:  # rows enter the tree once they are written
            return tree.match(digests).pages
        return leading_readable(self.pool.states(tree.match_pages(tree.match(digests))))

    def fits(self, namespace: Namespace, pages: int) -> bool:
        """Whether `pages` more can be promised to it with every promise kept. Ask again after locking."""
        if not namespace.within_hard(pages):
            return False
        namespace.promised += pages
        left = self._slack()
        namespace.promised -= pages
        return left >= 0

    def most(self, namespace: Namespace) -> int:
        """Pages that a request of this namespace could ever have."""
        return min(self.pool.pages, namespace.quota.hard or self.pool.pages)

    def reachable(self, namespace: Namespace) -> int:
        """Pages that a request of this namespace could have now if nothing else ran: all but what the soft quotas of
        the others protect.
        """
        return self.pool.pages - soft_pages(self.namespaces.values()) + namespace.soft_pages

    def reachable_by_each(self) -> dict[Namespace, int]:
        """The `reachable` pages of each namespace, with one sum over all of them."""
        unprotected = self.pool.pages - soft_pages(self.namespaces.values())
        return {namespace: unprotected + namespace.soft_pages for namespace in self.namespaces.values()}

    def _slack(self) -> int:
        return slack(self.pool.free + len(self._released), self.namespaces.values())

    # -- pages of requests ---------------------------------------------------------------------------------------

    def take(self, namespace: Namespace, pages: int) -> list[int] | None:
        """Takes `pages` LEASED pages for a request that was promised them; the caller lowers its promise. None: not
        yet. If then no copy is under way, nothing will change by itself.
        """
        self.settle()
        if not self.eviction.make_room(namespace, pages):
            return None
        namespace.own += pages
        taken = self.pool.allocate(pages, PageState.LEASED)
        if self.limits.zero_freed:
            self._unclean += [page for page in taken if self._used[page]]
            for page in taken:
                self._used[page] = True
        return taken

    def take_unclean(self) -> tuple[int, ...]:
        """Pages taken since the last time that hold what others left: to be cleared before anybody is told of them."""
        unclean, self._unclean = self._unclean, []
        self.zeroed += len(unclean)
        return tuple(unclean)

    def release(self, namespace: Namespace, pages: Iterable[int]) -> None:
        """A request's own pages, which nothing names any more. They are freed together, at `settle`."""
        before = len(self._released)
        self._released.extend(pages)
        namespace.own -= len(self._released) - before
        assert namespace.own >= 0, "more pages were released than taken"

    def settle(self) -> None:
        """Frees what was released since the last time."""
        if self._released:
            released, self._released = self._released, []
            self.pool.free_pages(released)

    def name(self, namespace: Namespace, pages: list[int], digests: bytes) -> None:
        """Names these device pages, which are about to be inserted into the namespace's tree."""
        self.pool.name_pages(pages, digests, namespace.id)
        if self.events is not None:
            self.events.name_device(namespace.id, pages, digests)

    def publish(self, namespace: Namespace, inserted: int) -> None:
        """`inserted` of its own pages are the tree's now."""
        namespace.own -= inserted
        assert namespace.own >= 0, "more pages were inserted than taken"

    def pruned(self, namespace: Namespace, removed: list[int]) -> None:
        """Pages that `prune` took out of the tree: freed."""
        namespace.own += len(removed)
        self.release(namespace, removed)

    def restore(self, namespace: Namespace, lock: Lock, pages: list[int]) -> None:
        """Starts the copy of the host-only part of the locked path into `pages` (taken before)."""
        copy = namespace.tree.restore(lock, pages)
        assert copy is not None, "nothing to restore on this path"
        self.publish(namespace, len(pages))
        self.copies.start(namespace, copy)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def flush(self, namespaces: Iterable[Namespace]) -> FlushCount:
        """Frees every page of these namespaces that nothing holds."""
        device = host = skipped = 0
        for namespace in namespaces:
            result = namespace.tree.flush()
            freed, coming = (0, 0) if self.stores is None else self.stores.flush(namespace)
            device, host = device + result.device, host + result.host + freed
            skipped += result.skipped + coming
        return FlushCount(device, host, skipped)

    def copies_of(self, namespace: Namespace) -> int:
        """Copies under way of what a flush comes to."""
        return namespace.tree.copies + (0 if self.stores is None else self.stores.copies(namespace))

    def forget_device(self) -> int:
        """The device pool's memory is gone: what the host tier has stays, the rest is forgotten. No lock, no request's
        page and no copy may be left. Returns how many pages it held.
        """
        self.settle()
        copies, promised = self.copies.running, self.promised
        assert not copies and not promised, f"{copies} copies, {promised} pages promised"
        forgotten = 0
        for namespace in self.namespaces.values():
            pages = namespace.tree.forget_device()
            namespace.evicted += pages
            forgotten += pages
        counts = self.pool.counts()
        assert counts.free == counts.total, f"device pages are in use: {counts}"
        return forgotten

    def resize(self, pages: int) -> None:
        """Takes another memory, of so many pages. None may be in use."""
        self.pool.resize(pages)
        self.eviction.ahead = int(self.limits.write_ahead * pages)
        assert not self._unclean, f"{len(self._unclean)} pages were taken and not cleared"
        self._used = self._used_at_first(pages)

    def grow_host(self, pages: int, found: Sequence[int]) -> None:
        """The host tier has so many pages now. Those of them that are `found` hold something of an earlier run: each is
        to be recovered, or discarded."""
        assert self.host is not None
        self.host.grow(pages)
        self.host.claim(found, PageState.LEASED)

    def begin_recovery(self) -> None:
        """Before the first `recover`, while the trees are small: later it takes as long as they are large."""
        self._recovers = True
        for namespace in self.namespaces.values():
            namespace.tree.begin_recovery()

    def end_recovery(self) -> None:
        """After the last `recover`."""
        self._recovers = False
        for namespace in self.namespaces.values():
            namespace.tree.end_recovery()

    def recover(self, namespace: Namespace, digests: bytes, parents: bytes, rows: list[int], outputs: bytes) -> None:
        """Takes in pages that were found in the host tier's file."""
        assert self.host is not None
        self.host.name_pages(rows, digests, namespace.id)
        if self.events is not None:
            self.events.name_host(namespace.id, rows, digests)
        result = namespace.tree.recover(digests, parents, rows, outputs)
        self.tiers.recovered += result.attached + result.orphans
        self.eviction.keep_host_quota(namespace)
        self.tiers.discarded_entries += result.dropped

    def discard(self, rows: Sequence[int]) -> None:
        """Forgets pages that were found, and have no place in a tree."""
        assert self.host is not None
        self.host.free_pages(rows)
        self.tiers.discarded_entries += len(rows)

    def take_forgotten(self) -> tuple[int, ...]:
        """Host rows that were freed since the last time (where frees are logged)."""
        return tuple(self.host.take_freed()) if self.host is not None and self.host.log_frees else ()

    def _used_at_first(self, pages: int) -> bytearray:
        if not self.limits.zero_freed:
            return bytearray()
        return bytearray([self.limits.used_before]) * pages
