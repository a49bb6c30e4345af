"""Failures as clients see them, of servers that fail, are late or not there; and as servers see clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import openai
import pytest

from kvferry.front import engines as front_engines
from tests.support.front_stack import MODEL, Fault, Server, Stack

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> float:
    """How long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"after {seconds} s not: {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def post(stack: Stack, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/{path}", json={**CHAT, **fields}, timeout=30)


def idle(stack: Stack) -> bool:
    stats = httpx.get(f"{stack.url}/kvferry/stats").json()
    servers = stats["prefill"] + stats["decode"]
    return stats["running"] == 0 and all(server["outstanding"] == 0 for server in servers)


async def hang() -> None:
    await asyncio.sleep(60)


def behind(other: Server) -> Callable[[], Awaitable[None]]:
    """What a server waits for: that the other half has come to `other`, where it can be seen to be cancelled."""
    calls = len(other.prefills) + len(other.decodes)

    async def wait() -> None:
        while len(other.prefills) + len(other.decodes) == calls:
            await asyncio.sleep(0.001)

    return wait


CODES = [
    (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    (grpc.StatusCode.OUT_OF_RANGE, 400, "invalid_request_error"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    (grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"),
    (grpc.StatusCode.ABORTED, 503, "service_unavailable_error"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    (grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error"),
    (grpc.StatusCode.INTERNAL, 500, "server_error"),
]


def test_errors_of_servers_before_the_first_token() -> None:
    with Stack() as stack:
        for code, status, kind in CODES:
            for side, other in ((stack.prefill[0], stack.decode[0]), (stack.decode[0], stack.prefill[0])):
                if side is stack.prefill[0] and status == 503:
                    continue  # decode computes the prompt: tests/front/test_prefill_away.py
                side.fault, other.before = Fault(code, "pool of 8 pages"), hang
                for stream in (False, True):
                    cancelled, side.before = other.cancelled, behind(other)
                    response = post(stack, stream=stream)
                    error = response.json()["error"]
                    assert response.status_code == status
                    assert error["type"] == kind
                    assert "pool of 8 pages" in error["message"]
                    assert side.address in error["message"]
                    until(lambda: other.cancelled > cancelled, "the other half is cancelled")  # noqa: B023
                side.fault, side.before, other.before = None, None, None
                until(lambda: post(stack).status_code == 200, "the server is used again")
        until(lambda: idle(stack), "nothing is left running")


def test_error_types_of_the_openai_client() -> None:
    with Stack() as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        stack.decode[0].fault = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "waiting queue is full")
        with pytest.raises(openai.RateLimitError, match="waiting queue is full"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])


def test_an_error_behind_the_first_token_is_an_event_of_the_stream() -> None:
    with Stack() as stack:
        decode = stack.decode[0]

        def fail(prompt: Any) -> list[int]:
            return [97, 98, 1 << 40]  # not a uint32: the server's own failure after two tokens

        decode.reply = fail
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        assert [next(stream).choices[0].text for _ in "ab"] == ["a", "b"]
        with pytest.raises(openai.APIError, match=decode.address):
            next(stream)
        assert httpx.post(f"{stack.url}/v1/completions", json={"prompt": "x"}).status_code == 500


@pytest.mark.parametrize("says_started", [True, False])
def test_a_prefill_error_behind_the_first_token_changes_nothing(says_started: bool) -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]
        decode.says_started = says_started

        async def slow() -> None:
            await asyncio.sleep(0.1)

        async def meet() -> None:
            await asyncio.sleep(0.1)  # the decode half waits by now
            for future in stack.meeting.done.values():
                future.set_result(None)
            await asyncio.sleep(0.1)  # the first token is out by now

        prefill.before, decode.between = meet, slow
        prefill.fault = Fault(grpc.StatusCode.INTERNAL, "too late")
        assert post(stack).status_code == 200


def test_deadline_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.front.legs.ANSWER_SLACK_S", 0.1)

    def configure(stack: Stack) -> None:
        stack.service = {"first_token_s": 0.3}
        stack.decode[0].before = hang

    with Stack(configure=configure) as stack:
        response = post(stack)
        assert response.status_code == 504
        assert "the first token did not come in time" in response.json()["error"]["message"]
        until(lambda: stack.decode[0].cancelled == 1, "the decode half is cancelled", 1.0)


def test_deadline_of_the_next_token() -> None:
    def configure(stack: Stack) -> None:
        stack.service = {"next_token_s": 0.3}
        stack.decode[0].between = hang

    with Stack(configure=configure) as stack:
        response = post(stack)
        assert response.status_code == 504
        assert "the next token did not come in time" in response.json()["error"]["message"]


def test_a_request_that_is_paused_has_the_first_tokens_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.front.legs.ANSWER_SLACK_S", 0.1)

    def configure(stack: Stack) -> None:
        stack.service = {"next_token_s": 0.2, "first_token_s": 1.5}
        stack.decode[0].paused_s = 0.6

    with Stack(configure=configure) as stack:
        response = post(stack)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 8
        assert httpx.get(f"{stack.url}/kvferry/stats").json()["paused"] == 1
        stack.decode[0].paused_s = 10
        response = post(stack)
        assert response.status_code == 504
        assert "the next token did not come in time" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", ["before", "between"])
def test_a_client_that_leaves_ends_both_halves(stream: bool, waiting: str) -> None:
    with Stack() as stack:
        prefill, decode = stack.prefill[0], stack.decode[0]
        setattr(decode, waiting, hang)
        if waiting == "before":
            prefill.before = hang
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, "stream": stream}, timeout=0.5)
        until(lambda: decode.cancelled == 1, "the decode half is cancelled", 1.0)
        if waiting == "before":
            until(lambda: prefill.cancelled == 1, "the prefill half is cancelled", 1.0)
        until(lambda: idle(stack), "nothing is left running")
        assert httpx.get(f"{stack.url}/kvferry/stats").json()["cancelled"] == 1


