"""Pairs of vLLM versions joined by kvferry, each of every prefill and every decode version, against one vLLM of
decode's version without a connector, token for token. Decode's cache is too small for all chats: what it evicts comes
back.

python bench/vllm/versions.py PYTHON... [--output bench/results/vllm-versions.txt]

PYTHON: an interpreter of an environment that bench/vllm/venv.sh made. A difference is allowed as bench/vllm/greedy.py
allows it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

from chat import Load, Reply, compared, run_chats, texts
from cluster import Cluster, Log, Spec

DECODE_BLOCKS = 34  # fewer than the chats take, and as few as one of the longest prompts


def version_of(python: Path) -> str:
    """Of the vLLM there: CalledProcessError where it has none."""
    asked = "import vllm; print(vllm.__version__)"
    return subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()


def run_pair(prefill: Path, decode: Path, load: Load, reference: list[list[Reply]]) -> tuple[str, bool]:
    """What is told of the pair, and whether it did well: every token, and pages that came from prefill."""
    spec = Spec(decode_blocks=DECODE_BLOCKS, extra={"deadline_seconds": 120.0}, python=prefill, decode_python=decode)
    with Cluster(spec) as cluster:
        cluster.kvferry()
        got = asyncio.run(run_chats(cluster.front, load, texts(reference)))
        stats = cluster.stats("decode")
        # 0.26 counts what a waiting request would find once for each step that it waits
        hits = cluster.metric("decode", "vllm:prefix_cache_hits_total")
        failed = sum(cluster.metric(name, "vllm:kvferry_failed_total") for name in ("prefill", "decode"))
    comparison = compared(reference, got)
    well = not (comparison.wrong or failed) and stats.transfers.delta_pages > 0 and stats.requests.hit_tokens > 0
    told = (
        f"{comparison}; "
        f"the engine had {hits:.0f} tokens itself, the daemon held {stats.requests.hit_tokens}, "
        f"received {stats.transfers.delta_pages} pages; {failed:.0f} failed"
    )
    return "\n".join([told, *comparison.told]), well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path, nargs="+")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--user-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.user_words, args.max_tokens)
    pythons = {version_of(python): python.absolute() for python in args.python}
    log = Log(args.output, "bench/vllm/versions.py")
    references: dict[str, list[list[Reply]]] = {}
    all_well = True
    for prefill, decode in itertools.product(pythons, repeat=2):
        if decode not in references:
            with Cluster(Spec(python=pythons[decode])) as cluster:
                references[decode] = asyncio.run(run_chats(cluster.alone().url, load))
        told, well = run_pair(pythons[prefill], pythons[decode], load, references[decode])
        log.add(f"prefill {prefill}, decode {decode}: {told}")
        all_well = all_well and well
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
