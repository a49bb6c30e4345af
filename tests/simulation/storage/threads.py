"""Threads that copy between the tiers, on virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.clock import Violation, expect
from tests.simulation.loops import ProcessLoop

Work = Callable[[], Any]
Step = Callable[[], None]


class SimThreads:
    """`CopyThreads` of a process on virtual time: so many copies at a time, in the order in which they come, each in
    steps; the last of them is the work."""

    def __init__(
        self, process: ProcessLoop, count: int, steps: Callable[[Work], list[Step]], ended: Callable[[Work], None]
    ) -> None:
        self.count = count
        self.executor = self
        self._process, self._steps, self._ended = process, steps, ended
        self._waiting: deque[tuple[Work, asyncio.Future[Any], list[Step]]] = deque()
        self._since: dict[asyncio.Future[Any], float] = {}  # of copies that run

    def submit(self, work: Work) -> asyncio.Future[Any]:
        future = self._process.create_future()
        self._waiting.append((work, future, self._steps(work)))
        self._begin()
        return future

    def _begin(self) -> None:
        while self._waiting and len(self._since) < self.count:
            work, future, steps = self._waiting.popleft()
            self._since[future] = self._process.time()
            self._later(work, future, steps)

    def _later(self, work: Work, future: asyncio.Future[Any], steps: list[Step]) -> None:
        seconds = self._process.clock.between(0.0001, 0.005)
        self._process.call_later(seconds, self._step, work, future, steps)

    def _step(self, work: Work, future: asyncio.Future[Any], steps: list[Step]) -> None:
        if steps:
            steps.pop(0)()
            self._later(work, future, steps)
            return
        try:
            result, error = work(), None
        except Violation:
            raise
        except Exception as raised:
            result, error = None, raised
        del self._since[future]
        self._ended(work)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        self._begin()

    def oldest(self, now: float) -> float:
        return now - min(self._since.values(), default=now)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        while cancel_futures and self._waiting:
            work, future, _ = self._waiting.popleft()
            self._ended(work)
            future.cancel()
        expect(not (wait and self._since), "the loop's thread waits for copies that run")

    def close(self) -> None:
        self.shutdown(wait=True)
