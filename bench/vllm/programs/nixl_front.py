"""kvferry's front end before servers with vLLM's NixlConnector, so that both connectors are measured behind the same
one: prefill is asked first, and decode with what it answered.

python bench/vllm/programs/nixl_front.py DECODE_URL[,DECODE_URL...] PREFILL_URL... PORT
"""

from __future__ import annotations

import contextlib
import sys

from kvferry.front import vllm_server
from kvferry.front.upstream.legs import Legs, Server
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_body import Body, Refusal
from kvferry.front.vllm_places import Place
from kvferry.front.vllm_reply import DecodeAnswer
from kvferry.pauses import short_collections

FROM_NOWHERE: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlFront(VllmFront):
    """One leg behind the other."""

    async def _both(
        self, stack: contextlib.AsyncExitStack, prefill: Server, decode: Server, legs: Legs, body: Body
    ) -> DecodeAnswer:
        half = body.first_token(FROM_NOWHERE)
        prefill.running += 1
        try:
            reply = await self.client.post(prefill.url + legs.path, content=half, headers=legs.headers(prefill))
        finally:
            prefill.running -= 1
        if reply.status_code != 200:
            raise Refusal(502, f"prefill answered {reply.status_code}: {reply.text[:200]}")
        params = reply.json()["kv_transfer_params"]
        return await self.calls.begun(stack, decode, legs, body.whole(params))


def main() -> int:
    decodes, *prefills, port = sys.argv[1:]
    vllm_server.VllmFront = NixlFront
    config = VllmConfig(
        tuple(Place(url, f"prefill-{number}") for number, url in enumerate(prefills)),
        tuple(map(Place, decodes.split(","))),
        first_token_s=240.0,
        next_token_s=240.0,
    )
    serving = vllm_server.VllmServing("127.0.0.1", int(port), wait_s=60.0, grace_s=1.0)
    return vllm_server.run(config, serving, under=short_collections)


if __name__ == "__main__":
    raise SystemExit(main())
