"""The tasks that one side starts beside its callers': who hears how they end, and that they do. Shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers.session import report_invariant

log = logging.getLogger(__name__)


class SideTasks:
    """A broken invariant is reported, another error logged; a RequestError is answered by whoever awaits the task."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            report_invariant(error)
        elif error is not None and not isinstance(error, RequestError):
            log.error("%s: %s: %s", self._role, type(error).__name__, error)

    async def close(self) -> None:
        """Cancels all of them, and waits for their ends, also for that of a thread which one of them waits for."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
