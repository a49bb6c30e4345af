"""Digest chain against OpenSSL over the same bytes in the same run, and what clients pay for the digests of prompts.

First table, nanoseconds a page, the best of interleaved repetitions:
  kvferry     one C++ call for the whole prompt: CBOR made and hashed
  hash limit  OpenSSL in one call over as many 64-byte blocks as the pages' messages take, no CBOR, no chain
  hashlib     OpenSSL page by page over messages encoded beforehand: the chain as Python would do it
  portable    kvferry without the processor's SHA instructions

Second table, microseconds a call (CPU: of the processor, in the mean), from int64 arrays of token ids below 128,000:
  W1  a conversation behind 1,024 tokens, 10 turns of 400 + 200: `DigestChain.extend` by a turn's 600 tokens; whole
      prompts through one `PromptCache`; whole prompts by `prompt_digests`
  W2  prompts of 50,000 tokens, one of 20, and 4,500 of their own: `PromptCache`, `prompt_digests`; a request is either
      of them, then the tree's match, lock, insert and unlock
  engine   on the engine's own thread, a new prompt of 9,248 token ids in a list: `PromptChain.prompt`, then the look-up
      of its full pages, which are all held, in an index of 100,000 pages
  hashing  what C++ needs at best for the pages that were not hashed before, of the mean prompt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
from collections.abc import Callable, Iterator
from time import perf_counter_ns, thread_time_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry.connectors.prompt_chain import PromptChain
from kvferry.radix import DigestChain, PagedRadixTree, PagePool, PromptDigests, prompt_digests, root_digest
from kvferry.radix.digests import DIGEST_BYTES, token_view
from kvferry.radix.pool import PageState
from kvferry.radix.prompt_cache import PromptCache

NULL = b"\xf6"
# What a page's SHA instructions were given to take, encoding aside; not measured here.
SHA_NI_NS = {16: 126, 64: 291}
VOCABULARY = 128_000
SYSTEM, TURN, OUTPUT = 1024, 400, 200
HEADS, HEAD, SUFFIX = 20, 50_000, 4_500
PROMPT, PROMPTS, INDEXED = 9248, 100, 100_000  # tokens, prompts, pages
BATCH = 100  # W2 prompts made at once: more than the processor's caches hold

Tokens = NDArray[np.int64]


class Row(NamedTuple):
    page_size: int
    pages: int
    message_bytes: float  # mean
    blocks: float  # mean
    kvferry_ns: float
    limit_ns: float
    hashlib_ns: float
    portable_ns: float


class Line(NamedTuple):
    """Microseconds a call, of the run that took the least of the processor."""

    page_size: int
    what: str
    calls: int
    p50_us: float
    cpu_us: float  # mean
    hashing_us: float


class Run(NamedTuple):
    calls_ns: list[int]
    cpu_ns: int  # of all calls: what others do on the same cores is not in it

    def __add__(self, other: Run) -> Run:  # type: ignore[override]
        return Run(self.calls_ns + other.calls_ns, self.cpu_ns + other.cpu_ns)


def encode_bodies(tokens: NDArray[np.uint32], page_size: int) -> list[bytes]:
    """What follows the parent in each page's message, made by the plain rule of CBOR."""

    def head(major: int, n: int) -> bytes:
        for limit, info, size in ((24, n, 0), (1 << 8, 24, 1), (1 << 16, 25, 2), (1 << 32, 26, 4)):
            if n < limit:
                return bytes([major << 5 | info]) + (n.to_bytes(size, "big") if size else b"")
        raise ValueError(n)

    items = [head(0, int(token)) for token in tokens]
    pages = range(0, len(items) - page_size + 1, page_size)
    return [head(4, page_size) + b"".join(items[at : at + page_size]) + NULL for at in pages]


def hashlib_chain(bodies: list[bytes], parent: bytes) -> bytes:
    for body in bodies:
        parent = hashlib.sha256(b"\x83\x58\x20" + parent + body).digest()
    return parent


def measure(page_size: int, total_tokens: int, vocabulary: int, repetitions: int) -> Row:
    tokens = np.random.default_rng(7).integers(0, vocabulary, total_tokens, dtype=np.uint32)
    parent = root_digest()
    bodies = encode_bodies(tokens, page_size)
    lengths = np.array([35 + len(body) for body in bodies])
    blocks = (lengths + 9 + 63) // 64
    same_blocks = bytes(int(blocks.sum()) * 64 - 9)  # with its padding exactly as many

    view = token_view(tokens)

    def chain(implementation: Any = "auto") -> bytes:
        return _core.chain_digests(view, b"", page_size, parent, NULL, {}, 0, implementation)[0]

    if chain()[-DIGEST_BYTES:] != hashlib_chain(bodies, parent):
        raise AssertionError("the two chains differ")
    contenders: list[Callable[[], object]] = [
        chain,
        lambda: hashlib.sha256(same_blocks).digest(),
        lambda: hashlib_chain(bodies, parent),
        lambda: chain("portable"),
    ]
    best = [float("inf")] * len(contenders)
    for _ in range(repetitions):
        for i, contender in enumerate(contenders):
            begin = perf_counter_ns()
            contender()
            best[i] = min(best[i], (perf_counter_ns() - begin) / len(bodies))
    return Row(page_size, len(bodies), float(lengths.mean()), float(blocks.mean()), *best)


