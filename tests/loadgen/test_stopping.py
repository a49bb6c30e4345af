"""A run that is stopped keeps what was over by then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.loadgen.client import Client
from kvferry.loadgen.dialogue import Dialogue
from kvferry.loadgen.runner import Closed, Conversation, Open, TurnRecord, run


class Hangs:
    """A server's client that answers `answers` requests and no more."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.ended = 0

    async def send(self, path: str, body: bytes) -> SimpleNamespace:
        self.answers -= 1
        if self.answers < 0:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1
        timing = SimpleNamespace(latency_s=0.001, first_s=0.001, gaps_s=[])
        return SimpleNamespace(error=None, timing=timing, prompt_tokens=1, cached_tokens=0, output_tokens=1)


@pytest.mark.parametrize("loop", [Closed(2, 2), Open(2)])
def test_what_was_over_is_kept_and_what_runs_is_ended(loop: Closed | Open) -> None:
    async def scenario() -> None:
        client, stop = Hangs(3), asyncio.Event()
        dialogue = SimpleNamespace(turns=1, path="/", think_s=lambda turn: 0.0, request=lambda turn: b"")
        conversations = [Conversation(number, cast(Dialogue, dialogue), 0.0) for number in range(9)]
        seen: list[TurnRecord] = []

        def on_turn(turn: TurnRecord) -> None:
            seen.append(turn)
            if len(seen) == 3:
                asyncio.get_running_loop().call_later(0.1, stop.set)

        record = await asyncio.wait_for(
            run(cast(Client, client), conversations, loop, on_turn=on_turn, stop=stop), timeout=5
        )
        assert (len(record.turns), record.stopped, client.ended) == (3, True, 2)

    asyncio.run(scenario())
