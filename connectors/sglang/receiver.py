"""A prompt of a decode engine, as SGLang's scheduler sees its transfer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVReceiver
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvferry.connectors.sglang.digests import seed_of
from kvferry.connectors.sglang.manager import KVFerryManager
from kvferry.connectors.sglang.transfers import FetchedPrompt, PageTransfer, PollState


class KVFerryReceiver(BaseKVReceiver):  # type: ignore[misc]
    """What decode lacks comes from its daemon's host tier or from prefill, straight into SGLang's pages."""

    def __init__(self, mgr: KVFerryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.bootstrap_infos: list[Any] = []
        self.conclude_state: PollState | None = None
        self.require_staging = False
        self.abort_notified = False
        self._dp_rank: int | None = None
        self._born = time.monotonic()
        self._transfer: PageTransfer | None = None
        self._handed = self._aborted = False
        self._state = PollState.BOOTSTRAPPING  # until it is handed in
        self._reason = ""
        self._prefill = ""  # name of its daemon

    def take_request(self, request: Any, *, rebootstrap: bool) -> None:
        """Called with the request that it is made for."""
        if rebootstrap:
            self._fail("kvferry's pages are of the weights that the engine started with: no request is computed anew")
        elif getattr(request, "input_embeds", None) is not None:
            self._fail("the request has embeddings in the place of tokens, and nothing names its pages")
        else:
            name = self.kv_mgr.name_of(self.bootstrap_addr, self.bootstrap_room or 0)
            seed = seed_of(request)
            self._transfer = PageTransfer(name, request.origin_input_ids, self.kv_mgr.kv_args.page_size, seed)

    def init(self, prefill_dp_rank: int) -> None:
        self._dp_rank = prefill_dp_rank

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        device_kv_indices: Any = None,
    ) -> None:
        """`kv_indices`: the pages for the prompt's tokens from `decode_prefix_len` on; `aux_index`: its row."""
        if self._state is PollState.FAILED or self._transfer is None or aux_index is None:
            self._fail("it has no request")
            return
        start, blocks = decode_prefix_len or 0, np.asarray(kv_indices).tolist()
        if len(blocks) != self._transfer.pages - start // self._transfer.page_size:
            self._fail(f"kv_indices has {len(blocks)} pages for tokens {start} to {self._transfer.tokens}")
            return
        self._handed = True
        self._transfer.state = PollState.TRANSFERRING
        order = FetchedPrompt(self._transfer, self._prefill, start, blocks, aux_index, self.kv_mgr.begun())
        self.kv_mgr.carrier.receive(order)

    def poll(self) -> PollState:
        if self._handed and self._transfer is not None:
            state = self._transfer.state
        else:
            state = self._state
            if state is PollState.BOOTSTRAPPING:
                state = self._state = self._bootstrapped()
        if state in (PollState.FAILED, PollState.SUCCESS) and self.conclude_state is None:
            self.conclude_state = state
            if state is PollState.FAILED and self._dp_rank is not None and not self._aborted:
                self.kv_mgr.peers.forget(self.bootstrap_addr, self._dp_rank)
        return state

    def _bootstrapped(self) -> PollState:
        lacks = "prefill's rank"
        if self._dp_rank is not None:
            if self._transfer is None:
                self._fail("it has no request: kvferry's hooks were not applied")
                return self._state
            self._prefill = self.kv_mgr.peers.find(self.bootstrap_addr, self._dp_rank)
            if self._prefill and self.kv_mgr.carrier.there:
                return PollState.WAITING_FOR_INPUT
            lacks = "a session with the daemon" if self._prefill else "the name of prefill's daemon"
        if time.monotonic() - self._born > self.kv_mgr.waiting_timeout:
            self._fail(f"{lacks} did not come within {self.kv_mgr.waiting_timeout} s")
        return self._state

    def _fail(self, reason: str) -> None:
        self._reason, self._state = self._reason or reason, PollState.FAILED

    def failure_exception(self) -> None:
        """Raises why it failed."""
        reason = (self._transfer.reason if self._transfer is not None else "") or self._reason
        raise KVTransferError(self.bootstrap_room, reason or "it failed on another rank", not reason)

    def abort(self) -> None:
        """Ends the transfer: its state is FAILED as soon as nothing is written into its pages any more."""
        self._aborted = True
        if self._handed and self._transfer is not None:
            self.kv_mgr.carrier.abort(self._transfer)
        else:
            self._fail("it was aborted")
            self.conclude_state = PollState.FAILED

    def clear(self) -> None:
        """SGLang needs it no more."""
