"""In which order unlocked leaves are evicted: a policy is one small class, by whose keys the tree sorts its leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LeafUse:
    """What a policy may look at: times are the tree's clock."""

    created: float
    last_access: float
    hits: int  # locks ever taken on it
    pages: int


class EvictionPolicy(Protocol):
    def key(self, leaf: LeafUse) -> float:
        """The leaf with the smallest key goes first; asked when a node becomes an unlocked leaf."""
        ...


class LRU:
    """Least recently used first."""

    def key(self, leaf: LeafUse) -> float:
        return leaf.last_access
