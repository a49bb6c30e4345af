"""What a side holds, in a file that the engines' schedulers map and read without asking. Shell.

The index itself: csrc/radix/held_index.h. Who reads a beat that is too old, or 0, takes nothing for held.
"""

from __future__ import annotations

import time

from kvferry.daemon.core.cache import Cache
from kvferry.radix.pool import HeldIndex
from kvferry.transfer.mapping.segment import Segment


class HeldPages:
    """The index of one cache, from its making to `close`. Made before any other has it."""

    def __init__(self, directory: str, name: str, cache: Cache) -> None:
        """OSError where there is too little memory."""
        pages = cache.pool.pages + (cache.host.pages if cache.host is not None else 0)
        self._segment = Segment.create(directory, name, HeldIndex.bytes_for(pages))
        self._index = HeldIndex(self._segment.buffer)
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
        self._cache.index_held(None)
        self._index.beat(0)
        self._index.close()
        self._segment.unlink()
        self._segment.close()
