"""What a decode daemon sends back of requests that hold it. Core: no I/O.

Only pages are promised and sent that are readable, or that a copy from the host tier makes so; or, in blocks of an
engine, a step of that engine that was begun already: a fetch waits for nobody else who computes. The lease keeps its
locks, and its blocks, until no gather of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import LookUpCounters, TransferCounters
from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, Outbox, SendProgress
from kvferry.daemon.core.errors import (
    RequestError,
    aborted,
    exhausted,
    invalid,
    out_of_range,
    precondition,
    unavailable,
)
from kvferry.daemon.core.lease import Lease, LeaseState
from kvferry.daemon.core.limits import Name, TransferNumbers
from kvferry.daemon.core.reservations import Holds
from kvferry.daemon.core.way_back.loans import Loans
from kvferry.proto import peer_pb2 as peer
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState, leading_readable


@dataclass(slots=True, eq=False)
class _Return:
    """A send that is open or ending."""

    lease: Lease
    first_page: int
    pages: int
    ready: int  # pages of the prompt, from its start on
    ending: bool = False

    @property
    def end(self) -> int:
        return self.first_page + self.pages


class Returns:
    def __init__(
        self, cache: Cache, outbox: Outbox, holds: Holds, waiting: Callable[[], int], excluded: Container[bytes]
    ) -> None:
        """waiting, excluded: see `Loans`."""
        self.counters = TransferCounters()
        self.loans = Loans(cache, outbox, holds, self.counters, waiting, excluded)
        self._cache = cache
        self._outbox = outbox
        self._open: dict[tuple[int, int], _Return] = {}  # by (session, transfer)
        self._numbers = TransferNumbers()

    def __len__(self) -> int:
        return len(self._open) + len(self.loans)

    def held(self, lease: Lease) -> int:
        """Guard: leading pages of the prompt that may be asked back. None that somebody is asked for: its bytes may
        come from the very daemon that would wait for them."""
        if lease.blocks:
            return self._held_in_blocks(lease)
        path = lease.pages[: lease.hold.matched]
        end = self._cache.pool.states(path).find(PageState.ARRIVING)
        return len(path) if end < 0 else end

    def _held_in_blocks(self, lease: Lease) -> int:
        """Leading pages in an engine's blocks: those that it holds itself, if it has named their blocks, and behind
        them what the host tier restores into whole pages."""
        own = lease.held_pages
        if own and not lease.held_blocks:
            return 0
        if own >= lease.matched or not lease.is_whole(own):
            return own
        return next((i for i in range(own, lease.matched) if lease.pages[i] in lease.filling), lease.matched)

    def ask(self, session: int, prefill: str, lease: Lease | None, ask: peer.Ask) -> None:
        """An Ask of the prefill daemon. What is wrong with it fails the ask, never the session."""
        error = self._numbers.take(session, ask.transfer) or self._refusal(prefill, lease, ask)
        if error is not None:
            self._outbox.put(FailAsk(session, ask.transfer, error))
            return
        assert lease is not None
        opened = _Return(lease, ask.first_page, ask.pages, self._readable(lease, ask.first_page + ask.pages))
        self._open[session, ask.transfer] = opened
        lease.returns += 1
        self.counters.opened += 1
        page_ids = tuple(lease.pages[opened.first_page : opened.end])
        self._outbox.put(OpenSend(session, ask.transfer, opened.first_page, page_ids, opened.ready))

    def lend(self, session: int, ask: peer.Ask, deadline: float) -> None:
        """An Ask by digests, likewise."""
        if error := self._numbers.take(session, ask.transfer):
            self._outbox.put(FailAsk(session, ask.transfer, error))
        else:
            self.loans.ask(session, ask, deadline)

    def _refusal(self, prefill: str, lease: Lease | None, ask: peer.Ask) -> RequestError | None:
        if lease is None or lease.prefill != prefill or lease.state is not LeaseState.FILLING:
            return aborted("the request asks this daemon for nothing, or not any more")
        if lease.returns:
            return exhausted(f"{lease.returns} transfer of it is on its way back; the bound is 1")
        error = _other_prompt(lease, ask)
        if error is not None:
            return error
        if ask.pages < 1:
            return invalid(f"pages is {ask.pages}; it must be at least 1")
        held = self.held(lease)
        if ask.first_page + ask.pages > held:
            return out_of_range(f"first_page {ask.first_page} + pages {ask.pages} is past the {held} pages held")
        return None

    def _readable(self, lease: Lease, end: int) -> int:
        """Guard: leading pages of the first `end` that can be read now. What an engine holds itself can be once it has
        said so: it counts as held before the step that computes it has run."""
        if lease.blocks:
            if lease.held_pages and not lease.held_written:
                return 0
            return next((i for i in range(lease.held_pages, end) if lease.pages[i] in lease.missing), end)
        return leading_readable(self._cache.pool.states(lease.pages[:end]))

    def look(self) -> None:
        """Sends on what has become readable; ends what never will, or is late. After every step."""
        self.loans.look()
        for (session, transfer), opened in self._open.items():
            if opened.ending or opened.ready == opened.end:
                continue
            ready = self._readable(opened.lease, opened.end)
            if ready > opened.ready:
                opened.ready = ready
                self._outbox.put(SendProgress(session, transfer, ready))
            if self.held(opened.lease) < opened.end:
                self._end(session, transfer, opened, unavailable("a page could not be restored"))

    def end_all(self, lease: Lease, error: RequestError) -> None:
        """The lease wants its pages for itself. `closed` follows for each."""
        if lease.returns:
            for (session, transfer), opened in self._open.items():
                if opened.lease is lease and not opened.ending:
                    self._end(session, transfer, opened, error)

    def _end(self, session: int, transfer: int, opened: _Return, error: RequestError) -> None:
        opened.ending = True
        self._outbox.put(FailAsk(session, transfer, error))
        self._outbox.put(EndSend(session, transfer))

    def ask_end(self, session: int, transfer: int) -> None:
        """Ends an ask. Idempotent."""
        opened = self._open.get((session, transfer))
        if opened is not None:
            opened.ending = True
        self.loans.ask_end(session, transfer)
        self._outbox.put(EndSend(session, transfer))

    def closed(self, session: int, transfer: int, *, completed: bool) -> Lease | None:
        """No gather of it runs: whose it was; None where it was over, or nobody's."""
        opened = self._open.pop((session, transfer), None)
        if opened is None:
            self.loans.closed(session, transfer, completed=completed)
            return None
        if completed:
            self.counters.completed += 1
        else:
            self.counters.abort(opened.lease.failure or "request_ended")
        opened.lease.returns -= 1
        return opened.lease

    def session_down(self, session: int) -> Sequence[Lease]:
        """The session is over, and no copy of it runs. Whose pages it was to send."""
        self._numbers.session_down(session)
        self.loans.session_down(session)
        keys = [key for key in self._open if key[0] == session]
        return [lease for key in keys if (lease := self.closed(*key, completed=False)) is not None]


