"""A prefill that fails before the prompt is ready is tried once elsewhere; what was handed over is let go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from tests.support.front_stack import Fault, Stack

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"after {seconds} s not: {what}"
        time.sleep(0.01)


def post(stack: Stack, **fields: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=30)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL]
)
def test_a_prefill_that_fails_is_tried_once_elsewhere(code: grpc.StatusCode) -> None:
    with Stack(prefill=2, decode=2) as stack:
        expected = post(stack).json()["choices"]
        for server in stack.prefill:
            server.prefills.clear()
        for server in stack.decode:
            server.decodes.clear()
        failing, other = stack.prefill[1], stack.prefill[0]  # the one that was given fewer
        failing.fault = Fault(code, "no more")

        async def decode_is_there() -> None:  # a refusal that comes sooner cancels a call before it is made
            while not any(server.decodes for server in stack.decode):
                await asyncio.sleep(0.01)

        failing.before = decode_is_there
        response = post(stack)
        assert response.status_code == 200
        assert response.json()["choices"] == expected
        assert [request.name.attempt for request in failing.prefills] == [1]
        assert [request.name.attempt for request in other.prefills] == [2]
        (decode,) = [server for server in stack.decode if server.decodes]
        first, second = decode.decodes
        assert (first.name.attempt, second.name.attempt) == (1, 2)
        assert (first.prefill, second.prefill) == (failing.name, other.name)
        assert first.name.request_id == second.name.request_id == other.prefills[0].name.request_id
        assert 0 < second.deadline_ms <= first.deadline_ms
        assert httpx.get(f"{stack.url}/kvferry/stats").json()["tried_again"] == 1


def test_a_session_that_broke_is_tried_elsewhere() -> None:
    """The decode server says UNAVAILABLE: its daemon lost the prefill daemon."""
    with Stack(prefill=2) as stack:
        decode = stack.decode[0]
        calls = 0

        async def first_fails() -> None:
            nonlocal calls
            calls += 1
            decode.fault = Fault(grpc.StatusCode.UNAVAILABLE, "the session ended") if calls == 1 else None

        decode.before = first_fails
        assert post(stack).status_code == 200
        assert [request.name.attempt for request in decode.decodes] == [1, 2]
        assert decode.decodes[0].prefill != decode.decodes[1].prefill


def test_the_second_failure_is_the_requests() -> None:
    with Stack(prefill=3) as stack:
        for server in stack.prefill:
            server.fault = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{server.name} is full")
        response = post(stack)
        assert response.status_code == 429
        tried = [server for server in stack.prefill if server.prefills]
        assert len(tried) == 2
        (last,) = [server for server in tried if server.prefills[0].name.attempt == 2]
        assert f"{last.name} is full" in response.json()["error"]["message"]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_what_another_server_would_not_change_is_not_tried_again(code: grpc.StatusCode) -> None:
    with Stack(prefill=2) as stack:
        for server in stack.prefill:
            server.fault = Fault(code, "no")
        assert post(stack).status_code in (400, 504)
        assert sum(len(server.prefills) for server in stack.prefill) == 1


def test_a_prompt_that_was_handed_over_is_let_go_when_the_other_half_fails() -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]

        async def late() -> None:
            while not stack.meeting.done or not all(met.done() for met in stack.meeting.done.values()):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the reply of the prefill server is there

        decode.before = late
        decode.fault = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        assert post(stack).status_code == 429
        until(lambda: len(prefill.aborts) == 1, "the prefill server is told")
        assert prefill.aborts[0] == prefill.prefills[0].name


def test_a_client_that_leaves_lets_go_what_was_handed_over() -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]

        async def hang() -> None:
            await asyncio.sleep(60)

        decode.before = hang
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, timeout=0.5)
        until(lambda: decode.cancelled == 1, "the decode half is cancelled", 1.0)
        until(lambda: len(prefill.aborts) == 1, "the prefill server is told", 1.0)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION])
def test_what_the_decode_server_says_of_its_prefill_daemon_is_tried_elsewhere(code: grpc.StatusCode) -> None:
    """Its word comes first: the prefill server of the first try says nothing."""
    with Stack(prefill=2) as stack:
        decode = stack.decode[0]

        async def first_fails() -> None:
            first = decode.decodes[-1].name.attempt == 1
            decode.fault = Fault(code, "of the prefill daemon", of_prefill=True) if first else None

        async def hang_at_first() -> None:
            if sum(len(server.prefills) for server in stack.prefill) == 1:
                await asyncio.sleep(60)

        decode.before = first_fails
        for server in stack.prefill:
            server.before = hang_at_first
        assert post(stack).status_code == 200
        assert [request.name.attempt for request in decode.decodes] == [1, 2]
        assert decode.decodes[0].prefill != decode.decodes[1].prefill
        until(lambda: sum(server.cancelled for server in stack.prefill) == 1, "the first prefill half is cancelled")


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"), 429),
        (Fault(grpc.StatusCode.FAILED_PRECONDITION, "the name is in use"), 500),
        (Fault(grpc.StatusCode.OUT_OF_RANGE, "past the prompt", of_prefill=True), 400),
    ],
)
def test_what_another_prefill_daemon_would_not_change_is_not_tried_again(fault: Fault, status: int) -> None:
    with Stack(prefill=2) as stack:
        decode = stack.decode[0]
        decode.fault = fault
        assert post(stack).status_code == status
        assert len(decode.decodes) == 1


def test_a_prefill_that_fails_once_the_prompt_is_ready_fails_nothing() -> None:
    """Between Started and the first token; there is no other server to turn to."""
    with Stack() as stack:
        expected = post(stack).json()["choices"]
        prefill, decode = stack.prefill[0], stack.decode[0]
        decode.decodes.clear()
        started, failed = asyncio.Event(), asyncio.Event()

        async def fails() -> None:
            await started.wait()
            await asyncio.sleep(0.2)  # the front end has read it
            failed.set()
            raise RuntimeError("it is gone")

        async def goes_on() -> None:
            started.set()
            await failed.wait()
            await asyncio.sleep(0.2)  # the front end has heard of it

        prefill.at_handover, decode.at_start = fails, goes_on
        response = post(stack)
        assert response.status_code == 200
        assert response.json()["choices"] == expected
        assert len(decode.decodes) == 1


def test_a_client_that_leaves_once_the_prompt_is_ready_ends_both_halves() -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]

        async def hang() -> None:
            await asyncio.sleep(60)

        prefill.at_handover, decode.at_start = hang, hang
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, timeout=0.5)
        until(lambda: decode.cancelled == 1, "the decode half is cancelled", 1.0)
        until(lambda: prefill.cancelled == 1, "the prefill half is cancelled", 1.0)
