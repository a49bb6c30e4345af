"""Where prefill is away, decode computes prompts itself; where it is back, it is used again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import openai
import pytest

from kvferry.front import engines as front_engines
from tests.support.front_stack import MODEL, Fault, Stack

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"after {seconds} s not: {what}"
        time.sleep(0.02)


def post(stack: Stack) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, timeout=30)


def stats(stack: Stack) -> Any:
    return httpx.get(f"{stack.url}/kvferry/stats").json()


def test_a_prefill_server_that_goes_costs_no_request_and_is_used_again() -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]
        expected = post(stack).json()["choices"]
        address = prefill.address
        stack.call(prefill.stop())
        for _ in range(3):
            response = post(stack)
            assert response.status_code == 200
            assert response.json()["choices"] == expected
            assert decode.decodes[-1].prefill == ""
        until(lambda: stats(stack)["prefill"][0]["state"] == "down", "it is known to be down")
        assert post(stack).status_code == 200
        assert httpx.get(f"{stack.url}/health").status_code == 200
        told = stats(stack)
        assert (told["decode_alone"], told["failed"], told["finished"]) == (4, 0, 5)
        stack.call(prefill.start(address))
        until(lambda: stats(stack)["prefill"][0]["state"] == "up", "it is up again")
        calls = len(prefill.prefills)
        assert post(stack).status_code == 200
        assert len(prefill.prefills) == calls + 1 and decode.decodes[-1].prefill == prefill.name
        assert stats(stack)["decode_alone"] == 4


def test_every_prefill_server_is_away() -> None:
    """One more is tried first; then decode alone, as attempt 3 of the same request."""
    with Stack(prefill=3) as stack:
        decodes = stack.decode[0].decodes

        async def decode_is_there() -> None:  # a refusal that comes sooner cancels a call before it is made
            tries = sum(len(server.prefills) for server in stack.prefill)
            while len(decodes) < tries:
                await asyncio.sleep(0.01)

        for server in stack.prefill:
            server.fault = Fault(grpc.StatusCode.UNAVAILABLE, f"{server.name} is gone")
            server.before = decode_is_there
        assert post(stack).status_code == 200
        assert [(request.name.attempt, bool(request.prefill)) for request in decodes] == [
            (1, True),
            (2, True),
            (3, False),
        ]
        assert len({request.name.request_id for request in decodes}) == 1
        told = stats(stack)
        assert (told["tried_again"], told["decode_alone"]) == (1, 1)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
def test_decode_is_not_loaded_with_what_prefill_refuses(code: grpc.StatusCode) -> None:
    with Stack() as stack:
        stack.prefill[0].fault = Fault(code, "the queue is full")
        assert post(stack).status_code in (429, 500)
        assert stats(stack)["decode_alone"] == 0


def test_a_front_end_starts_without_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_engines, "ALONE_AFTER_S", 0.5)

    def configure(stack: Stack) -> None:
        stack.prefill[0].absent = True

    with Stack(configure=configure) as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=4)
        assert reply.choices[0].message.content
        assert stats(stack)["decode_alone"] == 1


def test_decode_servers_that_are_away_are_an_error() -> None:
    with Stack() as stack:
        stack.call(stack.decode[0].stop())
        until(lambda: post(stack).status_code == 503, "no decode server answers")
        until(lambda: httpx.get(f"{stack.url}/health").status_code == 503, "the front end is not well")
