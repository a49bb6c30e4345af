"""The thread in which a worker computes: cancellation, errors, and work that is completed all the same."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.waiting import complete
from kvferry.workers.models.compute_thread import ComputeThread


def test_a_cancelled_call_that_runs_is_waited_for() -> None:
    async def scenario() -> None:
        thread = ComputeThread()
        started, release = threading.Event(), threading.Event()
        ended = []

        def call() -> None:
            started.set()
            release.wait(10)
            ended.append(True)

        task = asyncio.create_task(thread.run(call))
        await asyncio.to_thread(started.wait, 10)
        for _ in range(3):  # however often it is told
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        thread.close()

    asyncio.run(scenario())


def test_a_cancelled_call_that_waits_never_starts() -> None:
    async def scenario() -> None:
        thread = ComputeThread()
        release = threading.Event()
        ran = []
        first = asyncio.create_task(thread.run(release.wait, 10))
        second = asyncio.create_task(thread.run(ran.append, 1))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
        thread.close()
        assert not ran

    asyncio.run(scenario())


def test_an_error_of_the_call_is_raised() -> None:
    async def scenario() -> None:
        thread = ComputeThread()
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        thread.close()

    asyncio.run(scenario())


def test_complete_finishes_the_work_and_then_is_cancelled() -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        done = []

        async def work() -> None:
            await release.wait()
            done.append(True)

        task = asyncio.create_task(complete(work()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done

    asyncio.run(scenario())


def test_complete_passes_results_and_errors() -> None:
    async def value() -> int:
        return 3

    async def error() -> int:
        raise KeyError("x")

    assert asyncio.run(complete(value())) == 3
    with pytest.raises(KeyError):
        asyncio.run(complete(error()))
