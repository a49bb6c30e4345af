"""A prompt of a prefill engine, as SGLang's scheduler sees its transfer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVTransferMetric
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvferry.connectors.sglang.digests import seed_of
from kvferry.connectors.sglang.manager import KVFerryManager
from kvferry.connectors.sglang.read_ahead import PagesRead
from kvferry.connectors.sglang.transfers import GpuMoment, PageTransfer, PollState, PromptChunk, SentPrompt


class KVFerrySender(BaseKVSender):  # type: ignore[misc]
    """It does not wait for decode: a prompt is computed at once, and its pages are sent when decode has room."""

    def __init__(
        self,
        mgr: KVFerryManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: Sequence[int] = (),
        pp_rank: int = 0,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: PollState | None = None
        self._early_send_wait_event: GpuMoment | None = None  # set by SGLang before a `send`
        self._address = bootstrap_addr
        self._born = time.monotonic()
        self._began: float | None = None
        self._latency: float | None = None
        self._transfer: PageTransfer | None = None
        self.order: SentPrompt | None = None
        self.pages_read: PagesRead | None = None  # SGLang's own hooks are given them
        self._state = PollState.BOOTSTRAPPING  # until it is handed in
        self._reason = ""
        self._pages = self._row = 0
        self._sent = 0
        if mgr.system_dp_size > 1 and not req_has_disagg_prefill_dp_rank:
            mgr.tell_rank(bootstrap_addr, bootstrap_room)

    def take_request(self, request: Any) -> None:
        """Called with the request that it is made for."""
        if getattr(request, "input_embeds", None) is not None:
            self._fail("the request has embeddings in the place of tokens, and nothing names its pages")
            return
        name = self.kv_mgr.name_of(self._address, self.bootstrap_room)
        seed = seed_of(request)
        self._transfer = PageTransfer(name, request.origin_input_ids, self.kv_mgr.kv_args.page_size, seed)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """All ranks may compute it. `num_kv_indices`: all pages of the prompt; `aux_index`: its metadata row."""
        assert self._transfer is not None and num_kv_indices == self._transfer.pages
        assert aux_index is not None
        self._pages, self._row = num_kv_indices, aux_index
        self._state = PollState.WAITING_FOR_INPUT
        self.kv_mgr.waiting.ahead.add(self)

    def pop_decode_prefix_len(self) -> int:
        """Nothing is known here of what decode has: its daemon asks for the rest only."""
        return 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        indices_event: GpuMoment | None = None,
    ) -> None:
        """The next pages of the prompt, in order; the last ones once its metadata row is set. They are computed."""
        after, self._early_send_wait_event = self._early_send_wait_event, None
        transfer = self._transfer
        if transfer is None or self._state is PollState.FAILED or transfer.over:
            return
        if indices_event is not None:
            indices_event.synchronize()
        self._sent += len(kv_indices)
        last = self._sent >= self._pages
        end = transfer.tokens if last else self._sent * transfer.page_size
        row = self.kv_mgr.rows.read(self._row) if last else None
        chunk = PromptChunk(end, np.asarray(kv_indices).tolist(), () if after is None else (after,), row)
        if last:
            self.pages_read = None  # and with it the memory that it is in
        if self.order is None:
            self.order = SentPrompt(transfer)
            self._began = time.monotonic()
            transfer.state = PollState.TRANSFERRING
            self.kv_mgr.carrier.send(self.order)
        self.kv_mgr.carrier.hand_in(self.order, chunk)

    def poll(self) -> PollState:
        if self.order is not None and self._transfer is not None:
            state = self._transfer.state
            if state is PollState.SUCCESS and self._latency is None and self._began is not None:
                self._latency = time.monotonic() - self._began
        else:
            state = self._state
            if state is PollState.BOOTSTRAPPING:
                state = self._bootstrapped()
        if state in (PollState.FAILED, PollState.SUCCESS):
            self.conclude_state = state
        return state

    def _bootstrapped(self) -> PollState:
        if self.kv_mgr.carrier.there and self._transfer is not None and self.kv_mgr.waiting.take_in(self):
            return PollState.WAITING_FOR_INPUT
        if time.monotonic() - self._born > self.kv_mgr.bootstrap_timeout:
            there = "decode has no room" if self.kv_mgr.carrier.there else "there is no session with the daemon"
            self._fail(f"not begun within {self.kv_mgr.bootstrap_timeout} s: {there}")
        return self._state

    @property
    def pages_held(self) -> int:
        if self._transfer is None or self._transfer.over or self._state is PollState.FAILED:
            return 0
        return 0 if self.order is not None and self.order.gave_back else self._transfer.pages

    def _fail(self, reason: str) -> None:
        self._reason, self._state = reason, PollState.FAILED

    def get_transfer_metric(self) -> KVTransferMetric:
        """How many bytes decode asked for its daemon counts, not the prefill engine."""
        return KVTransferMetric(transfer_latency_s=self._latency)

    def failure_exception(self) -> None:
        """Raises why it failed."""
        reason = (self._transfer.reason if self._transfer is not None else "") or self._reason
        raise KVTransferError(self.bootstrap_room, reason or "it failed on another rank", not reason)

    def abort(self) -> None:
        """Ends the transfer: its state is FAILED as soon as nothing is read from its pages any more. Where chunks of
        the prompt are still to come that is waited for: SGLang gives their pages away at once, without a poll."""
        if self.order is None or self._transfer is None:
            self._fail("it was aborted")
            self.conclude_state = PollState.FAILED
            return
        self.kv_mgr.carrier.abort(self._transfer)
        if self._sent < self._pages:
            self.kv_mgr.carrier.wait_over(self._transfer)

    def clear(self) -> None:
        """SGLang needs it no more."""
        self.kv_mgr.waiting.ahead.discard(self)
