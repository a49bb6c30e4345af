"""An ask for a prompt that was not begun: workers that said so are told of it, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast
from unittest import mock

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.limits import Name
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, ROOT, SimSide
from tests.simulation.faults import Faults
from tests.simulation.prompts import ENGINE_GEOMETRY, PAGE, Prompt

NAME, BEGUN = Name(bytes(16), 1), Name(bytes(15) + b"b", 1)
TOKENS = PAGE + 1


class Prefill(SimSide, PrefillSide):
    def __init__(self) -> None:
        clock = Clock(1)
        PrefillSide.__init__(self, DaemonConfig(role="prefill", page_size=PAGE), bytes(16), lambda: clock.now)
        self.furnish(clock, replace(PLAIN, geometry=ENGINE_GEOMETRY, blocks=8, pages=16, block_tokens=PAGE), Faults())

    def worker(self, number: int, told: list[wire.WorkerEvent], *, hears_asks: bool) -> Any:
        events = cast(Any, type("Events", (), {"put_nowait": lambda self, event: told.append(event)})())
        worker = self.enter(number, events)
        worker.hears_asks = hears_asks
        return worker


def test_an_ask_is_told_to_those_that_hear_of_it_before_the_prompt_is_begun() -> None:
    async def story() -> None:
        side, told, other = Prefill(), list[wire.WorkerEvent](), list[wire.WorkerEvent]()
        worker = side.worker(0, told, hears_asks=True)
        side.worker(1, other, hears_asks=False)
        prompt = Prompt(range(TOKENS), ROOT)
        begin = wire.Begin(name=BEGUN.to_proto(), digests=prompt.digests, tokens=TOKENS, tail_digest=prompt.tail)
        side.handle(worker, "begin", wire.WorkerMessage(begin=begin))
        for transfer, name in enumerate((NAME, NAME, BEGUN), 1):
            ask = peer.Ask(name=name.to_proto(), transfer=transfer, pages=2, tokens=TOKENS)
            side.on_ask(mock.Mock(number=7), ask)
        asked = [event.asked.name for event in told if event.HasField("asked")]
        assert asked == [NAME.to_proto()]
        assert not [event for event in other if event.HasField("asked")]

    asyncio.run(story())
