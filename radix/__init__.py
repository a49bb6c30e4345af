"""What is held: digests, page pools, the radix tree and its eviction. Core: no I/O."""

from kvferry.radix.policy import LRU, EvictionPolicy, LeafUse
from kvferry.radix.pool import PagePool, PageState, PoolCounts, PoolExhausted
from kvferry.radix.tree import InsertResult, Lock, Match, PagedRadixTree

__all__ = [
    "LRU",
    "EvictionPolicy",
    "InsertResult",
    "LeafUse",
    "Lock",
    "Match",
    "PagePool",
    "PageState",
    "PagedRadixTree",
    "PoolCounts",
    "PoolExhausted",
]
