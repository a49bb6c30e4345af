"""The scheduler's half in a prefill engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvferry.connectors import params as transfer_params
from kvferry.connectors.orders import Begin, Cancel, Drop, FirstToken, Orders, Release, Save
from kvferry.connectors.scheduler_side import EngineRequest, SchedulerSide, counted, traceparent_of

_log = logging.getLogger(__name__)


class PrefillScheduler(SchedulerSide):
    """The prefill engine's part: prompts are computed here and pushed, chunk by chunk."""

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

    def matched(self, request: EngineRequest, computed: int) -> tuple[int, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.begun or not self._view.up or request.skip_reading_prefix_cache:
            return 0, False
        return self._held(tracked, request.num_prompt_tokens - 1, computed)

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.begun or tracked.alone:
            return
        assert tracked.params is not None
        # Whether a look-up found the daemon gone or not: what was promised to the engine must be reported, and a worker
        # without a daemon fails the push at once.
        tracked.begun = True
        most = self._view.most_pages
        tracked.unsent = 0 < most < -(-request.num_prompt_tokens // self.shape.page_size)
        prompt = tracked.chain.prompt(request.num_prompt_tokens)
        begin = Begin(request.request_id, tracked.params.name, prompt, traceparent=traceparent_of(request))
        if external:
            start, end = tracked.found - external, tracked.found
            begin = replace(begin, start=start, end=end, blocks=self._blocks(blocks, start, end))
            tracked.loading = True
        self._orders.append(begin)
        self.counts.begins += 1

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
        if tracked is None:
            return False, None
        if not tracked.begun:
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
        over = Release if whole else Drop
        self._orders.append(over(request.request_id, first_of(request)))
        return True, transfer_params.answer(tracked.params, self._view.daemon) if sent else None


def first_of(request: EngineRequest) -> int | None:
    """The first token of its reply, once there is one."""
    prompt = request.num_prompt_tokens
    return request.all_token_ids[prompt] if request.num_tokens > prompt else None
