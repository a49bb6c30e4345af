"""A prompt that an engine sends from its own blocks, to a scripted daemon: how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.connectors import daemon_requests
from kvferry.connectors.block_requests import BlockRequests
from kvferry.connectors.orders import Begin, PromptPages
from kvferry.connectors.worker_state import Push
from kvferry.proto import common_pb2, worker_pb2
from tests.client.requests import name
from tests.connectors.scripted_tools import tools_at
from tests.support.fake_daemon import FakeDaemon

Scenario = Callable[[FakeDaemon, DaemonClient, BlockRequests], Awaitable[None]]


def at_daemon(folder: Path, scenario: Scenario) -> None:
    async def run() -> None:
        async with tools_at(folder, common_pb2.ROLE_PREFILL) as (daemon, client, tools):
            await scenario(daemon, client, BlockRequests(tools))

    asyncio.run(run())


def push_of(request: RequestName) -> Push:
    return Push(Begin("r", request, PromptPages(bytes(64), 9, bytes(32))), 1, None)


def test_a_name_that_is_used_again_at_once_is_the_new_requests(tmp_path: Path) -> None:
    """Also where the end of the old one was awaited."""

    async def scenario(daemon: FakeDaemon, client: DaemonClient, requests: BlockRequests) -> None:
        daemon.override["begin"] = lambda message: []
        again: list[asyncio.Future[bool]] = []
        request = name()
        sending = requests.push(push_of(request))
        sending.add_done_callback(lambda _: again.append(requests.push(push_of(request))))
        requests._lasting.look()
        await daemon.wait_for("begin")
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto())))
        assert await sending
        await daemon.wait_for("begin", 2)
        assert client.open_requests == 1
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto())))
        assert await asyncio.wait_for(again[0], 10)
        assert not client.open_requests

    at_daemon(tmp_path, scenario)


def test_the_end_is_awaited_as_long_as_a_decode_daemon_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may ask as late as the prompt's deadline, and has one of its own then."""
    monkeypatch.setattr(daemon_requests, "ANSWER_SLACK_S", 0.0)

    async def scenario(daemon: FakeDaemon, client: DaemonClient, requests: BlockRequests) -> None:
        requests._tools.settings = replace(requests._tools.settings, deadline_seconds=1.0)
        daemon.override["begin"] = lambda message: []
        request = name()
        sending = requests.push(push_of(request))
        requests._lasting.look()
        await daemon.wait_for("begin")
        await asyncio.sleep(1.5)
        assert not sending.done()
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto())))
        assert await sending

    at_daemon(tmp_path, scenario)
