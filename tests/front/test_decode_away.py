"""A decode server that is away before it has said anything costs no request while there is another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest

from kvferry.front import engines, service
from kvferry.front.service import DECODE_SERVERS
from tests.support.front_stack import Fault, Server, Stack

ASKED = 6  # times, behind which the next one is 3.2 s later
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
GONE = Fault(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")


def post(stack: Stack, **fields: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=30)


def stats(stack: Stack) -> Any:
    return httpx.get(f"{stack.url}/kvferry/stats").json()


def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"after {seconds} s not: {what}"
        time.sleep(0.01)


def legs(stack: Stack, role: str, result: str) -> float:
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("kvferry_front_legs_total{")]
    wanted = (f'role="{role}"', f'result="{result}"')
    return sum(float(line.split()[-1]) for line in found if all(label in line for label in wanted))


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_server_that_drains_costs_no_request(stream: bool) -> None:
    with Stack(prefill=2, decode=2) as stack:
        expected = post(stack).json()["choices"][0]["message"]["content"]
        gone = next(server for server in stack.decode if not server.decodes)  # fewer were given to it
        other = next(server for server in stack.decode if server.decodes)
        other.decodes.clear()
        gone.fault = GONE
        for _ in range(4):  # some of them are given to the one that drains, where the other holds no more of them
            other.served.clear()
            reply = post(stack, stream=stream)
            assert reply.status_code == 200
            if stream:
                assert reply.text.count("[DONE]") == 1 and reply.text.count('"finish_reason":"') == 1
            else:
                assert reply.json()["choices"][0]["message"]["content"] == expected
        assert len(other.decodes) == 4
        moved = len(gone.decodes)  # asked once for each, not three times
        told = stats(stack)
        assert moved >= 1 and (told["moved"], told["tried_again"], told["decode_alone"]) == (moved, 0, 0)
        assert (told["finished"], told["failed"], told["running"]) == (5, 0, 0)
        ids = [call.name.request_id for server in (gone, other) for call in server.decodes]
        assert len(set(ids)) == 4 + moved  # another name each time
        assert [server["outstanding"] for server in (*told["prefill"], *told["decode"])] == [0, 0, 0, 0]
        assert (legs(stack, "decode", "ok"), legs(stack, "decode", "failed")) == (5, moved)
        assert legs(stack, "prefill", "ok") + legs(stack, "prefill", "cancelled") == 5 + moved


def test_a_decode_server_that_nobody_can_reach_costs_no_request() -> None:
    with Stack(decode=2) as stack:
        expected = post(stack).json()["choices"]
        stack.call(stack.decode[0].stop())
        for _ in range(6):
            reply = post(stack)
            assert (reply.status_code, reply.json()["choices"]) == (200, expected)
        told = stats(stack)
        assert (told["finished"], told["failed"], told["tried_again"], told["decode_alone"]) == (7, 0, 0, 0)


def test_the_prefill_half_of_the_first_server_is_let_go() -> None:
    with Stack(decode=2) as stack:
        prefill = stack.prefill[0]
        late = asyncio.Event()

        async def once_handed_over() -> None:
            await late.wait()
            await asyncio.sleep(0.1)  # the reply of the prefill server is there

        async def handed_over() -> None:
            late.set()

        prefill.at_handover = handed_over
        for server in stack.decode:
            server.before, server.fault = once_handed_over, GONE
        assert post(stack).status_code == 503
        assert stats(stack)["moved"] == 1
        assert len(prefill.prefills) == 2
        until(lambda: prefill.aborts[:1] == [prefill.prefills[0].name], "it is told")


def test_a_request_that_ends_each_server_does_not_end_all() -> None:
    with Stack(decode=DECODE_SERVERS + 1) as stack:
        for server in stack.decode:
            server.fault = GONE
        reply = post(stack)
        assert reply.status_code == 503 and "shutting down" in reply.json()["error"]["message"]
        asked = [server for server in stack.decode if server.decodes]
        assert len(asked) == DECODE_SERVERS
        told = stats(stack)
        assert (told["moved"], told["failed"], told["decode_alone"]) == (DECODE_SERVERS - 1, 1, 1)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"),
        Fault(grpc.StatusCode.INTERNAL, "broken"),
        Fault(grpc.StatusCode.INVALID_ARGUMENT, "no"),
    ],
)
def test_what_another_decode_server_might_not_change_is_the_requests(fault: Fault) -> None:
    with Stack(decode=2) as stack:
        for server in stack.decode:
            server.fault = fault
        assert post(stack).status_code in (400, 429, 500)
        assert sum(len(server.decodes) for server in stack.decode) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_began_is_not_begun_elsewhere(stream: bool) -> None:
    with Stack(decode=2) as stack:
        ends: list[asyncio.Task[None]] = []

        def ending(server: Server) -> Callable[[], Awaitable[None]]:
            async def end() -> None:
                ends.append(asyncio.create_task(server.stop()))
                await asyncio.sleep(60)

            return end

        for server in stack.decode:
            server.between = ending(server)
        reply = post(stack, stream=stream)
        assert reply.status_code == (200 if stream else 503)
        assert "service_unavailable_error" in reply.text and '"finish_reason":"' not in reply.text
        assert sum(len(server.decodes) for server in stack.decode) == 1
        told = stats(stack)
        assert (told["moved"], told["failed"]) == (0, 1)


class Unseen:
    """Servers that describe themselves too late, until they are let: a front end asks them at ever longer times."""

    def __init__(self, stack: Stack, servers: list[Server]) -> None:
        self._servers = servers
        asked = dict.fromkeys((server.address for server in servers), 0)

        def late(server: Server) -> Callable[[], Awaitable[None]]:
            async def wait() -> None:
                asked[server.address] += 1
                await asyncio.sleep(5)

            return wait

        for server in servers:
            server.at_describe = late(server)
        until(lambda: min(asked.values()) >= ASKED, "asked again only after seconds", 30.0)
        found = {each["address"]: each["state"] for each in stats(stack)["decode"]}
        assert {found[address] for address in asked} == {"down"}

    def let(self) -> None:
        for server in self._servers:
            server.at_describe = None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "DESCRIBE_DEADLINE_S", 0.1)
    monkeypatch.setattr(engines, "RECHECK_S", 0.05)
    monkeypatch.setattr(engines, "MAX_BACKOFF_S", 60.0)
    monkeypatch.setattr(service, "COMES_SECONDS", 2.0)  # the next question would be later


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("drains", [True, False])
def test_a_server_that_has_just_come_is_found_when_the_only_other_one_goes(drains: bool) -> None:
    with Stack(decode=2) as stack:
        comes, goes = stack.decode
        others = Unseen(stack, [comes] if drains else [comes, goes])
        if drains:
            goes.fault = GONE
        others.let()
        assert [post(stack).status_code for _ in range(3)] == [200] * 3
        assert stats(stack)["failed"] == 0


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_come_is_awaited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "COMES_SECONDS", 0.5)
    with Stack(decode=2) as stack:
        Unseen(stack, [stack.decode[0]])
        stack.decode[1].fault = GONE
        began = time.monotonic()
        reply = post(stack)
        assert reply.status_code == 503 and "shutting down" in reply.json()["error"]["message"]
        assert time.monotonic() - began >= 0.5
