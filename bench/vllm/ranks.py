"""Engines of several tensor-parallel ranks joined by kvferry against one vLLM of one rank, token for token.

python bench/vllm/ranks.py [--pairs 1:2 2:1 2:2] [--aborts 100] [--restarts 10] [--output bench/results/vllm-ranks.txt]

A pair: ranks of prefill and of decode. Each with a large decode cache, in which clients leave and daemons die besides,
and with one that evicts. VLLM_MODEL must have heads for so many ranks: without it, `random_model.py` makes one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import chaos
from chat import Comparison, Load, compared, run_chats, texts
from cluster import Cluster, Log, Spec
from random_model import make

from kvferry.workers.smollm import cache_folder

EVICTS = 40  # blocks
CHAOS_TOKENS = 16
PATIENT: dict[str, object] = {"deadline_seconds": 60.0}


def tell(log: Log, pair: str, case: str, cluster: Cluster, comparison: Comparison) -> int:
    stats = cluster.stats("decode")
    log.add(
        f"prefill:decode {pair}, {case}: {comparison}; received {stats.transfers.delta_pages} pages, the daemon held "
        f"{stats.requests.hit_tokens} tokens",
        *comparison.told,
    )
    nothing = stats.transfers.delta_pages == 0
    if nothing:
        log.add("  MISSED: no page was received")
    return len(comparison.wrong) + nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["1:2", "2:1", "2:2"], metavar="P:D")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_MODEL", str(make(cache_folder() / "random-4-heads")))
    log = Log(Path(args.output) if args.output else None)
    load = Load(args.conversations, args.turns, user_words=60, max_tokens=24)
    asked = chaos.prompts(4, 3)
    with Cluster(Spec()) as one:
        url = one.alone().url
        reference = asyncio.run(run_chats(url, load))
        wanted = chaos.Wanted(asyncio.run(chaos.references(url, asked, CHAOS_TOKENS)))
    wrong = 0
    for pair in args.pairs:
        prefill, decode = map(int, pair.split(":"))
        spec = {"ranks": {"prefill": prefill, "decode": decode}, "extra": PATIENT}
        for case, blocks in (("large", 0), ("evicting", EVICTS)):
            with Cluster(Spec(decode_blocks=blocks, **spec)) as cluster:  # type: ignore[arg-type]
                cluster.kvferry()
                got = asyncio.run(run_chats(cluster.front, load, texts(reference)))
                wrong += tell(log, pair, case, cluster, compared(reference, got))
                if not blocks and args.aborts + args.restarts:
                    lines, failed = chaos.run_on(cluster, asked, wanted, args.aborts, args.restarts, 4, CHAOS_TOKENS)
                    log.add(*lines)
                    wrong += failed
    log.add("0 wrong" if not wrong else f"{wrong} WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
