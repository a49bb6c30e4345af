"""vLLM answers requests all the time: prints the milliseconds of each quarter second's decode steps, until stdin ends.

The environment is that of bench/vllm/cluster.py, for one engine alone; each request's answer is as long as may be.
"""

from __future__ import annotations

import asyncio
import select
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vllm"))
from cluster import MODEL_NAME, Cluster, Spec

AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 16, 1024, 3000
LONGEST = PROMPT_TOKENS + ANSWER_TOKENS
TOLD_SECONDS = 0.25


async def answers(url: str) -> None:
    """Each of AT_ONCE at a time gets a token in a step."""
    tokens = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal tokens
        turn = 0
        while True:
            prompt = [1000 + (number * 131 + turn * 17 + place) % 5000 for place in range(PROMPT_TOKENS)]
            asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            async with client.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    tokens += line.startswith("data: {")
            turn += 1

    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        running = [asyncio.create_task(one(client, number)) for number in range(AT_ONCE)]
        while tokens < 10 * AT_ONCE:  # the first are slow
            await _check(running)
        began, before = time.perf_counter(), tokens
        while not select.select([sys.stdin], [], [], 0)[0]:
            await _check(running)
            now = time.perf_counter()
            if tokens > before:
                print(f"{1e3 * (now - began) * AT_ONCE / (tokens - before):.3f}", flush=True)
            began, before = now, tokens
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _check(running: list[asyncio.Task[None]]) -> None:
    """A quarter of a second later all of them run. Raises what ended one."""
    done, _ = await asyncio.wait(running, timeout=TOLD_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def main() -> None:
    flags = ("--dtype", "bfloat16", "--max-num-seqs", str(AT_ONCE), "--max-model-len", str(LONGEST))
    with Cluster(Spec(flags=(*flags, "--load-format", "dummy"))) as cluster:
        asyncio.run(answers(cluster.alone().url))


if __name__ == "__main__":
    main()
