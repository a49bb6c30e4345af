"""Greedy output of two vLLM servers joined by kvferry against one vLLM without any connector, token for token.

python bench/vllm/greedy.py [--ranks 2:1] [--alone-ranks 2] [--output bench/results/vllm-greedy.txt]

A difference is allowed only where the reference's two best logits are within VLLM_TIE; it is printed and counted. What
the one vLLM, asked again, says as well is counted apart. --nixl: before each case the same chats go through a pair with
vLLM's NixlConnector.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import httpx
from chat import Load, Reply, Token, compared, run_chats, texts
from cluster import Cluster, ClusterError, Spec, machine, ranks_of

from kvferry.transfer.protocol.slots import HEADER_BYTES


class Reference(NamedTuple):
    """What one vLLM answers, and what when it is asked the same again, its prompts in its cache: how they differ is the
    arithmetic's own doing."""

    replies: list[list[Reply]]
    again: list[list[Reply]]


def kept(path: str | None, ranks: int) -> Reference | None:
    """What was kept there; None: nothing was. ValueError where it is of a server of another number of ranks."""
    if path is None or not Path(path).exists():
        return None
    told = json.loads(Path(path).read_text())
    there = told["ranks"] if isinstance(told, dict) else "an unknown number of"
    if there != ranks:
        raise ValueError(
            f"--reference {path} has the replies of one vLLM of {there} ranks, --alone-ranks is {ranks}: give that "
            "number, or another file"
        )
    return Reference(
        *(
            [
                [Reply(**{**reply, "tokens": [Token(**each) for each in reply["tokens"]]}) for reply in one]
                for one in told[name]
            ]
            for name in Reference._fields
        )
    )


def keep(path: str, reference: Reference, ranks: int) -> None:
    """Keeps it as `kept` reads it."""
    passes = {
        name: [[asdict(reply) for reply in replies] for replies in each] for name, each in reference._asdict().items()
    }
    Path(path).write_text(json.dumps({"ranks": ranks, **passes}))


def refer(url: str, load: Load) -> Reference:
    replies = asyncio.run(run_chats(url, load))
    return Reference(replies, asyncio.run(run_chats(url, load, texts(replies))))


def without(reference: Reference, said: list[list[str]], load: Load, spec: Spec, case: str) -> list[str]:
    """What a pair with NixlConnector answers in the same case, or why it does not."""
    try:
        with Cluster(spec) as cluster:
            cluster.nixl()
            cluster.start_nixl_front()
            got = asyncio.run(run_chats(cluster.front, load, said))
            drafted = accepted(cluster, "decode")
    except (ClusterError, RuntimeError, httpx.HTTPError) as error:
        return [f"{case}, NixlConnector: {type(error).__name__} {error}"]
    comparison = compared(reference.replies, got, reference.again)
    return [f"{case}, NixlConnector: {comparison}{drafted}", *comparison.told]


def accepted(cluster: Cluster, engine: str) -> str:
    """How many of a draft model's tokens the engine has taken; empty where it has no draft model."""
    taken, proposed = (
        cluster.metric(engine, f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("accepted", "draft")
    )
    return f"; accepted {taken:.0f} of {proposed:.0f} draft tokens" if proposed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--user-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--small-blocks", type=int, default=34, help="decode blocks of the evicting case")
    parser.add_argument("--ranks", default="1:1", metavar="P:D", help="tensor-parallel, of prefill and of decode")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel ranks, of prefill and of decode")
    parser.add_argument("--alone-ranks", type=int, default=1, metavar="N", help="of the one vLLM without kvferry")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="whose it is")
    parser.add_argument("--pool-bytes", default=Spec().pool_bytes, help="of each daemon")
    parser.add_argument("--host-bytes", default=Spec().host_bytes, help="of the host tier of decode's")
    parser.add_argument(
        "--cases", nargs="+", choices=("large", "small"), default=("large", "small"), help="decode caches"
    )
    parser.add_argument("--nixl", action="store_true", help="ask a pair with NixlConnector as well")
    parser.add_argument("--reference", metavar="FILE", help="take the single server's replies from there, or keep them")
    parser.add_argument("--output", metavar="FILE")
    args = parser.parse_args()
    ranks = ranks_of(args.ranks)
    load = Load(args.conversations, args.turns, args.user_words, args.max_tokens)
    lines = [f"{machine()}; {' '.join(sys.argv)}; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"]
    print(lines[0], flush=True)
    try:
        reference = kept(args.reference, args.alone_ranks)
    except ValueError as error:
        parser.error(str(error))
    if reference is None:
        with Cluster(Spec(ranks={"alone": args.alone_ranks})) as cluster:
            reference = refer(cluster.alone().url, load)
            lines.append(f"one vLLM, asked twice: {compared(*reference)}{accepted(cluster, 'alone')}")
            print(lines[-1], flush=True)
        if args.reference:
            keep(args.reference, reference, args.alone_ranks)
    said = texts(reference.replies)
    wrong = 0
    for case in args.cases:
        blocks = args.small_blocks if case == "small" else 0
        spec = Spec(decode_blocks=blocks, page_size=args.page_size, pool=args.pool, ranks=ranks, dp=args.dp)
        spec = replace(spec, pool_bytes=args.pool_bytes, host_bytes=args.host_bytes)
        if args.nixl:
            lines += (told := without(reference, said, load, spec, case))
            print(*told, sep="\n", flush=True)
        with Cluster(replace(spec, extra={"deadline_seconds": 120.0})) as cluster:
            cluster.kvferry()
            got = asyncio.run(run_chats(cluster.front, load, said))
            comparison = compared(reference.replies, got, reference.again)
            stats = [cluster.stats(cluster.daemon_of("decode", rank)) for rank in range(args.dp)]
            hits = cluster.metric("decode", "vllm:prefix_cache_hits_total")
            drafted = accepted(cluster, "decode")
        prompt = sum(reply.prompt_tokens for replies in got for reply in replies)
        pages = [each.transfers.delta_pages for each in stats]
        sent = sum(each.transfers.wire_bytes - HEADER_BYTES * each.transfers.parts for each in stats)
        token_bytes = sent / max(1, sum(pages)) / args.page_size
        received = f"received {'+'.join(map(str, pages))} pages, {token_bytes:,.0f} bytes a token"
        lines.append(
            f"{case} decode cache ({blocks or 'all'} blocks): {comparison}; prompts {prompt} tokens, the engine had "
            f"{hits:.0f} itself, {received}, the daemon held {sum(each.requests.hit_tokens for each in stats)} tokens"
            f"{drafted}"
        )
        print(lines[-1], *comparison.told, sep="\n", flush=True)
        lines += comparison.told
        wrong += len(comparison.wrong)
    text = "\n".join(lines)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
