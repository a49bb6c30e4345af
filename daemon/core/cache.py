"""One role's pages: a device pool, perhaps a host pool under it, and a radix tree for every namespace over both. Core:
no I/O; copies between the tiers are given out as `CopyStarted` and their ends told by `copy_ended`.

Device pages are had by `take`: free ones at once; else leaves are evicted, in the policy's order over all namespaces
whose quota allows it. A leaf that must be spilled first gives its pages when its copy ends: `take` then answers None
and is to be asked again. Frees are batched: `release` collects, and the next `take`, `settle` or statistic frees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.daemon.core.counters import TierCounters
from kvferry.daemon.core.errors import exhausted
from kvferry.daemon.core.kv_events import KvEventLog, TokenChain
from kvferry.daemon.core.namespaces import Namespace, Quota, own_share, slack, soft_pages
from kvferry.radix.policy import Clock, Policy
from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import BACKUP, RESTORE, SPILL, Copy, Evicted, Lock, PagedRadixTree

MAX_NAMESPACES = 64
MIXED_CHUNK = 16  # pages evicted from one tree before the next one is compared, where several are candidates
MAX_COPY_PAGES = 256  # of one copy to the host: pages are free as it ends
MAX_COPIES = 64  # to the host, under way at once; more pages wait


@dataclass(frozen=True, slots=True)
class CacheLimits:
    policy: str = "lru"
    evict_output_first: bool = False
    write_through_hits: int = 0  # 0: write-back only
    zero_freed: bool = False  # pages that were used before are cleared before a request has them
    used_before: bool = False  # the memory is somebody else's: every page may hold something already
    quotas: Mapping[bytes, Quota] | None = None  # by namespace id
    default_quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class CopyStarted:
    """A copy that the shell is to carry out. `number` names it in `copy_ended`."""

    number: int
    namespace_id: bytes
    copy: Copy


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """What the end of a copy changed. Device page ids."""

    namespace: Namespace
    kind: int
    readable: list[int]  # restored
    lost: list[int]  # their restore failed: ARRIVING now, to be asked for again
    removed: list[int]  # held by nobody: out of the tree, and the caller's to free (`Holds.removed`)


@dataclass(frozen=True, slots=True)
class FlushCount:
    """Pages: freed of each tier, and left because something holds them."""

    device: int
    host: int
    skipped: int


class Cache:
    """`pages` device pages of `page_size` tokens; `host_pages` 0: no host tier."""

    def __init__(self, pages: int, page_size: int, *, host_pages: int = 0, limits: CacheLimits | None = None) -> None:
        self.page_size = page_size
        self.limits = limits if limits is not None else CacheLimits()
        self.pool = PagePool(pages)
        self.host = PagePool(host_pages, "host") if host_pages else None
        self.clock = Clock()  # one for all trees, so that their eviction keys compare
        self.namespaces: dict[bytes, Namespace] = {}
        self.tiers = TierCounters()
        self.events: KvEventLog | None = None
        self.evicted = 0  # device pages
        self.zeroed = 0  # device pages, that `take_unclean` gave out
        # By device page: whether a request has had it, or somebody else before.
        self._used = self._used_at_first(pages)
        self._unclean: list[int] = []
        self._policy = Policy(self.limits.policy, self.limits.evict_output_first)
        self._released: list[int] = []
        self._started: list[CopyStarted] = []
        self._copies: dict[int, tuple[Namespace, Copy]] = {}
        self._next_copy = 1

    def log_events(self, chain: TokenChain | None = None) -> None:
        """From the start, before anything is held: `events` says what enters and leaves each tier. `chain`: of the
        digests, where tokens are to be judged by them.
        """
        self.events = KvEventLog(self.page_size, self.pool, self.host, chain)

    # -- namespaces ----------------------------------------------------------------------------------------------

    def namespace(self, namespace_id: bytes) -> Namespace:
        """Made when it is first named. RESOURCE_EXHAUSTED beyond MAX_NAMESPACES."""
        found = self.namespaces.get(namespace_id)
        if found is None:
            if len(self.namespaces) >= MAX_NAMESPACES:
                raise exhausted(f"namespace {namespace_id.hex()[:16]} would be one more than {MAX_NAMESPACES}")
            tree = PagedRadixTree(self.pool, self.host, self._policy, self.clock, self.limits.write_through_hits)
            quotas = self.limits.quotas or {}
            quota = quotas.get(namespace_id, self.limits.default_quota)
            found = self.namespaces[namespace_id] = Namespace(namespace_id, tree, quota)
        return found

    @property
    def evictable(self) -> int:
        return sum(namespace.tree.evictable for namespace in self.namespaces.values())

    @property
    def locks(self) -> int:
        return sum(namespace.tree.locks for namespace in self.namespaces.values())

    @property
    def nodes(self) -> int:
        return sum(namespace.tree.nodes for namespace in self.namespaces.values())

    @property
    def orphans(self) -> int:
        return sum(namespace.tree.orphans for namespace in self.namespaces.values())

    @property
    def spilling(self) -> int:
        """Device pages that will be free when their copies end."""
        return sum(namespace.tree.spilling for namespace in self.namespaces.values())

    @property
    def promised(self) -> int:
        return sum(namespace.promised for namespace in self.namespaces.values())

    @property
    def copies(self) -> int:
        """Under way."""
        return len(self._copies)

    @property
    def yielding(self) -> int:
        """Of the copies under way, those that make pages free or evictable."""
        return sum(copy.kind != RESTORE for _, copy in self._copies.values())

    def available(self) -> int:
        """Pages that could still be promised to a namespace without quotas."""
        return max(0, slack(self.pool.free + len(self._released), self.namespaces.values()))

    # -- promises ------------------------------------------------------------------------------------------------

    def fits(self, namespace: Namespace, pages: int) -> bool:
        """Whether `pages` more can be promised to it with every promise kept. Ask again after locking."""
        if not namespace.within_hard(pages):
            return False
        namespace.promised += pages
        left = slack(self.pool.free + len(self._released), self.namespaces.values())
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
        """As `reachable`, of all namespaces, with one sum over them."""
        unprotected = self.pool.pages - soft_pages(self.namespaces.values())
        return {namespace: unprotected + namespace.soft_pages for namespace in self.namespaces.values()}

    # -- pages of requests ---------------------------------------------------------------------------------------

    def take(self, namespace: Namespace, pages: int) -> list[int] | None:
        """`pages` LEASED pages for a request that was promised them; the caller lowers its promise. None: not yet. If
        then no copy is under way, nothing will change by itself.
        """
        self.settle()
        if not self._make_room(namespace, pages):
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
        """These device pages are about to be inserted into its tree."""
        if self.events is not None:
            self.events.name_device(namespace.id, pages, digests)

    def publish(self, namespace: Namespace, inserted: int) -> None:
        """`inserted` of its own pages are the tree's now."""
        namespace.own -= inserted
        assert namespace.own >= 0, "more pages were inserted than taken"

    def unpublish(self, namespace: Namespace, removed: int) -> None:
        """`removed` of the tree's pages are a request's own again."""
        namespace.own += removed

    def pruned(self, namespace: Namespace, removed: list[int]) -> None:
        """Pages that `prune` took out of the tree: freed."""
        self.unpublish(namespace, len(removed))
        self.release(namespace, removed)

    def restore(self, namespace: Namespace, lock: Lock, pages: list[int]) -> None:
        """Starts the copy of the host-only part of the locked path into `pages` (taken before)."""
        copy = namespace.tree.restore(lock, pages)
        assert copy is not None, "nothing to restore on this path"
        self.publish(namespace, len(pages))
        self._start(namespace, copy)

    @property
    def host_pages(self) -> int:
        """In use in the host tier."""
        return self.host.pages - self.host.free if self.host is not None else 0

    def spill(self, pages: int) -> int:
        """Evicts up to `pages` of what nothing holds, for the host tier's sake. Returns how many go."""
        going = 0
        for namespace in self.namespaces.values():
            while going < pages and self.yielding < MAX_COPIES:
                taken = self._evict_from(namespace, pages - going)
                if taken == 0:
                    break
                going += taken
        return going

    def flush(self, namespaces: Iterable[Namespace]) -> FlushCount:
        """Frees every page of these namespaces' trees that nothing holds."""
        device = host = skipped = 0
        for namespace in namespaces:
            result = namespace.tree.flush()
            device, host, skipped = device + result.device, host + result.host, skipped + result.skipped
        return FlushCount(device, host, skipped)

    def forget_device(self) -> int:
        """The device pool's memory is gone: what the host tier has stays, the rest is forgotten. No lock, no request's
        page and no copy may be left. Returns how many pages it held.
        """
        self.settle()
        assert not self._copies and not self.promised, f"{len(self._copies)} copies, {self.promised} pages promised"
        forgotten = 0
        for namespace in self.namespaces.values():
            pages = namespace.tree.forget_device()
            namespace.evicted += pages
            forgotten += pages
        self.evicted += forgotten
        counts = self.pool.counts()
        assert counts.free == counts.total, f"device pages are in use: {counts}"
        return forgotten

    def resize(self, pages: int) -> None:
        """Another memory, of so many pages. None may be in use."""
        self.pool.resize(pages)
        assert not self._unclean, f"{len(self._unclean)} pages were taken and not cleared"
        self._used = self._used_at_first(pages)

    def _used_at_first(self, pages: int) -> bytearray:
        if not self.limits.zero_freed:
            return bytearray()
        return bytearray([self.limits.used_before]) * pages

    def recover(self, namespace: Namespace, digests: bytes, parents: bytes, rows: list[int], outputs: bytes) -> None:
        """Pages of the host tier's file, found again at the start."""
        assert self.host is not None
        self.host.claim(rows, PageState.LEASED)
        if self.events is not None:
            self.events.name_host(namespace.id, rows, digests)
        result = namespace.tree.recover(digests, parents, rows, outputs)
        self.tiers.recovered += result.attached + result.orphans
        over = namespace.tree.host_pages - namespace.quota.host_hard
        if namespace.quota.host_hard and over > 0:
            self.tiers.host_evicted += namespace.tree.evict_host(over)
        self.tiers.discarded_entries += result.dropped

    def take_forgotten(self) -> tuple[int, ...]:
        """Host rows that were freed since the last time (where frees are logged)."""
        return tuple(self.host.take_freed()) if self.host is not None and self.host.log_frees else ()

    # -- copies --------------------------------------------------------------------------------------------------

    def take_started(self) -> list[CopyStarted]:
        started, self._started = self._started, []
        return started

    def copy_ended(self, number: int, failed: Iterable[int], mismatched: int, seconds: float) -> CopyEnded:
        """`failed`: device ids of pages whose bytes are not right; `mismatched`: how many of them by checksum."""
        namespace, copy = self._copies.pop(number)
        bad = list(failed)
        result = namespace.tree.finish_copy(copy.id, bad)
        good = len(copy.device) - len(bad)
        tiers = self.tiers
        tiers.mismatched += mismatched
        if copy.kind == RESTORE:
            tiers.restored += good
            tiers.restore_failed += len(bad)
            tiers.restore_seconds += seconds
        else:
            tiers.spill_failed += len(bad)
            tiers.spill_seconds += seconds
            if copy.kind == SPILL:
                tiers.spilled += good
            else:
                tiers.backed_up += good
        self.evicted += len(result.freed)
        namespace.evicted += len(result.freed)
        namespace.arrivals += bool(result.readable)
        return CopyEnded(namespace, copy.kind, result.readable, result.lost, result.removed)

    def write_through(self) -> None:
        """Starts copies of nodes that were hit often enough, into free host pages only."""
        if not self.limits.write_through_hits or self.host is None:
            return
        for namespace in self.namespaces.values():
            if self.host.free == 0 or self.yielding >= MAX_COPIES:
                return
            room = min(self.host.free, MAX_COPY_PAGES, self._host_quota_left(namespace))
            if room == 0:
                continue
            copy = namespace.tree.backups(room)
            if copy is not None:
                assert copy.kind == BACKUP
                self._start(namespace, copy)

    def _start(self, namespace: Namespace, copy: Copy) -> None:
        number = self._next_copy
        self._next_copy += 1
        self._copies[number] = (namespace, copy)
        if self.events is not None:
            if copy.kind == RESTORE:
                self.events.name_device(namespace.id, copy.device, copy.digests)
            else:
                self.events.name_host(namespace.id, copy.host, copy.digests)
        self._started.append(CopyStarted(number, namespace.id, copy))

    # -- eviction ------------------------------------------------------------------------------------------------

    def _make_room(self, namespace: Namespace, pages: int) -> bool:
        """Evicts and spills until `pages` are free, or as many copies are under way; True: they are free now."""
        while own := self._own_share(namespace, pages):
            # Its own part first, else others would pay for it. Again, since what it has above its soft quota shrinks.
            if self._evict(namespace, own - namespace.tree.spilling, others=[]) == 0:
                return False
        lacking = pages - self.pool.free - self.spilling
        self._evict(namespace, lacking, others=[n for n in self.namespaces.values() if n is not namespace])
        return self.pool.free >= pages

    def _own_share(self, namespace: Namespace, pages: int) -> int:
        return own_share(namespace, pages, slack(self.pool.free, self.namespaces.values()))

    def _evict(self, asker: Namespace, pages: int, others: list[Namespace]) -> int:
        """Takes up to `pages`, in the policy's order, from the asker and from what `others` have above their soft
        quotas. Returns how many: some may be free only when their spill ends.
        """
        evicted = 0
        while evicted < pages and self.yielding < MAX_COPIES:
            left = pages - evicted
            bounds = [(asker, left)]
            bounds += [(n, min(left, n.above_soft - n.tree.spilling, MIXED_CHUNK)) for n in others]
            ordered = [
                (key, i) for i, (n, most) in enumerate(bounds) if most > 0 and (key := n.tree.oldest()) is not None
            ]
            if not ordered:
                break
            chosen, most = bounds[min(ordered)[1]]
            taken = self._evict_from(chosen, most if len(ordered) == 1 else min(most, MIXED_CHUNK))
            if taken == 0:
                break
            evicted += taken
        return evicted

    def _evict_from(self, namespace: Namespace, pages: int) -> int:
        """Pages that are free now, or will be when their spill ends."""
        pages = min(pages, namespace.tree.evictable - namespace.tree.spilling, MAX_COPY_PAGES)
        if pages == 0:
            return 0
        going = 0
        if self.host is not None:
            # What has a row already, or finds one free, needs no room made.
            going = self._gone(namespace, namespace.tree.evict_with_room(pages, self._host_quota_left(namespace)))
            if going == pages or namespace.tree.oldest() is None:  # the rest waits for copies that run
                return going
            self._make_host_room(self.host, namespace, pages - going)
        return going + self._gone(namespace, namespace.tree.evict(pages - going, self._host_quota_left(namespace)))

    def _gone(self, namespace: Namespace, result: Evicted) -> int:
        if result.spill is not None:
            self._start(namespace, result.spill)
        self.evicted += len(result.freed)
        namespace.evicted += len(result.freed)
        self.tiers.dropped += result.dropped
        return len(result.freed) + (len(result.spill.device) if result.spill is not None else 0)

    def _host_quota_left(self, namespace: Namespace) -> int:
        """Host pages that it may still take, by its hard quota."""
        hard = namespace.quota.host_hard
        return max(0, hard - namespace.tree.host_pages) if hard else self.pool.pages

    def _make_host_room(self, host: PagePool, namespace: Namespace, pages: int) -> None:
        """So that `pages` of this namespace could be spilled: frees host pages of its own where its hard quota is
        reached, else in the policy's order over all namespaces whose host quota allows it.
        """
        over = pages - self._host_quota_left(namespace)
        if over > 0:
            self.tiers.host_evicted += namespace.tree.evict_host(over)
        pages = min(pages, self._host_quota_left(namespace)) - host.free
        while pages > 0:
            candidates = [
                (key, i, n)
                for i, n in enumerate(self.namespaces.values())
                if (n is namespace or n.host_above_soft) and (key := n.tree.oldest_host()) is not None
            ]
            if not candidates:
                break
            chosen = min(candidates, key=lambda entry: entry[:2])[2]
            most = pages if len(candidates) == 1 else min(pages, MIXED_CHUNK)
            if chosen is not namespace and chosen.quota.host_soft:
                most = min(most, chosen.host_above_soft)
            freed = chosen.tree.evict_host(most)
            if freed == 0:
                break
            self.tiers.host_evicted += freed
            pages -= freed
