"""A front end that stood still finds what was said to it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kvferry.front import legs as front_legs
from kvferry.front.errors import ApiError
from kvferry.front.vllm_reply import DecodeAnswer, streamed
from kvferry.proto import engine_pb2
from tests.support.standstill import StandStill, jumping_clock

LONG = 1000.0  # of a standstill
LATER = 0.2  # seconds behind it that the next word comes
WITHIN = 10.0


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


class Decode:
    """A server and its call."""

    label = "decode server"

    def __init__(self, stand_still: StandStill | None) -> None:
        self._stand_still = stand_still

    async def read(self) -> engine_pb2.DecodeReply:
        await asyncio.sleep(0.01)
        if self._stand_still is None:
            await asyncio.Event().wait()
        else:
            self._stand_still(LONG)
        await asyncio.sleep(LATER)
        return engine_pb2.DecodeReply(paused=engine_pb2.Paused())


async def read(decode: Any, seconds: float, prefilling: asyncio.Task[None] | None = None) -> engine_pb2.DecodeReply:
    deadline = asyncio.get_running_loop().time() + seconds
    return await front_legs._read(decode, decode, prefilling, deadline, "next token")


def test_the_next_word_comes_behind_a_standstill(stand_still: StandStill) -> None:
    async def story() -> None:
        prefilled = asyncio.create_task(asyncio.sleep(0.001))
        assert (await read(Decode(stand_still), WITHIN, prefilled)).HasField("paused")

    asyncio.run(story())


def test_a_word_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises(ApiError, match="the next token did not come in time"):
        asyncio.run(asyncio.wait_for(read(Decode(None), 0.1), 20))


def test_a_prefill_that_broke_unexpectedly_is_heard_of_once() -> None:
    async def breaks() -> None:
        raise RuntimeError("no error of a server")

    async def story() -> None:
        prefilling = asyncio.create_task(breaks())
        began = time.process_time()
        with pytest.raises(ApiError, match="the next token did not come in time"):
            await asyncio.wait_for(read(Decode(None), 0.5, prefilling), 10)
        assert time.process_time() - began < 0.3, "it waits, and does not spin"

    asyncio.run(story())


def test_the_rest_of_a_reply_comes_behind_a_standstill(stand_still: StandStill) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0.01)
        stand_still(LONG)
        await asyncio.sleep(LATER)
        yield b"two"

    async def story() -> None:
        reply = DecodeAnswer(cast(Any, None), b"", chunks())
        assert [chunk async for chunk in streamed(reply, WITHIN)] == [b"one", b"two"]

    asyncio.run(story())
