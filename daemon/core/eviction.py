"""Eviction: who gives pages back when a pool is full, and which of them are copied to the host tier. Core: no I/O.

Leaves are evicted in the policy's order over all namespaces whose quota allows it. One that must be spilled first gives
its pages when its copy ends. Nodes that are hit often are copied to the host tier before they must go (write-through),
and so are those that would go next, while nothing else is copied there (write-ahead).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.daemon.core.counters import TierCounters
from kvferry.daemon.core.namespaces import Namespace, own_share, slack
from kvferry.daemon.core.tier_copies import TierCopies
from kvferry.radix.pool import PagePool
from kvferry.radix.tree import BACKUP, Evicted

MIXED_CHUNK = 16  # pages evicted from one tree before the next one is compared, where several are candidates
MAX_AHEAD_PAGES = 64  # of a copy ahead: meanwhile younger ones would go
LOOK_PAGES = 16  # that go, or are to be ahead, before it is looked again what is to be copied ahead
MAX_COPY_PAGES = 256  # of one copy to the host tier: pages are free as it ends


class Eviction:
    """Takes pages from the trees of `namespaces`, which share both pools, a policy and a clock.

    write_through_hits: as the trees have it. ahead: pages that are free, or in the host tier as well, where it has
    room. 0: nothing is copied before it must go.
    """

    def __init__(
        self,
        pool: PagePool,
        host: PagePool | None,
        namespaces: Mapping[bytes, Namespace],
        copies: TierCopies,
        counters: TierCounters,
        write_through_hits: int = 0,
        ahead: int = 0,
    ) -> None:
        self._pool = pool
        self._host = host
        self._namespaces = namespaces
        self._copies = copies
        self._counters = counters
        self._write_through_hits = write_through_hits
        self.ahead = ahead
        self._saved: dict[Namespace, tuple[int, int]] = {}  # what was looked at when nothing was to be copied ahead

    def make_room(self, namespace: Namespace, pages: int) -> bool:
        """Evicts and spills until `pages` that were promised to the namespace are free, or as many copies are under
        way. True: they are free now.
        """
        while own := own_share(namespace, pages, slack(self._pool.free, self._namespaces.values())):
            # Its own part first, else others would pay for it. Again, since what it has above its soft quota shrinks.
            if self._evict(namespace, own - namespace.tree.spilling, others=[]) == 0:
                return False
        spilling = sum(each.tree.spilling for each in self._namespaces.values())  # free when their copies end
        lacking = pages - self._pool.free - spilling
        self._evict(namespace, lacking, others=[n for n in self._namespaces.values() if n is not namespace])
        return self._pool.free >= pages

    def spill(self, pages: int) -> int:
        """Evicts up to `pages` of what nothing holds, for the host tier's sake. Returns how many go."""
        going = 0
        for namespace in self._namespaces.values():
            while going < pages and not self._copies.full:
                taken = self._evict_from(namespace, pages - going)
                if taken == 0:
                    break
                going += taken
        return going

    def write_through(self) -> None:
        """Starts copies of nodes that were hit often enough, into free host pages only."""
        if not self._write_through_hits or self._host is None:
            return
        for namespace in self._namespaces.values():
            if self._host.free == 0 or self._copies.full:
                return
            room = min(self._host.free, MAX_COPY_PAGES, self._host_quota_left(namespace))
            if room == 0:
                continue
            copy = namespace.tree.backups(room)
            if copy is not None:
                assert copy.kind == BACKUP
                self._copies.start(namespace, copy)

    def write_ahead(self) -> None:
        """Starts a copy of what would be evicted next, into free host pages only: its eviction costs nothing then."""
        if self._host is None or self._copies.yielding:
            return
        ahead = self.ahead - self._pool.free
        if ahead <= 0 or self._host.free == 0:
            return
        evictable = sum(namespace.tree.evictable for namespace in self._namespaces.values())
        if not evictable:
            return
        for namespace in self._namespaces.values():
            own = -(-ahead * namespace.tree.evictable // evictable)
            looked = (namespace.evicted // LOOK_PAGES, own // LOOK_PAGES)
            room = min(self._host.free, MAX_AHEAD_PAGES, self._host_quota_left(namespace))
            if own == 0 or room == 0 or self._saved.get(namespace) == looked:
                continue
            copy = namespace.tree.backups_ahead(room, own)
            if copy is not None:
                self._copies.start(namespace, copy)
                return
            self._saved[namespace] = looked

    def keep_host_quota(self, namespace: Namespace) -> None:
        """Frees host pages of the namespace that are above its hard quota."""
        over = namespace.tree.host_pages - namespace.quota.host_hard
        if namespace.quota.host_hard and over > 0:
            self._counters.host_evicted += namespace.tree.evict_host(over)

    def host_room(self, namespace: Namespace, pages: int) -> int:
        """Makes room for up to `pages` new pages of the namespace in the host tier: how many may be taken now."""
        if self._host is None or not pages:
            return 0
        self._make_host_room(self._host, namespace, pages)
        return min(pages, self._host_quota_left(namespace), self._host.free)

    def _evict(self, asker: Namespace, pages: int, others: list[Namespace]) -> int:
        """Takes up to `pages`, in the policy's order, from the asker and from what `others` have above their soft
        quotas. Returns how many: some may be free only when their spill ends.
        """
        evicted = 0
        while evicted < pages and not self._copies.full:
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
        """Takes up to `pages` from its tree. Returns how many are free now, or will be when their spill ends."""
        pages = min(pages, namespace.tree.evictable - namespace.tree.spilling, MAX_COPY_PAGES)
        if pages == 0:
            return 0
        going = 0
        if self._host is not None:
            # What has a row already, or finds one free, needs no room made.
            going = self._gone(namespace, namespace.tree.evict_with_room(pages, self._host_quota_left(namespace)))
            if going == pages or namespace.tree.oldest() is None:  # the rest waits for copies that run
                return going
            self._make_host_room(self._host, namespace, pages - going)
        return going + self._gone(namespace, namespace.tree.evict(pages - going, self._host_quota_left(namespace)))

    def _gone(self, namespace: Namespace, result: Evicted) -> int:
        """Starts the spill of what its tree has given up, and counts. Returns the pages, freed and spilled."""
        if result.spill is not None:
            self._copies.start(namespace, result.spill)
        namespace.evicted += len(result.freed)
        self._counters.dropped += result.dropped
        return len(result.freed) + (len(result.spill.device) if result.spill is not None else 0)

    def _host_quota_left(self, namespace: Namespace) -> int:
        """Host pages that it may still take, by its hard quota."""
        hard = namespace.quota.host_hard
        return max(0, hard - namespace.tree.host_pages) if hard else self._pool.pages

    def _make_host_room(self, host: PagePool, namespace: Namespace, pages: int) -> None:
        """Makes room for `pages` of this namespace to be spilled: frees host pages of its own where its hard quota is
        reached, else in the policy's order over all namespaces whose host quota allows it.
        """
        over = pages - self._host_quota_left(namespace)
        if over > 0:
            self._counters.host_evicted += namespace.tree.evict_host(over)
        pages = min(pages, self._host_quota_left(namespace)) - host.free
        while pages > 0:
            candidates = [
                (key, i, n)
                for i, n in enumerate(self._namespaces.values())
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
            self._counters.host_evicted += freed
            pages -= freed
