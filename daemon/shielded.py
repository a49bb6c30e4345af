"""Waiting for what must come to its end, though the waiter itself is cancelled. Shell."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(task: asyncio.Task[T]) -> T:
    """The task's result once it is over, however often the waiter is cancelled meanwhile; only then is its own
    cancellation raised."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
