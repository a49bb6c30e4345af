"""Waits that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

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
