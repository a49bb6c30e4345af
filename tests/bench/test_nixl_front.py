"""The front end of bench/vllm before a pair with NixlConnector: prefill is asked first, and decode with its answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.routing import Route

from tests.front.test_vllm_front import CHAT, FakeVllm, serving

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "vllm" / "nixl_front.py"
READY = "ready: front "


def test_decode_is_asked_with_what_prefill_answered() -> None:
    async def run() -> None:
        prefill, decode = FakeVllm("prefill"), FakeVllm("decode")
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for fake in (prefill, decode):
                routes = [Route(CHAT, fake.__call__, methods=["POST"]), Route("/health", fake.health)]
                urls.append(await stack.enter_async_context(serving(Starlette(routes=routes))))
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), "0", *urls, stdout=pipe)
            try:
                assert process.stdout is not None
                line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
                assert line.startswith(READY), line
                asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
                async with httpx.AsyncClient(timeout=10) as client:
                    reply = await client.post(f"http://{line.removeprefix(READY).strip()}{CHAT}", json=asked)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()
        assert (reply.status_code, reply.json()["from"]) == (200, "decode")
        (half,), (whole,) = prefill.asked, decode.asked
        sent = half["kv_transfer_params"]
        assert isinstance(sent, dict) and sent["do_remote_decode"] is True
        assert (half["max_tokens"], whole["max_tokens"]) == (1, 7)
        assert whole["kv_transfer_params"] == {"do_remote_prefill": True}

    asyncio.run(run())
