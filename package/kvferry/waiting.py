"""Waits that a cancellation does not cut short, and deadlines that a standstill of this process does not use up.

While a process stands still, as it is stopped or its machine is paused, the clock goes on: when it wakes its timers
have expired, though what it waited for may have come long since, unread. A deadline by which another one counts as
dead, stuck or lost is therefore waited for in `slices`, or counted in `OwnTime`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from threading import Thread
from typing import Any, TypeVar

SLICES = 8  # of a deadline: a standstill uses up one of them
LOOKS = 4  # behind a deadline, so that what came while this process stood still is seen
LOOK_SECONDS = 0.02

_T = TypeVar("_T")


async def complete(work: Awaitable[_T]) -> _T:
    """Waits to the end of `work`, however often the waiting task is cancelled meanwhile; then the cancellation goes
    on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break  # the work's own: raised by result() below
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # marked as seen
        raise cancelled
    return task.result()


def slices(seconds: float) -> Iterator[float]:
    """A deadline as times to wait, in seconds, one behind the other, with a look after each: however long this process
    stands still, that uses up one of them. The last ones are short, for a last look."""
    return chain(repeat(seconds / SLICES, SLICES), repeat(LOOK_SECONDS, LOOKS))


async def awake(seconds: float) -> None:
    """Sleeps for so long, by `slices`."""
    for part in slices(seconds):
        await asyncio.sleep(part)


async def is_done(future: asyncio.Future[Any], seconds: float) -> bool:
    """Whether it is within so long, by `slices`; it goes on where it is not."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    for part in slices(seconds):
        # As asyncio.wait({future}, timeout=part), which takes three times as long.
        waiter: asyncio.Future[None] = loop.create_future()
        wake = partial(_wake, waiter)
        future.add_done_callback(wake)
        timer = loop.call_later(part, wake, future)
        try:
            await waiter
        finally:
            timer.cancel()
            future.remove_done_callback(wake)
        if future.done():
            return True
    return False


def _wake(waiter: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def within(seconds: float, work: Awaitable[_T]) -> _T:
    """The result of `work` within so long, by `slices`; else asyncio.TimeoutError. Then, and where the waiting task is
    cancelled, it is cancelled, and has ended."""
    task = asyncio.ensure_future(work)
    late = False
    try:
        late = not await is_done(task, seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # not gather: cancelled again, it would cancel what cleans up
            if not task.cancelled():
                task.exception()  # marked as seen
    if late and task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


async def unmoved(look: Callable[[], object], seconds: float) -> None:
    """Waits until `look` has given the same for so long, by `slices`; None does not count."""
    while True:
        before = look()
        for part in slices(seconds):
            await asyncio.sleep(part)
            if (now := look()) is None or now != before:
                break
        else:
            return


def have_ended(threads: Sequence[Thread], seconds: float) -> bool:
    """Joins them; whether all have ended within so long, by `slices`."""
    for part in slices(seconds):
        end = time.monotonic() + part
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            return True
    return False


class OwnTime:
    """A clock of one thread, in seconds, for deadlines that are looked at again and again: between two readings no more
    than `most` pass, however long this process stood still."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._passed = 0.0
        self._read = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._passed += min(now - self._read, self._most)
        self._read = now
        return self._passed
