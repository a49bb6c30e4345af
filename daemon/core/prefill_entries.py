"""The requests of the prefill daemon: what it sends of them, and how they begin, yield and end. Core: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.daemon.core.blocks.stows import Stows
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import RequestCounters, TransferCounters, reason_of
from kvferry.daemon.core.effects import (
    BindPages,
    EndSend,
    FailAsk,
    OpenSend,
    Outbox,
    SendAux,
    SendProgress,
    ZeroTail,
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
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST, Name, TransferNumbers, pages_for
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry, EntryState, Rendezvous
from kvferry.daemon.core.prefill_scheduler import PrefillSupply
from kvferry.daemon.core.way_back.choice import NO_WAY_BACK, Judge, WayBackLimits
from kvferry.daemon.core.way_back.fetches import Fetches
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
    way_back: WayBackLimits = NO_WAY_BACK


class PrefillSends:
    """The decode daemons' asks, and what is sent for them."""

    def __init__(self, page_size: int, outbox: Outbox) -> None:
        self.counters = TransferCounters()
        self.open: dict[tuple[int, int], Entry] = {}  # by (session, transfer), open or ending
        self._numbers = TransferNumbers()
        self._page_size = page_size
        self._outbox = outbox

    def refusal(self, session: int, entry: Entry | None, name: Name, ask: peer.Ask) -> RequestError | None:
        """Why this ask can be no transfer; None where it can. Its number is used in any case."""
        if error := self._numbers.take(session, ask.transfer):
            return error
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
        total = pages_for(ask.tokens, self._page_size)
        if ask.first_page + ask.pages > total:
            return out_of_range(f"first_page {ask.first_page} + pages {ask.pages} is past the prompt's {total} pages")
        return None

    def session_down(self, session: int) -> None:
        self._numbers.session_down(session)

    def check_asks(self, entry: Entry) -> None:
        """Checks that both sides speak of the same tokens, else nothing is sent."""
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
                        "both must be given the same tokens of the same model, with weights of the same epoch "
                        "(of images, with the same names: vLLM hashes them)"
                    )
                    break
            else:
                continue
            entry.asks.remove(ask)
            assert entry.session is not None
            self._outbox.put(FailAsk(entry.session, ask.transfer, error))

    def open_asks(self, entry: Entry) -> None:
        """Opens sends for the entry's asks. Those of no pages stay until the aux blob is there: who waits for it alone
        is told if it will not come."""
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
            self.counters.opened += 1
            entry.sends.add(ask.transfer)
            self.open[entry.session, ask.transfer] = entry
            where = prompt.rows or prompt.pages
            page_ids = tuple(where[ask.first_page : ask.first_page + ask.pages])
            ready, from_rows = prompt.pages_ready, bool(prompt.rows)
            self._outbox.put(OpenSend(entry.session, ask.transfer, ask.first_page, page_ids, ready, from_rows))
        entry.asks = waiting

    def close(self, session: int, transfer: int) -> Entry | None:
        """Closes a send, of which no gather runs: its entry; None where it was over."""
        entry = self.open.pop((session, transfer), None)
        if entry is not None:
            entry.sends.discard(transfer)
        return entry

    def withdraw(self, entry: Entry, error: RequestError) -> None:
        """Ends all that is sent for the request."""
        self.fail_asks(entry, error)
        for number in sorted(entry.sends):
            assert entry.session is not None
            self._outbox.put(FailAsk(entry.session, number, error))
        self.end(entry)

    def end(self, entry: Entry) -> None:
        for number in sorted(entry.sends):
            assert entry.session is not None
            self._outbox.put(EndSend(entry.session, number))

    def fail_asks(self, entry: Entry, error: RequestError) -> None:
        for ask in entry.asks:
            assert entry.session is not None
            self._outbox.put(FailAsk(entry.session, ask.transfer, error))
        entry.asks.clear()


