"""What the tree's operations cost on multi-turn chat: p50 and p99 in microseconds.

200 conversations of 10 turns in mixed order behind one system prompt of 1,024 tokens; a turn adds 400 tokens of prompt
and 200 of output; the pool holds half of the unique pages, so that the cache is always full. Garbage collection is on.

    python bench/radix_ops.py [--conversations 200] [--turns 10] [--repeat 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from kvferry.radix.pool import PagePool
from kvferry.radix.tree import PagedRadixTree

DIGEST_BYTES = 32
SYSTEM, USER, OUTPUT = 1024, 400, 200
STEPS = ("match", "lock", "evict", "allocate", "insert", "unlock")


@dataclass(frozen=True, slots=True)
class Turn:
    """Digests of the full pages of a turn's prompt, and of its prompt and output."""

    prompt: bytes
    full: bytes


@dataclass(slots=True)
class Result:
    turns: int = 0
    prompt_pages: int = 0
    matched_pages: int = 0
    evicted_pages: int = 0
    seconds: float = 0.0
    nanoseconds: dict[str, list[int]] = field(default_factory=lambda: {step: [] for step in STEPS})


def chat_turns(conversations: int, turns: int, page_size: int, seed: int = 1) -> Iterator[Turn]:
    """Random digests stand for chained ones: equal exactly where the whole prefix is."""
    rng = np.random.default_rng(seed)
    system = rng.bytes(SYSTEM // page_size * DIGEST_BYTES)
    own_pages = turns * (USER + OUTPUT) // page_size
    bodies = [system + rng.bytes(own_pages * DIGEST_BYTES) for _ in range(conversations)]
    turn_of = [0] * conversations
    for c in rng.permutation(np.repeat(np.arange(conversations), turns)):
        tokens = SYSTEM + turn_of[c] * (USER + OUTPUT) + USER
        turn_of[c] += 1
        body = bodies[c]
        yield Turn(body[: tokens // page_size * DIGEST_BYTES], body[: (tokens + OUTPUT) // page_size * DIGEST_BYTES])


def run(conversations: int, turns: int, page_size: int) -> Result:
    unique = (SYSTEM + conversations * turns * (USER + OUTPUT)) // page_size
    pool = PagePool(unique // 2)
    tree = PagedRadixTree(pool)
    result = Result()
    spent = [result.nanoseconds[step] for step in STEPS]
    for turn in list(chat_turns(conversations, turns, page_size)):
        at = [perf_counter_ns()]
        match = tree.match(turn.prompt)
        at.append(perf_counter_ns())
        lock = tree.lock(match)
        at.append(perf_counter_ns())
        need = len(turn.full) // DIGEST_BYTES - match.pages
        evicted = tree.evict(max(0, need - pool.free))
        at.append(perf_counter_ns())
        pages = pool.allocate(need)
        at.append(perf_counter_ns())
        tree.insert(turn.full, pages, start=match.pages)
        at.append(perf_counter_ns())
        tree.unlock(lock)
        at.append(perf_counter_ns())
        for i, times in enumerate(spent):
            if STEPS[i] != "evict" or evicted:
                times.append(at[i + 1] - at[i])
        result.turns += 1
        result.prompt_pages += len(turn.prompt) // DIGEST_BYTES
        result.matched_pages += match.pages
        result.evicted_pages += len(evicted)
        result.seconds += (at[-1] - at[0]) / 1e9
    tree.check()
    pool.check()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each page size; the fastest is printed")
    arguments = parser.parse_args()
    print(f"{'page':>4} {'step':>8} {'calls':>6} {'p50 us':>8} {'p99 us':>8}")
    for page_size in (16, 64):
        runs = [run(arguments.conversations, arguments.turns, page_size) for _ in range(arguments.repeat)]
        best = min(runs, key=lambda result: result.seconds)
        for step, times in best.nanoseconds.items():
            if times:
                p50, p99 = np.percentile(times, (50, 99)) / 1000
                print(f"{page_size:>4} {step:>8} {len(times):>6} {p50:>8.1f} {p99:>8.1f}")
        hit = best.matched_pages / best.prompt_pages
        print(
            f"{page_size:>4} {best.turns} turns, {best.turns / best.seconds:,.0f} turns/s, "
            f"{hit:.1%} of prompt pages matched, {best.evicted_pages} evicted"
        )


if __name__ == "__main__":
    main()
