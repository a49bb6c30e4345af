"""Seconds that a decode engine takes to start, its daemon with a host tier and without one, by turns, behind one more.

    VLLM_DEVICES=cuda:0 python bench/gpu/beside/starts.py [--host-bytes 56GiB] [--rounds 2]

The engine is started when its daemon is ready. Meanwhile the daemon is asked how much of its tier may be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vllm"))
from cluster import SCHEDULER, Cluster, Spec

FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "64", "--max-model-len", "16384", "--load-format", "dummy")
KV_BYTES = 8 << 30
NONE = "0"


def grown(cluster: Cluster, began: float) -> str:
    """When the first part of the tier was there, and all."""
    first = 0.0
    while (side := cluster.stats("decode")).host.pages < side.host.asked_pages or not side.host.pages:
        if side.tiers.host_stays:
            return f"; {side.tiers.host_stays}"
        first = first or (time.monotonic() - began) * (side.host.pages > 0)
        time.sleep(0.02)
    host = side.host
    whole = time.monotonic() - began
    return (
        f"; of {host.asked_pages * host.page_bytes / (1 << 30):.0f} GiB the first {first or whole:.1f}, all {whole:.1f}"
    )


def start(host_bytes: str) -> str:
    spec = Spec(
        flags=FLAGS, decode_flags=SCHEDULER, decode_bytes=KV_BYTES, page_size=64, pool="engine", host_bytes=host_bytes,
        extra={"revision": "bench"},
    )  # fmt: skip
    with Cluster(spec) as cluster, ThreadPoolExecutor(1) as watching:
        began = time.monotonic()
        cluster.start_daemons()
        ready = time.monotonic()
        tier = watching.submit(grown, cluster, ready) if host_bytes != NONE else None
        cluster.decode_alone()
        up = time.monotonic()
        told = (
            f"tier {host_bytes}: daemons ready {ready - began:.1f} s, the engine answers {up - ready:.1f} s behind them"
        )
        return told + (tier.result() if tier is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-bytes", default="56GiB")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    start(NONE)  # a machine's first is slow
    for number in range(args.rounds):
        for host_bytes in (NONE, args.host_bytes)[:: -1 if number % 2 else 1]:
            print(start(host_bytes), flush=True)


if __name__ == "__main__":
    main()
