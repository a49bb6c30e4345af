"""Replays a trace in Mooncake's format through the tree and its tiers: hit rates by pool size and eviction policy.

A line of such a trace is a request: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": []},
an id for each 512 tokens of its prompt, equal where the whole prefix is. Each request matches and locks what is held,
restores from the host, evicts and spills as it must, inserts its whole prompt and unlocks. Beside the policies stand
two bounds of the same trace: a cache without end, and Belady's optimum of the same size (for `hit %`: of both tiers
together), which evicts the leaf that is used again last.

    python bench/trace_replay.py --trace FILE [--blocks 2000,8000] [--host-blocks N] [--policies lru,lfu] [--plot PNG]

Sizes are in blocks of 512 tokens, whatever the page size. `of the gap`: where a policy stands between LRU (0 %) and the
optimum (100 %), on the requests from --score-from on, with a cache warmed by those before.
"""

from __future__ import annotations

import argparse
import heapq
import json
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry import flags
from kvferry.radix import DIGEST_BYTES
from kvferry.radix.digests import split_digests
from kvferry.radix.pool import PagePool
from kvferry.radix.tree import Clock, Lock, PagedRadixTree, Policy, policy_names

BLOCK_TOKENS = 512
NEVER = 1 << 62
NO_END, OPTIMUM = "no end", "optimum"
SCORE_FROM = 6000


class TraceError(Exception):
    """The trace cannot be used."""


