"""The front end of bench/vllm before a pair with NixlConnector: prefill is asked first, and decode with its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.front.test_processes import started
from tests.front.test_vllm_front import CHAT, FakeVllm, serving

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "vllm" / "programs" / "nixl_front.py"


def test_decode_is_asked_with_what_prefill_answered() -> None:
    async def run() -> None:
        prefill, decode = FakeVllm("prefill"), FakeVllm("decode")
        asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
        async with (
            serving(prefill.app()) as prefill_url,
            serving(decode.app()) as decode_url,
            started(str(SCRIPT), decode_url, prefill_url, "0") as (_, url),
            httpx.AsyncClient(timeout=10) as client,
        ):
            reply = await client.post(url + CHAT, json=asked)
        assert (reply.status_code, reply.json()["from"]) == (200, "decode")
        (half,), (whole,) = prefill.asked, decode.asked
        sent = half["kv_transfer_params"]
        assert isinstance(sent, dict) and sent["do_remote_decode"] is True
        assert (half["max_tokens"], whole["max_tokens"]) == (1, 7)
        assert whole["kv_transfer_params"] == {"do_remote_prefill": True}

    asyncio.run(run())
