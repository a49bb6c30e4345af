"""The radix cache from Python, garbage collection on: requests a second and microseconds an operation.

W1   200 conversations x 10 turns behind one system prompt, +400/+200 tokens a turn, the pool holds half of the unique
     tokens: each turn extends its conversation's digests, matches, locks, evicts, inserts, unlocks.
W2   1,000 requests of 50,000 (20 prefixes) + 4,500 tokens at page 64, from raw tokens: with the client's prompt cache,
     and without. Nothing is evicted.
ops  given digests, at 10^3 to 10^6 pages: a match of 10,240 tokens, lock + unlock, the insert of a 512-token turn, the
     eviction of 64 pages of 4-page leaves.

Baselines of the same run: OpenSSL's SHA-256 over the bytes that were hashed, and a flat dict of digests that knows
neither order nor locks. Reference figures of the field are printed as they were published, from another machine.

    python bench/radix.py [--repeat 3] [--only w1,w2,ops,memory]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from token_workloads import W1_POOL_TOKENS, W2_POOL_TOKENS, w1, w2

from kvferry.radix import DIGEST_BYTES, DigestChain, prompt_digests
from kvferry.radix.pool import PagePool
from kvferry.radix.prompt_cache import PromptCache
from kvferry.radix.tree import PagedRadixTree

STEPS = ("hash", "match", "lock", "evict", "allocate", "insert", "unlock")
FIELD = """reference (other machine, best of several, p50 us; W1 match, lock, insert, unlock, evict)
  SGLang, Rust core     W1 7,320 / 7,016 req/s at page 16 / 64   19, 9.3, 42, 5.5, 63     W2 match 119
  SGLang, Python tree   W1 4,447 / 2,764                         60, 9.9, 79, 8.1, 58     W2 match 180
  vLLM, sha256          W1 720 / 2,244                           182, -, 183, 51, -       W2 match 910 + 3,648 hashing
  evict 64 pages of 4-page leaves at 1,562 / 15,625 / 250,000 leaves: SGLang 60 / 530 / 10,000 (Rust core)
  bytes an indexed page (16 / 64): SGLang 288 / 1,129, vLLM 319 / 345"""


@dataclass(slots=True)
class Times:
    """Nanoseconds of each step, and how many pages were hashed."""

    steps: dict[str, list[int]] = field(default_factory=lambda: {step: [] for step in STEPS})
    hashed_pages: int = 0
    matched_pages: int = 0
    requests: int = 0

    @property
    def seconds(self) -> float:
        return sum(sum(times) for times in self.steps.values()) / 1e9

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    def p50(self, step: str) -> float:
        """Microseconds."""
        return float(np.percentile(self.steps[step], 50)) / 1000 if self.steps[step] else 0.0


@dataclass(slots=True)
class Cache:
    """The steps of a request, timed."""

    pool: PagePool
    tree: PagedRadixTree
    times: Times

    @staticmethod
    def of(pages: int) -> Cache:
        pool = PagePool(pages)
        return Cache(pool, PagedRadixTree(pool), Times())

    def request(self, prompt: bytes, full: bytes | None, extend: Callable[[], bytes] | None = None) -> None:
        """`extend` gives the digests of prompt and output once the prompt was matched; it is timed as hashing."""
        times, tree, pool = self.times.steps, self.tree, self.pool
        t0 = time.perf_counter_ns()
        match = tree.match(prompt)
        t1 = time.perf_counter_ns()
        lock = tree.lock(match)
        t2 = time.perf_counter_ns()
        times["lock"].append(t2 - t1)
        if extend is not None:
            full = extend()
            times["hash"].append(time.perf_counter_ns() - t2)
            t2 = time.perf_counter_ns()
        assert full is not None
        need = len(full) // DIGEST_BYTES - match.pages
        if pool.free < need:
            tree.evict(need - pool.free)
            t3 = time.perf_counter_ns()
            times["evict"].append(t3 - t2)
        else:
            t3 = t2
        pages = pool.allocate(need)
        t4 = time.perf_counter_ns()
        tree.insert(full, pages, match.pages)
        t5 = time.perf_counter_ns()
        tree.unlock(lock)
        t6 = time.perf_counter_ns()
        times["match"].append(t1 - t0)
        times["allocate"].append(t4 - t3)
        times["insert"].append(t5 - t4)
        times["unlock"].append(t6 - t5)
        self.times.matched_pages += match.pages
        self.times.requests += 1


def run_w1(page_size: int) -> Times:
    cache = Cache.of(W1_POOL_TOKENS // page_size)
    times = cache.times
    chains: dict[int, DigestChain] = {}
    requests = list(w1())
    for conversation, prompt, full in requests:
        t0 = time.perf_counter_ns()
        chain = chains.get(conversation)
        if chain is None:
            chain = chains[conversation] = DigestChain(page_size=page_size)
        before = chain.pages
        chain.extend(prompt[chain.tokens :])
        digests = chain.digests
        times.steps["hash"].append(time.perf_counter_ns() - t0)

        def extend(chain: DigestChain = chain, full: np.ndarray = full) -> bytes:  # type: ignore[type-arg]
            chain.extend(full[chain.tokens :])
            return chain.digests

        cache.request(digests, None, extend)
        times.hashed_pages += chain.pages - before
    cache.tree.check()
    cache.pool.check()
    return times


def run_flat_w1(page_size: int) -> float:
    """Requests a second of a dict of digests: hashing as in W1, look-up page by page, insert, no eviction, no locks."""
    held: dict[bytes, int] = {}
    chains: dict[int, DigestChain] = {}
    requests = list(w1())
    began = time.perf_counter()
    for conversation, prompt, full in requests:
        chain = chains.setdefault(conversation, DigestChain(page_size=page_size))
        chain.extend(prompt[chain.tokens :])
        digests = chain.digests
        at = 0
        while at < len(digests) and digests[at : at + DIGEST_BYTES] in held:
            at += DIGEST_BYTES
        chain.extend(full[chain.tokens :])
        digests = chain.digests
        for start in range(at, len(digests), DIGEST_BYTES):
            held[digests[start : start + DIGEST_BYTES]] = start
    return len(requests) / (time.perf_counter() - began)


def run_w2(cached: bool) -> Times:
    page_size = 64
    cache = Cache.of(W2_POOL_TOKENS // page_size)
    prompts = PromptCache(page_size=page_size) if cached else None
    for tokens in list(w2()):
        t0 = time.perf_counter_ns()
        named = prompts.digests(tokens) if prompts is not None else prompt_digests(tokens, page_size=page_size)
        cache.times.steps["hash"].append(time.perf_counter_ns() - t0)
        cache.request(named.digests, named.digests)
    return cache.times


def openssl_ns(page_size: int) -> float:
    """Nanoseconds that OpenSSL takes for the bytes of a page's message (some 3.6 bytes a token and the parent)."""
    message = np.random.default_rng(1).bytes(int(page_size * 4.6) + 40)
    count = 20_000
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter_ns()
        for _ in range(count):
            hashlib.sha256(message).digest()
        best = min(best, (time.perf_counter_ns() - began) / count)
    return best