@dataclass(frozen=True, slots=True)
class Request:
    seconds: float
    digests: bytes  # 32 a page
    pages: NDArray[np.int64]  # the same pages, numbered

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Hits:
    """Of each request, the pages found on either tier."""

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Hit rates in percent of the pages requested."""

    blocks: int
    policy: str
    total: float
    device: float
    host: float
    scored: float
    gap: float | None  # share of it that is closed
    requests_per_second: float | None


# -- the trace ---------------------------------------------------------------------------------------------------------


def read_trace(path: Path, page_size: int, limit: int | None = None) -> list[Request]:
    """The digest of a page is the SHA-256 of its parent's, its block's id and its place in it: no tokens are hashed."""
    numbers: dict[bytes, int] = {}
    blocks: dict[tuple[bytes, int], bytes] = {}
    requests: list[Request] = []
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"--trace: {path}: {error.strerror}") from error
    with lines:
        for at, line in enumerate(lines, 1):
            if limit is not None and len(requests) >= limit:
                break
            milliseconds, tokens, ids = _fields(f"{path}:{at}", line)
            parent, parts = b"", []
            for block in ids:
                digests = blocks.get((parent, block))
                if digests is None:
                    digests = blocks[parent, block] = _block_digests(parent, block, BLOCK_TOKENS // page_size)
                parts.append(digests)
                parent = digests[-DIGEST_BYTES:]
            whole = len(ids) * BLOCK_TOKENS
            prompt = tokens if whole - BLOCK_TOKENS < tokens < whole else whole  # the last block may be partial
            data = b"".join(parts)[: -(-prompt // page_size) * DIGEST_BYTES]
            numbered = np.array([numbers.setdefault(each, len(numbers)) for each in split_digests(data)], np.int64)
            requests.append(Request(milliseconds / 1000, data, numbered))
    if not any(len(request) for request in requests):
        raise TraceError(f"--trace: {path}: no requests")
    return requests


def _block_digests(parent: bytes, block: int, pages: int) -> bytes:
    digests = b""
    for page in range(pages):
        parent = sha256(parent + struct.pack("<QI", block, page)).digest()
        digests += parent
    return digests


def _fields(where: str, line: str) -> tuple[float, int, list[int]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: is {type(record).__name__}, must be an object")
    for name in ("timestamp", "input_length", "output_length"):
        value = record.get(name)
        types = (int, float) if name == "timestamp" else (int,)
        if type(value) not in types or not value >= 0:
            kind = "a number" if name == "timestamp" else "a whole number"
            raise TraceError(f"{where}: {name}: {_shown(record, name)}, must be {kind} >= 0")
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 64 for i in ids):
        raise TraceError(f"{where}: hash_ids: {_shown(record, 'hash_ids')}, must be a list of whole numbers >= 0")
    return float(record["timestamp"]), int(record["input_length"]), ids


def _shown(record: dict[str, object], name: str) -> str:
    return repr(record[name])[:60] if name in record else "missing"


# -- the tree ----------------------------------------------------------------------------------------------------------


def replay(requests: Sequence[Request], policy: str, device_pages: int, host_pages: int, in_flight: int = 1) -> Hits:
    """Of the latest `in_flight` requests the whole paths are locked, unless there is no room for that many."""
    device = PagePool(device_pages)
    host = PagePool(host_pages, "host") if host_pages else None
    clock = Clock()
    tree = PagedRadixTree(device, host, Policy(policy), clock)
    on_device, on_host = np.zeros(len(requests), np.int64), np.zeros(len(requests), np.int64)
    held: deque[Lock] = deque()
    began = time.perf_counter()
    for i, request in enumerate(requests):
        clock.now = request.seconds
        match = tree.match(request.digests)
        on_device[i], on_host[i] = match.device_pages, match.pages - match.device_pages
        if match.pages > device_pages:  # of a path on the host, no more is restored than fits
            match = tree.match(request.digests[: device_pages * DIGEST_BYTES])
        lock = tree.lock(match)
        fits = min(len(request), device_pages)
        while held and device.free + tree.evictable < fits - match.device_pages:
            tree.unlock(held.popleft())
        make_room(tree, fits - match.device_pages)
        if match.pages > match.device_pages:
            copy = tree.restore(lock, device.allocate(match.pages - match.device_pages))
            assert copy is not None
            tree.finish_copy(copy.id)
        if fits > match.pages:
            pages = device.allocate(fits - match.pages)
            tree.relock(lock, tree.insert(request.digests[: fits * DIGEST_BYTES], pages, match.pages).match)
        held.append(lock)
        while len(held) >= in_flight:
            tree.unlock(held.popleft())
    for lock in held:
        tree.unlock(lock)
    seconds = time.perf_counter() - began
    tree.check()
    return Hits(on_device, on_host, seconds)


def make_room(tree: PagedRadixTree, pages: int) -> None:
    """`pages` of the device are free afterwards. Spills end at once, and the host makes room for them first."""
    while (lacking := pages - tree.device.free) > 0:
        if tree.host is not None and tree.host.free < lacking:
            tree.evict_host(lacking - tree.host.free)
        evicted = tree.evict(lacking)
        if evicted.spill is not None:
            tree.finish_copy(evicted.spill.id)
        assert evicted.freed or evicted.spill is not None, "nothing can be evicted"


# -- the bounds --------------------------------------------------------------------------------------------------------


def without_end(requests: Sequence[Request]) -> Hits:
    seen: set[int] = set()
    hits = np.zeros(len(requests), np.int64)
    for i, request in enumerate(requests):
        pages = request.pages.tolist()
        hits[i] = next((k for k, page in enumerate(pages) if page not in seen), len(pages))
        seen.update(pages)
    return Hits(hits, np.zeros_like(hits))


def next_uses(requests: Sequence[Request]) -> list[NDArray[np.int64]]:
    """Of each page of each request, the next request that names it."""
    following = np.full(1 + max(int(request.pages.max(initial=0)) for request in requests), NEVER, np.int64)
    uses = []
    for i in range(len(requests) - 1, -1, -1):
        uses.append(following[requests[i].pages])
        following[requests[i].pages] = i
    return uses[::-1]


def optimum(requests: Sequence[Request], uses: Sequence[NDArray[np.int64]], capacity: int) -> Hits:
    """Belady's rule for a prefix tree: of the leaves, the one goes whose next use is the farthest."""
    parent: dict[int, int] = {}  # of what is held
    children: dict[int, int] = {-1: 0}
    next_use: dict[int, int] = {}
    leaves: list[tuple[int, int]] = []  # (-next use, page); some are no longer true
    hits = np.zeros(len(requests), np.int64)
    for i, request in enumerate(requests):
        pages = request.pages.tolist()
        held = next((k for k, page in enumerate(pages) if page not in parent), len(pages))
        hits[i] = held
        del pages[capacity:]
        for page in pages[:held]:
            next_use[page] = -1  # locked
        while len(parent) + len(pages) - held > capacity:
            use, page = heapq.heappop(leaves)
            if page not in parent or children[page] or next_use[page] != -use:
                continue
            above = parent.pop(page)
            children[above] -= 1
            if above != -1 and not children[above] and next_use[above] != -1:
                heapq.heappush(leaves, (-next_use[above], above))
        above = pages[held - 1] if held else -1
        for page in pages[held:]:
            parent[page] = above
            children[above] += 1
            children[page] = 0
            above = page
        next_use.update(zip(pages, uses[i].tolist(), strict=False))
        if pages and not children[pages[-1]]:
            heapq.heappush(leaves, (-next_use[pages[-1]], pages[-1]))
    return Hits(hits, np.zeros_like(hits))


