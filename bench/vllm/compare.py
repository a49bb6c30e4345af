"""vLLM's own NixlConnector (CPU buffers) against kvferry: the same two servers, the same chats, one run.

python bench/vllm/compare.py [--output bench/results/vllm-compare.txt]

Two cases: a decode engine whose KV cache holds every conversation, and one that evicts them between turns. Bytes are
those that went from the prefill to the decode host. Aim: bytes and median TTFT equal or better in the first case, in
the first turn and from the second on; in the second at least 2 x fewer bytes and a lower TTFT from the second turn on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from chat import Ask, Load, Reply, chats, new_client, one_server, prefill_first, texts
from cluster import Cluster, Spec, machine
from rich.console import Console
from rich.table import Table

EQUAL = 0.999  # kvferry counts what stands before a part, too


@dataclass(frozen=True, slots=True)
class Done:
    """What kvferry's decode daemons did; zeros without one."""

    delta_pages: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    queried_tokens: int = 0

    def less(self, before: Done) -> Done:
        mine, theirs = astuple(self), astuple(before)
        return Done(*(have - had for have, had in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Result:
    system: str
    wire_bytes: float
    seconds: float
    replies: list[list[Reply]]
    done: Done = Done()

    def ttfts(self, turns: slice) -> list[float]:
        """In ms."""
        return [reply.ttft_s * 1000 for replies in self.replies for reply in replies[turns]]

    @property
    def requests(self) -> int:
        return sum(len(replies) for replies in self.replies)


async def drive(cluster: Cluster, system: str, load: Load, said: list[list[str]] | None) -> Result:
    async with new_client() as client:
        ask: Ask
        if system == "kvferry":
            ask = one_server(client, cluster.front)
        else:
            ask = prefill_first(client, cluster.engines["prefill"].url, cluster.engines["decode"].url)
        warm_up = Load(1, 2, 20, 4, first=load.conversations)  # sessions are opened, kernels warmed
        await chats(ask, warm_up)
        before, did = wire_bytes(cluster, system), done_by(cluster, system)
        began = time.monotonic()
        replies = await chats(ask, load, said)
        seconds = time.monotonic() - began
    done = done_by(cluster, system).less(did)
    return Result(system, wire_bytes(cluster, system) - before, seconds, replies, done)


def wire_bytes(cluster: Cluster, system: str) -> float:
    if system == "kvferry":
        return float(cluster.stats("decode").transfers.wire_bytes)
    return cluster.metric("decode", "vllm:nixl_bytes_transferred_sum")


def done_by(cluster: Cluster, system: str) -> Done:
    if system != "kvferry":
        return Done()
    every = [cluster.stats(name) for name in cluster.daemons_of("decode")]
    return Done(
        sum(each.transfers.delta_pages for each in every),
        sum(each.requests.hit_tokens for each in every),
        sum(each.requests.host_hit_tokens for each in every),
        sum(each.requests.queried_tokens for each in every),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--user-words", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=2, help="requests at a time")
    parser.add_argument("--small-blocks", type=int, default=56, help="decode blocks of the evicting case")
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.user_words, args.max_tokens, args.concurrency)
    console = Console(record=True, width=118)
    console.print(f"{machine()}; {' '.join(sys.argv)}; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")
    missed = []
    said: list[list[str]] | None = None
    for case, blocks in (("large", 0), ("evicting", args.small_blocks)):
        results = []
        for system in ("nixl", "kvferry"):
            with Cluster(Spec(decode_blocks=blocks)) as cluster:
                getattr(cluster, system)()
                result = asyncio.run(drive(cluster, system, load, said))
            said = said or texts(result.replies)
            results.append(result)
        console.print(table(case, blocks, results))
        missed += judge(case, *results)
    for line in missed or ["every aim was met"]:
        console.print(line)
    if args.output:
        with open(args.output, "w") as file:
            file.write(console.export_text())
    return 1 if missed else 0


def table(case: str, blocks: int, results: list[Result]) -> Table:
    shown = Table(title=f"{case} decode cache ({blocks or 'all'} blocks), TTFT in ms, p50 / p90")
    for name in ("system", "MB moved", "requests/s", *(f"turn {i + 1}" for i in range(len(results[0].replies[0])))):
        shown.add_column(name, justify="left" if name == "system" else "right")
    for result in results:
        turns = [result.ttfts(slice(i, i + 1)) for i in range(len(result.replies[0]))]
        shown.add_row(
            result.system,
            f"{result.wire_bytes / 1e6:.1f}",
            f"{result.requests / result.seconds:.3f}",
            *(f"{percentile(times, 50):.0f} / {percentile(times, 90):.0f}" for times in turns),
        )
    return shown


def unused(case: str, done: Done) -> list[str]:
    """What a decode daemon was there for and did not do: then its case shows nothing."""
    needed = {"pages received": done.delta_pages, "tokens held": done.hit_tokens}
    if case == "evicting":
        needed["tokens from the host tier"] = done.host_hit_tokens
    return [f"missed, {case}: {what} are {value}" for what, value in needed.items() if not value]


def judge(case: str, nixl: Result, kvferry: Result) -> list[str]:
    missed = [f"missed, {case}: {each.system} moved nothing" for each in (nixl, kvferry) if not each.wire_bytes]
    factor = EQUAL if case == "large" else 2.0
    if kvferry.wire_bytes * factor > nixl.wire_bytes:
        missed.append(
            f"missed, {case}: {kvferry.wire_bytes / 1e6:.3f} MB, not {factor:g} x below {nixl.wire_bytes / 1e6:.3f}"
        )
    judged = {"from turn 2 on": slice(1, None)}
    if case == "large":
        judged["of turn 1"] = slice(0, 1)
    for when, turns in judged.items():
        ours, theirs = percentile(kvferry.ttfts(turns), 50), percentile(nixl.ttfts(turns), 50)
        if ours > theirs or (ours == theirs and case != "large"):
            missed.append(f"missed, {case}: median TTFT {when} {ours:.1f} ms, not below {theirs:.1f}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
