"""What the prefill daemon keeps of its requests, what it sends of them, and how they end. Core: no I/O.

`prefill_core` has the steps from outside; each of them ends with `_pump`, which looks again at who waits for pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import RequestCounters, TransferCounters, reason_of
from kvferry.daemon.core.effects import (
    Effect,
    EndSend,
    FailAsk,
    OpenSend,
    SendAux,
    ToWorker,
    tier_effects,
    zero_effects,
)
from kvferry.daemon.core.errors import (
    RequestError,
    aborted,
    exhausted,
    invalid,
    out_of_range,
    precondition,
    unavailable,
)
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, Name, pages_for
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry, EntryState
from kvferry.daemon.core.prefill_scheduler import PrefillSupply
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import PROMPT

REST_SECONDS = 1.0  # Done, or an Ask for what came wrong, takes a round trip


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    table: int  # requests in the rendezvous table, from either side
    reuse: str = "on"
    overtakes: int = OVERTAKES


class PrefillRequests:
    def __init__(self, store: Cache, limits: PrefillLimits) -> None:
        self.store = store
        self.limits = limits
        self.counters = RequestCounters()
        self.transfer_counters = TransferCounters()
        self.entries: dict[Name, Entry] = {}
        # Of them, those kept for who comes late, oldest first: ended by Done, and yielded.
        self._over: dict[Name, None] = {}
        self._yielded: dict[Name, None] = {}
        self._sends: dict[tuple[int, int], Entry] = {}  # (session, transfer)
        self._rested: dict[Entry, float] = {}  # all that rest, since when, and some that do no more
        self._newest: dict[int, int] = {}  # by session, the greatest transfer number that it has used
        self._supply = PrefillSupply(store, limits.overtakes, self._on_begun)
        self.pins = Pins(store, self._supply.holds)
        self._next_order = 1
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return [*zero_effects(self.store), *effects]

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int:
        namespace = self.store.namespaces.get(namespace_id)
        return 0 if namespace is None else namespace.tree.match(digests).pages * self.store.page_size

    @property
    def running(self) -> int:
        return len(self.entries) - len(self._over) - len(self._yielded) - self.waiting_requests

    @property
    def failed_requests(self) -> int:
        """Of the running ones, those that have failed: they wait for their worker's last word or its proven end."""
        return sum(entry.failed for entry in self.entries.values())

    @property
    def waiting_requests(self) -> int:
        return self._supply.waiting

    @property
    def reserved(self) -> int:
        """Of the running ones, those that wait for pages to be spilled."""
        return self._supply.reserved

    @property
    def active_transfers(self) -> int:
        return len(self._sends)

    @property
    def draining_transfers(self) -> int:
        """Of the active ones, those of requests that have ended: gathers from their pages may run."""
        return sum(entry.done for entry in self._sends.values())

    # -- pages ---------------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        self.store.clock.now = now
        self._supply.pump(now)
        while (entry := self._resting(now)) is not None:
            self._yield_pages(entry)
            self._supply.pump(now)
        self.store.settle()
        self.store.eviction.write_through()
        self.counters.overtaken = self._supply.queue.overtaken
        self._effects += tier_effects(self.store)

    def _resting(self, now: float) -> Entry | None:
        """Of those that have rested for REST_SECONDS the youngest whose pages one that was asked for waits for and may
        have, where nothing moves that would give pages back. Where pages are to be asked for again the decode daemon
        turns to the oldest first.

        At the decode daemon it may wait for a page that another brings, and that one's prompt wait here for its pages:
        without this both would stay until their deadline.
        """
        if not self._rested or self._supply.reserved or any(entry.moves for entry in self.entries.values()):
            return None
        self._rested = {entry: since for entry, since in self._rested.items() if entry.rests}
        rested = [entry for entry, since in self._rested.items() if since + REST_SECONDS <= now]
        for wants in self._supply.first_asked() if rested else ():
            any_tenant = wants.namespace.within_hard(wants.wanted)  # else its own hard quota is what is in the way
            found = [entry for entry in rested if any_tenant or entry.scope is wants.namespace]
            if found:
                return max(found, key=lambda entry: entry.order)
        return None

    def _yield_pages(self, entry: Entry) -> None:
        """Whoever asks for some of it again is told to try anew. The name stays until Done or its deadline."""
        prompt = entry.prompt
        assert prompt is not None and entry.rests
        del self._rested[entry]
        self._supply.drop(entry)
        self.counters.finished += 1
        self._tell_ended(prompt.worker, entry.name)
        entry.prompt = None
        entry.move(EntryState.YIELDED)
        self._yielded[entry.name] = None

    def _on_begun(self, entry: Entry) -> None:
        prompt = entry.prompt
        assert prompt is not None
        hold, page_size = prompt.hold, self.store.page_size
        prompt.tree_pages = prompt.pages_ready = hold.matched
        prompt.computed = hold.matched * page_size
        host = hold.host_matched * page_size
        self.counters.lookup(prompt.tokens, prompt.computed, host)
        hold.namespace.looked_up(prompt.tokens, prompt.computed, host)
        begun = wire.Begun(name=entry.name.to_proto(), matched_tokens=prompt.computed, pages=prompt.pages)
        self._effects.append(ToWorker(prompt.worker, wire.WorkerEvent(begun=begun)))
        self._open_asks(entry)

    def _publish(self, prompt: BegunPrompt, full: int) -> None:
        """Computed full pages enter the tree. Where another request was first, its page wins and ours stays private
        until the end. Its pages are locked then, too: while they are promised to others, ours wait.
        """
        if full <= prompt.tree_pages:
            return
        namespace = prompt.hold.namespace
        digests = prompt.digests[: full * DIGEST_BYTES]
        theirs = namespace.tree.match(digests).device_pages - prompt.tree_pages
        if theirs > 0 and not self.store.fits(namespace, theirs):
            return
        fresh = prompt.pages[prompt.tree_pages : full]
        duplicates = self._supply.holds.extend(prompt.hold, digests, fresh, prompt.tree_pages, PROMPT)
        # No loop over pages: the send waits for this.
        others_first = len(prompt.private) - (len(prompt.pages) - prompt.tree_pages)
        published = slice(others_first, others_first + len(fresh))
        assert prompt.private[published] == fresh, "private pages are not in the prompt's order"
        prompt.private[published] = duplicates
        prompt.tree_pages = full

    # -- asks ----------------------------------------------------------------------------------------------------

    def _ask_refusal(self, session: int, entry: Entry | None, name: Name, ask: peer.Ask) -> RequestError | None:
        newest = self._newest.get(session, -1)
        if ask.transfer <= newest:
            return precondition(
                f"transfer is {ask.transfer}; it must be greater than {newest}, the newest of the session"
            )
        for field_name in ("namespace_id", "last_full_digest", "tail_digest"):
            length = len(getattr(ask, field_name))
            if length > DIGEST_BYTES:
                return invalid(f"{field_name} has {length} bytes; the bound is {DIGEST_BYTES}")
        if entry is not None:
            if entry.state is EntryState.YIELDED:
                return unavailable(f"the pages of name {name} were sent, and then given to others; try again")
            if entry.done:
                return aborted(f"name {name} has ended")
            if entry.session not in (None, session):
                return precondition(f"name {name} was asked for by another session")
            open_asks = len(entry.asks) + len(entry.sends)
            if open_asks >= MAX_ASKS_PER_REQUEST:
                return exhausted(f"{open_asks} transfers of name {name} are open; the bound is {MAX_ASKS_PER_REQUEST}")
        total = pages_for(ask.tokens, self.store.page_size)
        if ask.first_page + ask.pages > total:
            return out_of_range(f"first_page {ask.first_page} + pages {ask.pages} is past the prompt's {total} pages")
        return self._table_full() if entry is None else None

    def _check_asks(self, entry: Entry) -> None:
        """Both sides must speak of the same tokens, else nothing is sent."""
        prompt = entry.prompt
        if prompt is None:
            return
        for ask in list(entry.asks):
            for field_name, theirs, ours in (
                ("namespace_id", ask.namespace_id, prompt.namespace_id),
                ("tokens", ask.tokens, prompt.tokens),
                ("last_full_digest", ask.last_full_digest, prompt.digests[-DIGEST_BYTES:]),
                ("tail_digest", ask.tail_digest, prompt.tail_digest),
            ):
                if theirs != ours:
                    shown = [v.hex()[:16] if isinstance(v, bytes) else v for v in (theirs, ours)]
                    error = precondition(
                        f"{field_name} differs: the decode worker has {shown[0]}, the prefill worker {shown[1]}; "
                        "both must be given the same tokens of the same model"
                    )
                    break
            else:
                continue
            entry.asks.remove(ask)
            assert entry.session is not None
            self._effects.append(FailAsk(entry.session, ask.transfer, error))

    def _open_asks(self, entry: Entry) -> None:
        """Those of no pages stay until the aux blob is there: who waits for it alone is told if it will not come."""
        if entry.state not in (EntryState.COMPUTING, EntryState.COMPUTED, EntryState.SERVED):
            return
        prompt = entry.prompt
        assert prompt is not None
        waiting: list[peer.Ask] = []
        for ask in entry.asks:
            if ask.pages == 0 and prompt.aux is None:
                waiting.append(ask)
                continue
            assert entry.session is not None
            self.transfer_counters.opened += 1
            entry.sends.add(ask.transfer)
            self._sends[entry.session, ask.transfer] = entry
            page_ids = tuple(prompt.pages[ask.first_page : ask.first_page + ask.pages])
            self._effects.append(OpenSend(entry.session, ask.transfer, ask.first_page, page_ids, prompt.pages_ready))
        entry.asks = waiting

    def _send_aux(self, entry: Entry) -> None:
        prompt = entry.prompt
        if entry.state is EntryState.COMPUTED and entry.session is not None:
            assert prompt is not None and prompt.aux is not None
            entry.move(EntryState.SERVED)
            self._rested[entry] = self.store.clock.now
            self._effects.append(SendAux(entry.session, entry.name, prompt.aux))

    def _send_closed(self, session: int, transfer: int) -> Entry | None:
        """Whose it was; None where it was over."""
        entry = self._sends.pop((session, transfer), None)
        if entry is not None:
            entry.sends.discard(transfer)
            self._settle(entry)
            if entry.rests:
                self._rested[entry] = self.store.clock.now
        return entry

    # -- ends ----------------------------------------------------------------------------------------------------

    def _expire(self, entry: Entry, error: RequestError) -> None:
        self._fail_asks(entry, error)
        if entry.prompt is None:
            self._drop(entry)
            return
        self._fail(entry, error)

    def _fail(self, entry: Entry, error: RequestError) -> None:
        self._tell_failed(entry, error)
        # The worker's Abort is awaited before its pages go, unless it had said its last word or knows none.
        self._withdraw(
            entry, error, EntryState.FAILED if entry.state is EntryState.COMPUTING else EntryState.FAILED_ENDING
        )
        self._settle(entry)

    def _tell_failed(self, entry: Entry, error: RequestError) -> None:
        prompt = entry.prompt
        assert prompt is not None
        self.counters.fail(error.code)
        entry.failure = reason_of(error.code)
        failed = wire.Failed(name=entry.name.to_proto(), error=error.to_proto())
        self._effects.append(ToWorker(prompt.worker, wire.WorkerEvent(failed=failed)))

    def _withdraw(self, entry: Entry, error: RequestError, state: EntryState) -> None:
        """Nothing more is sent for it; it is in `state` from now on."""
        assert not entry.done
        self._fail_asks(entry, error)
        for number in sorted(entry.sends):
            assert entry.session is not None
            self._effects.append(FailAsk(entry.session, number, error))
        self._end_sends(entry)
        self._supply.leave(entry)
        entry.move(state)

    def _worker_ended(self, entry: Entry, error: RequestError) -> None:
        """Its worker gave it up, or is proven gone: it touches the pages no more."""
        if entry.state is EntryState.FAILED:
            entry.move(EntryState.FAILED_ENDING)
        elif entry.state is EntryState.RECEIVED:
            entry.move(EntryState.ABORTED)
        elif not entry.done:
            self._withdraw(entry, error, EntryState.ABORTED)

    def _end_sends(self, entry: Entry) -> None:
        for number in sorted(entry.sends):
            assert entry.session is not None
            self._effects.append(EndSend(entry.session, number))

    def _fail_asks(self, entry: Entry, error: RequestError) -> None:
        for ask in entry.asks:
            assert entry.session is not None
            self._effects.append(FailAsk(entry.session, ask.transfer, error))
        entry.asks.clear()

    def copies_run(self, entry: Entry) -> bool:
        """Guard: pages that are gathered from, or whose tail is being cleared, are nobody else's."""
        return bool(entry.sends) or entry.zeroing

    def _settle(self, entry: Entry) -> None:
        """Gives the pages back once nothing is wanted, no copy of it runs and the worker is done."""
        if not entry.ending or self.copies_run(entry):
            return
        prompt = entry.prompt
        assert prompt is not None
        self._supply.drop(entry)
        if not entry.failed:
            self.counters.finished += 1
        if entry.acknowledge or not entry.failed:
            self._tell_ended(prompt.worker, entry.name)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self.entries[entry.name]
        self._over.pop(entry.name, None)
        self._yielded.pop(entry.name, None)
        self._rested.pop(entry, None)

    def _new_entry(self, name: Name, deadline: float, now: float) -> Entry:
        entry = self.entries[name] = Entry(name, deadline, now, self._next_order)
        self._next_order += 1
        return entry

    def _refusal(self, entry: Entry | None, name: Name, tokens: int, most: int) -> RequestError | None:
        need = pages_for(tokens, self.store.page_size)
        if need > most:
            return invalid(f"prompt of {tokens} tokens needs {need} pages; its namespace may have {most}")
        if entry is None:
            return self._table_full()
        return aborted(f"name {name} was ended by the decode daemon") if entry.done else None

    def _table_full(self) -> RequestError | None:
        kept = self._over or self._yielded  # who asks again for what was yielded waits, and is to hear of it at once
        if len(self.entries) >= self.limits.table and kept:
            self._drop(self.entries[next(iter(kept))])
        if len(self.entries) < self.limits.table:
            return None
        return exhausted(f"{len(self.entries)} requests are in the rendezvous table; the bound is {self.limits.table}")

    def _of_worker(self, worker: int) -> list[tuple[Entry, BegunPrompt]]:
        return [(e, e.prompt) for e in self.entries.values() if e.prompt is not None and e.prompt.worker == worker]

    def _prompt_of(self, worker: int, name: Name) -> tuple[Entry, BegunPrompt]:
        entry = self.entries.get(name)
        if entry is None or entry.prompt is None:
            raise precondition(f"name {name} is not a running request")
        if entry.prompt.worker != worker:
            raise precondition(f"name {name} belongs to another worker")
        return entry, entry.prompt

    def _tell_ended(self, worker: int, name: Name) -> None:
        ended = wire.Ended(name=name.to_proto())
        self._effects.append(ToWorker(worker, wire.WorkerEvent(ended=ended)))