# -- the tables --------------------------------------------------------------------------------------------------------


class Scores:
    def __init__(self, requests: Sequence[Request], page_size: int, score_from: int, in_flight: int = 1) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._scale = BLOCK_TOKENS // page_size
        self._score_from = score_from
        self._lengths = np.array([len(request) for request in requests])
        self._uses = next_uses(requests)
        self._no_end = without_end(requests)

    def of_size(self, blocks: int, host_blocks: int, policies: Sequence[str]) -> Iterator[Row]:
        pages, host_pages = blocks * self._scale, host_blocks * self._scale
        yield self._row(blocks, NO_END, self._no_end, None)
        device = optimum(self._requests, self._uses, pages)
        both = optimum(self._requests, self._uses, pages + host_pages) if host_pages else device
        best = self._row(blocks, OPTIMUM, Hits(device.device, both.device - device.device), None)
        yield best
        lru = replay(self._requests, "lru", pages, host_pages, self._in_flight)
        gap = (self._row(blocks, "lru", lru, None).scored, best.scored)
        for policy in policies:
            hits = lru if policy == "lru" else replay(self._requests, policy, pages, host_pages, self._in_flight)
            yield self._row(blocks, policy, hits, gap)

    def _row(self, blocks: int, policy: str, hits: Hits, gap: tuple[float, float] | None) -> Row:
        device, host = self._rate(hits.device), self._rate(hits.host)
        scored = self._rate(hits.device + hits.host, self._score_from)
        closed = None if gap is None or gap[1] - gap[0] < 0.05 else 100 * (scored - gap[0]) / (gap[1] - gap[0])
        speed = len(self._requests) / hits.seconds if hits.seconds else None
        return Row(blocks, policy, device + host, device, host, scored, closed, speed)

    def _rate(self, pages: NDArray[np.int64], begin: int = 0) -> float:
        return 100 * float(pages[begin:].sum()) / max(1, int(self._lengths[begin:].sum()))


def table(rows: Iterable[Row], score_from: int) -> Iterator[str]:
    last = None
    title = f"{'blocks':>7} {'policy':>9} {'hit %':>7} {'device':>7} {'host':>7}   "
    yield title + f"{f'from {score_from:,}':>11} {'of the gap':>11} {'req/s':>8}"
    for row in rows:
        size = "" if row.blocks == last else f"{row.blocks:,}"
        last = row.blocks
        gap = "" if row.gap is None else f"{row.gap:.0f} %"
        speed = "" if row.requests_per_second is None else f"{row.requests_per_second:,.0f}"
        bound = row.policy in (NO_END, OPTIMUM)
        tiers = f"{row.device:>7.2f} " + (" " * 7 if bound else f"{row.host:>7.2f}")
        yield f"{size:>7} {row.policy:>9} {row.total:>7.2f} {tiers}   {row.scored:>11.2f} {gap:>11} {speed:>8}".rstrip()


