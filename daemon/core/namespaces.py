"""The pages that a namespace may use of a pool, and those that may be promised to whom. Core: no I/O.

A promise holds when its pages can be had without breaking another's. A namespace's evictable pages under its soft
quota are its own only (`protected`); what is above it, and every free page, anybody may have. So all promises can be
kept together exactly when

    sum over namespaces of max(0, promised - protected)  <=  free + sum of (evictable - protected)

and each namespace stays within its hard quota: used + promised - evictable <= hard. Spilling pages count as evictable:
they are free as soon as their copy ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from kvferry.radix.tree import PagedRadixTree


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of one namespace, in pages. 0: no quota. Soft: what others may not evict; hard: what it may use at
    most."""

    soft: int = 0
    hard: int = 0
    host_soft: int = 0
    host_hard: int = 0

    def __post_init__(self) -> None:
        for soft, hard, tier in ((self.soft, self.hard, "device"), (self.host_soft, self.host_hard, "host")):
            if soft < 0 or hard < 0 or (hard and soft > hard):
                raise ValueError(f"{tier} quota is {soft}:{hard}; soft must be 0 to hard, both not negative")


@dataclass(slots=True, eq=False)
class Namespace:
    id: bytes
    tree: PagedRadixTree
    quota: Quota = field(default_factory=Quota)
    own: int = 0  # device pages of its requests that are not the tree's
    promised: int = 0  # pages promised to its requests and not yet given
    arrivals: int = 0  # times that pages of its tree became readable
    evicted: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    pinned_pages: int = 0

    @property
    def used(self) -> int:
        """Device pages in use."""
        return self.tree.pages + self.own

    @property
    def above_soft(self) -> int:
        """Used pages that others may have, as far as they are evictable."""
        return max(0, self.used - self.quota.soft)

    @property
    def protected(self) -> int:
        """Evictable pages that are only its own to evict."""
        return max(0, self.tree.evictable - self.above_soft)

    @property
    def soft_pages(self) -> int:
        """Pages of the tree that others may not have even if no request held any."""
        return min(self.quota.soft, self.tree.pages)

    @property
    def host_above_soft(self) -> int:
        return max(0, self.tree.host_pages - self.quota.host_soft)

    def looked_up(self, queried: int, hit: int, host_hit: int) -> None:
        """Tokens of one request."""
        self.queried_tokens += queried
        self.hit_tokens += hit
        self.host_hit_tokens += host_hit

    def within_hard(self, more: int) -> bool:
        """Whether `more` promised pages keep it within its hard quota."""
        hard = self.quota.hard
        return hard == 0 or self.used + self.promised + more - self.tree.evictable <= hard


def soft_pages(namespaces: Iterable[Namespace]) -> int:
    return sum(namespace.soft_pages for namespace in namespaces)


def quota_states(namespaces: Iterable[Namespace]) -> Callable[[object], Hashable]:
    """For each namespace, in this step: what decides which of its requests are over its hard quota or kept out by the
    soft ones of others. What they match changes with the pages that it uses and that become readable, but for a page in
    place of another.
    """
    soft = soft_pages(namespaces)

    def state(namespace: object) -> Hashable:
        assert isinstance(namespace, Namespace)
        uses = namespace.tree.pages, namespace.tree.evictable, namespace.own, namespace.promised, namespace.arrivals
        return uses, soft - namespace.soft_pages

    return state


def slack(free: int, namespaces: Iterable[Namespace]) -> int:
    """Pages that could be promised to a namespace without protected ones; negative when promises cannot all be kept."""
    left = free
    for namespace in namespaces:
        protected = namespace.protected
        left += namespace.tree.evictable - protected - max(0, namespace.promised - protected)
    return left


def own_share(namespace: Namespace, pages: int, left: int) -> int:
    """The number of the next `pages` (promised) pages of `namespace` that must come from its own tree, so that its hard
    quota and, `left` being the slack, all other promises hold.
    """
    hard = namespace.quota.hard
    over = max(0, namespace.used + pages - hard) if hard else 0
    protected = namespace.protected
    shared = max(0, namespace.promised - protected) + max(0, left)
    return max(over, min(protected, pages - shared), 0)
