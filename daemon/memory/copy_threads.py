"""Threads that copy, in host memory or between tiers, and for how long each is at what it does."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class CopyThreads:
    """Threads that copy. `run`, `submit`, `oldest` and `close` are for the event loop's thread."""

    def __init__(self, count: int, name: str = "kvferry-copy") -> None:
        self.count = count
        self.executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._numbers = itertools.count()
        self._steps: dict[int, int] = {}  # the number of the last one, by thread that copies
        self._seen: dict[int, float] = {}  # of these, those of the last look, and since when they are

    def run(self, copy: Callable[[], None]) -> asyncio.Future[str]:
        """Runs the copy on a thread: its end, "" or what went wrong."""
        return self.submit(partial(attempt, copy))

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs the work on a thread: its result."""
        return asyncio.get_running_loop().run_in_executor(self.executor, self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        self.step()
        try:
            return work()
        finally:
            del self._steps[threading.get_ident()]

    def step(self) -> None:
        """Notes, in a copy that is long, that it has come further."""
        self._steps[threading.get_ident()] = next(self._numbers)

    def oldest(self, now: float) -> float:
        """Seconds for which the slowest copy has not come further, as those who ask saw it; 0: none runs."""
        self._seen = {step: self._seen.get(step, now) for step in self._steps.copy().values()}
        return now - min(self._seen.values(), default=now)

    def close(self) -> None:
        """Waits for the copies that run."""
        self.executor.shutdown(wait=True)


def attempt(copy: Callable[[], None]) -> str:
    """The outcome of the copy: "" or what went wrong."""
    try:
        copy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
