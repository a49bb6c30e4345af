"""Places for so many running requests at a time; the others wait in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.client.requests import RequestFailed
from kvferry.proto import common_pb2


class Places:
    """Places for `count` requests; 0: for any number."""

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"max_running is {count}; it must be at least 0")
        self._count = count
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def take(self, deadline_s: float) -> AsyncIterator[float]:
        """Gives the seconds that are left when there is a place. Raises RequestFailed when there is none in time."""
        if not self._count:
            yield deadline_s
            return
        began = time.monotonic()
        await self._acquire(deadline_s)
        try:
            yield max(0.001, deadline_s - (time.monotonic() - began))
        finally:
            self._free.release()

    async def _acquire(self, deadline_s: float) -> None:
        # not wait_for: before Python 3.12 it swallows a cancellation that comes together with the place
        place = asyncio.ensure_future(self._free.acquire())
        try:
            await asyncio.wait({place}, timeout=deadline_s)
        except asyncio.CancelledError:
            if not place.cancel():
                self._free.release()
            raise
        if not place.done() and place.cancel():
            raise RequestFailed(
                common_pb2.ERROR_DEADLINE_EXCEEDED,
                f"{self._count} requests run (max_running); no place in {deadline_s:g} s",
            )