class EntryKeeper:
    """Keeps requests: how they begin, rest, yield their pages, fail and end."""

    def __init__(
        self, cache: Cache, limits: PrefillLimits, outbox: Outbox, table: Rendezvous, sends: PrefillSends
    ) -> None:
        self.counters = RequestCounters()
        self.supply = PrefillSupply(cache, limits.overtakes, self._on_pages)
        judge = Judge(limits.way_back, cache.page_size)
        self.speed = judge.speed
        self.fetches = Fetches(cache, judge, outbox, self.supply.holds.lengthen, self.publish, self._begin, self.settle)
        self.stows = Stows(cache, outbox, self.supply.drop, self._copy_over)
        self._cache = cache
        self._outbox = outbox
        self._table = table
        self._sends = sends
        self._rested: dict[Entry, float] = {}  # all that rest, since when, and some that do no more

    # -- pages ---------------------------------------------------------------------------------------------------

    def _resting(self, now: float) -> Entry | None:
        """The youngest of those that have rested for REST_SECONDS whose pages one that was asked for waits for and may
        have, where nothing moves that would give pages back. Where pages are to be asked for again the decode daemon
        turns to the oldest first.

        At the decode daemon it may wait for a page that another brings, and that one's prompt wait here for its pages:
        without this both would stay until their deadline.
        """
        if not self._rested or self.supply.reserved or any(entry.moves for entry in self._table.entries.values()):
            return None
        self._rested = {entry: since for entry, since in self._rested.items() if entry.rests}
        rested = [entry for entry, since in self._rested.items() if since + REST_SECONDS <= now]
        rested = [entry for entry in rested if entry.prompt is not None and not entry.prompt.rows]  # those hold no page
        for wants in self.supply.first_asked() if rested else ():
            any_tenant = wants.namespace.within_hard(wants.wanted)  # else its own hard quota is what is in the way
            found = [entry for entry in rested if any_tenant or entry.scope is wants.namespace]
            if found:
                return max(found, key=lambda entry: entry.order)
        return None

    def yield_pages(self, now: float) -> bool:
        """One that rests gives its pages to one that waits for them, where that helps. False: nobody did."""
        entry = self._resting(now)
        if entry is not None:
            self._yield(entry)
        return entry is not None

    def _yield(self, entry: Entry) -> None:
        """Whoever asks for some of it again is told to try anew. The name stays until Done or its deadline."""
        prompt = entry.prompt
        assert prompt is not None and entry.rests
        del self._rested[entry]
        self.supply.drop(entry)
        self.counters.finished += 1
        self._outbox.tell_ended(prompt.worker, entry.name)
        entry.prompt = None
        self._table.keep_name(entry, EntryState.YIELDED)

    def _on_pages(self, entry: Entry) -> None:
        prompt = entry.prompt
        assert prompt is not None
        hold, page_size = prompt.hold, self._cache.page_size
        prompt.tree_pages = prompt.pages_ready = hold.matched
        matched, host = hold.matched * page_size, hold.host_matched * page_size
        if not prompt.is_ahead:
            prompt.computed = matched
        self.counters.lookup(prompt.tokens, matched, host)
        hold.namespace.looked_up(prompt.tokens, matched, host)
        if not self.fetches.take(entry):
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        """The worker has its pages from now on, and computes what is not held."""
        prompt = entry.prompt
        assert prompt is not None
        entry.move(EntryState.COMPUTING)
        if prompt.aux is None:
            self.speed.begins(entry, prompt.tokens - self.had(prompt), self._cache.clock.now)
        matched = 0 if prompt.is_ahead else prompt.computed
        begun = wire.Begun(name=entry.name.to_proto(), matched_tokens=matched, fetched_tokens=prompt.fetched)
        if prompt.blocks is not None:
            self._bind(prompt, range(len(prompt.pages)))
        else:
            begun.pages.extend(prompt.pages)
        self._outbox.tell(prompt.worker, wire.WorkerEvent(begun=begun))
        if prompt.is_ahead:
            self.computed(entry)
        if prompt.aux is None:
            self._sends.open_asks(entry)
        else:
            self.handed_in(entry)

    def objection(self, entry: Entry, blocks: Sequence[int], tokens: int) -> RequestError | None:
        """Why the prompt's first `tokens` tokens cannot be computed by now; else `blocks` are more of its engine's,
        where it names them."""
        prompt = entry.prompt
        assert prompt is not None
        if (entry.queued and not prompt.is_ahead) or not prompt.computed <= tokens <= prompt.tokens:
            return invalid(f"tokens is {tokens}; it must be {prompt.computed} to {prompt.tokens}, after Begun")
        return self.name_blocks(prompt, blocks, tokens)

    def computed(self, entry: Entry) -> None:
        """More of the prompt is computed, whose pages its worker knows."""
        prompt = entry.prompt
        assert prompt is not None
        full, partial = divmod(prompt.computed, self._cache.page_size)
        ready = full
        if prompt.computed == prompt.tokens and partial:
            ready += 1
            if ready > prompt.pages_ready:
                entry.zeroing = True
                self._outbox.put(ZeroTail(entry.name, prompt.pages[full], partial))
        if prompt.keep:
            self.publish(prompt, full)
        if ready > prompt.pages_ready:
            prompt.pages_ready = ready
            for number in sorted(entry.sends):
                assert entry.session is not None
                self._outbox.put(SendProgress(entry.session, number, ready))

    def handed_in(self, entry: Entry) -> None:
        """The worker has said its last word, and all of the prompt is in its pages."""
        entry.move(EntryState.COMPUTED)
        self._sends.open_asks(entry)
        self.send_aux(entry)
        self.settle(entry)

    def refusal(self, entry: Entry | None, name: Name, request: wire.Begin, most: int) -> RequestError | None:
        """Why a checked Begin cannot be taken."""
        tokens, held = request.tokens, request.held_tokens
        need = pages_for(tokens, self._cache.page_size)
        if held > tokens:
            return invalid(f"held_tokens is {held}; the prompt has {tokens} tokens")
        if need > most:
            return invalid(f"prompt of {tokens} tokens needs {need} pages; its namespace may have {most}")
        if entry is None:
            return self._table.make_room()
        return aborted(f"name {name} was ended by the decode daemon") if entry.done else None

    def name_blocks(self, prompt: BegunPrompt, blocks: Sequence[int], tokens: int) -> RequestError | None:
        """Takes in more blocks of the prompt, whose first `tokens` tokens are computed. The objection, or None."""
        if prompt.blocks is None:
            return precondition(f"blocks has {len(blocks)} entries; Begin named none") if blocks else None
        try:
            pages = prompt.blocks.add(blocks)
        except RequestError as error:
            return error
        if prompt.blocks.tokens < tokens:
            return invalid(f"tokens is {tokens}; blocks of {prompt.blocks.tokens} are named")
        self._bind(prompt, pages)
        return None

    def _bind(self, prompt: BegunPrompt, pages: range) -> None:
        assert prompt.blocks is not None
        if pages and prompt.pages:  # else they are when it has some
            ids = tuple(prompt.pages[pages.start : pages.stop])
            self._outbox.put(BindPages(ids, prompt.blocks.of_pages(pages)))

    def publish(self, prompt: BegunPrompt, full: int) -> None:
        """Computed full pages enter the tree. Where another request was first, its page wins and ours stays private
        until the end. Its pages are locked then, too: while they are promised to others, ours wait.
        """
        if full <= prompt.tree_pages:
            return
        namespace = prompt.hold.namespace
        digests = prompt.digests[: full * DIGEST_BYTES]
        theirs = namespace.tree.match(digests).device_pages - prompt.tree_pages
        if theirs > 0 and not self._cache.fits(namespace, theirs):
            return
        fresh = prompt.pages[prompt.tree_pages : full]
        duplicates = self.supply.holds.extend(prompt.hold, digests, fresh, prompt.tree_pages, PROMPT)
        # No loop over pages: the send waits for this.
        others_first = len(prompt.private) - (len(prompt.pages) - prompt.tree_pages)
        published = slice(others_first, others_first + len(fresh))
        assert prompt.private[published] == fresh, "private pages are not in the prompt's order"
        prompt.private[published] = duplicates
        prompt.tree_pages = full

    def send_aux(self, entry: Entry) -> None:
        prompt = entry.prompt
        if entry.state is EntryState.COMPUTED and entry.session is not None:
            assert prompt is not None and prompt.aux is not None
            entry.move(EntryState.SERVED)
            self._rested[entry] = self._cache.clock.now
            self._outbox.put(SendAux(entry.session, entry.name, prompt.aux))

    def send_closed(self, session: int, transfer: int) -> Entry | None:
        """No gather of it runs. Whose it was; None where it was over."""
        entry = self._sends.close(session, transfer)
        if entry is not None:
            self.settle(entry)
            self.look_at_rest(entry, self._cache.clock.now)
        return entry

    def look_at_rest(self, entry: Entry, now: float) -> None:
        """A copy of it is over: it may rest from now on."""
        if entry.rests:
            self._rested[entry] = now

    def _copy_over(self, entry: Entry) -> None:
        self.look_at_rest(entry, self._cache.clock.now)
        self.settle(entry)

    def stood_still(self, seconds: float, now: float) -> None:
        self._rested = {entry: min(since + seconds, now) for entry, since in self._rested.items()}

    # -- ends ----------------------------------------------------------------------------------------------------

    def expire(self, entry: Entry, error: RequestError) -> None:
        self._sends.fail_asks(entry, error)
        if entry.prompt is None:
            self._table.drop(entry)
            return
        self.fail(entry, error)

    def fail(self, entry: Entry, error: RequestError) -> None:
        self._tell_failed(entry, error)
        # The worker's Abort is awaited before its pages go, unless it had said its last word or knows none.
        self.withdraw(
            entry, error, EntryState.FAILED if entry.state is EntryState.COMPUTING else EntryState.FAILED_ENDING
        )
        self.settle(entry)

    def _tell_failed(self, entry: Entry, error: RequestError) -> None:
        prompt = entry.prompt
        assert prompt is not None
        self.counters.fail(error.code)
        entry.failure = reason_of(error.code)
        failed = wire.Failed(name=entry.name.to_proto(), error=error.to_proto())
        self._outbox.tell(prompt.worker, wire.WorkerEvent(failed=failed))

    def had(self, prompt: BegunPrompt) -> int:
        """Tokens that its engine need not compute any more."""
        return max(prompt.computed, prompt.engine_held * self._cache.page_size)

    def computes_no_more(self, entry: Entry) -> None:
        """Called when its engine has no more of it to compute. Idempotent."""
        self.speed.ends(entry)
        if not self.speed.seconds_left:
            self.fetches.ask_waits.engine_idle()

    def withdraw(self, entry: Entry, error: RequestError, state: EntryState) -> None:
        """Ends all that is sent for the request, which is in `state` from now on."""
        assert not entry.done
        self._sends.withdraw(entry, error)
        self.supply.leave(entry)
        self.fetches.leave(entry)
        self.computes_no_more(entry)
        entry.move(state)

    def worker_ended(self, entry: Entry, error: RequestError) -> None:
        """The entry's worker gave it up, or is proven gone: it touches the pages no more."""
        if entry.state is EntryState.FAILED:
            entry.move(EntryState.FAILED_ENDING)
        elif entry.state is EntryState.RECEIVED:
            entry.move(EntryState.ABORTED)
        elif not entry.done:
            self.withdraw(entry, error, EntryState.ABORTED)

    def copies_run(self, entry: Entry) -> bool:
        """Guard: pages that are copied from, or fetched into, or whose tail is being cleared, are nobody else's."""
        return bool(entry.sends) or entry.zeroing or entry.stowing or entry.fetch is not None

    def settle(self, entry: Entry) -> None:
        """Gives the pages back once nothing is wanted, no copy of it runs and the worker is done."""
        if not entry.ending or self.copies_run(entry):
            return
        prompt = entry.prompt
        assert prompt is not None
        self.supply.drop(entry)
        if not entry.failed:
            self.counters.finished += 1
        if entry.acknowledge or not entry.failed:
            self._outbox.tell_ended(prompt.worker, entry.name)
        self._rested.pop(entry, None)
        self._table.drop(entry)