def hashing_us(page_size: int, tokens: int) -> float:
    """The best time of C++ over the full pages of so many tokens."""
    view = token_view(np.random.default_rng(5).integers(0, VOCABULARY, tokens).astype(np.uint32))
    parent, best = root_digest(), float("inf")
    for _ in range(200):
        begin = perf_counter_ns()
        _core.chain_digests(view, b"", page_size, parent, NULL, {}, 0)
        best = min(best, (perf_counter_ns() - begin) / 1000)
    return best


NO_CALLS = Run([], 0)


def best_line(page_size: int, what: str, runs: list[Run], hashing: float) -> Line:
    best = min(runs, key=lambda run: run.cpu_ns)
    calls = len(best.calls_ns)
    return Line(page_size, what, calls, float(np.median(best.calls_ns)) / 1000, best.cpu_ns / calls / 1000, hashing)


def timed(call: Callable[[Any], object], arguments: list[Any]) -> Run:
    times = []
    cpu = thread_time_ns()
    for argument in arguments:
        begin = perf_counter_ns()
        call(argument)
        times.append(perf_counter_ns() - begin)
    return Run(times, thread_time_ns() - cpu)


def w1(page_size: int, repetitions: int, conversations: int = 50, turns: int = 10) -> list[Line]:
    rng = np.random.default_rng(1)
    system = rng.integers(0, VOCABULARY, SYSTEM)
    bodies = rng.integers(0, VOCABULARY, (conversations, turns * (TURN + OUTPUT)))
    steps = [list(np.split(body, turns)) for body in bodies]
    ends = range(TURN, bodies.shape[1], TURN + OUTPUT)
    prompts = [np.concatenate([system, body[:end]]) for body in bodies for end in ends]

    def extended() -> Run:
        run = NO_CALLS
        for conversation in steps:
            chain = DigestChain(page_size=page_size)
            chain.extend(system)
            run += timed(chain.extend, conversation)
        return run

    def cached() -> Run:
        return timed(PromptCache(page_size=page_size).digests, prompts)

    def plain() -> Run:
        return timed(lambda tokens: prompt_digests(tokens, page_size=page_size), prompts)

    new, whole = hashing_us(page_size, TURN + OUTPUT), hashing_us(page_size, sum(map(len, prompts)) // len(prompts))
    contenders = [
        ("W1 turn, DigestChain.extend", extended, new),
        ("W1 prompt, PromptCache", cached, new),
        ("W1 prompt, prompt_digests", plain, whole),
    ]
    return [
        best_line(page_size, what, [run() for _ in range(repetitions)], hashing) for what, run, hashing in contenders
    ]


def w2_batches(requests: int) -> Iterator[list[Tokens]]:
    rng = np.random.default_rng(2)
    heads = rng.integers(0, VOCABULARY, (HEADS, HEAD))
    for at in range(0, requests, BATCH):
        chosen = rng.integers(0, HEADS, min(BATCH, requests - at))
        yield [np.concatenate([heads[head], rng.integers(0, VOCABULARY, SUFFIX)]) for head in chosen]


def w2(page_size: int, repetitions: int, requests: int) -> list[Line]:
    pages = (HEADS * HEAD + requests * (SUFFIX + page_size)) // page_size

    def through_tree(digests_of: Callable[[Tokens], PromptDigests]) -> Callable[[Tokens], None]:
        pool = PagePool(pages)
        tree = PagedRadixTree(pool)

        def request(tokens: Tokens) -> None:
            digests = digests_of(tokens).digests
            match = tree.match(digests)
            lock = tree.lock(match)
            tree.insert(digests, pool.allocate(len(digests) // DIGEST_BYTES - match.pages), start=match.pages)
            tree.unlock(lock)

        return request

    def cache() -> Callable[[Tokens], PromptDigests]:
        return PromptCache(page_size=page_size).digests

    def plain(tokens: Tokens) -> PromptDigests:
        return prompt_digests(tokens, page_size=page_size)

    contenders: list[tuple[str, Callable[[], Callable[[Tokens], object]], int]] = [
        ("W2 prompt, PromptCache", cache, SUFFIX),
        ("W2 prompt, prompt_digests", lambda: plain, HEAD + SUFFIX),
        ("W2 request, PromptCache + tree", lambda: through_tree(cache()), SUFFIX),
        ("W2 request, prompt_digests + tree", lambda: through_tree(plain), HEAD + SUFFIX),
    ]
    runs: list[list[Run]] = [[] for _ in contenders]
    for _ in range(repetitions):
        calls = [make() for _, make, _ in contenders]
        for of_contender in runs:
            of_contender.append(NO_CALLS)
        for batch in w2_batches(requests):
            for call, of_contender in zip(calls, runs, strict=True):
                of_contender[-1] += timed(call, batch)
    return [
        best_line(page_size, what, of_contender, hashing_us(page_size, fresh))
        for (what, _, fresh), of_contender in zip(contenders, runs, strict=True)
    ]


def engine(page_size: int, repetitions: int) -> list[Line]:
    rng = np.random.default_rng(3)
    prompts = [SimpleNamespace(all_token_ids=rng.integers(0, VOCABULARY, PROMPT).tolist()) for _ in range(PROMPTS)]
    pool, memory = PagePool(INDEXED), mmap.mmap(-1, _core.HeldIndex.bytes_for(INDEXED))
    index, space = _core.HeldIndex(memory), root_digest()
    pool.publish(index)
    reader = _core.HeldIndexReader(memory)

    def hashed(prompt: Any) -> bytes:
        return PromptChain(prompt, page_size, None).prompt(PROMPT).digests

    def held(digests: bytes) -> None:
        if reader.held_pages(digests, space) != PROMPT // page_size:
            raise AssertionError("the index does not hold the prompt")

    names = [hashed(prompt) for prompt in prompts]
    for digests in names:
        pages = pool.allocate(PROMPT // page_size)
        pool.name_pages(pages, digests, space)
        pool.move(pages, PageState.LEASED, PageState.CACHED)
    return [
        best_line(page_size, "engine, PromptChain.prompt", [timed(hashed, prompts) for _ in range(repetitions)],
                  hashing_us(page_size, PROMPT)),
        best_line(page_size, "engine, index of held pages", [timed(held, names) for _ in range(repetitions)], 0.0),
    ]  # fmt: skip


def print_chain(rows: list[Row]) -> None:
    print("page  pages  bytes/page  blocks/page  kvferry ns  hash limit ns  of limit  hashlib ns  portable ns")
    for r in rows:
        print(
            f"{r.page_size:4}  {r.pages:5}  {r.message_bytes:10.1f}  {r.blocks:11.2f}  {r.kvferry_ns:10.0f}  "
            f"{r.limit_ns:13.0f}  {r.limit_ns / r.kvferry_ns:8.0%}  {r.hashlib_ns:10.0f}  {r.portable_ns:11.0f}"
        )
    for r in rows:
        print(
            f"page {r.page_size}, times kvferry's: OpenSSL over the same bytes in one call "
            f"{r.limit_ns / r.kvferry_ns:.2f}, page by page {r.hashlib_ns / r.kvferry_ns:.2f}"
        )
        if given := SHA_NI_NS.get(r.page_size):
            print(f"page {r.page_size}, reference: SHA instructions alone were given as {given} ns; ", end="")
            print(f"{given / r.kvferry_ns:.2f} of kvferry's")


def print_clients(lines: list[Line]) -> None:
    print(
        f"{'page':>4}  {'':33}  {'calls':>5}  {'p50 us':>7}  {'CPU us':>7}  {'hashing us':>10}  {'calls / CPU s':>13}"
    )
    for line in lines:
        print(
            f"{line.page_size:4}  {line.what:33}  {line.calls:5}  {line.p50_us:7.1f}  {line.cpu_us:7.1f}  "
            f"{line.hashing_us:10.1f}  {1e6 / line.cpu_us:13,.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="length of the prompt (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=49_152, help="token ids below this (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=50, help="of the first table (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of the second table (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="of W2 (default %(default)s)")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    args = parser.parse_args()
    rows = [measure(size, args.tokens, args.vocabulary, args.repetitions) for size in args.page_sizes]
    lines = [
        line
        for size in args.page_sizes
        for line in w1(size, args.runs) + w2(size, args.runs, args.requests) + engine(size, args.runs)
    ]
    if args.format == "json":
        print(json.dumps({"chain": [row._asdict() for row in rows], "clients": [line._asdict() for line in lines]}))
        return
    print(f"{args.tokens} tokens, ids below {args.vocabulary}; SHA-256: {', '.join(_core.sha256_implementations())}")
    print_chain(rows)
    print()
    print_clients(lines)


if __name__ == "__main__":
    main()
