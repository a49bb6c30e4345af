"""Bytes of others that cannot be cleared go nowhere: the daemon ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import Effect, SendProgress, ZeroTail
from kvferry.daemon.core.limits import Name
from kvferry.daemon.memory.interface import CopyEnd
from kvferry.daemon.sides.prefill import PrefillSide
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimSide
from tests.simulation.faults import Faults

NAME = Name(bytes(16), 1)
SETTING = replace(PLAIN, zero_freed=True)


class Side(SimSide, PrefillSide):
    def __init__(self) -> None:
        clock = Clock(1)
        PrefillSide.__init__(self, DaemonConfig(role="prefill"), bytes(16), lambda: clock.now)
        self.furnish(clock, SETTING, Faults())
        self.performed: list[Effect] = []

    def perform(self, effect: Effect) -> None:
        self.performed.append(effect)
        super().perform(effect)


def test_nothing_is_sent_behind_a_tail_that_was_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        side = Side()

        def fail(page: int, tokens: int, done: CopyEnd) -> None:
            raise OSError("cuda:0: launch: OTHER")

        monkeypatch.setattr(side.tiers.memory, "zero_tail", fail)
        tail = ZeroTail(NAME, 3, 2)
        side._effects.extend([tail, SendProgress(1, 1, 4)])
        with pytest.raises(AssertionError, match="a page's tail could not be cleared: cuda:0: launch: OTHER"):
            side.flush()
        side.flush()
        assert side.performed == [tail]

    asyncio.run(story())


def test_nothing_is_done_once_the_clearing_of_a_tail_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        side, reported, ends = Side(), list[Any](), list[CopyEnd]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        monkeypatch.setattr(side.tiers.memory, "zero_tail", lambda page, tokens, done: ends.append(done))
        tail = ZeroTail(NAME, 3, 2)
        side._effects.append(tail)
        side.flush()
        ends[0]("GpuError: copy: OTHER")
        side._effects.append(SendProgress(1, 1, 4))
        side.flush()
        assert side.performed == [tail]
        (error,) = reported
        assert isinstance(error, AssertionError), "by which Daemon ends"
        assert "a page's tail could not be cleared: GpuError: copy: OTHER" in str(error)

    asyncio.run(story())


def test_pages_that_were_not_cleared_end_the_daemon() -> None:
    async def story() -> None:
        side, reported = Side(), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        side._zeroed("GpuError: launch: OTHER")
        (error,) = reported
        assert isinstance(error, AssertionError), "by which Daemon ends"
        assert "pages could not be cleared: GpuError: launch: OTHER" in str(error)

    asyncio.run(story())