def test_a_stop_string_ends_the_decode_half() -> None:
    with Stack() as stack:
        stack.decode[0].reply = lambda prompt: [*b"one, two, three, four"]
        response = post(stack, max_tokens=100, stop=[", t"])
        assert response.json()["choices"][0]["message"]["content"] == "one"
        until(lambda: idle(stack), "nothing is left running")


def test_too_many_requests() -> None:
    def configure(stack: Stack) -> None:
        stack.service = {"max_requests": 2}
        stack.decode[0].before = hang

    with Stack(configure=configure) as stack:
        clients = [threading.Thread(target=leave, args=(stack,)) for _ in range(2)]
        for client in clients:
            client.start()
        until(lambda: stack.decode[0].running == 2, "two requests run")
        response = post(stack)
        assert response.status_code == 429
        assert "2 requests are running, the bound is 2" in response.json()["error"]["message"]
        for client in clients:
            client.join()


def leave(stack: Stack) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, timeout=2)


def test_servers_that_come_later_and_come_back() -> None:
    with Stack() as stack:
        decode = stack.decode[0]
        address = decode.address
        stack.call(decode.stop())
        assert post(stack).status_code == 503
        until(lambda: httpx.get(f"{stack.url}/health").status_code == 503, "the front end is not healthy")
        error = httpx.get(f"{stack.url}/v1/models").json()["error"]
        assert f"decode server {address}: UNAVAILABLE" in error["message"]
        stack.call(decode.start(address))
        until(lambda: httpx.get(f"{stack.url}/health").status_code == 200, "the front end is healthy again", 15)
        assert post(stack).status_code == 200


def test_a_front_end_without_servers_listens_and_answers_503() -> None:
    def configure(stack: Stack) -> None:
        stack.wait_s = 0.2
        stack.service = {"model_name": "mine"}
        stack.decode[0].absent = True

    with Stack(configure=configure) as stack:
        for path in ("/health", "/v1/models"):
            response = httpx.get(f"{stack.url}{path}")
            assert response.status_code == 503
            assert "decode server 127.0.0.1:9: UNAVAILABLE" in response.json()["error"]["message"]
        assert post(stack).status_code == 503
        assert not httpx.get(f"{stack.url}/kvferry/stats").json()["ready"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"namespace_id": b"m" * 32}, "namespace_id is 6d6d"),
        ({"namespace_id": b"short"}, "namespace_id has 5 bytes; it must have 32"),
        ({"max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
        ({"role": 1}, "role is prefill; it must be decode"),
    ],
)
def test_a_server_that_does_not_fit_is_not_used(change: dict[str, Any], message: str) -> None:
    def configure(stack: Stack) -> None:
        for field, value in change.items():
            setattr(stack.decode[1], field, value)

    with Stack(decode=2, configure=configure) as stack:
        until(lambda: message in stack_error(stack), "the mismatch is named")
        for _ in range(3):
            assert post(stack).status_code == 200
        assert not stack.decode[1].decodes


def test_servers_of_which_no_two_fit_are_named_with_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    def configure(stack: Stack) -> None:
        stack.wait_s = 0.1
        stack.decode[0].page_size, stack.decode[0].namespace_id = 64, b"m" * 32

    with Stack(configure=configure) as stack:
        until(lambda: "does not fit" in post(stack).json()["error"]["message"], "both were found")
        response = post(stack)
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        decode, prefill = stack.decode[0].address, stack.prefill[0].address
        assert f"decode server {decode}: it does not fit prefill server {prefill}: " in message
        assert "geometry.page_size is 64 here and 16 there; start both daemons with the same --page-size" in message
        told = [each for each in caplog.messages if " is not used: it does not fit" in each]
        assert {line.split(" is not used: ")[0] for line in told} == {
            f"decode server {decode}",
            f"prefill server {prefill}",
        }
        assert len(told) == 2  # once each, however often they are asked


def stack_error(stack: Stack) -> str:
    error: str = httpx.get(f"{stack.url}/kvferry/stats").json()["decode"][1]["error"]
    return error


def test_a_server_may_be_late_once_to_say_that_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_engines, "DESCRIBE_DEADLINE_S", 0.5)
    monkeypatch.setattr(front_engines, "RECHECK_S", 0.05)
    with Stack() as stack:
        decode, calls, late = stack.decode[0], 0, 1

        async def late_then_not() -> None:
            nonlocal calls
            calls += 1
            if calls % (late + 1) != 0:
                await asyncio.sleep(5)

        def down() -> bool:
            return httpx.get(f"{stack.url}/health").status_code == 503

        decode.at_describe = late_then_not
        until(lambda: down() or calls >= 4, "it was late twice, and not in between")
        assert not down()
        late = 2
        until(down, "late twice on end, it is down")
        decode.at_describe = None
        until(lambda: not down(), "it is up again")
        assert post(stack).status_code == 200
