"""In which order unlocked leaves are evicted: a policy is one small class, by whose keys the tree sorts its leaves."""

from __future__ import annotations

from typing import Protocol


class LeafUse(Protocol):
    """What a policy may look at. Times are the tree's clock."""

    @property
    def created(self) -> float: ...

    @property
    def last_access(self) -> float:
        """When it was last locked, unlocked or met by an insert."""

    @property
    def hits(self) -> int:
        """Locks ever taken on it or below it."""

    @property
    def size(self) -> int:
        """Pages."""


class EvictionPolicy(Protocol):
    def key(self, leaf: LeafUse) -> float:
        """The leaf with the smallest key goes first; asked when a node becomes an unlocked leaf or its pages change.

        Trees that share a pool are compared by these keys, so they need the same policy and the same clock.
        """


class LRU:
    """Least recently used first."""

    def key(self, leaf: LeafUse) -> float:
        return leaf.last_access
