"""kvferry behind routers of others, as they are: greedy tokens equal one vLLM's, and decode receives and keeps pages.

vllm-router  vLLM's own router, with --kv-connector nixl; it asks prefill first, and hands on what that answers
dynamo       Dynamo's worker: its own registry of connectors, in which kvferry's plugin has entered itself, says what
             the prefill half is given, and what of its answer the decode half is

python bench/vllm/routers.py [--vllm-router PROGRAM] [--dynamo SITE_PACKAGES] [--output FILE]

PROGRAM: of the package vllm-router, in an environment of its own. SITE_PACKAGES: where ai-dynamo is, its dependencies
are not needed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from chat import Load, Reply, chats, compared, new_client, prefill_first, run_chats, texts
from cluster import Cluster, Log, Spec, free_port

UP_SECONDS = 60.0
Replies = list[list[Reply]]
Drive = Callable[[Cluster, Load, Replies], Coroutine[Any, Any, Replies]]


def through_vllm_router(program: Path) -> Drive:
    async def drive(cluster: Cluster, load: Load, reference: Replies) -> Replies:
        port, prefill, decode = free_port(), cluster.engines["prefill"].url, cluster.engines["decode"].url
        words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]
        router = await asyncio.create_subprocess_exec(program, *words, "--policy", "round_robin")
        try:
            url = f"http://127.0.0.1:{port}"
            await answers(url)
            return await run_chats(url, load, texts(reference))
        finally:
            router.terminate()
            await asyncio.wait_for(router.wait(), UP_SECONDS)

    return drive


async def answers(url: str) -> None:
    async with new_client() as client:
        for _ in range(round(UP_SECONDS / 0.5)):
            try:
                if (await client.get(url + "/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
    raise TimeoutError(f"{url} does not answer")


def through_dynamo(site: Path) -> Drive:
    """With a protocol of its registry for each request, as its prefill handler has one."""
    sys.path.append(str(site))
    import dynamo.vllm.kv_connector_protocols as known

    from kvferry.connectors.vllm import dynamo, plugin

    dynamo.register(plugin.CONNECTOR)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=plugin.CONNECTOR))

    def params() -> dict[str, object]:
        made: dict[str, object] = known.make_kv_connector_protocol(config).prefill_request_kv_transfer_params()
        return made

    async def drive(cluster: Cluster, load: Load, reference: Replies) -> Replies:
        async with new_client() as client:
            ask = prefill_first(client, cluster.engines["prefill"].url, cluster.engines["decode"].url, params)
            return await chats(ask, load, texts(reference))

    return drive


def run(drive: Drive, load: Load, reference: Replies) -> tuple[str, bool]:
    """What is told, and whether it did well: every token, pages that came from prefill, and some that were held."""
    waits = {"deadline_seconds": 120.0}
    spec = Spec(decode_blocks=34, extra=waits, extra_of={"decode": {"prefill": "prefill"}})
    with Cluster(spec) as cluster:
        cluster.kvferry()
        comparison = compared(reference, asyncio.run(drive(cluster, load, reference)))
        stats = cluster.stats("decode")
        failed = sum(cluster.metric(name, "vllm:kvferry_failed_total") for name in ("prefill", "decode"))
    received, held = stats.transfers.delta_pages, stats.requests.hit_tokens
    told = f"{comparison}; received {received} pages, the daemon held {held} tokens; {failed:.0f} failed"
    return "\n".join([told, *comparison.told]), not (comparison.wrong or failed) and received > 0 and held > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", type=Path)
    parser.add_argument("--dynamo", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    drives: dict[str, Drive] = {}
    if args.vllm_router:
        drives["vllm-router"] = through_vllm_router(args.vllm_router)
    if args.dynamo:
        drives["dynamo"] = through_dynamo(args.dynamo)
    if not drives:
        parser.error("--vllm-router or --dynamo is required")
    load = Load(conversations=3, turns=3, user_words=60, max_tokens=16)
    log = Log(args.output, "bench/vllm/routers.py")
    with Cluster(Spec()) as cluster:
        reference = asyncio.run(run_chats(cluster.alone().url, load))
    all_well = True
    for name, drive in drives.items():
        told, well = run(drive, load, reference)
        log.add(f"{name}: {told}")
        all_well = all_well and well
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
