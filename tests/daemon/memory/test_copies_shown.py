"""Ways of copying between the tiers, as a daemon tells them; and a pool that cannot be made."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvferry.daemon.cli.stats import render
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory.making import make_pool
from kvferry.daemon.memory.shared import SharedPoolMemory
from kvferry.daemon.observe.stats import side_stats
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics, StrategyCounts
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimSide
from tests.simulation.faults import Faults

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)


class Side(SimSide, DecodeSide):
    def __init__(self) -> None:
        clock = Clock(1)
        DecodeSide.__init__(self, DaemonConfig(role="decode"), bytes(16), lambda: clock.now)
        self.furnish(clock, PLAIN, Faults())


def shown(stats: cache.SideStats) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(cache.StatsReply(daemon="d", sides=[stats])))
    return captured.get()


def test_what_moved_pages_is_told_and_outlives_an_engines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        side = Side()
        told = side_stats(side).copies
        assert [(each.strategy, each.copies) for each in told.strategies] == [("memcpy", 0)]
        assert "memcpy: copies / descriptors / bytes" in shown(side_stats(side))

        memory: Any = side.tiers.memory
        counts = {"staged": StrategyCounts(2, 30, 4096), "batch": StrategyCounts()}
        of_a_gpu = CopyStatistics(counts, {"rows are not pinned": 3}, "kernel")
        monkeypatch.setattr(memory, "copy_statistics", lambda: of_a_gpu)
        for end in ("stop", "close"):
            monkeypatch.setattr(memory, end, lambda: None, raising=False)
        for _ in range(2):  # while it is there, and when it has gone
            stats = side_stats(side)
            (staged, batch), (fallback,) = stats.copies.strategies, stats.copies.fallbacks
            assert (staged.strategy, staged.copies, staged.descriptors, staged.bytes) == ("staged", 2, 30, 4096)
            assert (batch.strategy, batch.copies) == ("batch", 0)
            assert (fallback.reason, fallback.count, stats.copies.forced) == ("rows are not pinned", 3, "kernel")
            if side.tiers._memory is not None:
                await side.tiers.forget_pool()
        text = shown(stats)
        for words in ("kernel, forced by KVFERRY_COPY", "2 / 30 / 4.0 KiB", "fallback, rows are not pinned"):
            assert words in text
        assert "batch: copies" not in text

    asyncio.run(story())


def test_an_engines_memory_is_closed_though_its_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def close() -> None:
        reached.set()
        assert go_on.wait(20)
        ended.append("closed")

    async def story() -> None:
        side = Side()
        memory: Any = side.tiers.memory
        host = SimpleNamespace(detach=lambda: ended.append("detached"))
        monkeypatch.setattr(memory, "stop", lambda: None, raising=False)
        monkeypatch.setattr(memory, "close", close, raising=False)
        monkeypatch.setattr(side.tiers, "_host", host)
        forgetting = asyncio.create_task(side.tiers.forget_pool())
        assert await asyncio.to_thread(reached.wait, 20)
        forgetting.cancel()
        await asyncio.sleep(0)
        assert not forgetting.done() and ended == ["detached"], "the rows are to be attached no more"
        go_on.set()
        await asyncio.wait([forgetting])
        assert forgetting.cancelled()
        assert ended == ["detached", "closed"]

    asyncio.run(story())


def test_a_pool_that_cannot_be_made_is_a_refusal_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*words: object) -> SharedPoolMemory:
        raise ValueError("KVFERRY_COPY is 'dma'")

    monkeypatch.setattr(SharedPoolMemory, "create", create)
    with pytest.raises(RequestError, match="pool: this daemon cannot make it: KVFERRY_COPY is 'dma'") as refused:
        asyncio.run(make_pool(DaemonConfig(role="decode"), GEOMETRY, 4, "name"))
    assert refused.value.code == common.ERROR_FAILED_PRECONDITION
    with pytest.raises(RequestError, match="pool: this daemon cannot make it: ") as refused:
        asyncio.run(make_pool(DaemonConfig(role="decode", ranks=3), GEOMETRY, 4, "name"))
    assert refused.value.code == common.ERROR_FAILED_PRECONDITION
