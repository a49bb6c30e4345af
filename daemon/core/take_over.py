"""Takers that bring pages in another's place, where single flight would tie a request to a prefill daemon that may
never answer. Core: no I/O, time is passed in.

A follower whose own prefill daemon has computed the pages takes them over from a filler that has brought none for
PATIENCE_SECONDS. From one that has brought some, which was only slow, it takes them after STALL_SECONDS, and twice as
long each time they change hands: each change throws away what was half received.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.lease import Lease, LeaseState, Transfer
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.daemon.core.transfers import Asks

# Far below any deadline, and below the time for which a prefill daemon surely keeps what it has sent (REST_SECONDS).
PATIENCE_SECONDS = 0.25
STALL_SECONDS = 2.0
MAX_TAKE_OVERS = 4  # by one request, of pages that were coming


class TakeOvers:
    def __init__(self, arrivals: Arrivals[Lease], asks: Asks) -> None:
        self._arrivals = arrivals
        self._asks = asks

    def look(self, leases: Iterable[Lease], now: float) -> None:
        """Looks for pages to be taken over, at each tick."""
        for filler in leases:
            quiet = filler.state is LeaseState.FILLING and now - filler.quiet_since >= PATIENCE_SECONDS
            if quiet and self._asks.waits(filler):
                taker = self._taker(filler, now)
                if taker is not None:
                    taker.take_overs += _delivers(filler)
                    self._pass(filler, taker, self._asks.give_to(taker, filler, taker.missing & filler.filling))

    def _taker(self, filler: Lease, now: float) -> Lease | None:
        delivers = _delivers(filler)
        if delivers and now - filler.quiet_since < STALL_SECONDS * 2**filler.hands:
            return None
        # Who waits for any page of a prompt waits for the first one, too: what is matched is a prefix.
        pages = filler.pages[self._asks.first_page(filler) :]
        first = next(filter(filler.filling.__contains__, pages), None)
        for follower in () if first is None else self._arrivals.followers(first):
            sooner = (follower.prefill != filler.prefill and follower.take_overs < MAX_TAKE_OVERS) or not delivers
            if follower is not filler and sooner and _is_served(follower, now):
                return follower
        return None

    def drained(self, moving: Transfer) -> RequestError | None:
        """No copy runs of a transfer that has a taker, which asks for what it waits for; the rest is asked for again.
        Returns the prefill daemon's refusal, if it came meanwhile and the aux blob has not: by that the request fails.
        """
        lease, taker = moving.lease, moving.taker
        assert taker is not None
        if moving.refusal is not None and lease.aux is None:
            return moving.refusal
        still = [page for page in moving.page_ids if page in lease.filling]
        if taker.state is LeaseState.FILLING:
            self._pass(lease, taker, [page for page in still if page in taker.missing])
        if rest := [page for page in still if page in lease.filling]:
            self._asks.ask_on(lease, rest)
        elif lease.aux is None and not lease.transfers and not lease.runs:
            self._asks.await_aux(lease)
        return None

    def _pass(self, lease: Lease, taker: Lease, pages: list[int]) -> None:
        if not pages:
            return
        self._arrivals.take_over(pages, lease, taker)
        for page in pages:
            if lease.taken.pop(page, None) is not taker:  # else they go back to whom they came from
                taker.taken[page] = lease
        taker.hands = max(taker.hands, lease.hands + 1)
        self._asks.ask_on(taker, pages)

    def give_back(self, moving: Transfer) -> bool:
        """The prefill daemon refuses what was taken over, as it may: it keeps for a short while only what it has sent.
        Where the pages were coming they go back to whom they were taken from, and True.
        """
        lease = moving.lease
        if lease.aux is None:
            return False  # nor will that come
        for page in moving.page_ids:
            former = lease.taken.get(page)
            if former is not None and page in former.missing and page in lease.filling and _delivers(former):
                lease.take_overs = MAX_TAKE_OVERS
                self._asks.give_transfer(moving, former)
                return True
        return False


def _delivers(lease: Lease) -> bool:
    """Whether the lease's own prefill daemon has brought something of it."""
    return lease.brings or lease.served_at is not None


def _is_served(follower: Lease, now: float) -> bool:
    served = follower.served_at is not None and now - follower.served_at >= PATIENCE_SECONDS
    return served and follower.state is LeaseState.FILLING
