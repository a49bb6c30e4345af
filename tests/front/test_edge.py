"""The side of both front ends that clients and operators see: request ids, keys, CORS, metrics, the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.front.edge.settings import EdgeSettings
from kvferry.secret_files import ApiKeys, BearerToken
from tests.support.front_process import FrontProcess, front_process, refused
from tests.support.front_stack import Stack
from tests.support.small_vllm import SmallVllm

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
KEY, TOKEN = "sk-key-of-a-client", "token-for-engines"


def samples(url: str, headers: dict[str, str] | None = None) -> Callable[..., float]:
    """Gives each sample's value by its name and the values of its labels, in any order."""
    reply = httpx.get(url, headers=headers)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    return lambda name, *labels: found[(name, *sorted(labels))]


def until(holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it does not come")


def stack_with(edge: EdgeSettings, **service: object) -> Stack:
    def configure(stack: Stack) -> None:
        stack.edge = edge
        stack.service = service

    return Stack(configure=configure)


def before_vllm(prefill: SmallVllm, decode: SmallVllm, *flags: str) -> tuple[str, ...]:
    return ("--vllm-prefill", f"p={prefill.url}", "--vllm-decode", decode.url, *flags)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[SmallVllm, SmallVllm, FrontProcess, Stack]]:
    """Both front ends, each before a prefill and a decode server."""
    with (
        SmallVllm() as prefill,
        SmallVllm() as decode,
        Stack() as stack,
        front_process(*before_vllm(prefill, decode)) as front,
    ):
        yield prefill, decode, front, stack


@pytest.mark.parametrize("given", ["trace-7", "a b", "x" * 129, 'x"y', ""])
def test_a_clients_request_id_is_kept_and_carried_to_both_servers(
    both: tuple[SmallVllm, SmallVllm, FrontProcess, Stack], given: str
) -> None:
    prefill, decode, front, stack = both
    replies = [httpx.post(url + CHAT, json=HI, headers={"x-request-id": given}) for url in (front.url, stack.url)]
    heard = [prefill.heard[-1][1], decode.heard[-1][1], stack.prefill[0].heard[-1], stack.decode[0].heard[-1]]
    ids = [reply.headers["x-request-id"] for reply in replies for _ in range(2)]
    assert [each["x-request-id"] for each in heard] == ids
    assert all(each == given if given == "trace-7" else re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_what_a_reference_front_end_counts() -> None:
    with Stack() as stack:
        for stream in (False, True):
            assert httpx.post(stack.url + CHAT, json={**HI, "stream": stream}).status_code == 200
        assert httpx.post(stack.url + CHAT, json={**HI, "n": 2}).status_code == 400
        assert httpx.get(stack.url + "/v1/nothing").status_code == 404
        found = samples(stack.url + "/metrics")
        decode, prefill = stack.decode[0].address, stack.prefill[0].address
    assert found("kvferry_front_requests_total", CHAT, "200") == 2
    assert found("kvferry_front_requests_total", CHAT, "400") == 1
    assert found("kvferry_front_requests_total", "other", "404") == 1
    assert found("kvferry_front_requests_running") == 0
    assert found("kvferry_front_first_token_seconds_count", CHAT) == 1
    assert found("kvferry_front_request_seconds_count", CHAT) == 3
    assert found("kvferry_front_legs_total", "decode", decode, "ok") == 2
    assert found("kvferry_front_legs_total", "prefill", prefill, "ok") == 2
    assert found("kvferry_front_decode_alone_total", "short") == 0


def test_a_request_runs_until_its_end_and_a_client_that_leaves_breaks_it_off() -> None:
    with Stack() as stack:
        hold = asyncio.Event()
        stack.decode[0].between = hold.wait
        with httpx.stream("POST", stack.url + CHAT, json={**HI, "stream": True}) as reply:
            lines = reply.iter_lines()  # closed when it is dropped
            next(lines)
            assert samples(stack.url + "/metrics")("kvferry_front_requests_running") == 1
        until(lambda: samples(stack.url + "/metrics")("kvferry_front_requests_running") == 0)
        found = samples(stack.url + "/metrics")
        assert found("kvferry_front_broken_replies_total", "client") == 1
        assert found("kvferry_front_legs_total", "decode", stack.decode[0].address, "cancelled") == 1


def test_what_a_front_end_before_vllm_counts() -> None:
    with (
        SmallVllm() as prefill,
        SmallVllm() as decode,
        front_process(*before_vllm(prefill, decode, "--metrics", "/m")) as front,
    ):
        httpx.post(front.url + CHAT, json={**HI, "stream": True})
        httpx.post(front.url + CHAT, json={**HI, "n": 2})
        httpx.post(front.url + CHAT, json={**HI, "temperature": 3})
        httpx.post(front.url + "/tokenize", json={"prompt": "x"})
        found = samples(front.url + "/m")
    assert found("kvferry_front_requests_total", CHAT, "200") == 2
    assert found("kvferry_front_requests_total", CHAT, "400") == 1
    assert found("kvferry_front_requests_total", "/tokenize", "200") == 1
    assert found("kvferry_front_first_token_seconds_count", CHAT) == 1
    assert found("kvferry_front_legs_total", "decode", decode.url, "ok") == 3
    assert found("kvferry_front_legs_total", "decode", decode.url, "refused") >= 1
    assert found("kvferry_front_decode_alone_total", "whole") == 1
    assert found("kvferry_front_decode_alone_total", "no_prefill") == 0


def test_several_processes_count_together_at_an_address_of_their_own() -> None:
    with SmallVllm() as prefill, SmallVllm() as decode:
        at = f"127.0.0.1:{free_port()}"
        flags = before_vllm(prefill, decode, "--processes", "3", "--metrics", at, "--access-log")
        with front_process(*flags) as front:
            for _ in range(20):
                assert httpx.post(front.url + CHAT, json=HI).status_code == 200
            for _ in range(5):
                assert samples(f"http://{at}/metrics")("kvferry_front_requests_total", CHAT, "200") == 20
            assert httpx.get(front.url + "/metrics").status_code == 404
            log = front.end()
    assert len(re.findall(rf"path={CHAT} status=200", log)) == 20


def test_what_a_killed_process_had_running_runs_no_more() -> None:
    async def asking(url: str) -> None:
        async with httpx.AsyncClient() as client:
            await client.post(url + CHAT, json=HI, timeout=20)

    with SmallVllm() as prefill, SmallVllm() as decode:
        decode.delay_s = 20.0
        with front_process(*before_vllm(prefill, decode, "--processes", "2")) as front:

            async def run() -> None:
                task = asyncio.create_task(asking(front.url))
                while not decode.heard:
                    await asyncio.sleep(0.01)
                assert samples(front.url + "/metrics")("kvferry_front_requests_running") == 1
                for child in psutil.Process(front.process.pid).children():
                    child.kill()
                with pytest.raises(httpx.TransportError):
                    await task

            asyncio.run(run())
            until(lambda: running(front.url) == 0)


def running(url: str) -> float:
    """How many requests run; -1 where nobody answers."""
    try:
        return samples(url + "/metrics")("kvferry_front_requests_running")
    except httpx.TransportError:
        return -1.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_who_has_no_key_is_refused_and_asks_no_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with stack_with(EdgeSettings(keys=ApiKeys(str(tmp_path / "keys")))) as stack:
        assert httpx.get(stack.url + "/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/kvferry/stats"):
            assert httpx.get(stack.url + path).status_code == 401
        reply = httpx.post(stack.url + CHAT, json=HI, headers={"authorization": "Bearer wrong-key"})
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer" and not stack.decode[0].decodes
        known = {"authorization": f"Bearer {KEY}"}
        assert httpx.post(stack.url + CHAT, json=HI, headers=known).status_code == 200
        assert samples(stack.url + "/metrics", known)("kvferry_front_requests_total", CHAT, "401") == 1


def test_servers_get_their_own_token_and_never_a_clients_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "token").write_text(TOKEN)
    keys, token = ("--api-keys", str(tmp_path / "keys")), ("--engine-token", str(tmp_path / "token"))
    known = {"authorization": f"Bearer {KEY}"}
    with SmallVllm(token=TOKEN) as prefill, SmallVllm(token=TOKEN) as decode:
        with front_process(*before_vllm(prefill, decode, *keys, *token, "--access-log")) as front:
            assert httpx.post(front.url + CHAT, json=HI, headers=known).status_code == 200
            assert httpx.post(front.url + CHAT, json=HI).status_code == 401
            log = front.end()
        assert {headers["authorization"] for _, headers, _ in prefill.heard + decode.heard} == {f"Bearer {TOKEN}"}
        decode.heard.clear()
        with front_process(*before_vllm(prefill, decode, *keys)) as front:
            assert httpx.post(front.url + CHAT, json=HI, headers=known).status_code == 401
        assert not any("authorization" in headers for _, headers, _ in decode.heard)
    assert KEY not in log and TOKEN not in log and "status=401" in log


