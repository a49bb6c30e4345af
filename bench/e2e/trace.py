"""A whole trace in Mooncake's format through the system, and its hit rate beside that of bench/trace_replay.py.

    python bench/e2e/trace.py --trace FILE [--blocks 8000] [--in-flight 32] [--requests N]

Every prompt in arrival order, at most 32 in flight, one output token each, so that the tree holds prompts alone, as in
the replay. Pages of 256 tokens with 1 KiB of payload; synthetic workers check every byte of every page. The replay has
the same pool, page size and policy, counts full pages only (a partial page is never matched), and locks the whole paths
of the latest 32 requests.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rig import RigError, Setup, run

from kvferry.loadgen.trace import read_trace
from kvferry.radix import DIGEST_BYTES

sys.path.insert(0, str(Path(__file__).parent.parent))
import trace_replay

PAGE = 256
PAGE_BYTES = 1024
LIMIT_POINTS = 1.0


def replayed(path: Path, limit: int | None, pages: int, in_flight: int) -> float:
    """Matched share of the prompt tokens, in percent."""
    tokens = [request.input_tokens for request in read_trace(path, limit)]
    requests = []
    for request, length in zip(trace_replay.read_trace(path, PAGE, limit), tokens, strict=True):
        full = length // PAGE
        requests.append(replace(request, digests=request.digests[: full * DIGEST_BYTES], pages=request.pages[:full]))
    hits = trace_replay.replay(requests, "lru", pages, 0, in_flight)
    return 100 * PAGE * int(np.sum(hits.device)) / sum(tokens)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=None, help="only the first so many")
    parser.add_argument("--blocks", type=int, default=8000, help="of 512 tokens, in the decode pool")
    parser.add_argument("--in-flight", type=int, default=32)
    given = parser.parse_args(words)
    pages = given.blocks * 512 // PAGE
    expected = replayed(given.trace, given.requests, pages, given.in_flight)
    setup = Setup(
        decode_pages=pages,
        prefill_pages=4 * pages,
        engine=None,
        page_size=PAGE,
        page_bytes=PAGE_BYTES,
        chunk_tokens=1 << 17,
    )
    load = ["--workload", "trace", "--file", str(given.trace), "--max-tokens", "1"]
    load += ["--concurrency", str(given.in_flight)]
    if given.requests is not None:
        load += ["--conversations", str(given.requests)]
    began = time.perf_counter()
    try:
        measured = run(setup, load)
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    report, decode = measured.report, measured.decode
    hit = 100 * measured.hit_share
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {given.trace.name}")
    rows = (
        ("requests, answered in arrival order", f"{report.requests:,}"),
        ("errors", f"{report.failed}"),
        ("wrong pages (bytes compared at arrival, at reuse and at the end), second tries", "none, or it had failed"),
        ("in flight at most", f"{given.in_flight}"),
        ("decode pool, pages of 256 tokens, 1 KiB of payload", f"{pages:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("pages moved / matched", f"{decode.transfers.delta_pages:,} / {decode.transfers.saved_pages:,}"),
        ("pages evicted", f"{decode.pool.evicted:,}"),
        ("requests/s", f"{report.requests_per_s:.1f}"),
        ("seconds, with start and end", f"{time.perf_counter() - began:.0f}"),
        ("hit rate of the daemon, %", f"{hit:.2f}"),
        ("hit rate of the replay, same pool and locks, %", f"{expected:.2f}"),
        (f"difference, points (limit {LIMIT_POINTS:g})", f"{abs(hit - expected):.2f}"),
    )
    for what, value in rows:
        print(f"{what:<70} {value:>16}")
    return 0 if abs(hit - expected) <= LIMIT_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
