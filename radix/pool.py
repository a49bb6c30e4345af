"""The pages of one tier: states, generations, and free runs from which neighbours are given out together.

The pool is C++ (`csrc/radix/page_pool.cpp`): `kvferry._core.PagePool`, whose methods say what they do.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import _core
from kvferry._core import HeldIndex, PoolExhausted

__all__ = ["HeldIndex", "PagePool", "PageState", "PoolCounts", "PoolExhausted", "leading_readable"]


class PageState(enum.IntEnum):
    """The state of a page; every page is in exactly one. In the host tier, CACHED is readable, SPILLING is being
    written by a copy and RESTORING read by one.
    """

    FREE = 0
    LEASED = 1  # a request's own
    ARRIVING = 2  # in the tree, its bytes are on their way
    CACHED = 3  # in the tree, readable
    SPILLING = 4  # being copied to the tier below
    RESTORING = 5  # being copied from the tier below
    ORPHANED = 6  # of a lost worker that may still write


_STATES = tuple(PageState)
_READABLE = bytes((PageState.CACHED, PageState.SPILLING))  # of the device's pages in a tree


def leading_readable(states: bytes) -> int:
    """Guard: device pages before the first whose bytes cannot be read, by the states of a path in order."""
    return len(states) - len(states.lstrip(_READABLE))


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state; they sum to the pool's size."""

    free: int
    leased: int
    arriving: int
    cached: int
    spilling: int
    restoring: int
    orphaned: int

    @property
    def total(self) -> int:
        return self.free + self.leased + self.arriving + self.cached + self.spilling + self.restoring + self.orphaned


class PagePool(_core.PagePool):
    """`pages` pages, named 0 to pages - 1. A page's generation grows each time it is freed.

    A page id outside the pool is an IndexError; a page in the wrong state, or named twice, an AssertionError. Neither
    changes anything. Several trees may share a pool. Not thread-safe.
    """

    def counts(self) -> PoolCounts:
        return PoolCounts(*self.count_list())

    def those(self, pages: Sequence[int], state: PageState) -> list[int]:
        """Those of these pages that are in the state."""
        codes = self.states(pages)
        if codes.count(state) == len(pages):
            return list(pages)
        return [page for page, code in zip(pages, codes, strict=True) if code == state]

    def state(self, page: int) -> PageState:
        return _STATES[self.state_code(page)]