def test_reference_servers_get_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with stack_with(EdgeSettings(), engine_token=BearerToken(str(tmp_path / "token"))) as stack:
        assert httpx.post(stack.url + CHAT, json=HI, headers={"authorization": "Bearer mine"}).status_code == 200
        for server in (stack.prefill[0], stack.decode[0]):
            assert server.heard[0]["authorization"] == f"Bearer {TOKEN}"


def test_pages_of_named_origins_may_ask() -> None:
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    with stack_with(EdgeSettings(cors_origins=("https://chat.example",))) as stack:
        allowed = httpx.options(stack.url + CHAT, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = httpx.options(stack.url + CHAT, headers={**asks, "origin": "https://other.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    with Stack() as stack:
        assert "access-control-allow-origin" not in httpx.options(stack.url + CHAT, headers=asks).headers


def test_one_line_a_request_without_anything_that_was_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvferry.front.access"), stack_with(EdgeSettings(access_log=True)) as stack:
        httpx.post(f"{stack.url}{CHAT}?secret=1", json={**HI, "stream": True}, headers={"x-request-id": "mine"})
        httpx.get(f"{stack.url}/a%0Ab")
        until(lambda: len(caplog.records) == 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        rf"id=mine client=127.0.0.1 method=POST path={CHAT} status=200 ms=[\d.]+ first_ms=[\d.]+ bytes=\d+ whole=yes",
        first,
    )
    assert r'path="/a\nb" status=404' in second and "secret" not in first


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--metrics", "0.0.0.0:9480"), "--metrics is 0.0.0.0:9480: .* needs --insecure"),
        (("--metrics", "/a b"), "a path must have"),
        (("--cors-origin", "chat.example"), "must be http://HOST"),
        (("--api-keys", "/absent/keys"), "/absent/keys: No such file"),
    ],
)
def test_settings_that_cannot_be(flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("--vllm-decode", "http://127.0.0.1:9", *flags) == 2
    assert re.search(says, capsys.readouterr().err)
