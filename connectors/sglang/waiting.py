"""Prefill's computed prompts that decode has not asked for. Their pages stay locked, up to a share of all. Where others
wait for that room, the oldest go to the daemon's host tier, if it has one with room for them, and SGLang has their
pages back: the request itself stays in its queue, as one that is being sent.

All of it is called on the scheduler's thread. Ranks of one engine decide alike: what goes, and in which step SGLang has
its pages back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from inspect import signature, unwrap
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
    def __init__(
        self,
        most: float,
        stow: Callable[[SentPrompt], None],
        stows: Callable[[], bool],
        agree: Callable[[list[bool]], list[bool]],
    ) -> None:
        """`most`: pages that they may hold. `stow`: has the daemon take one's pages. `stows`: whether it does such
        things. `agree`: of each whether all ranks say so."""
        self.ahead: WeakSet[PromptAhead] = WeakSet()  # SGLang forgets some without a word
        self._next: WeakSet[PromptAhead] = WeakSet()  # which this rank would take in; all must
        self._moving: list[SentPrompt] = []  # the same on all ranks: SGLang has not their pages back yet
        self._most = most
        self._stow = stow
        self._stows = stows
        self._agree = agree

    def look(self) -> None:
        """Prompts are about to ask anew: what one rank alone would have taken in has no room yet."""
        self._next.clear()

    def take_in(self, prompt: PromptAhead) -> bool:
        """Whether it may be computed before decode has room for it, as far as this rank says."""
        if there_is := self._over < 0:
            self._next.add(prompt)
        return there_is

    @property
    def _over(self) -> float:
        """Pages that are held beyond the share; from 0 on no prompt more may be computed."""
        return sum(each.pages_held for each in {*self.ahead, *self._next}) - self._most

    def make_room(self, requests: Sequence[Any]) -> None:
        """A prompt waits for room: has the oldest of `requests` go that may, until less is held when all that go are
        gone. `requests`: SGLang's that are being sent, the same on all ranks; so is whether a prompt waits."""
        orders = [order for request in requests if (order := _order_of(request)) is not None]
        if not orders:
            return
        for order, goes in zip(orders, self._agree(self._to_go(orders)), strict=True):
            if goes:
                order.place = PromptPlace.MOVES
                self._moving.append(order)
                self._stow(order)

    def _to_go(self, orders: Sequence[SentPrompt]) -> list[bool]:
        """Whether this rank would have each go."""
        now, over = time.monotonic(), self._over
        going = sum(order.transfer.pages for order in self._moving)
        chosen: set[SentPrompt] = set()
        for order in sorted(orders, key=lambda each: each.born):
            if over < 0 or going > over or not self._stows():
                break
            if order.computed and order.place is PromptPlace.PAGES and order.not_before <= now:
                chosen.add(order)
                going += order.transfer.pages
        return [order in chosen for order in orders]

    def give_back(self, scheduler: Any) -> None:
        """Gives the pages and metadata rows back of what is in the tier since the last time, on all ranks."""
        if not self._moving:
            return
        from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
        from sglang.srt.mem_cache.common import release_kv_cache

        kept = {"checkpoint": True} if "checkpoint" in signature(unwrap(release_kv_cache)).parameters else {}
        requests = {_order_of(request): request for request in scheduler.disagg_prefill_inflight_queue}
        for order in self.stored(requests.keys()):
            release_kv_cache(requests[order], scheduler.tree_cache, **kept)  # of later versions; before, it was so
            maybe_release_metadata_buffer(requests[order], scheduler.req_to_metadata_buffer_idx_allocator)
            order.gave_back = True

    def stored(self, orders: Collection[SentPrompt | None]) -> list[SentPrompt]:
        """Those that are in the tier since the last time, on all ranks. `orders`: of what is still being sent."""
        moving = [order for order in self._moving if order in orders]
        answered = self._agree([order.place is not PromptPlace.MOVES or order.transfer.over for order in moving])
        stored = self._agree([order.place is PromptPlace.TIER for order in moving])
        self._moving = [order for order, is_over in zip(moving, answered, strict=True) if not is_over]
        return [order for order, is_stored in zip(moving, stored, strict=True) if is_stored]


def _order_of(request: Any) -> SentPrompt | None:
    """The order of one of SGLang's requests; None: nothing of it is computed, or it is another backend's."""
    return getattr(getattr(request, "disagg_kv_sender", None), "order", None)


def gave_back(request: Any) -> bool:
    """Whether SGLang has this request's pages back, though it has not ended."""
    order = _order_of(request)
    return order is not None and order.gave_back
