"""What a prefill daemon fetches of its requests: from decode daemons that ask for them, or from others. Core: no I/O,
time is passed in.

A request waits here between having its pages and being told to its worker: for an Ask and for answers to look-ups,
briefly, and for a fetch, its own or one that brings the same pages, until that one's deadline. What has arrived of it
without a gap counts as computed; whatever goes wrong with it, the request goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.effects import BindPages, Outbox, StartFetch, StopFetch, WakeAt, ZeroPages
from kvferry.daemon.core.errors import RequestError, invalid, precondition
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry, EntryState
from kvferry.daemon.core.reservations import Hold
from kvferry.daemon.core.way_back.ask_waits import AskWaits
from kvferry.daemon.core.way_back.choice import NO_ASK, NO_PAGES, NO_SESSION, NOT_HELD, OFF, Choice, Judge
from kvferry.daemon.core.way_back.fetch import Fetch, Offer
from kvferry.daemon.core.way_back.look_ups import LookUps
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES

TOO_LATE = "too_late"


class Fetches:
    """lengthen: see `Holds`. publish: lets the prompt's first pages into the tree. begin: tells the worker its pages;
    settle: the request may have ended."""

    def __init__(
        self,
        cache: Cache,
        judge: Judge,
        outbox: Outbox,
        lengthen: Callable[[Hold], list[int]],
        publish: Callable[[BegunPrompt, int], None],
        begin: Callable[[Entry], None],
        settle: Callable[[Entry], None],
    ) -> None:
        self.judge = judge
        self.counters = TransferCounters()
        self.look_ups = LookUps(outbox, judge.limits.closed_namespaces)
        self.fetched_tokens = 0
        self.elsewhere_tokens = 0  # of them, from a daemon that did not ask for the prompt
        self.followed_tokens = 0  # that another's fetch has brought
        self._cache = cache
        self.ask_waits = AskWaits(cache, judge, outbox)
        self._outbox = outbox
        self._lengthen = lengthen
        self._publish, self._begin, self._settle = publish, begin, settle
        self._searching: dict[Entry, float] = {}  # that wait for answers to look-ups, until when
        self._following: dict[Entry, Fetch] = {}  # that wait for another's fetch
        self._offers: dict[Entry, Offer] = {}  # for which engines are to name blocks
        self._short: dict[Entry, float] = {}  # whose engines wait for pages of theirs, until when
        self._open: dict[int, Fetch] = {}
        self._written: set[int] = set()  # blocks of an engine's, by those
        self._sessions: set[int] = set()  # that have a way back
        self._next = 1

    def __len__(self) -> int:
        return len(self._open)

    def session_up(self, session: int) -> None:
        """The session has a way back."""
        self._sessions.add(session)

    # -- before the worker is told ---------------------------------------------------------------------------------

    def begun(self, entry: Entry) -> None:
        """Bounds the wait of an engine that could compute meanwhile, from its Begin until the request has its pages."""
        prompt = entry.prompt
        assert prompt is not None
        if prompt.patience == wire.PATIENCE_NONE:
            self._computes(entry, prompt, prompt.begun_at)
        if prompt.patience == wire.PATIENCE_FETCH:
            self._short[entry] = until = self.ask_waits.first(prompt)
            self._outbox.put(WakeAt(until))

    def _computes(self, entry: Entry, prompt: BegunPrompt, now: float) -> None:
        """The engine does so, whatever it has; of one that is not ahead nothing is heard before it has its pages."""
        self.judge.speed.begins(entry, self.ask_waits.lacking(prompt) if prompt.is_ahead else 0, now)

    def take(self, entry: Entry) -> bool:
        """Whether the request, which has its pages, waits here first."""
        prompt = entry.prompt
        assert prompt is not None
        self._short.pop(entry, None)
        if self.judge.limits.setting == OFF or prompt.patience == wire.PATIENCE_NONE:
            return False
        if not prompt.keep and (prompt.blocks is None or prompt.patience == wire.PATIENCE_PAGES):
            return False
        if not self._lacks(prompt) or not self._sessions:
            return False
        if entry.asked:
            return self._look_around(entry, prompt)
        until = self.ask_waits.until(prompt)
        if until <= self._cache.clock.now:
            self.judge.count(Choice(NO_ASK))
            return False
        entry.move(EntryState.LOOKING)
        self.ask_waits.wait(entry, until)
        return True

    def _wait(self, entry: Entry, until: float) -> None:
        if entry.state is not EntryState.LOOKING:
            entry.move(EntryState.LOOKING)
        self._outbox.put(WakeAt(until))

    def asked(self, entry: Entry) -> None:
        """A decode daemon has asked for it."""
        if self.ask_waits.ends(entry):
            assert entry.prompt is not None
            if not self._look_around(entry, entry.prompt):
                self._begin(entry)

    def found(self, session: int, number: int, pages: int) -> None:
        """The session's decode daemon holds so many of the pages that were looked up."""
        if (entry := self.look_ups.heard(session, number, pages)) is not None:
            self._end_search(entry)

    def _end_search(self, entry: Entry) -> None:
        """No more answers are waited for."""
        assert entry.prompt is not None
        del self._searching[entry]
        if not self._choose(entry, entry.prompt, self.look_ups.take(entry)):
            self._begin(entry)

    def _look_around(self, entry: Entry, prompt: BegunPrompt) -> bool:
        """Whether the request, which was asked for, waits for a fetch or for answers of other decode daemons."""
        return self._search(entry, prompt) or self._choose(entry, prompt, {})

    def _search(self, entry: Entry, prompt: BegunPrompt) -> bool:
        """Asks others for what the decode daemon that asks lacks, too."""
        most, had = self._most(prompt), max(self._held(entry), prompt.hold.matched, prompt.engine_held)
        now = self._cache.clock.now
        until = min(self.ask_waits.until(prompt), now + self.judge.patience((most - had) * self._cache.page_size))
        if had >= most or until <= now or self._leader(prompt) is not None:
            return False
        if not self.look_ups.begin(entry, prompt, most, lambda other: self.judge.worth(other, most - had, now)):
            return False
        self._searching[entry] = until
        self._wait(entry, until)
        return True

    def _held(self, entry: Entry) -> int:
        """Leading pages that the decode daemon that asks for it holds for it."""
        if entry.session not in self._sessions:
            return 0
        return max((ask.held_tokens for ask in entry.asks), default=0) // self._cache.page_size

    def _leader(self, prompt: BegunPrompt) -> Fetch | None:
        """The fetch that brings the next pages of the prompt for another one: all that it brings, or all that this
        could have. One with which it has only a beginning in common may take long for the rest. Who has waited so
        neither waits again nor is waited for: nobody waits for a row of fetches."""
        if not prompt.keep or prompt.followed:
            return None
        for fetch in self._open.values():
            theirs, end = fetch.entry.prompt, min(fetch.end, self._most(prompt))
            if theirs is None or not theirs.keep or theirs.followed or fetch.stopped:
                continue
            if fetch.entry.state is not EntryState.FETCHING:
                continue
            digest = slice((end - 1) * DIGEST_BYTES, end * DIGEST_BYTES)
            same = theirs.hold.namespace is prompt.hold.namespace and theirs.digests[digest] == prompt.digests[digest]
            gained = end - max(prompt.hold.matched, prompt.engine_held)
            worth = gained > 0 and self.judge.worth_waiting(gained, fetch.deadline - prompt.begun_at)
            if same and worth and fetch.first_page <= prompt.hold.matched:
                return fetch
        return None

    def _followers(self, leader: Fetch) -> list[tuple[Entry, BegunPrompt]]:
        return [(each, each.prompt) for each, fetch in self._following.items() if fetch is leader and each.prompt]

    def _resume(self, entry: Entry, prompt: BegunPrompt) -> None:
        """The fetch that the request waited for brings nothing more to it: it has what was brought, and may want
        more."""
        del self._following[entry]
        given_up = self._lengthen(prompt.hold)
        prompt.private = prompt.private[len(given_up) :]
        prompt.tree_pages = prompt.pages_ready = prompt.hold.matched
        prompt.computed = prompt.hold.matched * self._cache.page_size
        self.followed_tokens += len(given_up) * self._cache.page_size
        if not self._lacks(prompt) or not self._look_around(entry, prompt):
            self._begin(entry)

    def _lacks(self, prompt: BegunPrompt) -> bool:
        """Whether there is any page that would not have to be computed."""
        return self._most(prompt) > max(prompt.hold.matched, prompt.engine_held)

    def _most(self, prompt: BegunPrompt) -> int:
        """Pages that it could have; the last token is computed in any case, for its logits."""
        return (prompt.tokens - 1) // self._cache.page_size

    def _choose(self, entry: Entry, prompt: BegunPrompt, found: Mapping[int, int]) -> bool:
        """Whether the request waits for a fetch. `found`: pages that other decode daemons hold, by session."""
        assert entry.session is not None
        if (leader := self._leader(prompt)) is not None:
            self._wait(entry, leader.deadline)
            self._following[entry], prompt.followed = leader, True
            return True
        if entry.session not in self._sessions and not found:
            self.judge.count(Choice(NO_SESSION))
            return False
        now, most = self._cache.clock.now, self._most(prompt)
        ends = {each: min(end, most) for each, end in {**found, entry.session: self._held(entry)}.items()}
        had = max(prompt.hold.matched, prompt.engine_held)
        # Into an engine's blocks only what it lacks is fetched; into the daemon's own pages all: they have no gap.
        first = had if prompt.blocks is not None else prompt.hold.matched
        longer = [each for each, end in ends.items() if end > had]
        if not longer:
            self.judge.count(Choice(NOT_HELD))
            return False

        def seconds(session: int) -> tuple[float, bool]:
            """Until the engine could have it all; at equal times the asking daemon comes first."""
            end = ends[session]
            return self.judge.seconds(session, end - first, most - end, now), session != entry.session

        session = min(longer, key=seconds)
        end = ends[session]
        choice = self.judge.choose(session, end - first, now, end - had)
        offer = Offer(session, end, choice.seconds)
        if choice.seconds > 0 and prompt.blocks is not None:
            entry.move(EntryState.OFFERED)
            self._offers[entry] = offer
            self._tell(entry, end * self._cache.page_size)
        elif choice.seconds > 0:
            self._start(entry, prompt, prompt.hold.matched, offer)
        return choice.seconds > 0

    def _tell(self, entry: Entry, tokens: int) -> None:
        assert entry.prompt is not None
        proceed = wire.Proceed(name=entry.name.to_proto(), fetch_tokens=tokens)
        self._outbox.tell(entry.prompt.worker, wire.WorkerEvent(proceed=proceed))

    def named(self, entry: Entry, request: wire.Fetch) -> RequestError | None:
        """The engine has blocks for what it was offered, or wants nothing of it. The objection, or None."""
        prompt = entry.prompt
        assert prompt is not None
        if (offer := self._offers.pop(entry, None)) is None:
            return precondition("fetch comes once, and where Proceed says that something can be fetched")
        page_size, first = self._cache.page_size, request.held_tokens // self._cache.page_size
        if not request.blocks or first >= offer.end or offer.session not in self._sessions:
            self._begin(entry)
            return None
        assert prompt.blocks is not None
        try:
            prompt.blocks.add(request.blocks)
            prompt.blocks.check_held(request.held_tokens)
        except RequestError as error:
            return error
        if prompt.blocks.tokens < offer.end * page_size:
            return invalid(f"blocks of {prompt.blocks.tokens} tokens are named; {offer.end * page_size} were offered")
        pages = range(first, offer.end)
        # Blocks of the engine's own may be others', too: nothing writes them.
        own = prompt.blocks.of_pages(pages, request.held_tokens)
        if twice := self._written.intersection(own) - {-1}:
            return precondition(f"blocks has {min(twice)}, which is fetched into for another request")
        self._outbox.put(BindPages(tuple(prompt.pages[first : offer.end]), own))
        fetch = self._start(entry, prompt, first, offer)
        fetch.blocks = frozenset(own)
        self._written |= fetch.blocks
        return None

    def _start(self, entry: Entry, prompt: BegunPrompt, first: int, offer: Offer) -> Fetch:
        assert entry.fetch is None
        now, number, seconds = self._cache.clock.now, self._next, offer.seconds
        self._next += 1
        page_ids = tuple(prompt.pages[first : offer.end])
        entry.fetch = number
        fetch = Fetch(number, entry, offer.session, first, page_ids, now + seconds, bytearray(len(page_ids)))
        self._open[number] = fetch
        self.judge.rates.begins(offer.session, number, len(page_ids) * self.judge.limits.page_bytes, now)
        entry.move(EntryState.FETCHING)
        self.counters.opened += 1
        ask = peer.Ask(
            transfer=number,
            name=entry.name.to_proto(),
            namespace_id=prompt.namespace_id,
            first_page=first,
            pages=len(page_ids),
            promised_tokens=prompt.computed,
            tokens=prompt.tokens,
            last_full_digest=prompt.digests[-DIGEST_BYTES:],
            tail_digest=prompt.tail_digest,
            remaining_ms=math.ceil(seconds * 1000),
            digests=b"" if offer.session == entry.session else prompt.digests[: offer.end * DIGEST_BYTES],
        )
        self._outbox.put(StartFetch(offer.session, ask, page_ids))
        self._outbox.put(WakeAt(now + seconds))
        return fetch

    # -- on its way ------------------------------------------------------------------------------------------------

    def arrived(self, number: int, prompt_pages: Sequence[int]) -> None:
        """Verified bytes of these prompt pages are in the request's own pages."""
        fetch = self._open.get(number)
        if fetch is None:
            return
        before, nbytes = fetch.ready, len(prompt_pages) * self.judge.limits.page_bytes
        self.judge.rates.progress(fetch.session, number, nbytes, self._cache.clock.now)
        for page in prompt_pages:
            fetch.there[page - fetch.first_page] = 1
        prompt = fetch.entry.prompt
        if fetch.ready == before or fetch.entry.state is not EntryState.FETCHING:
            return
        assert prompt is not None
        prompt.computed = fetch.ready * self._cache.page_size
        # An engine's blocks are the request's for sure once it has computed behind them: where it is aborted as their
        # load is reported, the engine gives them away before it says Abort.
        prompt.pages_ready = fetch.ready if prompt.blocks is None else 0
        if prompt.keep:
            self._publish(prompt, fetch.ready)
        for follower, theirs in self._followers(fetch):
            if self._most(theirs) <= fetch.ready:
                self._resume(follower, theirs)

    def completed(self, number: int) -> None:
        """Every page has arrived; the receiver knows the transfer no more."""
        if (fetch := self._open.get(number)) is not None:
            self.counters.completed += 1
            self._over(fetch)

    def stopped_by(self, session: int, number: int, reason: str) -> None:
        """What this session says of it ends it; of another one's it has nothing to say."""
        fetch = self._open.get(number)
        if fetch is not None and fetch.session == session:
            self.stop(number, reason)

    def stop(self, number: int, reason: str) -> None:
        """Wants no more of it: `drained` follows. Idempotent. The reasons are a fixed few."""
        fetch = self._open.get(number)
        if fetch is not None and not fetch.stopped:
            fetch.stopped = reason
            self._outbox.put(StopFetch(fetch.session, number, reason))

    def drained(self, number: int) -> None:
        """Called after StopFetch: no copy into its pages runs, and none will."""
        if (fetch := self._open.get(number)) is not None:
            self.counters.abort(fetch.stopped or "session_ended")
            self._over(fetch)

    def _over(self, fetch: Fetch) -> None:
        now, entry = self._cache.clock.now, fetch.entry
        self._close(fetch)
        if fetch.stopped in ("", TOO_LATE):  # else the time says nothing of the session
            self.judge.rates.progress(fetch.session, fetch.number, 1, now)  # what brings nothing is slow, not unknown
        self.judge.rates.ends(fetch.session, fetch.number, now)
        if entry.state is EntryState.FETCHING:
            self._go_on(fetch, entry)
        else:
            self._settle(entry)
        for follower in self._followers(fetch):
            self._resume(*follower)

    def _go_on(self, fetch: Fetch, entry: Entry) -> None:
        """The request has what has arrived."""
        assert entry.prompt is not None
        if entry.prompt.blocks is not None and fetch.ready == fetch.first_page:
            entry.prompt.blocks.forget()  # an engine for which nothing was loaded may begin anew with others
        tokens = (fetch.ready - fetch.first_page) * self._cache.page_size
        entry.prompt.fetched += tokens
        self.fetched_tokens += tokens
        self.elsewhere_tokens += tokens if fetch.session != entry.session else 0
        if self._cache.limits.zero_freed and fetch.ready < fetch.end and not self._cache.limits.in_blocks:
            self._outbox.put(ZeroPages(fetch.page_ids[fetch.ready - fetch.first_page :]))
        if fetch.ready > fetch.first_page or not self._asker_instead(fetch, entry):
            self._begin(entry)

    def _asker_instead(self, fetch: Fetch, entry: Entry) -> bool:
        """Whether the request, for which nothing came from another decode daemon, waits for what its own one holds."""
        prompt = entry.prompt
        assert prompt is not None
        if fetch.session == entry.session or prompt.blocks is not None or self._held(entry) <= prompt.hold.matched:
            return False
        return self._choose(entry, prompt, {})

    def _close(self, fetch: Fetch) -> None:
        """No copy of it runs."""
        del self._open[fetch.number]
        self._written -= fetch.blocks
        fetch.entry.fetch = None

    # -- ends ------------------------------------------------------------------------------------------------------

    def leave(self, entry: Entry) -> None:
        """The request has ended: it waits for nothing here; what is on its way drains."""
        for waits in (self._searching, self._following, self._short, self._offers):
            waits.pop(entry, None)
        self.ask_waits.ends(entry)
        self.look_ups.take(entry)
        if entry.fetch is not None:
            self.stop(entry.fetch, "request_ended")

    def wake(self, now: float) -> None:
        """Lets those begin that have waited long enough."""
        while (over := self.ask_waits.next_over()) is not None:
            self.judge.count(Choice(NO_ASK))
            self._begin(over)
        for entry in [entry for entry, until in self._searching.items() if until <= now]:
            self.look_ups.timed_out(entry)
            self._end_search(entry)
        for entry in [entry for entry, until in self._short.items() if until <= now]:
            self._proceed(entry)
        for fetch in list(self._open.values()):
            if fetch.deadline <= now:
                self.stop(fetch.number, TOO_LATE)

    def _proceed(self, entry: Entry) -> None:
        """Has the engine compute, with nothing fetched: it has waited long enough for pages."""
        prompt = entry.prompt
        assert prompt is not None
        if entry.state is EntryState.RESTORING:
            return  # its pages are there, and copies end by themselves
        del self._short[entry]
        prompt.patience = wire.PATIENCE_NONE
        self._computes(entry, prompt, self._cache.clock.now)
        self.judge.count(Choice(NO_PAGES))
        self._tell(entry, 0)

    def session_down(self, session: int) -> None:
        """The session is over, and no copy of it runs. Before its requests are failed; others' go on with what has
        arrived."""
        self._sessions.discard(session)
        for entry in [entry for entry in self._following if entry.session == session]:
            del self._following[entry]
        for entry in self.look_ups.session_down(session):
            self._end_search(entry)
        for fetch in [fetch for fetch in self._open.values() if fetch.session == session]:
            fetch.stopped = "session_ended"
            self.counters.abort(fetch.stopped)
            if fetch.entry.session != session or fetch.entry.state is not EntryState.FETCHING:
                self._over(fetch)
            else:
                self._close(fetch)
                for follower in self._followers(fetch):
                    self._resume(*follower)
        self.judge.rates.forget(session)
