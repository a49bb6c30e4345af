"""A courier's process that ends while the daemon's stands still has ended in time; one that does not end has not."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from kvferry.transfer.courier.config import CourierError
from kvferry.transfer.courier.process import CourierProcess
from tests.support.standstill import StandStill, jumping_clock

LONG = 60.0
DEADLINE = 10.0


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


async def started(program: str) -> CourierProcess:
    """That has said something."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import time; print('here', flush=True); {program}", stdout=asyncio.subprocess.PIPE
    )
    courier = CourierProcess(process)
    while not courier.said():
        await asyncio.sleep(0.01)
    return courier


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 1000))  # by the clock that jumps


def test_a_reaping_outlives_a_standstill(stand_still: StandStill) -> None:
    async def story() -> None:
        courier = await started("time.sleep(600)")
        asyncio.get_running_loop().call_soon(stand_still, LONG)  # once it is killed, and before its end is looked at
        assert await courier.reap(DEADLINE) == f"killed by signal {signal.SIGKILL}"

    run(story())


def test_so_does_the_wait_for_an_end_of_its_own(stand_still: StandStill) -> None:
    async def story() -> None:
        courier = await started("time.sleep(0.3); raise SystemExit(7)")
        asyncio.get_running_loop().call_soon(stand_still, LONG)
        await courier.wait(DEADLINE)
        assert await courier.reap(DEADLINE) == "exit status 7"

    run(story())


def test_one_that_does_not_end_is_not_reaped() -> None:
    class Lasting:
        """As a process in the kernel's hands, which no signal ends."""

        pid, returncode = 7, None

        def __init__(self) -> None:
            self.stdout = asyncio.StreamReader()
            self.killed = 0

        def kill(self) -> None:
            self.killed += 1

        async def wait(self) -> int:
            await asyncio.Event().wait()
            return 0

    async def story() -> None:
        process: Any = Lasting()
        courier = CourierProcess(process)
        await courier.wait(0.1)
        with pytest.raises(CourierError, match=r"courier 7 did not end within 0.1 s of SIGKILL"):
            await courier.reap(0.1)
        assert process.killed == 1
        process.stdout.feed_eof()

    run(story())
