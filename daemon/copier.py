"""Gathers and scatters for the sessions: small copies at once, large ones on the copy threads that it owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvferry import _core
from kvferry.transfer.slots import HEADER_BYTES

INLINE_BYTES = 256 * 1024  # below it the hop to a thread costs more than the copy


class Copier:
    """Copies between one pool's pages and slots. Completions run on the event loop's thread."""

    def __init__(self, pool: memoryview, page_bytes: int, threads: int) -> None:
        self._pool = pool
        self._page_bytes = page_bytes
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvferry-copy")

    def gather(
        self, slot: memoryview, page_ids: Sequence[int], byte_offset: int, nbytes: int, done: Callable[[str], None]
    ) -> None:
        """Pages -> behind the slot's header. `done` is called with "" or what went wrong."""

        def copy() -> None:
            ids = np.asarray(page_ids, np.int64)
            _core.gather_pages(slot, HEADER_BYTES, self._pool, ids, self._page_bytes, byte_offset, nbytes)

        self._run(copy, nbytes, done)

    def scatter(
        self, slot: memoryview, page_ids: Sequence[int], byte_offset: int, nbytes: int, done: Callable[[str], None]
    ) -> None:
        """From behind the slot's header -> pages."""

        def copy() -> None:
            ids = np.asarray(page_ids, np.int64)
            _core.scatter_pages(self._pool, ids, self._page_bytes, byte_offset, slot, HEADER_BYTES, nbytes)

        self._run(copy, nbytes, done)

    def close(self) -> None:
        """Waits for the copies that run; their number is bounded by the slots."""
        self._executor.shutdown(wait=True)

    def _run(self, copy: Callable[[], None], nbytes: int, done: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        if nbytes <= INLINE_BYTES:
            # Its completion comes later all the same: callers may hold a state machine half-way.
            loop.call_soon(done, _attempt(copy))
        else:
            future = loop.run_in_executor(self._executor, _attempt, copy)
            future.add_done_callback(lambda finished: done(finished.result()))


def _attempt(copy: Callable[[], None]) -> str:
    try:
        copy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
