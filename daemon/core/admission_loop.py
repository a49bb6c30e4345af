"""The loop by which waiting requests come to their pages, one for both roles. Core: no I/O, time is passed in.

Whoever the queue lets go first is reserved: what it matches is locked, the rest is promised. In the order of their
reservations the requests then claim their pages, as these become free. One that loses what it matched, or whose promise
was used up by growth, gives its reservation back and waits for its turn again.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from kvferry.daemon.core.admission_queue import Admission, AdmissionQueue, Waiting
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.reservations import Hold, Holds


class Reserving(Waiting, Protocol):
    """A request of either role."""

    @property
    def hold(self) -> Hold: ...


ReservingT = TypeVar("ReservingT", bound=Reserving)
_ReservingT = TypeVar("_ReservingT", bound=Reserving, contravariant=True)


class AdmissionRules(Protocol[_ReservingT]):
    """What the roles do in ways of their own."""

    def reserve(self, request: _ReservingT, now: float) -> Admission:
        """Locks and promises, if the rules and the pool allow it."""

    def on_claimed(self, request: _ReservingT, fresh: list[int], now: float) -> None:
        """It has its pages; `fresh` are those behind the matched ones."""

    def on_lost(self, request: _ReservingT, now: float) -> None:
        """Its reservation is of no use: it is given back."""


class AdmissionLoop(Generic[ReservingT]):
    def __init__(
        self, queue: AdmissionQueue[ReservingT], store: Cache, holds: Holds, rules: AdmissionRules[ReservingT]
    ) -> None:
        self.reserved: deque[ReservingT] = deque()
        self._queue = queue
        self._store = store
        self._holds = holds
        self._rules = rules

    def run(self, now: float) -> list[ReservingT]:
        """One step. Returns those whose reservations were of no use, which are to wait again."""
        lost = self._claim(now)
        walk = self._queue.walk()
        while (request := walk.next()) is not None:
            admission = self._rules.reserve(request, now)
            walk.judge(admission)
            if admission is Admission.TAKEN:
                self.reserved.append(request)
                lost += self._claim(now)
        return lost

    def _claim(self, now: float) -> list[ReservingT]:
        """As far as pages are free."""
        lost: list[ReservingT] = []
        while self.reserved:
            request = self.reserved[0]
            fresh = None
            if self._holds.is_good(request.hold):
                fresh = self._holds.claim(request.hold)
                if fresh is None and self._store.copies.yielding:
                    break
            self.reserved.popleft()
            if fresh is None:
                self._rules.on_lost(request, now)
                lost.append(request)
            else:
                self._rules.on_claimed(request, fresh, now)
        return lost