def best_of(repeat: int, run: Callable[[], Times]) -> Times:
    return max((run() for _ in range(repeat)), key=lambda times: times.rate)


def print_w1(repeat: int) -> None:
    print(f"W1 {'page':>4} {'req/s':>9} {'flat dict':>10} " + " ".join(f"{step:>8}" for step in STEPS) + "   (p50 us)")
    for page_size in (16, 64):
        times = best_of(repeat, lambda size=page_size: run_w1(size))  # type: ignore[misc]
        flat = max(run_flat_w1(page_size) for _ in range(repeat))
        p50s = " ".join(f"{times.p50(step):>8.2f}" for step in STEPS)
        print(f"   {page_size:>4} {times.rate:>9,.0f} {flat:>10,.0f} {p50s}")
        hashing = sum(times.steps["hash"]) / max(1, times.hashed_pages)
        print(
            f"        hashing {hashing:.0f} ns a page with all calls around it; "
            f"OpenSSL over as many bytes, a call a page: {openssl_ns(page_size):.0f} ns"
        )


def print_w2(repeat: int) -> None:
    print(f"\nW2 {'prompt cache':>13} {'req/s':>9} " + " ".join(f"{step:>8}" for step in STEPS if step != "evict"))
    for cached in (True, False):
        times = best_of(repeat, lambda cached=cached: run_w2(cached))  # type: ignore[misc]
        p50s = " ".join(f"{times.p50(step):>8.2f}" for step in STEPS if step != "evict")
        print(f"   {'yes' if cached else 'no':>13} {times.rate:>9,.0f} {p50s}")


