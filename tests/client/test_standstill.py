"""A worker that stood still has not lost its daemon: what that has said meanwhile, or says soon after, is in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client.client import DaemonClient
from kvferry.proto import common_pb2
from tests.client.requests import FACTS, GEOMETRY, admit, name
from tests.support.fake_daemon import Event, FakeDaemon, Message
from tests.support.standstill import StandStill, jumping_clock

LONG = 1000.0  # of a standstill
LATER = 0.2  # seconds behind it that an answer comes


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


def late(daemon: FakeDaemon, kind: str, stand_still: StandStill) -> Callable[[Message], list[Event]]:
    """The daemon's answer to what it is told comes behind a standstill of the worker."""

    def answer(message: Message) -> list[Event]:
        stand_still(LONG)
        for event in getattr(daemon, f"_on_{kind}")(message):
            asyncio.get_running_loop().call_later(LATER, daemon.events.put_nowait, event)
        return []

    return answer


@pytest.mark.parametrize("kind", ["hello", "admit"])
def test_an_answer_comes_behind_a_standstill(tmp_path: Path, stand_still: StandStill, kind: str) -> None:
    async def story() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            daemon.override[kind] = late(daemon, kind, stand_still)
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)
            request = name()
            assert await admit(client, request) == (0, 1, 2)
            await client.ready(request)
            await client.finish(request, tokens=9, digests=b"")
            await client.close()

    asyncio.run(story())


def test_the_end_of_a_session_is_heard_behind_a_standstill(tmp_path: Path, stand_still: StandStill) -> None:
    def stands_still(message: Message) -> list[Event]:
        stand_still(LONG)
        return []

    async def story() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            daemon.override["quiesced"] = stands_still
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)
            await client.close()
            assert client._stream.over.result().code == 0

    asyncio.run(story())
