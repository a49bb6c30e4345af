"""The prefill daemon's requests: the rendezvous of a worker's Begin with a decode daemon's Ask, and what is sent. Core:
no I/O, time is passed in.

Whichever comes first waits in a bounded table until its deadline. Who gets pages when is `prefill_supply`'s. A
request's whole path stays locked until its Done.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.core.effects import (
    EndSend,
    FailAsk,
    SendProgress,
    ZeroTail,
)
from kvferry.daemon.core.errors import (
    RequestError,
    aborted,
    deadline_exceeded,
    invalid,
    precondition,
    unavailable,
)
from kvferry.daemon.core.limits import Name, pages_for
from kvferry.daemon.core.prefill_entries import PrefillLimits, PrefillRequests
from kvferry.daemon.core.prefill_entry import BegunPrompt, EntryState
from kvferry.daemon.core.reservations import Hold
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_AUX_BYTES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState

__all__ = ["PrefillCore", "PrefillLimits"]


class PrefillCore(PrefillRequests):
    # -- worker's words ------------------------------------------------------------------------------------------

    def begin(
        self, worker: int, namespace_id: bytes, name: Name, request: wire.Begin, deadline: float, now: float
    ) -> None:
        entry = self.entries.get(name)
        if entry is not None and entry.state not in (EntryState.EXPECTED, EntryState.OVER):
            raise precondition(f"name {name} is already in use; a new try takes the next attempt number")
        namespace = self.store.namespace(namespace_id)
        most = self.store.most(namespace)
        error = self._refusal(entry, name, request.tokens, most)
        if error is not None:
            self.counters.refused += 1
            self.begin_refused(name, error)
            raise error
        if entry is None:
            entry = self._new_entry(name, deadline, now)
        entry.deadline = max(entry.deadline, deadline)
        keep = self.limits.reuse == "on" and not request.warmup
        # The last token's logits are needed, so at least one token is computed.
        matchable = (request.tokens - 1) // self.store.page_size if keep else 0
        hold = Hold(
            namespace,
            digests=request.digests[: matchable * DIGEST_BYTES],
            wanted=pages_for(request.tokens, self.store.page_size),
            growth=0,
            priority=request.priority,
            readable_only=True,
            overcommit=1.0,
        )
        entry.prompt = BegunPrompt(worker, hold, request.digests, request.tokens, request.tail_digest, keep)
        self._supply.add(entry)
        self._check_asks(entry)
        self._pump(now)

    def begin_refused(self, name: Name, error: RequestError) -> None:
        """Whoever asked for it is told at once: nothing else would end those asks before their deadline."""
        entry = self.entries.get(name)
        if entry is not None and entry.state in (EntryState.EXPECTED, EntryState.OVER):
            self._fail_asks(entry, error)
            self._drop(entry)

    def progress(self, worker: int, name: Name, tokens: int, now: float) -> None:
        entry, prompt = self._prompt_of(worker, name)
        if entry.told:
            return
        if entry.worker_done:
            raise precondition(f"name {name} is out of the worker's hands: progress comes before aux or abort")
        if entry.queued or not prompt.computed <= tokens <= prompt.tokens:
            self._fail(
                entry, invalid(f"tokens is {tokens}; it must be {prompt.computed} to {prompt.tokens}, after Begun")
            )
            self._pump(now)
            return
        prompt.computed = tokens
        page_size = self.store.page_size
        full, partial = divmod(tokens, page_size)
        ready = full
        if tokens == prompt.tokens and partial:
            ready += 1
            if ready > prompt.pages_ready:
                entry.zeroing = True
                self._effects.append(ZeroTail(name, prompt.pages[full], partial))
        if prompt.keep:
            self._publish(prompt, full)
        if ready > prompt.pages_ready:
            prompt.pages_ready = ready
            for number in sorted(entry.sends):
                assert entry.session is not None
                self._effects.append(SendProgress(entry.session, number, ready))
        self._pump(now)

    def aux(self, worker: int, name: Name, blob: bytes, now: float) -> None:
        """The worker's last word on the request: it touches the pages no more."""
        entry, prompt = self._prompt_of(worker, name)
        if entry.told:
            self.abort(worker, name, now)  # it crossed Failed on the way
            return
        if entry.worker_done:
            raise precondition(f"name {name} is out of the worker's hands: aux comes once, and not behind abort")
        if len(blob) > MAX_AUX_BYTES:
            self._fail(entry, invalid(f"blob has {len(blob)} bytes; the bound is {MAX_AUX_BYTES}"))
        elif entry.queued or prompt.computed != prompt.tokens:
            self._fail(entry, precondition(f"aux follows progress to {prompt.tokens} tokens, not {prompt.computed}"))
        else:
            prompt.aux = blob
            entry.move(EntryState.COMPUTED)
            self._open_asks(entry)
            self._send_aux(entry)
            self._settle(entry)
        self._pump(now)

    def abort(self, worker: int, name: Name, now: float) -> None:
        entry = self.entries.get(name)
        if entry is None or entry.prompt is None:
            self._tell_ended(worker, name)
            return
        self._prompt_of(worker, name)
        if not (entry.told or entry.acknowledge):  # acknowledge: it was aborted before, and a gather still runs
            self.counters.aborted += 1
        self._worker_ended(entry, aborted("the prefill worker aborted the request"))
        entry.acknowledge = True
        self._settle(entry)
        self._pump(now)

    def worker_lost(self, worker: int, now: float) -> None:
        """Its stream broke: it may still write; its pages are orphaned until `worker_gone`."""
        for entry, prompt in self._of_worker(worker):
            if entry.worker_done:
                continue  # it had said its last word: the pages can still be sent
            if not entry.done:
                self.counters.aborted += 1
                self._withdraw(
                    entry,
                    unavailable("the prefill worker is gone"),
                    EntryState.ABORTED if entry.queued else EntryState.FAILED,
                )
            leased = self.store.pool.those(prompt.private, PageState.LEASED)
            self.store.pool.move(leased, PageState.LEASED, PageState.ORPHANED)
            self._settle(entry)
        self._pump(now)

    def worker_gone(self, worker: int, now: float) -> None:
        """Proof that it writes no more."""
        for entry, _ in self._of_worker(worker):
            if not entry.worker_done:
                if not entry.done:
                    self.counters.aborted += 1
                self._worker_ended(entry, unavailable("the prefill worker is gone"))
            self._settle(entry)
        self._pump(now)

    def pool_leaves(self, now: float) -> None:
        """The pool's memory goes with the engine that it is of: what it had computed can be sent no more."""
        self.pins.unpin(0)
        for entry in list(self.entries.values()):
            if entry.prompt is None or entry.done:
                continue
            self._fail(entry, unavailable("the engine whose memory the pool is has ended"))
            if entry.state is EntryState.FAILED:
                entry.move(EntryState.FAILED_ENDING)
                self._settle(entry)
        self._pump(now)

    # -- the decode daemon's words -------------------------------------------------------------------------------

    def ask(self, session: int, name: Name, request: peer.Ask, deadline: float, now: float) -> None:
        """An Ask under a well-formed name. What is wrong with it fails the ask, never the session."""
        entry = self.entries.get(name)
        error = self._ask_refusal(session, entry, name, request)
        self._newest[session] = max(request.transfer, self._newest.get(session, -1))
        if error is not None:
            self._effects.append(FailAsk(session, request.transfer, error))
            return
        if entry is None:
            entry = self._new_entry(name, deadline, now)
        if entry.session is None:
            self._supply.asked(entry, session)
        entry.deadline = max(entry.deadline, deadline)
        entry.asks.append(request)
        self._check_asks(entry)
        self._open_asks(entry)
        self._send_aux(entry)
        self._pump(now)

    def ask_end(self, session: int, transfer: int) -> None:
        """Idempotent. Of an unknown transfer nothing is sent, so it has ended."""
        entry = self._sends.get((session, transfer))
        if entry is not None:
            self._effects.append(EndSend(session, transfer))
            return
        for waiting in self.entries.values():
            if waiting.session == session:
                waiting.asks = [ask for ask in waiting.asks if ask.transfer != transfer]
        self._effects.append(EndSend(session, transfer))

    def send_completed(self, session: int, transfer: int, now: float) -> None:
        """Every part of it has reached the other side; no gather of it runs."""
        if self._send_closed(session, transfer) is not None:
            self.transfer_counters.completed += 1
        self._pump(now)

    def send_ended(self, session: int, transfer: int, now: float) -> None:
        """After EndSend: no gather of it runs."""
        entry = self._send_closed(session, transfer)
        if entry is not None:
            self.transfer_counters.abort(entry.failure or "request_ended")
        self._pump(now)

    def done(self, session: int, name: Name, now: float) -> None:
        """The decode daemon needs nothing more of this request. Idempotent."""
        entry = self.entries.get(name)
        if entry is None or entry.session not in (None, session):
            return
        if entry.state is EntryState.YIELDED:
            self._drop(entry)
        elif entry.state is EntryState.EXPECTED:
            entry.move(EntryState.OVER)
            self._over[name] = None  # so that a worker that comes late is told
            self._effects += [EndSend(session, ask.transfer) for ask in entry.asks]
            entry.asks.clear()
        elif entry.state in (EntryState.COMPUTED, EntryState.SERVED):
            entry.move(EntryState.RECEIVED)  # what it still has open it has received, or ends with AskEnd
            self._settle(entry)
        elif not entry.done:
            self._fail(entry, aborted("the decode daemon ended the request before it was computed"))
        self._pump(now)

    def session_down(self, session: int, now: float) -> None:
        """The session is over and its sender with it; requests that it had asked for end."""
        self._newest.pop(session, None)
        for entry in [entry for entry in self.entries.values() if entry.session == session]:
            entry.asks.clear()
            if entry.prompt is None:
                self._drop(entry)
                continue
            if not entry.done:
                self._fail(entry, unavailable("the session to the decode daemon broke"))
            self._end_sends(entry)
        self._pump(now)

    def tail_zeroed(self, name: Name, now: float) -> None:
        """After ZeroTail: it runs no more. Until then the page is not given to anybody else."""
        entry = self.entries[name]
        entry.zeroing = False
        if entry.rests:
            self._rested[entry] = now
        self._settle(entry)
        self._pump(now)

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None:
        """A copy between the tiers is over; `failed` are the device ids of pages whose bytes are not right."""
        ended = self._supply.copy_ended(number, failed, mismatched, seconds)
        if ended.lost:
            self.pins.shorten(ended.namespace)
        self._pump(now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This daemon did, for so long, and has not read what came meanwhile: nothing has rested longer by that."""
        self._rested = {entry: min(since + seconds, now) for entry, since in self._rested.items()}

    def tick(self, now: float) -> None:
        self.pins.expire(now)
        for entry in list(self.entries.values()):
            if entry.deadline > now:
                continue
            if entry.done:
                if entry.prompt is None:
                    self._drop(entry)
                else:
                    self._end_sends(entry)  # of a decode daemon that said Done and grants no credit for the rest
                continue
            who = (
                "worker began it"
                if entry.prompt is None
                else "decode daemon asked for it"
                if not entry.asked
                else "end came"
            )
            self._expire(
                entry, deadline_exceeded(f"waited {now - entry.arrived_at:.3f} s and no {who}; the deadline is passed")
            )
        self._pump(now)
