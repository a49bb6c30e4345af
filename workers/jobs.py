"""The requests that a worker runs, each in a task: a caller that leaves cancels its job, and the job cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.client.requests import RequestFailed, RequestName, name_in_use
from kvferry.proto import common_pb2

_T = TypeVar("_T")


class Jobs:
    """The running jobs: at most `limit` at a time, one of a name; none once `drain` has begun."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_requests is {limit}; it must be at least 1")
        self._limit = limit
        self._tasks: dict[RequestName, asyncio.Task[Any]] = {}
        self._draining = False

    def __len__(self) -> int:
        return len(self._tasks)

    def check(self) -> None:
        """Raises RequestFailed when no job may be started now."""
        if self._draining:
            raise RequestFailed(common_pb2.ERROR_UNAVAILABLE, "the worker is shutting down")
        if len(self._tasks) >= self._limit:
            raise RequestFailed(
                common_pb2.ERROR_RESOURCE_EXHAUSTED, f"{len(self._tasks)} requests run; the worker takes {self._limit}"
            )

    def start(self, name: RequestName, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Starts a job; call `check` first. Raises NotOpened, with nothing of `work` done, while a job of this name
        runs."""
        assert not self._draining
        if name in self._tasks:
            work.close()
            raise name_in_use(name)
        task = asyncio.create_task(work, name=f"request {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda task: self._ended(name, task))
        return task

    async def drain(self, grace_s: float) -> None:
        """Starts no more, lets the running ones finish for `grace_s`, then cancels the rest and waits for their end."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())  # each wait in a cancelled job has a deadline of its own

    def _ended(self, name: RequestName, task: asyncio.Task[Any]) -> None:
        del self._tasks[name]
        if not task.cancelled():
            task.exception()  # marked as seen: whoever started it hears of it, if still there
