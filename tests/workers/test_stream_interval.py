"""The interval of a reply's stream: tokens that travel together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.client.requests import Ready
from kvferry.proto import engine_pb2
from kvferry.workers.decode import DecodePaused, DecodeStarted, Ending, Reply
from kvferry.workers.engine_service import _forward


class Context:
    def __init__(self) -> None:
        self.sent: list[str | list[int]] = []

    async def write(self, reply: engine_pb2.DecodeReply) -> None:
        kind = reply.WhichOneof("kind")
        self.sent.append(list(reply.generated.tokens) if kind == "generated" else str(kind))


STARTED = DecodeStarted(0, 0, Ready(b"", 0, 0, 0))


@pytest.mark.parametrize(
    ("interval", "tokens", "sent"),
    [
        (1, 3, [[0], [1], [2]]),
        (3, 8, [[0], [1, 2, 3], [4, 5, 6], [7]]),
        (3, 1, [[0]]),
        (100, 5, [[0], [1, 2, 3, 4]]),
    ],
)
def test_the_first_token_goes_alone_and_the_others_together(interval: int, tokens: int, sent: list[list[int]]) -> None:
    async def run() -> list[str | list[int]]:
        replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        context: Any = Context()
        forwarding = asyncio.create_task(_forward(replies, context, interval))
        for reply in (STARTED, *range(tokens), Ending("length", tokens), None):
            replies.put_nowait(reply)
            await asyncio.sleep(0.001)
        await asyncio.wait_for(forwarding, 5)
        return list(context.sent)

    assert asyncio.run(run()) == ["started", *sent, "ending"]


def test_a_pause_waits_for_no_token() -> None:
    async def run() -> list[str | list[int]]:
        replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        context: Any = Context()
        forwarding = asyncio.create_task(_forward(replies, context, 10))
        for reply in (STARTED, 0, 1, 2, DecodePaused()):
            replies.put_nowait(reply)
            await asyncio.sleep(0.001)
        seen = list(context.sent)
        replies.put_nowait(None)
        await asyncio.wait_for(forwarding, 5)
        return seen

    assert asyncio.run(run()) == ["started", [0], [1, 2], "paused"]
