"""Stow at a prefill side: whether an engine's computed prompts can be moved is what its Welcome said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.proto import worker_pb2 as wire
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, ROOT, SimSide
from tests.simulation.faults import Faults
from tests.simulation.prompts import ENGINE_GEOMETRY, PAGE, Prompt

NAME = Name(bytes(16), 1)
TOKENS = PAGE + 1  # a last page of small blocks lacks some


class Prefill(SimSide, PrefillSide):
    def __init__(self, block_tokens: int) -> None:
        clock = Clock(1)
        config = DaemonConfig(role="prefill", page_size=PAGE, transfer_seconds=30.0)
        PrefillSide.__init__(self, config, bytes(16), lambda: clock.now)
        setting = replace(PLAIN, geometry=ENGINE_GEOMETRY, blocks=8, pages=16, host_pages=8, block_tokens=block_tokens)
        self.furnish(clock, setting, Faults(stows=1.0))
        self.cache.grow_host(8, [])
        assert self.tiers.can_be_sent
        self.moved: list[CopyStarted] = []
        cast(Any, self.tiers.host).start = lambda started, done: self.moved.append(started)


@pytest.mark.parametrize("block_tokens", [PAGE, PAGE // 2])
def test_only_pages_of_one_block_each_are_moved(block_tokens: int) -> None:
    """Also where a tier is there since an engine whose blocks were larger."""

    async def story() -> None:
        side, told = Prefill(block_tokens), list[wire.WorkerEvent]()
        assert side.tiers.stows == (block_tokens == PAGE)
        events = cast(Any, type("Events", (), {"put_nowait": lambda self, event: told.append(event)})())
        worker, prompt, name = side.enter(0, events), Prompt(range(TOKENS), ROOT), NAME.to_proto()
        blocks = range(-(-TOKENS // block_tokens))
        begin = wire.Begin(name=name, digests=prompt.digests, tokens=TOKENS, tail_digest=prompt.tail)
        side.handle(worker, "begin", wire.WorkerMessage(begin=begin))
        progress = wire.Progress(name=name, tokens=TOKENS, blocks=blocks)
        side.handle(worker, "progress", wire.WorkerMessage(progress=progress))
        side.ready_core.tail_zeroed(NAME, 0.0)
        side.handle(worker, "aux", wire.WorkerMessage(aux=wire.Aux(name=name)))
        side.handle(worker, "stow", wire.WorkerMessage(stow=wire.Stow(name=name)))
        stored = [event.stowed.stored for event in told if event.HasField("stowed")]
        assert (stored, len(side.moved)) == (([], 1) if block_tokens == PAGE else ([False], 0))

    asyncio.run(story())
