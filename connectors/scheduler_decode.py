"""The scheduler's half in a decode engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvferry.connectors import params as transfer_params
from kvferry.connectors.orders import Cancel, Load, Orders, PromptPages, Restore, StorePages
from kvferry.connectors.scheduler_side import EngineRequest, SchedulerSide, Tracked, counted, traceparent_of

_log = logging.getLogger(__name__)


class DecodeScheduler(SchedulerSide):
    """The decode engine's part: prompts come from a prefill daemon, or as far as they can from the daemon beside this
    engine."""

    _begins: list[tuple[EngineRequest, int]] | None = None  # None: nobody takes them

    def new_request(self, request: EngineRequest) -> None:
        self._track(request)

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked.settled or tracked.loading or request.skip_reading_prefix_cache:
            return 0, False  # the last: all of its prompt is to be computed, for its log probabilities
        if not self._view.up:
            self.counts.not_asked += 1
            return 0, False
        if tracked.params is not None:
            if self._arrives_anyway(tracked, computed):
                return None, False
            external = request.num_prompt_tokens - computed
            return (external, True) if external > 0 else (0, False)
        return self._held(tracked, request.num_tokens - 1, computed)  # one is left to compute, for its logits

    def _arrives_anyway(self, tracked: Tracked, computed: int) -> bool:
        """Whether half of what it lacks is on its way for another request: loaded for each it would take their blocks,
        too. That one may not be computed before what prefill has of this one is sent: it is waited for no longer than
        half of a deadline. Behind one that has brought nothing no further one is waited for."""
        first = self._for_whom(tracked, computed, tracked.request.num_prompt_tokens)
        if not first:
            return False
        if tracked.behind not in self._arriving:
            if tracked.behind and computed <= tracked.held:
                return False
            self.counts.joins += not tracked.behind
            tracked.behind, tracked.held = first, computed
        now = self.now()
        tracked.until = tracked.until or now + self.put_off_seconds
        return now < tracked.until

    def allocated(self, request: EngineRequest, blocks: Sequence[int], external: int) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.settled:
            return
        if external == 0:
            tracked.settled = True
            return
        tracked.settled = tracked.loading = True
        page = self.shape.page_size
        if tracked.params is not None:
            end = request.num_prompt_tokens
            start = end - external
            held = start // page * page
            prompt = tracked.chain.prompt(end)
            self._orders.append(
                Load(
                    request.request_id,
                    tracked.params.name,
                    prompt,
                    tracked.params.prefill,
                    start,
                    self._blocks(blocks, 0, held),
                    self._blocks(blocks, start, end),
                    traceparent_of(request),
                )
            )
            self._arriving[request.request_id] = prompt.digests
            self.counts.loads += 1
            self.counts.load_tokens += external
        else:
            end = tracked.found
            prompt = tracked.chain.prompt(end + 1)
            start = end - external
            name = transfer_params.new_name()
            own = self._blocks(blocks, start, end)
            self._orders.append(Restore(request.request_id, name, prompt, start, own, traceparent_of(request)))
            self.counts.restores += 1
            self.counts.restore_tokens += external

    @property
    def has_first_tokens(self) -> bool:
        return bool(self._begins)

    def begin_with_first_tokens(self) -> None:
        """Keeps first tokens from now on: somebody takes them."""
        self._begins = []

    def received(self, requests: Sequence[str]) -> None:
        for request in requests:
            if (tracked := self._tracked.get(request)) is None:
                continue
            first, tracked.first = tracked.first, None
            bad, tracked.bad = tracked.bad, False
            if first is not None and not bad and self._begins is not None and not (tracked.alone or tracked.storing):
                self._begins.append((tracked.request, first))
        super().received(requests)

    def take_first_tokens(self) -> Sequence[tuple[EngineRequest, int]]:
        """Requests whose prompts have come since the last call, with the first tokens of their replies: they begin
        behind these."""
        if not self._begins:
            return ()
        begins, self._begins = self._begins, []
        return begins

    def finished(self, request: EngineRequest, blocks: Sequence[int]) -> tuple[bool, dict[str, object] | None]:
        self._arriving.pop(request.request_id, None)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False, None
        tracked.settled = tracked.storing = True
        if tracked.loading:
            # The scheduler keeps the blocks by itself until the load is reported.
            self._orders.append(Cancel(request.request_id))
            return False, None
        # The last token's KV is not computed, nor what a step under way is to compute.
        ready = min(counted(tracked), request.num_tokens - 1)
        tokens = ready - ready % self.shape.page_size
        if tokens < 1 or tracked.alone or not (self._view.up and self._view.keeps):
            del self._tracked[request.request_id]
            return False, None
        digests = tracked.chain.pages(tokens)
        if self._view.held_pages(digests) * self.shape.page_size >= tokens:
            del self._tracked[request.request_id]  # as after most short answers: its prompt was loaded from there
            return False, None
        name, prompt = transfer_params.new_name(), PromptPages(digests, tokens)
        self._orders.append(StorePages(request.request_id, name, prompt, self._blocks(blocks, 0, tokens)))
        self.counts.stores += 1
        return True, None

    def step(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], blocks_of: Callable[[str], Sequence[int]]
    ) -> Orders:
        self._mark(scheduled, preempted)
        for request_id in preempted:
            # What it computed may be found here again; a prefill daemon has forgotten it.
            if (tracked := self._tracked.get(request_id)) is not None and not (tracked.loading or tracked.alone):
                tracked.params, tracked.settled = None, False
        if self.awaits_outcomes:  # what it holds may be another's blocks, which this very step fails to load
            self._orders = [
                replace(order, held_blocks=()) if isinstance(order, Load) else order for order in self._orders
            ]
        return super().step(scheduled, preempted, blocks_of)

    def _renew(self, tracked: Tracked) -> None:
        if tracked.settled:  # it was preempted, and the prefill daemon has forgotten it
            tracked.params = None
        super()._renew(tracked)

    def _track(self, request: EngineRequest) -> Tracked:
        try:
            half = transfer_params.decode_half(request.kv_transfer_params, self._default_prefill)
        except ValueError as error:
            _log.warning("request %s is computed here: %s", request.request_id, error)
            half = None
        return self._tracked_anew(request, half)
