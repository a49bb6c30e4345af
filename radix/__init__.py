"""What is held: digests, page pools, the radix tree and its eviction. Core: no I/O."""

from kvferry.radix.digests import (
    DIGEST_BYTES,
    DigestChain,
    PromptDigests,
    chain_digests,
    prompt_digests,
    root_digest,
    tail_digest,
)
from kvferry.radix.policy import LRU, EvictionPolicy, LeafUse
from kvferry.radix.pool import PagePool, PageState, PoolCounts, PoolExhausted
from kvferry.radix.tree import InsertResult, Lock, Match, PagedRadixTree

__all__ = [
    "DIGEST_BYTES",
    "LRU",
    "DigestChain",
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
    "PromptDigests",
    "chain_digests",
    "prompt_digests",
    "root_digest",
    "tail_digest",
]