def tree_of_leaves(leaves: int, leaf_pages: int, spare: int = 0) -> tuple[PagePool, PagedRadixTree]:
    """`leaves` leaves of `leaf_pages` pages at the root, none locked."""
    pool = PagePool(leaves * leaf_pages + spare)
    tree = PagedRadixTree(pool)
    rng = np.random.default_rng(3)
    for _ in range(leaves):
        tree.insert(rng.bytes(leaf_pages * DIGEST_BYTES), pool.allocate(leaf_pages))
    return pool, tree


def timed(count: int, operation: Callable[[], object]) -> float:
    """p50 in microseconds."""
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        operation()
        times.append(time.perf_counter_ns() - began)
    return float(np.percentile(times, 50)) / 1000


def measure_ops(leaves: int) -> tuple[float, float, float, float]:
    """p50 in microseconds of match, lock + unlock, insert and evict in a tree of 4-page leaves."""
    pool, tree = tree_of_leaves(leaves, 4, spare=2048)
    rng = np.random.default_rng(4)
    history = rng.bytes(160 * DIGEST_BYTES)
    tree.insert(history, pool.allocate(160))
    match_us = timed(500, lambda: tree.match(history))
    lock_us = timed(500, lambda: tree.unlock(tree.lock(tree.match(history)))) - match_us
    kept = tree.lock(tree.match(history))  # it stays while turns are inserted behind it and leaves go
    turns = iter([history + rng.bytes(8 * DIGEST_BYTES) for _ in range(60)])
    given = iter([pool.allocate(8) for _ in range(60)])
    insert_us = timed(60, lambda: tree.insert(next(turns), next(given), 160))
    evict_us = timed(max(1, min(60, leaves * 4 // 64 // 2)), lambda: tree.evict(64))
    tree.unlock(kept)
    return match_us, lock_us, insert_us, evict_us


def print_ops() -> None:
    print(f"\nops {'pages':>9} {'leaves':>8} {'match':>7} {'lock+unlock':>12} {'insert':>7} {'evict 64':>9}   (p50 us)")
    first: Sequence[float] | None = None
    last: Sequence[float] = ()
    for pages in (1_000, 6_248, 62_500, 250_000, 1_000_000):
        leaves = pages // 4
        match_us, lock_us, insert_us, evict_us = measure_ops(leaves)
        last = (match_us, insert_us, evict_us)
        first = first or last
        print(f"    {pages:>9,} {leaves:>8,} {match_us:>7.2f} {lock_us:>12.2f} {insert_us:>7.2f} {evict_us:>9.2f}")
    assert first is not None
    ratios = [after / before for before, after in zip(first, last, strict=True)]
    print(f"    10^3 -> 10^6 pages: match x {ratios[0]:.2f}, insert x {ratios[1]:.2f}, evict x {ratios[2]:.2f}")


def resident() -> int:
    """Bytes of this process in memory, freed heap given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def print_memory() -> None:
    print(f"\nmemory {'leaf':>5} {'pages':>9} {'bytes a page':>13} {'its own count':>14} {'GC-tracked a page':>18}")
    for leaf_pages in (4, 64):
        pages = 1_000_000
        pool = PagePool(pages)
        warm = pool.allocate(pages)
        pool.free_pages(warm)
        del warm
        tracked, before = len(gc.get_objects()), resident()
        tree = PagedRadixTree(pool)
        rng = np.random.default_rng(3)
        for _ in range(pages // leaf_pages):
            tree.insert(rng.bytes(leaf_pages * DIGEST_BYTES), pool.allocate(leaf_pages))
        after = resident()
        objects = (len(gc.get_objects()) - tracked) / pages
        own = tree.index_bytes / pages
        print(f"       {leaf_pages:>5} {pages:>9,} {(after - before) / pages:>13.1f} {own:>14.1f} {objects:>18.4f}")
        del tree, pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each workload; the fastest is printed")
    parser.add_argument("--only", default="w1,w2,ops,memory", help="sections, by comma")
    arguments = parser.parse_args()
    assert gc.isenabled()
    sections = {
        "w1": lambda: print_w1(arguments.repeat),
        "w2": lambda: print_w2(arguments.repeat),
        "ops": print_ops,
        "memory": print_memory,
    }
    for name in arguments.only.split(","):
        if name not in sections:
            parser.error(f"--only {name!r}: sections are {', '.join(sections)}")
        sections[name]()
    print("\n" + FIELD)


if __name__ == "__main__":
    main()