def plot(rows: Sequence[Row], host_blocks: int, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tiers = ["device", "total"] if host_blocks else ["device"]
    figure, axes = pyplot.subplots(1, len(tiers), figsize=(6.5 * len(tiers), 4.5), sharey=True, squeeze=False)
    for axis, tier in zip(axes[0], tiers, strict=True):
        for i, name in enumerate(dict.fromkeys(row.policy for row in rows)):
            of = [row for row in rows if row.policy == name]
            style = {NO_END: "k:", OPTIMUM: "k--"}.get(name, "o-")
            width = 1.2 if name in (NO_END, OPTIMUM) else max(1.0, 5.5 - i * 0.75)  # what lies upon another shows
            at, rates = [row.blocks for row in of], [getattr(row, tier) for row in of]
            axis.plot(at, rates, style, label=name, linewidth=width, markersize=width + 2)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row.blocks for row in rows}), [f"{n:,}" for n in sorted({row.blocks for row in rows})])
        axis.set_xlabel(f"device pool, blocks of {BLOCK_TOKENS} tokens")
        axis.set_title("device tier" if tier == "device" else f"with {host_blocks:,} blocks on the host")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("hit rate, % of pages requested")
    axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


# -- the command -------------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=flags.whole, default=None, help="only the first so many")
    parser.add_argument("--page-size", type=flags.whole, default=BLOCK_TOKENS, help="tokens; a divisor of 512")
    parser.add_argument("--blocks", type=_sizes, default=_sizes("2000,4000,8000,16000,32000"), help="device pools")
    parser.add_argument("--in-flight", type=flags.whole, default=1, help="requests whose paths are locked at a time")
    parser.add_argument("--host-blocks", type=flags.whole, default=0, help="host pool; none if not given")
    parser.add_argument("--policies", type=_policies, default=policy_names(), help=", ".join(policy_names()))
    parser.add_argument(
        "--score-from",
        "--fit",
        type=flags.whole,
        default=None,
        metavar="N",
        help="6000; half of a trace that is shorter",
    )
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="needs matplotlib")
    given = parser.parse_args(words)
    if BLOCK_TOKENS % given.page_size:
        parser.error(f"--page-size: {given.page_size}, must divide {BLOCK_TOKENS}")
    if given.plot is not None and not _has_matplotlib():
        parser.error("--plot: needs the package matplotlib (pip install matplotlib)")
    try:
        requests = read_trace(given.trace, given.page_size, given.requests)
    except TraceError as error:
        print(f"trace_replay: {error}", file=sys.stderr)
        return 2
    score_from = given.score_from or (SCORE_FROM if len(requests) > SCORE_FROM else len(requests) // 2)
    if score_from >= len(requests):
        parser.error(f"--score-from: {score_from}, the trace has {len(requests)} requests")
    pages = sum(len(request) for request in requests)
    different = 1 + max(int(request.pages.max(initial=0)) for request in requests)
    title = f"{len(requests):,} requests, {pages:,} pages of {given.page_size} tokens, {different:,} different"
    print(f"{title}; host tier: {given.host_blocks:,} blocks\n" if given.host_blocks else f"{title}; no host tier\n")
    scores = Scores(requests, given.page_size, score_from, given.in_flight)
    rows: list[Row] = []

    def all_rows() -> Iterator[Row]:
        for blocks in given.blocks:
            for row in scores.of_size(blocks, given.host_blocks, given.policies):
                rows.append(row)
                yield row

    for line in table(all_rows(), score_from):
        print(line, flush=True)
    if given.plot is not None:
        plot(rows, given.host_blocks, title, given.plot)
    return 0


def _sizes(words: str) -> list[int]:
    return [flags.whole(word) for word in words.split(",")]


def _policies(words: str) -> list[str]:
    names = words.split(",")
    for name in names:
        if name not in policy_names():
            raise argparse.ArgumentTypeError(f"{name!r}, must be of: {', '.join(policy_names())}")
    return names


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
