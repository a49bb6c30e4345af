"""`make demo-vllm`: a prefill and a decode vLLM, a daemon beside each, and the front end; a multi-turn chat to look at,
then a load whose conversations do not all fit into the decode engine's KV cache.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from chat import Load, Reply, body, chats, new_client, one_server, streamed
from cluster import Cluster, ClusterError, Spec
from compare import percentile
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.daemon.config.values import size
from kvferry.proto import cache_pb2

QUESTIONS = (
    "Here is what a ferry is: a boat that carries people and goods over water, again and again on the same way. "
    "In one sentence: what is a ferry?",
    "Where would I meet one?",
    "And what might it carry?",
)


async def show_chat(cluster: Cluster, console: Console, max_tokens: int) -> None:
    messages: list[dict[str, str]] = []
    async with new_client() as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            asked = {**body(messages, max_tokens, logprobs=False), "ignore_eos": False}
            moved = cluster.stats("decode").transfers.delta_pages
            reply = await streamed(client, cluster.front, asked, time.monotonic())
            pages = cluster.stats("decode").transfers.delta_pages - moved
            messages.append({"role": "assistant", "content": reply.text})
            console.print(f"  [bold]user[/]       {escape(question)}")
            console.print(f"  [bold]assistant[/]  {escape(' '.join(reply.text.split())[:120])}")
            told = f"prompt {reply.prompt_tokens} tokens, {pages} pages of {cluster.spec.page_size} tokens moved"
            console.print(f"             [dim]{told}, first token after {reply.ttft_s * 1000:.0f} ms[/]")


def table(
    replies: list[list[Reply]], load: Load, page_size: int, before: cache_pb2.SideStats, after: cache_pb2.SideStats
) -> Table:
    prompts = [reply.prompt_tokens for turns in replies for reply in turns]
    pages = sum(-(-tokens // page_size) for tokens in prompts)
    moved = after.transfers.delta_pages - before.transfers.delta_pages
    hits = after.requests.hit_tokens - before.requests.hit_tokens
    host = after.requests.host_hit_tokens - before.requests.host_hit_tokens
    page_bytes = after.pool.page_bytes
    shown = Table(title=f"{load.conversations} conversations x {load.turns} turns", title_justify="left")
    for column in ("", "all sent again", "kvferry", "saved"):
        shown.add_column(column, justify="left" if not column else "right")
    shown.add_row("pages moved", str(pages), str(moved), f"{1 - moved / pages:.0%}")
    shown.add_row(
        "bytes moved over NIXL", size(pages * page_bytes), size(moved * page_bytes), f"{1 - moved / pages:.0%}"
    )
    shown.add_row("held by the decode daemon", "", f"{hits / sum(prompts):.1%}", "")
    shown.add_row("  of it from the host tier", "", f"{host / max(1, hits):.1%}", "")
    for turn in range(load.turns):
        times = [turns[turn].ttft_s * 1000 for turns in replies]
        shown.add_row(f"TTFT of turn {turn + 1}, p50", "", f"{percentile(times, 50):.0f} ms", "")
    between = [(r.seconds - r.ttft_s) * 1000 / max(1, load.max_tokens - 1) for turns in replies for r in turns]
    shown.add_row("inter-token latency", "", f"{statistics.mean(between):.1f} ms", "")
    return shown


def held(stats: cache_pb2.SideStats) -> str:
    pool = stats.pool
    if pool.locks or pool.leased or pool.arriving or pool.orphaned or pool.promised:
        return f"pages or locks are still held: {pool}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--user-words", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--decode-blocks", type=int, default=40, help="of the decode engine's KV cache (0: 1 GiB)")
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.user_words, args.max_tokens, concurrency=2)
    console = Console()
    try:
        with Cluster(Spec(decode_blocks=args.decode_blocks)) as cluster:
            console.print("starting two vLLM servers, two daemons and the front end (a minute or more) ...")
            began = time.monotonic()
            cluster.kvferry()
            console.print(f"  up in {time.monotonic() - began:.0f} s at {cluster.front}; a chat:")
            asyncio.run(show_chat(cluster, console, args.max_tokens))
            before = cluster.stats("decode")
            console.print(f"  {args.conversations} conversations of {args.turns} turns ...")
            replies = asyncio.run(run_load(cluster, load))
            after = cluster.stats("decode")
            console.print(table(replies, load, cluster.spec.page_size, before, after))
            time.sleep(2.0)
            problem = held(cluster.stats("decode")) or held(cluster.stats("prefill"))
    except (ClusterError, RuntimeError, OSError) as error:
        print(f"demo-vllm: {error}", file=sys.stderr)
        return 1
    if problem:
        console.print(f"[red]{problem}")
    return 1 if problem else 0


async def run_load(cluster: Cluster, load: Load) -> list[list[Reply]]:
    async with new_client() as client:
        return await chats(one_server(client, cluster.front), load)


if __name__ == "__main__":
    sys.exit(main())
