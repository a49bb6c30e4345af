"""Health is progress: what does not move is named, and the daemon says that it does not serve."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.memory.copy_threads import CopyThreads
from kvferry.daemon.observe.health import HealthWatch
from kvferry.daemon.observe.progress import Progress
from kvferry.daemon.sides.prefill import PrefillSide
from tests.support.standstill import StandStill, jumping_clock


def test_parts_are_stalled_when_they_do_not_tick() -> None:
    progress = Progress(2.0)
    progress.tick("one", 10.0)
    progress.tick("two", 11.0)
    assert progress.stalled(12.0) == []
    assert progress.stalled(13.5) == [("one", 3.5), ("two", 2.5)]
    progress.tick("one", 13.5)
    assert progress.stalled(13.5) == [("two", 2.5)]
    progress.keep({"one"})
    assert progress.stalled(14.0) == []
    assert progress.known("one") and not progress.known("two")


class OneWorker:
    """A side whose tiers have one copy worker, and copies on several threads."""

    role = "decode"

    def __init__(self, executor: Executor, threads: CopyThreads | None = None) -> None:
        self.tiers = Tiers(executor, threads)


class Tiers:
    def __init__(self, executor: Executor, threads: CopyThreads | None) -> None:
        self._executor = executor
        self._threads = threads

    def copy_workers(self) -> dict[str, Executor]:
        return {"copy worker": self._executor}

    def late_copies(self, now: float) -> dict[str, float]:
        return {"oldest copy": self._threads.oldest(now)} if self._threads is not None else {}


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 9
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_copy_worker_that_hangs_is_named_and_comes_back() -> None:
    said: list[bool] = []

    def announce(serving: bool) -> None:
        said.append(serving)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as executor:
            watch = HealthWatch({"decode": cast(Any, OneWorker(executor))}, 0.3, announce)
            task = asyncio.create_task(watch.run())
            await until(lambda: said == [True])
            release = threading.Event()
            executor.submit(release.wait, 10)
            await until(lambda: said == [True, False])
            assert watch.stalled[0].startswith("decode copy worker for ")
            release.set()
            await until(lambda: said == [True, False, True])
            assert watch.stalled == []
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_a_copy_that_hangs_on_one_of_several_threads_is_named() -> None:
    """The others go on; one copy that takes long, and says that it comes further, is not late."""
    said: list[bool] = []

    def announce(serving: bool) -> None:
        said.append(serving)

    async def scenario() -> None:
        threads = CopyThreads(3)
        side = OneWorker(threads.executor, threads)
        watch = HealthWatch({"decode": cast(Any, side)}, 1.5, announce)
        task = asyncio.create_task(watch.run())
        release = threading.Event()

        def comes_further() -> None:
            while not release.wait(0.01):
                threads.step()

        def hangs() -> None:
            assert release.wait(10)

        long = threads.run(comes_further)
        for _ in range(50):
            assert await threads.run(lambda: None) == ""
            await asyncio.sleep(0.01)
        assert said == [True]
        hanging = threads.run(hangs)
        await until(lambda: said == [True, False])
        assert [stalled.partition(" for ")[0] for stalled in watch.stalled] == ["decode oldest copy"]
        release.set()
        assert await asyncio.gather(long, hanging) == ["", ""]
        await until(lambda: said == [True, False, True])
        assert threads.oldest(time.monotonic()) == 0.0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        threads.close()

    asyncio.run(scenario())


def test_a_copy_that_fails_runs_no_more() -> None:
    def fails() -> None:
        raise ValueError("wrong page")

    async def scenario() -> None:
        threads = CopyThreads(1)
        assert await threads.run(fails) == "ValueError: wrong page"
        assert threads.oldest(time.monotonic()) == 0.0
        threads.close()

    asyncio.run(scenario())


def test_an_event_loop_that_stands_still_is_written_down(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def announce(serving: bool) -> None:
        pass

    async def scenario() -> None:
        watch = HealthWatch({}, 0.2, announce)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    (record,) = [record for record in caplog.records if "the event loop has not moved" in record.message]
    assert record.levelname == "CRITICAL"
    assert "in scenario" in capfd.readouterr().err


# -- behind a standstill of the whole process ----------------------------------------------------------------------

LONG = 1000.0
STALLED = 60.0  # one look a second


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


class Posting:
    """A session with this courier."""

    def __init__(self, pid: int) -> None:
        self.remote, self.courier_pid, self.closed = "d0", pid, False
        self.why: list[str] = []

    def break_off(self, why: str) -> None:
        self.why.append(why)
        self.closed = True


def watched(side: object, story: Callable[[HealthWatch, list[bool]], Any]) -> None:
    said: list[bool] = []

    def announce(serving: bool) -> None:
        said.append(serving)

    async def scenario() -> None:
        watch = HealthWatch({"prefill": cast(Any, side)}, STALLED, announce)
        task = asyncio.create_task(watch.run())
        await until(lambda: said == [True])
        await story(watch, said)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


async def stands_still(stand_still: StandStill, looks: int) -> None:
    """Before each of the next looks."""
    for _ in range(looks):
        stand_still(LONG)
        for _ in range(5):
            await asyncio.sleep(0)


def test_copies_are_not_stalled_for_a_standstill_and_are_when_they_hang(stand_still: StandStill) -> None:
    """A copy worker, and a copy on a thread of its own."""
    release = threading.Event()

    def hangs() -> None:
        assert release.wait(60)

    async def story(watch: HealthWatch, said: list[bool]) -> None:
        executor.submit(hangs)
        copying = threads.run(hangs)
        await stands_still(stand_still, 5)
        assert said == [True] and watch.stalled == []
        await stands_still(stand_still, round(STALLED) + 5)
        assert said == [True, False]
        assert {stalled.partition(" for ")[0] for stalled in watch.stalled} == {
            "decode copy worker",
            "decode oldest copy",
        }
        release.set()
        assert await copying == ""

    with ThreadPoolExecutor(1) as executor:
        threads = CopyThreads(2)
        try:
            watched(OneWorker(executor, threads), story)
        finally:
            release.set()
            threads.close()


def test_a_courier_is_not_replaced_for_a_standstill_and_is_when_it_hangs(stand_still: StandStill) -> None:
    side = PrefillSide(DaemonConfig(role="prefill"), bytes(16), time.monotonic)

    async def story(watch: HealthWatch, said: list[bool]) -> None:
        posting = Posting(courier.pid)
        side.sessions[1] = cast(Any, posting)
        await stands_still(stand_still, 5)
        assert said == [True] and not posting.why
        await stands_still(stand_still, round(STALLED) + 5)
        assert said[:2] == [True, False]
        (why,) = posting.why
        assert why.startswith("its courier has not moved for 6")
        await side.close()

    sleeps = "print(flush=True); import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE) as courier:
        assert courier.stdout is not None
        courier.stdout.readline()
        time.sleep(0.05)  # it sleeps by then, and makes no wait more
        try:
            watched(side, story)
        finally:
            courier.kill()


def test_a_loop_that_could_not_run_is_not_written_down(
    stand_still: StandStill, caplog: pytest.LogCaptureFixture
) -> None:
    class Pauses:
        """The thread's: all stands still in the first."""

        left = 2

        def wait(self, seconds: float) -> bool:
            self.left -= 1
            stand_still(LONG)
            return not self.left

    def announce(serving: bool) -> None:
        raise AssertionError("it does not run")

    watch = HealthWatch({}, STALLED, announce)
    watch._ended = cast(Any, Pauses())
    with caplog.at_level(logging.CRITICAL):
        watch._watch_loop()
    assert not caplog.records
