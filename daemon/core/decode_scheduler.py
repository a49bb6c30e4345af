"""The order in which decode requests get pages: growth first, then what is reserved, then the admission queue. Core: no
I/O, time is passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvferry.daemon.core.admission_queue import Admission, AdmissionQueue
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.lease import Lease, LeaseState
from kvferry.daemon.core.limits import pages_for
from kvferry.daemon.core.namespaces import Namespace, quota_states
from kvferry.daemon.core.reservations import AdmissionLoop, Holds


class SupplyEvents(Protocol):
    def on_claimed(self, lease: Lease, fresh: list[int], now: float) -> None:
        """The lease has its pages; `fresh` are those behind the matched ones."""

    def on_grown(self, lease: Lease, first_page: int) -> None:
        """The lease's pages from index `first_page` on are new."""

    def on_short(self, lease: Lease, now: float) -> None:
        """No page can be had for its growth, and no copy is under way that would free one."""


@dataclass(slots=True, eq=False)
class Growth:
    lease: Lease
    tokens: int
    deadline: float


class Supply:
    def __init__(self, cache: Cache, holds: Holds, overtakes: int, events: SupplyEvents) -> None:
        self.queue: AdmissionQueue[Lease] = AdmissionQueue(overtakes, partial(quota_states, cache.namespaces.values()))
        self.growing: deque[Growth] = deque()
        self._loop: AdmissionLoop[Lease] = AdmissionLoop(self.queue, cache, holds, self)
        self._cache = cache
        self._holds = holds
        self._events = events

    @property
    def reserved(self) -> int:
        return len(self._loop.reserved)

    def remove(self, lease: Lease) -> None:
        """Forgets a lease that waits for nothing more."""
        if lease.state is LeaseState.WAITING:
            self.queue.remove(lease)
        elif lease.state is LeaseState.RESERVED:
            self._loop.reserved.remove(lease)
            self._holds.drop(lease.hold, [])

    def pump(self, now: float) -> None:
        self._grow(now)
        for lease in self._loop.run(now):
            self.queue.push(lease)

    def reserve(self, lease: Lease, now: float) -> Admission:
        """(AdmissionRules)"""
        admission = self._holds.reserve(lease.hold)
        if admission is Admission.TAKEN:
            lease.state, lease.admitted_at = LeaseState.RESERVED, now
        return admission

    def on_claimed(self, lease: Lease, fresh: list[int], now: float) -> None:
        """(AdmissionRules)"""
        self._events.on_claimed(lease, fresh, now)

    def on_lost(self, lease: Lease, now: float) -> None:
        """(AdmissionRules)"""
        self._holds.drop(lease.hold, [])
        lease.state, lease.waiting_since = LeaseState.WAITING, now

    def _grow(self, now: float) -> None:
        """Grows requests in order; a namespace whose first growth must wait holds up no other."""
        stuck: list[Namespace] = []
        for growth in list(self.growing):
            lease = growth.lease
            namespace = lease.hold.namespace
            if namespace in stuck:
                continue
            first = len(lease.pages)
            extra = pages_for(growth.tokens, self._cache.page_size) - first
            if lease.state is not LeaseState.READY:
                self.growing.remove(growth)  # it ended meanwhile
            elif extra <= 0 or self._holds.grow(lease.hold, extra):
                self.growing.remove(growth)
                self._events.on_grown(lease, first)
            else:
                stuck.append(namespace)
                if not self._cache.copies.yielding:
                    self._events.on_short(lease, now)
