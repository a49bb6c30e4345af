"""Deadlines while this process stands still: what came meanwhile, or comes soon after, is in time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from kvferry.waiting import LOOK_SECONDS, LOOKS, SLICES, OwnTime, awake, have_ended, is_done, slices, unmoved, within
from tests.support.standstill import StandStill, jumping_clock, run_with_standstill

LONG = 60.0  # of a standstill
DEADLINE = 10.0


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> StandStill:
    return jumping_clock(monkeypatch)


async def value_after(seconds: float, how: StandStill) -> str:
    """A standstill comes first, and what is waited for so long after it."""
    await asyncio.sleep(0)
    how(LONG)
    await asyncio.sleep(seconds)
    return "value"


def test_slices_are_the_deadline_and_a_last_look() -> None:
    assert list(slices(10.0)) == [10.0 / SLICES] * SLICES + [LOOK_SECONDS] * LOOKS


def test_a_deadline_outlives_a_standstill(stand_still: StandStill) -> None:
    async def story() -> None:
        assert await within(DEADLINE, value_after(0.1, stand_still)) == "value"
        assert await is_done(asyncio.ensure_future(value_after(0.1, stand_still)), DEADLINE)

    asyncio.run(story())


def test_one_look_more_behind_a_standstill_that_used_up_the_last_slice(stand_still: StandStill) -> None:
    async def several_turns() -> str:
        for _ in range(SLICES):
            stand_still(LONG)
            await asyncio.sleep(0.001)
        stand_still(LONG)
        for _ in range(20):
            await asyncio.sleep(0)
        return "value"

    assert asyncio.run(within(0.01, several_turns())) == "value"


def test_a_deadline_is_one() -> None:
    """Whoever is late is cancelled, and has ended then; a future goes on."""
    ended: list[str] = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("never")

    async def story() -> None:
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.05, never())
        assert ended == ["never"]
        future = asyncio.get_running_loop().create_future()
        assert not await is_done(future, 0.05)
        assert not future.done()
        await awake(0.05)
        assert time.monotonic() - began >= 3 * 0.05

    asyncio.run(story())


def test_a_cancellation_comes_through_and_what_is_waited_for_has_ended() -> None:
    ended: list[bool] = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def story() -> None:
        waiting = asyncio.create_task(within(DEADLINE, never()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == [True]

    asyncio.run(story())


def test_a_second_cancellation_does_not_cut_short_what_cleans_up() -> None:
    ended: list[bool] = []

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def story() -> None:
        waiting = asyncio.create_task(within(DEADLINE, cleans_up()))
        for _ in range(2):
            await asyncio.sleep(0.01)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.2)
        assert ended == [True]

    asyncio.run(story())


def test_what_fails_or_is_cancelled_itself_says_so() -> None:
    async def fails() -> None:
        raise OSError("gone")

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    async def story() -> None:
        with pytest.raises(OSError, match="gone"):
            await within(DEADLINE, fails())
        with pytest.raises(asyncio.CancelledError):
            await within(DEADLINE, is_cancelled())

    asyncio.run(story())


def test_a_result_that_meets_the_deadline_counts() -> None:
    async def says_so_when_cancelled() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "value"
        raise AssertionError

    assert asyncio.run(within(0.01, says_so_when_cancelled())) == "value"


def test_what_moves_is_not_unmoved_and_a_standstill_is_no_rest(stand_still: StandStill) -> None:
    seen: list[Any] = [0]

    async def story() -> None:
        waiting = asyncio.create_task(unmoved(lambda: seen[0], 0.4))
        for _ in range(10):
            await asyncio.sleep(0.1)
            seen[0] += 1
        await asyncio.sleep(0)
        stand_still(LONG)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        seen[0] += 1
        await asyncio.sleep(0.1)
        assert not waiting.done()
        seen[0] = None
        await asyncio.sleep(0.6)
        assert not waiting.done(), "there is nothing that could move"
        seen[0] = 1
        await asyncio.wait_for(waiting, 20)

    asyncio.run(story())


def test_the_own_time_goes_on_no_further_than_so_much_between_two_readings(stand_still: StandStill) -> None:
    own = OwnTime(0.5)
    first = own()
    stand_still(0.2)
    assert 0.2 <= own() - first < 0.5
    second = own()
    stand_still(LONG)
    assert own() - second == 0.5


def test_threads_that_end_and_one_that_does_not() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, args=(20,)) for _ in range(3)]
    assert have_ended([], 1.0)
    for thread in threads:
        thread.start()
    assert not have_ended(threads, 0.05)
    over.set()
    assert have_ended(threads, 20.0)


def test_threads_that_end_one_behind_the_other_use_up_the_time_that_they_take() -> None:
    threads = [threading.Thread(target=time.sleep, args=(0.03 * number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    assert have_ended(threads, 20.0)
    assert time.monotonic() - began < 10.0


def test_a_thread_that_a_standstill_kept_has_ended_in_time() -> None:
    program = """
        import os, signal, threading, time
        from kvferry.waiting import have_ended

        def work():
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)

        thread = threading.Thread(target=work)
        thread.start()
        print(have_ended([thread], 1.0))
    """
    assert run_with_standstill(program, 2.0).stdout == "True\n"
