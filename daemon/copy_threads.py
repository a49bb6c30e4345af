"""Threads that copy, in host memory or between tiers, and since when each is at what it does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class CopyThreads:
    """`run`, `submit`, `oldest` and `close` are for the event loop's thread."""

    def __init__(self, count: int, name: str = "kvferry-copy") -> None:
        self.count = count
        self.executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._since: dict[int, float] = {}  # by thread that copies

    def run(self, copy: Callable[[], None]) -> asyncio.Future[str]:
        """Its end: "" or what went wrong."""
        return self.submit(partial(attempt, copy))

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Its result."""
        return asyncio.get_running_loop().run_in_executor(self.executor, self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        self.step()
        try:
            return work()
        finally:
            del self._since[threading.get_ident()]

    def step(self) -> None:
        """In a copy that is long: it has come further."""
        self._since[threading.get_ident()] = time.monotonic()

    def oldest(self, now: float) -> float:
        """For how long the slowest copy has not come further; 0: none runs."""
        return max(0.0, now - min(self._since.copy().values(), default=now))

    def close(self) -> None:
        """Waits for the copies that run."""
        self.executor.shutdown(wait=True)


def attempt(copy: Callable[[], None]) -> str:
    """ "" or what went wrong."""
    try:
        copy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
