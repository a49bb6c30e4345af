"""Prefill's computed prompts that decode has not asked for. Their pages stay locked, up to a share of all. Where others
wait for that room, the oldest go to the daemon's host tier, if it has one with room for them, and SGLang has their
pages back: the request itself stays in its queue, as one that is being sent.

All of it is called on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from kvferry.connectors.sglang.transfers import PromptPlace, SentPrompt


class PromptAhead(Protocol):
    """A prompt that may be computed, or is."""

    @property
    def pages_held(self) -> int:
        """Pages of prefill's that it will keep locked, or does."""

    @property
    def order(self) -> SentPrompt | None:
        """The order of it; None: nothing of it is computed."""


class WaitingPrompts:
    def __init__(self, most: float, stow: Callable[[SentPrompt], None], stows: Callable[[], bool]) -> None:
        """most: pages that they may hold. stow: has the daemon take one's pages. stows: whether it does such things."""
        self.ahead: WeakSet[PromptAhead] = WeakSet()  # SGLang forgets some without a word
        self._next: WeakSet[PromptAhead] = WeakSet()  # which this rank would take in; all must
        self._most = most
        self._stow = stow
        self._stows = stows

    def look(self) -> None:
        """Prompts are about to ask anew: what one rank alone would have taken in has no room yet."""
        self._next.clear()

    def take_in(self, prompt: PromptAhead) -> bool:
        """Whether it may be computed before decode has room for it, as far as this rank says."""
        if there_is := self.has_room:
            self._next.add(prompt)
        return there_is

    @property
    def has_room(self) -> bool:
        """Whether another prompt may be computed before decode has room for it. Where it may not, room is made."""
        over = sum(each.pages_held for each in {*self.ahead, *self._next}) - self._most
        if over >= 0 and self._stows():
            self._make_room(over)
        return over < 0

    def _make_room(self, over: float) -> None:
        """Has the oldest go that may, until less is held when all that go are gone."""
        now = time.monotonic()
        orders = [order for prompt in self.ahead if (order := prompt.order) is not None and prompt.pages_held]
        going = sum(order.transfer.pages for order in orders if order.place in (PromptPlace.MOVES, PromptPlace.TIER))
        may_go = (
            each for each in orders if each.computed and each.place is PromptPlace.PAGES and each.not_before <= now
        )
        for order in sorted(may_go, key=lambda each: each.born):
            if going > over:
                return
            order.place = PromptPlace.MOVES
            going += order.transfer.pages
            self._stow(order)

    def give_back(self, scheduler: Any) -> None:
        """Gives the pages and metadata rows back of what is in the tier since the last time."""
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
        from sglang.srt.mem_cache.common import release_kv_cache

        for request in scheduler.disagg_prefill_inflight_queue:
            order = getattr(request.disagg_kv_sender, "order", None)
            if order is not None and order.place is PromptPlace.TIER and not order.gave_back:
                release_kv_cache(request, scheduler.tree_cache)
                maybe_release_metadata_buffer(request, scheduler.req_to_metadata_buffer_idx_allocator)
                order.gave_back = True


def gave_back(request: Any) -> bool:
    """Whether SGLang has this request's pages back, though it has not ended."""
    order = getattr(getattr(request, "disagg_kv_sender", None), "order", None)
    return order is not None and bool(order.gave_back)
