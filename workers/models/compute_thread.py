"""The one thread in which the model runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvferry.waiting import complete

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ComputeThread:
    """Runs calls one at a time, first come first served. A request submits its next call when the last one is done, so
    requests take turns: a chunk of a prompt or a decode step each."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The call's result. However this ends, cancelled too, the call is over or never starts: nothing of it touches
        a page any more."""
        future = self._executor.submit(call, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                await complete(_settled(asyncio.wrap_future(future)))
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _settled(future: asyncio.Future[_T]) -> None:
    await asyncio.gather(future, return_exceptions=True)
