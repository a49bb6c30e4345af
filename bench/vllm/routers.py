"""kvferry behind routers of others, as they are: greedy tokens equal one vLLM's, and decode receives and keeps pages.
Each asks prefill first, and hands on what that answers.

vllm-router       vLLM's own router, with --kv-connector nixl
production-stack  its router, with --routing-logic disaggregated_prefill_orchestrated
dynamo            Dynamo's front end and router before its own vLLM workers, in whose registry of connectors kvferry's
                  plugin has entered itself

python bench/vllm/routers.py [--vllm-router PROGRAM] [--production-stack PROGRAM] [--dynamo SITE_PACKAGES]
    [--output FILE]

PROGRAM: vllm-router, as the packages of either of the two install it, in an environment of its own. SITE_PACKAGES:
where ai-dynamo, ai-dynamo-runtime and redis are, for the vLLM that they are made for (VLLM_PYTHON; 1.6: 0.31).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
from chat import Load, Reply, compared, run_chats, texts
from cluster import MODEL_NAME, PROGRAMS, PYTHON, Cluster, Log, Spec, replace

from kvferry.daemon.cli.stack import lasting_port

# Decode's blocks hold a part of the chats: the rest is to come from its daemon.
WAITS = {"deadline_seconds": 120.0}
SPEC = Spec(decode_blocks=34, extra=WAITS, extra_of={"decode": {"prefill": "prefill"}})
UP_SECONDS = 60.0
Replies = list[list[Reply]]
Start = Callable[[Cluster], str]  # gives the router's URL


def vllm_router(program: str, cluster: Cluster) -> str:
    prefill, decode = cluster.engines["prefill"].url, cluster.engines["decode"].url
    words = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]
    words += ["--policy", "round_robin", "--prometheus-port", str(lasting_port()), "--host", "127.0.0.1", "--port"]
    return cluster.router([program, *words])


def production_stack(program: str, cluster: Cluster) -> str:
    names = ("prefill", "decode")
    words = ["--routing-logic", "disaggregated_prefill_orchestrated", "--service-discovery", "static"]
    words += ["--static-backends", ",".join(cluster.engines[name].url for name in names)]
    words += ["--static-models", f"{MODEL_NAME},{MODEL_NAME}", "--static-model-labels", ",".join(names)]
    words += ["--prefill-model-labels", "prefill", "--decode-model-labels", "decode", "--host", "127.0.0.1", "--port"]
    return cluster.router([program, *words])


def dynamo(site: str, cluster: Cluster) -> str:
    words = [str(PYTHON), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port"]
    return cluster.router(words, {"PYTHONPATH": site})


def name_dynamo(site: str) -> Spec:
    """Engines that are Dynamo's workers. They and its front end find each other in a folder below their own."""
    os.environ |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "dynamo", "DYN_TCP_RPC_HOST": "127.0.0.1"}
    os.environ |= {"DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYNAMO_SITE": site}
    return replace(SPEC, program=(str(PROGRAMS / "dynamo_worker.py"),))


async def asked_until_pages_come(url: str, cluster: Cluster) -> None:
    """A router may be up before it has found its servers, and have decode alone for a while."""
    deadline = time.monotonic() + UP_SECONDS
    for number in itertools.count(1000):
        with contextlib.suppress(RuntimeError, httpx.TransportError):
            await run_chats(url, Load(1, 1, 60, 1, first=number))
        if cluster.stats("decode").transfers.delta_pages:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: no page has come to decode in {UP_SECONDS:g} s")
        await asyncio.sleep(0.5)


def run(start: Start, spec: Spec, load: Load, reference: Replies) -> tuple[str, bool]:
    """What is told, and whether it did well: every token, pages that came from prefill, and some that were held."""
    with Cluster(spec) as cluster:
        cluster.kvferry()
        url = start(cluster)
        asyncio.run(asked_until_pages_come(url, cluster))
        before = cluster.stats("decode")
        comparison = compared(reference, asyncio.run(run_chats(url, load, texts(reference))))
        stats = cluster.stats("decode")
        loads = cluster.metric("decode", "vllm:kvferry_loads_total")
        failed = sum(cluster.metric(name, "vllm:kvferry_failed_total") for name in ("prefill", "decode"))
    received = stats.transfers.delta_pages - before.transfers.delta_pages
    held = stats.requests.hit_tokens - before.requests.hit_tokens
    told = f"{comparison}; received {received} pages, the daemon held {held} tokens; {failed:.0f} failed"
    well = not (comparison.wrong or failed) and received > 0 and held > 0 and loads > 0
    return "\n".join([told, *comparison.told]), well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", type=os.path.abspath)
    parser.add_argument("--production-stack", type=os.path.abspath)
    parser.add_argument("--dynamo", type=os.path.abspath)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    starts: dict[str, tuple[Start, Spec]] = {}
    if args.vllm_router:
        starts["vllm-router"] = partial(vllm_router, args.vllm_router), SPEC
    if args.production_stack:
        starts["production-stack"] = partial(production_stack, args.production_stack), SPEC
    if args.dynamo:
        starts["dynamo"] = partial(dynamo, args.dynamo), name_dynamo(args.dynamo)
    if not starts:
        parser.error("--vllm-router, --production-stack or --dynamo is required")
    load = Load(conversations=3, turns=3, user_words=60, max_tokens=16)
    log = Log(args.output, "bench/vllm/routers.py")
    with Cluster(Spec()) as cluster:
        reference = asyncio.run(run_chats(cluster.alone().url, load))
    all_well = True
    for name, (start, spec) in starts.items():
        told, well = run(start, spec, load, reference)
        log.add(f"{name}: {told}")
        all_well = all_well and well
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
