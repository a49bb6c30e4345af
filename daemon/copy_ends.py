"""The ends of GPU copies, told to the event loop: one thread waits for all that run."""

from __future__ import annotations

import asyncio
import threading

from kvferry._core import GpuCopy, GpuError, GpuWaiter
from kvferry.daemon.pool_memory import CopyEnd

LOOK_SECONDS = 1.0  # between looks at whether it is to end


class CopyEnds:
    """All methods but the thread's own are called on the event loop's thread."""

    def __init__(self) -> None:
        self._waiter = GpuWaiter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, tuple[GpuCopy, CopyEnd]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-copy-ends", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Copies that run."""
        return len(self._waiting)

    def add(self, copy: GpuCopy, done: CopyEnd) -> None:
        """ValueError where too many are waited for; then `done` is not called."""
        self._loop = asyncio.get_running_loop()
        self._waiter.add(copy)
        self._waiting[id(copy)] = (copy, done)  # holding it keeps its id its own

    def close(self) -> None:
        """Waits for the copies that run; nobody is told of their ends any more."""
        self._closing = True
        self._waiter.wake()
        self._thread.join()
        for copy, _ in self._waiting.values():
            try:
                copy.wait()
            except GpuError:
                continue  # it has ended all the same
        self._waiting.clear()

    def _run(self) -> None:
        while not self._closing:
            ended = self._waiter.wait(LOOK_SECONDS)
            if ended and not self._closing:
                assert self._loop is not None, "a copy came from a loop"
                try:
                    self._loop.call_soon_threadsafe(self._tell, ended)
                except RuntimeError:  # the loop is closed: who asked is gone
                    return

    def _tell(self, ended: list[GpuCopy]) -> None:
        for copy in ended:
            found = self._waiting.pop(id(copy), None)
            if found is None:  # closed meanwhile
                continue
            problem = ""
            try:
                copy.done()
            except GpuError as error:
                problem = f"GpuError: {error}"
            found[1](problem)
