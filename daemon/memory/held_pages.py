"""What a side holds, in a file that the engines' schedulers map and read without asking. Shell.

The index itself: csrc/radix/held_index.h. Who reads a beat that is too old, or 0, takes nothing for held.
"""

from __future__ import annotations

import time

from kvferry.daemon.core.cache import Cache
from kvferry.radix.pool import HeldIndex
from kvferry.transfer.mapping.segment import Segment


class HeldPages:
    """An index for so many pages, from its making to `close`. It is empty until it shows a cache."""

    def __init__(self, directory: str, name: str, pages: int) -> None:
        """OSError where there is too little memory."""
        self._segment = Segment.create(directory, name, self.bytes_for(pages))
        self._index = HeldIndex(self._segment.buffer)
        self._cache: Cache | None = None

    @staticmethod
    def bytes_for(pages: int) -> int:
        """Bytes of shared memory for so many pages."""
        return HeldIndex.bytes_for(pages)

    def show(self, cache: Cache) -> None:
        """Has in it what the cache holds, from now on."""
        self._cache = cache
        cache.index_held(self._index)
        self.beat()

    @property
    def path(self) -> str:
        return self._segment.path

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    def beat(self) -> None:
        """Says that this daemon lives."""
        self._index.beat(time.monotonic_ns())

    def close(self) -> None:
        """Says that it has ended; who has it mapped keeps the memory."""
        if self._cache is not None:
            self._cache.index_held(None)
        self._index.beat(0)
        self._index.close()
        self._segment.unlink()
        self._segment.close()
