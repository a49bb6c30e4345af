"""The scheduler's half in a prefill engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvferry.connectors import params as transfer_params
from kvferry.connectors.orders import Begin, Cancel, Drop, Fill, FirstToken, Orders, Release, Save
from kvferry.connectors.scheduler_side import (
    UNKNOWN,
    EngineRequest,
    SchedulerSide,
    Tracked,
    answer,
    counted,
    traceparent_of,
)

MOST_WAITING = 8  # prompts that have pages of the daemon's, or will, before they have blocks of the engine's
LINE_SECONDS = 1.0  # that one more lines up at most: then it is computed
LINE_SPEED = 4096.0  # tokens a second: for a quarter of a millisecond for each that it lacks

_log = logging.getLogger(__name__)


class PrefillScheduler(SchedulerSide):
    """The prefill engine's part: prompts are computed here and pushed, chunk by chunk.

    Where the daemon fetches, a prompt of which enough is lacking is begun when the engine first asks for it, before it
    has blocks. It waits until the daemon says what it has of it: that is little time where nothing is fetched.
    """

    def new_request(self, request: EngineRequest) -> None:
        try:
            half = transfer_params.prefill_half(request.kv_transfer_params)
        except ValueError as error:
            _log.warning("request %s is not sent to anyone: %s", request.request_id, error)
            half = None
        if half is None:
            return
        if self._tracked_anew(request, half).alone:
            del self._tracked[request.request_id]
            return
        self.counts.not_asked += not self._view.up

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.alone or request.skip_reading_prefix_cache:
            return 0, False
        tracked.held = computed
        if tracked.begun:
            if not tracked.waits or tracked.unsent:
                return 0, False
            if tracked.found == UNKNOWN:
                return (None, False) if self._view.up else (0, False)
            return answer(tracked.found, computed)
        if not self._view.up:
            return 0, False
        if self._holds_up(tracked, computed):
            return None, False
        return self._held(tracked, request.num_prompt_tokens - 1, computed)

    def _holds_up(self, tracked: Tracked, computed: int) -> bool:
        """Whether a prompt waits for what may be fetched, begun from now on, or lines up for that."""
        if tracked.hurried:
            return False
        full = len(self._waiting) >= MOST_WAITING
        first = "" if full else self._for_whom(tracked, computed, self._most(tracked))
        if (full or first) and self._session and tracked.lines_up is not None:  # it has been looked at
            if self.now() < tracked.lines_up:
                return True
            if full:
                tracked.hurried = True
                return False
            first = ""  # there is room: it is begun itself
        if not self._may_fetch(tracked, computed):
            return False
        if not (full or first):
            self._begin(tracked, waits=True)
        elif tracked.lines_up is None:
            lacking = self._most(tracked) - max(computed, tracked.near)
            tracked.lines_up = self.now() + min(LINE_SECONDS, lacking / LINE_SPEED)
            self.counts.joins += bool(first)
        return True

    def _may_fetch(self, tracked: Tracked, computed: int) -> bool:
        """Whether the daemon may fetch enough of it from the decode daemon that asks for it."""
        least = self._view.fetch_tokens
        if not least or not self._session or self._too_long(tracked):
            return False
        most, page = self._most(tracked), self.shape.page_size
        if most - computed < least:
            return False
        tracked.near = self._view.held_pages(tracked.chain.pages(most)) * page
        if most - tracked.near < least:
            return False
        if least > 1 and tracked.lines_up is None:  # one that lines up was found worth it
            tracked.hurried = not self._worth.hold_up(most - max(computed, tracked.near))
        return not tracked.hurried

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        tracked = self._tracked.get(request.request_id)
        self._waiting.discard(request.request_id)
        if not external:
            self._arriving.pop(request.request_id, None)
        if tracked is None or tracked.alone:
            return
        start, end = tracked.found - external, tracked.found
        own = self._blocks(blocks, start, end) if external else ()
        if not tracked.begun:
            self._begin(tracked, start, end, own)
        elif tracked.waits:
            tracked.waits = False
            if tracked.found != UNKNOWN:  # what the daemon had itself was not fetched
                had = max(tracked.held, tracked.near)
                if (lacking := self._most(tracked) - had) > 0:
                    self._worth.waited(lacking, max(0, tracked.found - had) if external else 0)
            if external:
                tracked.loading = True
                self._orders.append(Fill(request.request_id, start, end, self._blocks(blocks, 0, start), own))
                self.counts.fills += 1
                self.counts.fill_tokens += external

    def _begin(
        self, tracked: Tracked, start: int = 0, end: int = 0, blocks: tuple[int, ...] = (), *, waits: bool = False
    ) -> None:
        """Tells the worker, whether a look-up found the daemon gone or not: what was promised to the engine must be
        reported, and a worker without a daemon fails the push at once."""
        request = tracked.request
        assert tracked.params is not None
        tracked.begun, tracked.waits, tracked.loading = True, waits, bool(blocks)
        tracked.unsent = self._too_long(tracked)
        prompt = tracked.chain.prompt(request.num_prompt_tokens)
        if not blocks:
            start = end = 0
        if waits:
            tracked.found = UNKNOWN
            self._waiting.add(request.request_id)
            self._arriving[request.request_id] = prompt.digests
            self.counts.waits += 1
        traceparent, held = traceparent_of(request), max(tracked.held, end)
        name = tracked.params.name
        self._orders.append(Begin(request.request_id, name, prompt, start, end, blocks, traceparent, waits, held))
        self.counts.begins += 1

    def _too_long(self, tracked: Tracked) -> bool:
        """Whether it has more pages than the daemon may give it."""
        return 0 < self._view.most_pages < -(-tracked.request.num_prompt_tokens // self.shape.page_size)

    def step(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], blocks_of: Callable[[str], Sequence[int]]
    ) -> Orders:
        self._mark(scheduled, preempted)
        for request_id in preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saved = 0  # told again as it is computed again
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.begun or tracked.storing:
                continue
            if tracked.first is None and (first := first_of(tracked.request)) is not None:
                tracked.first = first
                self._orders.append(FirstToken(request_id, first))
            total = tracked.request.num_prompt_tokens
            ahead = tracked.request.num_computed_tokens + tokens
            computed = min(counted(tracked) if self.awaits_outcomes else ahead, total)
            page = self.shape.page_size
            if computed // page > tracked.saved // page or tracked.saved < computed == total:
                tracked.saved = computed
                self._orders.append(Save(request_id, computed, self._blocks(blocks_of(request_id), 0, computed)))
        return super().step(scheduled, preempted, blocks_of)

    def finished(self, request: EngineRequest, blocks: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        tracked = self._tracked.get(request.request_id)
        self._waiting.discard(request.request_id)
        self._arriving.pop(request.request_id, None)
        if tracked is None:
            return False, None
        if not tracked.begun:
            del self._tracked[request.request_id]
            return False, None
        if tracked.waits and not tracked.alone:  # the engine has no block of it
            self._orders.append(Cancel(request.request_id))
            del self._tracked[request.request_id]
            return False, None
        assert tracked.params is not None
        tracked.settled = tracked.storing = True
        total = request.num_prompt_tokens
        if self.awaits_outcomes and tracked.saved < total <= counted(tracked):
            tracked.saved = total
            self._orders.append(Save(request.request_id, total, self._blocks(blocks, 0, total)))
        whole = tracked.saved == total
        # Decode would wait until its deadline for what does not come; a router that hears of it asks decode alone.
        sent = whole and not tracked.unsent and self._session and self._view.up
        if tracked.loading or tracked.elsewhere:
            self._orders.append(Cancel(request.request_id))
            return False, None  # the scheduler keeps the blocks by itself until the load is reported
        over, first = Release if whole else Drop, first_of(request)
        self._orders.append(over(request.request_id, first))
        return True, transfer_params.answer(tracked.params, self._view.daemon, first) if sent else None


def first_of(request: EngineRequest) -> int | None:
    """The first token of its reply, once there is one."""
    prompt = request.num_prompt_tokens
    return request.all_token_ids[prompt] if request.num_tokens > prompt else None
