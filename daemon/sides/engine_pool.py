"""A pool that is an engine's own memory (`--pool engine`): who registered it, and how it is let go of. Shell.

It lives from its registration to the proof of that worker's end, and then until no copy runs on it: the sessions end,
with their couriers; what the core holds is failed; copies between the tiers run to their ends, since the mapping keeps
the memory whatever becomes of the engine's process; every device page is forgotten; the mappings are closed. What the
host tier has is restored into the next registration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvferry.daemon.core.errors import precondition, unavailable
from kvferry.waiting import within

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.02  # between looks at what still uses the memory
LATE_SECONDS = 30.0  # after which that is logged, again and again
RELEASE_SECONDS = 20.0  # that the next worker waits at most; a retry waits again


class PoolOwner(Protocol):
    """A side, as far as its memory's end goes."""

    def end_sessions(self, reason: str) -> None:
        """Ends all sessions. Idempotent; those that end are still `in_use`."""

    def drop_requests(self) -> None:
        """Drops what the core still holds of pages, with nobody to use them."""

    def in_use(self) -> str:
        """The sessions, requests or copies that keep the memory; empty: nothing does."""


class EnginePool:
    """The registered pool of one side. States: none, claimed (it is being mapped), owned by a worker, leaving."""

    def __init__(self, role: str, side: PoolOwner, unmap: Callable[[], Awaitable[None]]) -> None:
        self._role = role
        self._side = side
        self._unmap = unmap
        self._claimed_by = ""
        self._owner: int | None = None  # a worker's number
        self._owner_left = False
        self._released = asyncio.Event()
        self._released.set()

    async def claim(self, worker: str) -> None:
        """Claims the pool for the memory of this worker, which is about to be mapped. FAILED_PRECONDITION while another
        worker's is; UNAVAILABLE while that of one that has left is, longer than RELEASE_SECONDS."""
        if not self._released.is_set():
            if not self._owner_left:
                raise precondition(
                    f"worker {worker!r}: the {self._role} pool is the memory of worker {self._claimed_by!r}, which is "
                    "here; with --pool engine one engine process a side registers its memory at a time"
                )
            try:
                await within(RELEASE_SECONDS, self._released.wait())
            except asyncio.TimeoutError:
                raise unavailable(
                    f"the memory of worker {self._claimed_by!r} is still mapped after {RELEASE_SECONDS:g} s: "
                    f"{self._side.in_use() or 'its end is not proven'}; try again"
                ) from None
            if not self._released.is_set():  # another one was woken first
                raise unavailable(f"worker {self._claimed_by!r} registered its memory first; try again")
        self._claimed_by, self._owner, self._owner_left = worker, None, False
        self._released.clear()

    def give_up(self) -> None:
        """Gives up the claim: the memory could not be mapped."""
        self._released.set()

    def own(self, number: int) -> None:
        """Makes this worker the owner: its memory is mapped."""
        self._owner = number

    def is_owner(self, number: int) -> bool:
        return self._owner == number and not self._released.is_set()

    def owner_leaves(self) -> None:
        """Notes that the owner's stream has ended; the proof of its end may follow."""
        self._owner_left = True

    async def released(self, seconds: float) -> bool:
        """Waits for the memory's end."""
        try:
            await within(seconds, self._released.wait())
        except asyncio.TimeoutError:
            return False
        return True

    async def let_go(self) -> None:
        """The worker's end is proven, or it never came to be: unmaps its memory once nothing uses it."""
        self._owner_left = True
        reason = f"the engine whose memory the {self._role} pool was has ended"
        self._side.drop_requests()
        self._side.end_sessions(reason)
        loop = asyncio.get_running_loop()
        late = loop.time() + LATE_SECONDS
        while using := self._side.in_use():
            if loop.time() >= late:
                log.error("%s, and its memory cannot be unmapped yet: %s", reason, using)
                late = loop.time() + LATE_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self._side.end_sessions(reason)
        await self._unmap()
        self._owner = None
        self._released.set()
