"""The prefill daemon's requests: the rendezvous of a worker's Begin with a decode daemon's Ask, and what is sent. Core:
no I/O, time is passed in.

Whichever comes first waits in a bounded table until its deadline. Who gets pages when is decided by `PrefillSupply`. A
request's whole path stays locked until its Done.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.effects import Effect, EndSend, FailAsk, Outbox
from kvferry.daemon.core.errors import (
    RequestError,
    aborted,
    deadline_exceeded,
    invalid,
    precondition,
    unavailable,
)
from kvferry.daemon.core.limits import Name, NamedBlocks, pages_for
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.prefill_entries import EntryKeeper, PrefillLimits, PrefillSends
from kvferry.daemon.core.prefill_entry import BegunPrompt, EntryState, Rendezvous
from kvferry.daemon.core.reservations import Hold
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_AUX_BYTES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState

__all__ = ["PrefillCore", "PrefillLimits"]


class PrefillCore:
    def __init__(self, cache: Cache, limits: PrefillLimits) -> None:
        self.cache = cache
        self.limits = limits
        self._outbox = Outbox(cache)
        self._table = Rendezvous(limits.table)
        self._sends = PrefillSends(cache.page_size, self._outbox)
        self._keeper = EntryKeeper(cache, limits, self._outbox, self._table, self._sends)
        self._supply = self._keeper.supply
        self.fetches = self._keeper.fetches
        self.entries = self._table.entries
        self.counters = self._keeper.counters
        self.pins = Pins(cache, self._supply.holds)

    # -- what the shells ask -------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        return self._outbox.take()

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int:
        namespace = self.cache.namespaces.get(namespace_id)
        return 0 if namespace is None else namespace.tree.match(digests).pages * self.cache.page_size

    @property
    def running(self) -> int:
        return len(self.entries) - self._table.kept - self.waiting_requests

    @property
    def failed_requests(self) -> int:
        """The number of running requests that have failed: they wait for their worker's last word or its proven end."""
        return sum(entry.failed for entry in self.entries.values())

    @property
    def waiting_requests(self) -> int:
        return self._supply.waiting

    @property
    def reserved(self) -> int:
        """The number of running requests that wait for pages to be spilled."""
        return self._supply.reserved

    @property
    def transfer_counters(self) -> TransferCounters:
        return self._sends.counters

    @property
    def active_transfers(self) -> int:
        return len(self._sends.open)

    @property
    def draining_transfers(self) -> int:
        """The number of active transfers of requests that have ended: gathers from their pages may run."""
        return sum(entry.done for entry in self._sends.open.values())

    def _pump(self, now: float) -> None:
        self.cache.clock.now = now
        self._supply.pump(now)
        while self._keeper.yield_pages(now):
            self._supply.pump(now)
        self.cache.settle()
        self.cache.eviction.write_through()
        self.cache.eviction.write_ahead()
        self.counters.overtaken = self._supply.queue.overtaken
        self._outbox.end_step()

    # -- worker's words ------------------------------------------------------------------------------------------

    def begin(
        self,
        worker: int,
        namespace_id: bytes,
        name: Name,
        request: wire.Begin,
        deadline: float,
        now: float,
        blocks: NamedBlocks | None = None,
    ) -> None:
        """Takes a checked Begin, or raises why not. `blocks`: of an engine's, that its pages are."""
        entry = self.entries.get(name)
        if entry is not None and entry.state not in (EntryState.EXPECTED, EntryState.OVER):
            raise precondition(f"name {name} is already in use; a new try takes the next attempt number")
        namespace = self.cache.namespace(namespace_id)
        error = self._keeper.refusal(entry, name, request, self.cache.most(namespace))
        if error is not None:
            self.counters.refused += 1
            self.begin_refused(name, error)
            raise error
        if entry is None:
            entry = self._table.add(name, deadline, now)
        entry.deadline = max(entry.deadline, deadline)
        keep = self.limits.reuse == "on" and not request.warmup and blocks is None
        # The last token's logits are needed, so at least one token is computed.
        matchable = (request.tokens - 1) // self.cache.page_size if keep else 0
        hold = Hold(
            namespace,
            digests=request.digests[: matchable * DIGEST_BYTES],
            wanted=pages_for(request.tokens, self.cache.page_size),
            growth=0,
            priority=request.priority,
            readable_only=True,
            overcommit=1.0,
        )
        entry.prompt = BegunPrompt(worker, hold, request.digests, request.tokens, request.tail_digest, keep, blocks)
        entry.prompt.begun_at = now
        entry.prompt.patience = wire.PATIENCE_NONE if request.warmup and blocks else request.patience
        entry.prompt.engine_held = request.held_tokens // self.cache.page_size
        self._supply.add(entry)
        self._sends.check_asks(entry)
        self.fetches.begun(entry)
        self._pump(now)

    def begin_refused(self, name: Name, error: RequestError) -> None:
        """Whoever asked for it is told at once: nothing else would end those asks before their deadline."""
        entry = self.entries.get(name)
        if entry is not None and entry.state in (EntryState.EXPECTED, EntryState.OVER):
            self._sends.fail_asks(entry, error)
            self._table.drop(entry)

    def progress(self, worker: int, name: Name, tokens: int, now: float, blocks: Sequence[int] = ()) -> None:
        """The prompt's first `tokens` tokens are computed; `blocks` are more of its engine's, where it names them."""
        entry, prompt = self._table.prompt_of(worker, name)
        if entry.told:
            return
        if entry.worker_done or prompt.aux is not None:
            raise precondition(f"name {name} is out of the worker's hands: progress comes before aux or abort")
        if error := self._keeper.objection(entry, blocks, tokens):
            self._keeper.fail(entry, error)
            self._pump(now)
            return
        self._keeper.speed.progress(entry, max(0, tokens - self._keeper.had(prompt)), now)
        prompt.computed = tokens
        if not entry.queued:
            self._keeper.computed(entry)
        self._pump(now)

    def fetch(self, worker: int, name: Name, request: wire.Fetch, now: float) -> None:
        """The engine names blocks for what can be fetched."""
        entry = self._table.unless_over(worker, name)
        if entry is None or entry.told:
            return
        if entry.worker_done:
            raise precondition(f"name {name} is out of the worker's hands: fetch comes before Begun")
        self.cache.clock.now = now
        if error := self.fetches.named(entry, request):
            self._keeper.fail(entry, error)
        self._pump(now)

    def aux(self, worker: int, name: Name, blob: bytes, now: float) -> None:
        """The worker's last word on the request: it touches the pages no more."""
        entry, prompt = self._table.prompt_of(worker, name)
        if entry.told:
            self.abort(worker, name, now)  # it crossed Failed on the way
            return
        if entry.worker_done or prompt.aux is not None:
            raise precondition(f"name {name} is out of the worker's hands: aux comes once, and not behind abort")
        if len(blob) > MAX_AUX_BYTES:
            self._keeper.fail(entry, invalid(f"blob has {len(blob)} bytes; the bound is {MAX_AUX_BYTES}"))
        elif (entry.queued and not prompt.is_ahead) or prompt.computed != prompt.tokens:
            self._keeper.fail(
                entry, precondition(f"aux follows progress to {prompt.tokens} tokens, not {prompt.computed}")
            )
        else:
            prompt.aux = blob
            self._keeper.computes_no_more(entry)
            if not entry.queued:
                self._keeper.handed_in(entry)
        self._pump(now)

    def stow(self, worker: int, name: Name, now: float, *, can: bool = True) -> None:
        """The worker wants a computed prompt's blocks back, which is to wait in the host tier, if it `can`."""
        entry = self._table.unless_over(worker, name)
        if entry is not None and not entry.done:
            self._keeper.stows.begin(entry, can)
            self._pump(now)

    def abort(self, worker: int, name: Name, now: float) -> None:
        entry = self.entries.get(name)
        if entry is None or entry.prompt is None:
            self._outbox.tell_ended(worker, name)
            return
        self._table.prompt_of(worker, name)
        if not (entry.told or entry.acknowledge):  # acknowledge: it was aborted before, and a gather still runs
            self.counters.aborted += 1
        self._keeper.worker_ended(entry, aborted("the prefill worker aborted the request"))
        entry.acknowledge = True
        self._keeper.settle(entry)
        self._pump(now)

    def worker_lost(self, worker: int, now: float) -> None:
        """The worker's stream broke: it may still write; its pages are orphaned until `worker_gone`."""
        for entry, prompt in self._table.of_worker(worker):
            if entry.worker_done:
                continue  # it had said its last word: the pages can still be sent
            if not entry.done:
                self.counters.aborted += 1
                self._keeper.withdraw(
                    entry,
                    unavailable("the prefill worker is gone"),
                    EntryState.ABORTED if entry.queued else EntryState.FAILED,
                )
            leased = self.cache.pool.those(prompt.private, PageState.LEASED)
            self.cache.pool.move(leased, PageState.LEASED, PageState.ORPHANED)
            self._keeper.settle(entry)
        self._pump(now)

    def worker_gone(self, worker: int, now: float) -> None:
        """The worker's end is proven: it writes no more."""
        for entry, _ in self._table.of_worker(worker):
            if not entry.worker_done:
                if not entry.done:
                    self.counters.aborted += 1
                self._keeper.worker_ended(entry, unavailable("the prefill worker is gone"))
            self._keeper.settle(entry)
        self._pump(now)

    def pool_leaves(self, now: float) -> None:
        """The pool's memory goes with the engine that it is of: what it had computed can be sent no more."""
        self.pins.unpin(0)
        self.cache.eviction.ahead = 0  # of the next one it is as much as was asked for
        for entry in list(self.entries.values()):
            if entry.prompt is None or entry.done:
                continue
            self._keeper.fail(entry, unavailable("the engine whose memory the pool is has ended"))
            if entry.state is EntryState.FAILED:
                entry.move(EntryState.FAILED_ENDING)
                self._keeper.settle(entry)
        self._pump(now)

    # -- the decode daemon's words -------------------------------------------------------------------------------

    def ask(self, session: int, name: Name, request: peer.Ask, deadline: float, now: float) -> None:
        """An Ask under a well-formed name. What is wrong with it fails the ask, never the session."""
        entry = self.entries.get(name)
        error = self._sends.refusal(session, entry, name, request)
        if error is None and entry is None:
            error = self._table.make_room()
        if error is not None:
            self._outbox.put(FailAsk(session, request.transfer, error))
            return
        if entry is None:
            entry = self._table.add(name, deadline, now)
        if entry.session is None:
            self._supply.asked(entry, session)
        entry.deadline = max(entry.deadline, deadline)
        entry.asks.append(request)
        self._sends.check_asks(entry)
        self.cache.clock.now = now
        self.fetches.asked(entry)
        self._sends.open_asks(entry)
        self._keeper.send_aux(entry)
        self._pump(now)

    def ask_end(self, session: int, transfer: int) -> None:
        """Ends an ask. Idempotent. Of an unknown transfer nothing is sent, so it has ended."""
        entry = self._sends.open.get((session, transfer))
        if entry is not None:
            self._outbox.put(EndSend(session, transfer))
            return
        for waiting in self.entries.values():
            if waiting.session == session:
                waiting.asks = [ask for ask in waiting.asks if ask.transfer != transfer]
        self._outbox.put(EndSend(session, transfer))

    def send_completed(self, session: int, transfer: int, now: float) -> None:
        """Every part of the transfer has reached the other side; no gather of it runs."""
        if self._keeper.send_closed(session, transfer) is not None:
            self.transfer_counters.completed += 1
        self._pump(now)

    def send_ended(self, session: int, transfer: int, now: float) -> None:
        """Called after EndSend: no gather of the transfer runs."""
        entry = self._keeper.send_closed(session, transfer)
        if entry is not None:
            self.transfer_counters.abort(entry.failure or "request_ended")
        self._pump(now)

    def done(self, session: int, name: Name, now: float) -> None:
        """The decode daemon needs nothing more of this request. Idempotent."""
        entry = self.entries.get(name)
        if entry is None or entry.session not in (None, session):
            return
        if entry.state is EntryState.YIELDED:
            self._table.drop(entry)
        elif entry.state is EntryState.EXPECTED:
            self._table.keep_name(entry, EntryState.OVER)  # so that a worker that comes late is told
            for waiting in entry.asks:
                self._outbox.put(EndSend(session, waiting.transfer))
            entry.asks.clear()
        elif entry.state in (EntryState.COMPUTED, EntryState.SERVED):
            entry.move(EntryState.RECEIVED)  # what it still has open it has received, or ends with AskEnd
            self._keeper.settle(entry)
        elif not entry.done:
            self._keeper.fail(entry, aborted("the decode daemon ended the request before it was computed"))
        self._pump(now)

    def session_down(self, session: int, now: float) -> None:
        """The session is over and its sender with it; requests that it had asked for end."""
        self.cache.clock.now = now
        self._sends.session_down(session)
        self.fetches.session_down(session)
        for entry in [entry for entry in self.entries.values() if entry.session == session]:
            entry.asks.clear()
            if entry.prompt is None:
                self._table.drop(entry)
                continue
            if not entry.done:
                self._keeper.fail(entry, unavailable("the session to the decode daemon broke"))
            self._sends.end(entry)
        self._pump(now)

    # -- what comes back -----------------------------------------------------------------------------------------

    def fetch_arrived(self, transfer: int, prompt_pages: Sequence[int], now: float) -> None:
        """Verified bytes of these prompt pages, ascending, are in the fetch's pool pages."""
        self.cache.clock.now = now
        self.fetches.arrived(transfer, prompt_pages)
        self._pump(now)

    def fetch_completed(self, transfer: int, now: float) -> None:
        """Every page of the fetch has arrived; the receiver knows it no more."""
        self.cache.clock.now = now
        self.fetches.completed(transfer)
        self._pump(now)

    def fetch_stopped(self, session: int, transfer: int, reason: str, now: float) -> None:
        """Parts of the fetch were wrong, or the decode daemon says that it sends no more of it."""
        self.fetches.stopped_by(session, transfer, reason)
        self._pump(now)

    def fetch_drained(self, transfer: int, now: float) -> None:
        """Called after StopFetch: no copy into the fetch's pages runs, and none will."""
        self.cache.clock.now = now
        self.fetches.drained(transfer)
        self._pump(now)

    def found(self, session: int, number: int, pages: int, now: float) -> None:
        """The session's decode daemon holds so many leading pages of what was looked up."""
        self.cache.clock.now = now
        self.fetches.found(session, number, pages)
        self._pump(now)

    def wake(self, now: float) -> None:
        """Called after WakeAt."""
        self.cache.clock.now = now
        self.fetches.wake(now)
        self._pump(now)

    def tail_zeroed(self, name: Name, now: float) -> None:
        """Called after ZeroTail: the clearing runs no more. Until then the page is not given to anybody else."""
        entry = self.entries[name]
        entry.zeroing = False
        self._keeper.look_at_rest(entry, now)
        self._keeper.settle(entry)
        self._pump(now)

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None:
        """A copy between the tiers is over; `failed` are the device ids of pages whose bytes are not right."""
        self.cache.clock.now = now
        if not self._keeper.stows.ended(number, failed, mismatched, seconds):
            ended = self._supply.copy_ended(number, failed, mismatched, seconds)
            if ended.lost:
                self.pins.shorten(ended.namespace)
        self._pump(now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This daemon stood still for so long, and has not read what came meanwhile: nothing has rested longer by
        that."""
        self._keeper.stood_still(seconds, now)

    def tick(self, now: float) -> None:
        self.pins.expire(now)
        self.fetches.wake(now)
        for entry in list(self.entries.values()):
            if entry.deadline > now:
                continue
            if entry.done:
                if entry.prompt is None:
                    self._table.drop(entry)
                else:
                    self._sends.end(entry)  # of a decode daemon that said Done and grants no credit for the rest
                continue
            who = (
                "worker began it"
                if entry.prompt is None
                else "decode daemon asked for it"
                if not entry.asked
                else "end came"
            )
            self._keeper.expire(
                entry, deadline_exceeded(f"waited {now - entry.arrived_at:.3f} s and no {who}; the deadline is passed")
            )
        self._pump(now)