class ReturnSteps:
    """The steps of a decode core that are about what goes back. returned: a lease may end, or be ready; pump: ends a
    step."""

    def __init__(
        self,
        returns: Returns,
        leases: Mapping[Name, Lease],
        returned: Callable[[Lease, float], None],
        pump: Callable[[float], None],
    ) -> None:
        self._returns, self._leases = returns, leases
        self._returned, self._pump = returned, pump

    @property
    def counters(self) -> TransferCounters:
        return self._returns.counters

    @property
    def active(self) -> int:
        """The number of sends that are open or ending."""
        return len(self._returns)

    @property
    def look_ups(self) -> LookUpCounters:
        return self._returns.loans.look_ups

    def found(self, namespace_id: bytes, digests: bytes) -> int:
        """Leading pages of these that a prefill daemon could have now, whoever had them computed."""
        return self._returns.loans.found(namespace_id, digests)

    def lend(self, session: int, ask: peer.Ask, deadline: float, now: float) -> None:
        """The prefill daemon wants pages that it has looked up."""
        self._returns.lend(session, ask, deadline)
        self._pump(now)

    def verified(self, session: int, transfer: int, wrong: Collection[int] | None, now: float) -> None:
        """VerifyRows is over; `wrong`: rows of it that are not as they were written; None: that is not known."""
        self._returns.loans.verified(session, transfer, wrong)
        self._pump(now)

    def asked(self, session: int, prefill: str, name: Name, ask: peer.Ask, now: float) -> None:
        """The prefill daemon wants pages of a request that asks it for the others."""
        self._returns.ask(session, prefill, self._leases.get(name), ask)
        self._pump(now)

    def ask_end(self, session: int, transfer: int, now: float) -> None:
        """Ends an ask. Idempotent."""
        self._returns.ask_end(session, transfer)
        self._pump(now)

    def over(self, session: int, transfer: int, now: float, *, completed: bool) -> None:
        """No gather of the send runs, and none will. `completed`: all of it has reached the other side."""
        lease = self._returns.closed(session, transfer, completed=completed)
        if lease is not None:
            self._returned(lease, now)
        self._pump(now)

    def session_down(self, session: int, now: float) -> None:
        """The session is over, and no copy of it runs."""
        for lease in self._returns.session_down(session):
            self._returned(lease, now)
        self._pump(now)


def _other_prompt(lease: Lease, ask: peer.Ask) -> RequestError | None:
    """The objection where the two speak of different tokens."""
    for field_name, theirs, ours in (
        ("namespace_id", ask.namespace_id, lease.namespace_id),
        ("tokens", ask.tokens, lease.tokens),
        ("last_full_digest", ask.last_full_digest, lease.digests[-DIGEST_BYTES:]),
        ("tail_digest", ask.tail_digest, lease.tail_digest),
    ):
        if theirs != ours:
            return precondition(f"{field_name} of the pages that are asked back differs from the request's")
    return None
