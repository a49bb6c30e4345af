"""What is made in a thread, and let go again there where nobody is left to have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvferry.waiting import complete

_T = TypeVar("_T")


async def make_in_thread(make: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """What `make` makes. A thread cannot be cancelled: where the waiting task is, it waits on, and undoes what came."""
    loop = asyncio.get_running_loop()
    making = loop.run_in_executor(None, make)
    try:
        return await complete(making)
    except asyncio.CancelledError:
        if making.done() and not making.cancelled() and making.exception() is None:
            await complete(loop.run_in_executor(None, undo, making.result()))
        raise
