"""KV events, decoded by a router that is not ours: vLLM's own sends prompts where their pages are."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.daemon.cli.stack import Stack, lasting_port
from kvferry.daemon.cli.system import Replica, start_replicas
from tests.front.test_vllm_front import serving
from tests.support.engines import Engines, settled
from tests.support.other_routers import vllm_router
from tests.support.stacks import SmallSystem
from tests.system.operating.test_kv_events import PAGE, published

EVENTS = ["--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0"]  # it subscribes to no topic


@asynccontextmanager
async def worker(name: str) -> AsyncIterator[str]:
    """Answers with its name, as vLLM would."""

    async def completions(request: Request) -> Response:
        choice = {"index": 0, "text": name, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        told = {"id": name, "object": "text_completion", "created": 1, "model": "m"}
        return JSONResponse({**told, "choices": [choice], "usage": usage})

    async def anything(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/{path:path}", anything)]
    async with serving(Starlette(routes=routes)) as url:
        yield url


async def told_by(client: httpx.AsyncClient, router: str, prompt: Sequence[int]) -> str:
    body = {"model": "m", "prompt": [*prompt, 1, 2, 3], "max_tokens": 1}
    reply = await client.post(router + "/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


async def up(client: httpx.AsyncClient, router: str) -> None:
    for _ in range(120):
        try:
            if (await client.get(router + "/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
    raise AssertionError("the router does not answer")


async def routed(program: Path, log: Path, prefill: Replica, decodes: Sequence[Replica]) -> None:
    rng, ports = random.Random(3), (lasting_port(), lasting_port())
    prompts = [[rng.randrange(32_000) for _ in range(200)] for _ in range(4)]
    words = ["--port", str(ports[0]), "--prometheus-port", str(ports[1]), "--policy", "kv_aware"]
    words += ["--kv-event-block-size", str(PAGE), "--kv-event-model", "m"]
    router = f"http://127.0.0.1:{ports[0]}"
    async with worker("a") as a, worker("b") as b, httpx.AsyncClient(timeout=20) as client:
        for url, decode in zip((a, b), decodes, strict=True):
            told = published(decode)
            words += ["--kv-event-source", f"{url}={told.endpoint}", "--kv-event-replay-source", f"{url}={told.replay}"]
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                program, *words, "--worker-urls", a, b, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            await up(client, router)
            for number, prompt in enumerate(prompts):
                await asyncio.to_thread(fill, prefill, decodes[number % 2], prompt)
            for _ in range(50):
                names = [await told_by(client, router, prompt) for prompt in prompts]
                if names == ["a", "b", "a", "b"]:
                    break
                await asyncio.sleep(0.2)
            again = [await told_by(client, router, prompt) for prompt in prompts * 5]
            assert again == ["a", "b", "a", "b"] * 5, f"{log} says what the router did"
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)


def fill(prefill: Replica, decode: Replica, prompt: list[int]) -> None:
    with Engines(prefill, decode) as engines:
        assert engines.turn(prompt, 4).error is None
    settled(decode)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_vllms_router_sends_prompts_where_their_pages_are(tmp_path: Path) -> None:
    program = vllm_router(tmp_path / "router")
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decodes=2, decode_flags=EVENTS))
        asyncio.run(routed(program, tmp_path / "router.log", prefills[0], decodes))
