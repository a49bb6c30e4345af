"""A decode server of vLLM that cannot be reached costs no request while there is another one."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.front.vllm_places import Place
from tests.front.test_vllm_front import CHAT, ask, world


def leg(metrics: str, role: str, result: str) -> float:
    """Calls of a role's servers that ended so."""
    lines = [line for line in metrics.splitlines() if line.startswith("kvferry_front_legs_total{")]
    return sum(float(line.split()[-1]) for line in lines if f'role="{role}"' in line and f'result="{result}"' in line)


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_server_that_is_gone_costs_no_request(stream: bool) -> None:
    async def run() -> None:
        async with world() as w:
            well = w.front.decode[0]
            gone = [type(well)(Place(f"http://127.0.0.1:{port}")) for port in (7, 9)]
            w.front.decode[:] = [*gone, well]
            number = 0
            while w.front.counts.moved < 2:  # each belongs to some server
                number += 1
                gone[0].down_until = gone[1].down_until = 0.0
                words = [{"role": "user", "content": str(number)}]
                assert (await w.client.post(CHAT, json=ask(messages=words, stream=stream))).status_code == 200
            counts, moved = w.front.counts, w.front.counts.moved
            assert len(w.decode.asked) == number and any(server.down_until for server in gone)
            assert (counts.requests, counts.alone, counts.again) == (number, 0, 0)
            told = w.front.metrics.text().decode()
            assert leg(told, "decode", "failed") == moved and leg(told, "decode", "ok") == number
            assert leg(told, "prefill", "ok") + leg(told, "prefill", "cancelled") == number + moved
            w.front.decode[:] = gone
            reply = await w.client.post(CHAT, json=ask(stream=stream))
            assert reply.status_code == 503 and "cannot be reached" in reply.json()["error"]["message"]
            w.front.decode[:] = [well]

    asyncio.run(run())


def test_a_request_that_no_prefill_server_takes_part_in_is_counted_once() -> None:
    async def run() -> None:
        async with world() as w:
            well = w.front.decode[0]
            gone = [type(well)(Place(f"http://127.0.0.1:{port}")) for port in (7, 9)]
            w.front.prefill.clear()
            w.front.decode[:] = [*gone, well]
            while not w.front.counts.moved:
                gone[0].down_until = gone[1].down_until = 0.0
                words = [{"role": "user", "content": str(w.front.counts.requests)}]
                assert (await w.client.post(CHAT, json=ask(messages=words))).status_code == 200
            assert w.front.counts.alone == w.front.counts.requests == len(w.decode.asked)
            w.front.decode[:] = [well]

    asyncio.run(run())
