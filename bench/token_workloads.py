"""Token workloads on which prefix trees are compared. Each yields (match_tokens, insert_tokens), int64: a request
matches and locks the first, then inserts the second (prompt + output), unlocks, and evicts when the pool is full.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
VOCABULARY = 128_000
W1_SYSTEM, W1_USER, W1_ASSISTANT, W1_CONVERSATIONS, W1_TURNS = 1024, 400, 200, 200, 10
W1_POOL_TOKENS = (W1_SYSTEM + W1_CONVERSATIONS * W1_TURNS * (W1_USER + W1_ASSISTANT)) // 2  # half of the unique ones
W2_PREFIXES, W2_PREFIX, W2_SUFFIX, W2_REQUESTS = 20, 50_000, 4_500, 1000
W2_POOL_TOKENS = 2 * W2_PREFIXES * W2_PREFIX + W2_REQUESTS * W2_SUFFIX  # nothing is evicted


def w1(
    conversations: int = W1_CONVERSATIONS, turns: int = W1_TURNS, seed: int = 1
) -> Iterator[tuple[int, Tokens, Tokens]]:
    """Multi-turn chat behind one system prompt, conversations interleaved; the conversation's number comes first."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, W1_SYSTEM)
    per_turn = W1_USER + W1_ASSISTANT
    body = rng.integers(0, VOCABULARY, (conversations, turns * per_turn))
    turn_of = np.zeros(conversations, int)
    for c in rng.permutation(np.repeat(np.arange(conversations), turns)):
        turn = turn_of[c]
        turn_of[c] += 1
        full = np.concatenate([shared, body[c, : (turn + 1) * per_turn]])
        yield int(c), full[: W1_SYSTEM + turn * per_turn + W1_USER], full


def w2(requests: int = W2_REQUESTS, seed: int = 2) -> Iterator[Tokens]:
    """Long shared prefixes, each request with a suffix of its own."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(0, VOCABULARY, (W2_PREFIXES, W2_PREFIX))
    for prefix in rng.integers(0, W2_PREFIXES, requests):
        yield np.concatenate([heads[prefix], rng.integers(0, VOCABULARY, W2_SUFFIX)])
