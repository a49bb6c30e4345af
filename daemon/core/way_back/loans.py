"""What a decode daemon sends of its cache to prefill daemons that have looked it up: no request of the daemon names it.
Core: no I/O, time is passed in.

A look-up holds nothing: what it found may be gone when it is asked for. An Ask locks its pages for as long as they are
sent, until its deadline at most, and is refused where running requests were promised them, or others wait for pages.
Where device pages are blocks of an engine's, which has them, what is cached are rows of the host tier: they are
verified, as for a restore, and sent from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from kvferry.daemon.core.blocks.block_tier import forget_path
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import LookUpCounters, TransferCounters
from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, Outbox, VerifyRows
from kvferry.daemon.core.errors import RequestError, deadline_exceeded, exhausted, invalid, unavailable
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.reservations import Holds
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_LOOKED_UP_PAGES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import Lock

MAX_LOANS = 16  # of a session


@dataclass(slots=True, eq=False)
class _Loan:
    """A send that is open or ending."""

    namespace: Namespace
    lock: Lock
    deadline: float
    digests: bytes
    first_page: int
    rows: tuple[int, ...] = ()  # of the host tier, where it is sent from there
    failure: str = ""  # why it ends before it is sent, as a counter's key
    ending: bool = False


class Loans:
    """counters: of all that goes back. waiting: requests of the daemon that wait for admission. excluded: namespaces
    of which nothing is told or lent."""

    def __init__(
        self,
        cache: Cache,
        outbox: Outbox,
        holds: Holds,
        counters: TransferCounters,
        waiting: Callable[[], int],
        excluded: Container[bytes],
    ) -> None:
        self.look_ups = LookUpCounters()
        self._cache = cache
        self._outbox = outbox
        self._holds = holds
        self._counters = counters
        self._waiting = waiting
        self._excluded = excluded
        self._open: dict[tuple[int, int], _Loan] = {}  # by (session, transfer)
        self._verified_now: set[tuple[int, int]] = set()  # whose rows are looked at, though the loan may have ended

    def __len__(self) -> int:
        return len(self._open)

    def found(self, namespace_id: bytes, digests: bytes) -> int:
        """Leading pages of these that can be read now."""
        namespace = self._open_namespace(namespace_id)
        pages = 0 if namespace is None else self._cache.readable(namespace, digests)
        self.look_ups.heard(pages)
        return pages

    def ask(self, session: int, ask: peer.Ask, deadline: float) -> None:
        """An Ask by digests, whose transfer's number is new. What is wrong with it fails the ask."""
        error = self._refusal(session, ask) or self._lend(session, ask, deadline)
        if error is not None:
            self._outbox.put(FailAsk(session, ask.transfer, error))

    def _refusal(self, session: int, ask: peer.Ask) -> RequestError | None:
        if ask.pages < 1:
            return invalid(f"pages is {ask.pages}; it must be at least 1")
        end = ask.first_page + ask.pages
        if len(ask.digests) != end * DIGEST_BYTES or end > MAX_LOOKED_UP_PAGES:
            return invalid(
                f"digests has {len(ask.digests)} bytes; first_page {ask.first_page} + pages {ask.pages} need "
                f"{end} x {DIGEST_BYTES}, at most {MAX_LOOKED_UP_PAGES} x {DIGEST_BYTES}"
            )
        lent = sum(key[0] == session for key in self._open.keys() | self._verified_now)
        if lent >= MAX_LOANS:
            return exhausted(f"{lent} transfers of what was looked up are open or verified; the bound is {MAX_LOANS}")
        return None

    def _lend(self, session: int, ask: peer.Ask, deadline: float) -> RequestError | None:
        namespace = self._open_namespace(ask.namespace_id)
        end = ask.first_page + ask.pages
        if namespace is None or self._cache.readable(namespace, ask.digests) < end:
            return unavailable("the pages are not held here, or not any more")
        if waiting := self._waiting():
            return exhausted(f"{waiting} requests wait here for pages; nothing more is lent until they are admitted")
        lock = self._holds.lock_readable(namespace, ask.digests)
        if not self._cache.fits(namespace, 0):
            self._holds.unlock(namespace, lock)
            return exhausted(f"running requests were promised some of the {end} pages")
        loan = _Loan(namespace, lock, deadline, ask.digests, ask.first_page)
        self._open[session, ask.transfer] = loan
        self._counters.opened += 1
        if self._cache.limits.in_blocks:
            loan.rows = tuple(namespace.tree.path_rows(lock)[ask.first_page : end])
            self._verified_now.add((session, ask.transfer))
            self._outbox.put(VerifyRows(session, ask.transfer, loan.rows))
        else:
            page_ids = tuple(namespace.tree.path_pages(lock)[ask.first_page : end])
            self._outbox.put(OpenSend(session, ask.transfer, ask.first_page, page_ids, end))
        return None

    def verified(self, session: int, transfer: int, wrong: Collection[int] | None) -> None:
        """VerifyRows is over; `wrong`: rows that are not as they were written; None: it could not be found out. What
        has ended meanwhile is none of these any more."""
        self._verified_now.remove((session, transfer))
        loan = self._open.get((session, transfer))
        if loan is None or loan.ending:
            return
        end = loan.first_page + len(loan.rows)
        if wrong is not None and not wrong:
            self._outbox.put(OpenSend(session, transfer, loan.first_page, loan.rows, end, from_rows=True))
            return
        if wrong:
            self._cache.tiers.mismatched += len(wrong)
            good = next(i for i, row in enumerate(loan.rows) if row in wrong)
            loan.lock = forget_path(loan.namespace.tree, loan.lock, loan.digests, loan.first_page + good)
        loan.failure = "wrong_checksum" if wrong else "not_verified"
        self._outbox.put(FailAsk(session, transfer, unavailable("pages in the host tier are not as they were written")))
        self.closed(session, transfer, completed=False)

    def _open_namespace(self, namespace_id: bytes) -> Namespace | None:
        return None if namespace_id in self._excluded else self._cache.namespaces.get(namespace_id)

    def look(self) -> None:
        """Ends what is past its deadline. After every step."""
        for (session, transfer), loan in self._open.items():
            if loan.deadline <= self._cache.clock.now and not loan.ending:
                loan.ending, loan.failure = True, "deadline_exceeded"
                error = deadline_exceeded("the pages were not taken in the time that the ask has")
                self._outbox.put(FailAsk(session, transfer, error))
                self._outbox.put(EndSend(session, transfer))

    def ask_end(self, session: int, transfer: int) -> None:
        """The prefill daemon wants no more of it; EndSend is left by the caller. Idempotent."""
        if (loan := self._open.get((session, transfer))) is not None:
            loan.ending = True

    def closed(self, session: int, transfer: int, *, completed: bool) -> None:
        """No gather of it runs: its pages are unlocked. Idempotent."""
        loan = self._open.pop((session, transfer), None)
        if loan is None:
            return
        self._holds.unlock(loan.namespace, loan.lock)
        if completed:
            self._counters.completed += 1
        else:
            self._counters.abort(loan.failure or "request_ended")

    def session_down(self, session: int) -> None:
        """The session is over, and no copy of it runs."""
        for key in [key for key in self._open if key[0] == session]:
            self.closed(*key, completed=False)
