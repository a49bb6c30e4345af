"""The choice of the begun prompt that gets its pages next. Core: no I/O.

Requests that no decode daemon has asked for hold at most half of what the namespaces' soft quotas leave of the pool
and of their namespace's hard quota, and get no pages while one that was asked for waits for room: for that of all, or,
where only its namespace's hard quota is in its way, for that of its namespace. So one that needs no more than that half
waits only for what others have asked for; a larger one may wait also for those that nobody asks for, until their
deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from kvferry.daemon.core.admission_queue import Admission, AdmissionQueue, StateOf
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.namespaces import Namespace, quota_states
from kvferry.daemon.core.prefill_entry import BegunPrompt, Entry, EntryState
from kvferry.daemon.core.reservations import AdmissionLoop, Hold, Holds
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.daemon.core.tier_copies import CopyEnded
from kvferry.radix.pool import PageState


class PrefillSupply:
    """The supply of begun prompts with pages. `on_pages`: every page of the prompt is there, and its matched ones are
    readable."""

    def __init__(self, cache: Cache, overtakes: int, on_pages: Callable[[Entry], None]) -> None:
        self.queue: AdmissionQueue[Entry] = AdmissionQueue(overtakes, self._states)
        self._arrivals: Arrivals[Entry] = Arrivals()
        self.holds = Holds(cache, self._arrivals)
        self._cache = cache
        self._on_pages = on_pages
        self._parked = 0
        self._loop: AdmissionLoop[Entry] = AdmissionLoop(self.queue, cache, self.holds, self)
        self._asked_waiting = 0
        # Of this step, who keeps others without pages: namespaces of which one that was asked for is over their quota,
        # and whether one has no room.
        self._asked_over: set[Namespace] = set()
        self._asked_short = False
        self._unasked: Counter[bytes] = Counter()  # pages by namespace, reserved for or held by prompts not asked for

    @property
    def waiting(self) -> int:
        return len(self.queue) + self._parked

    @property
    def reserved(self) -> int:
        return len(self._loop.reserved)

    def first_asked(self) -> list[Hold]:
        """For each namespace the first of the requests that a decode daemon asked for and that wait for pages, in
        order; not those that only others' soft quotas keep out, whom nobody's pages would help.
        """
        if not self._asked_waiting:
            return []
        first: dict[Namespace, Hold] = {}
        reachable = self._cache.reachable_by_each()
        for entry in self.queue:
            assert entry.prompt is not None
            hold = entry.prompt.hold
            if entry.asked and hold.namespace not in first and hold.wanted <= reachable[hold.namespace]:
                first[hold.namespace] = hold
        return list(first.values())

    @property
    def unasked_pages(self) -> int:
        """Pages reserved for or held by prompts that nobody asked for."""
        return self._unasked.total()

    def most_unasked(self, namespace: Namespace | None = None) -> int:
        """Guard: the bound of them, of one namespace or of all; prompts that were asked for need the rest."""
        shared = self._cache.pool.pages - sum(each.quota.soft for each in self._cache.namespaces.values())
        return max(0, shared if namespace is None else min(shared, self._cache.most(namespace))) // 2

    def add(self, entry: Entry) -> None:
        """Lets the entry wait from now on."""
        if not entry.asked and entry.hold.wanted > self.most_unasked(entry.hold.namespace):
            entry.move(EntryState.PARKED)
            self._parked += 1
            return
        entry.move(EntryState.WAITING)
        self._asked_waiting += entry.asked
        self.queue.push(entry)

    def asked(self, entry: Entry, session: int) -> None:
        """A decode daemon asks for it, for the first time."""
        waits = self._leave_queue(entry)
        entry.session = session
        if waits:
            self.add(entry)
        if entry.prompt is not None:
            self._count_asked(entry.prompt)

    def leave(self, entry: Entry) -> None:
        """Forgets an entry that waits for nothing more."""
        if entry.state is EntryState.RESERVED:
            self._loop.reserved.remove(entry)
        self._leave_queue(entry)

    def drop(self, entry: Entry) -> None:
        """The prompt's hold on the cache ends, in either tier."""
        prompt = entry.prompt
        assert prompt is not None
        self._arrivals.leave(entry)
        self.holds.drop(prompt.hold, prompt.private)
        prompt.private = []
        if prompt.rows:
            assert self._cache.host is not None
            self._cache.host.free_pages(prompt.rows)
            prompt.rows = []
        self._count_asked(prompt)

    def pump(self, now: float) -> None:
        self._asked_over.clear()
        self._asked_short = False
        for entry in self._loop.run(now):
            self.add(entry)

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> CopyEnded:
        ended = self._cache.copies.ended(number, failed, mismatched, seconds)
        waiters = self._arrivals.arrived(ended.readable)
        _, stranded = self._arrivals.lost(ended.lost)
        self.holds.removed(ended.namespace, ended.removed)
        for entry in stranded:
            # Its worker was told nothing yet: it is admitted once more, with what is readable then.
            self.drop(entry)
            self.add(entry)
        for entry in waiters:
            if entry not in stranded:
                self._check_begun(entry)
        return ended

    def _leave_queue(self, entry: Entry) -> bool:
        """Whether it waited."""
        if entry.state is EntryState.PARKED:
            self._parked -= 1
            return True
        if entry.state is not EntryState.WAITING:
            return False
        self.queue.remove(entry)
        self._asked_waiting -= entry.asked
        return True

    def reserve(self, entry: Entry, now: float) -> Admission:
        """(AdmissionRules)"""
        prompt = entry.prompt
        assert prompt is not None
        admission = self._reserve_asked(prompt.hold) if entry.asked else self._reserve_unasked(prompt)
        if admission is Admission.TAKEN:
            entry.move(EntryState.RESERVED)
            self._asked_waiting -= entry.asked
        return admission

    def _reserve_asked(self, hold: Hold) -> Admission:
        admission = self.holds.reserve(hold)
        if admission is Admission.NO_ROOM:
            self._asked_short = True
        elif admission is Admission.OVER_QUOTA:
            self._asked_over.add(hold.namespace)
        return admission

    def _states(self) -> StateOf:
        quotas = quota_states(self._cache.namespaces.values())
        return lambda namespace: (quotas(namespace), self.unasked_pages, self._unasked[cast(Namespace, namespace).id])

    def _reserve_unasked(self, prompt: BegunPrompt) -> Admission:
        """Reserves for a prompt that nobody asked for. What was asked for was looked at before it in this step: it goes
        first."""
        namespace, wanted = prompt.hold.namespace, prompt.hold.wanted
        if self._asked_short or self.unasked_pages + wanted > self.most_unasked():
            return Admission.NO_ROOM
        if namespace in self._asked_over or self._unasked[namespace.id] + wanted > self.most_unasked(namespace):
            return Admission.OVER_QUOTA
        admission = self.holds.reserve(prompt.hold)
        if admission is Admission.TAKEN:
            prompt.unasked = wanted
            self._unasked[namespace.id] += wanted
        return admission

    def on_claimed(self, entry: Entry, fresh: list[int], now: float) -> None:
        """(AdmissionRules)"""
        prompt = entry.prompt
        assert prompt is not None
        entry.move(EntryState.RESTORING)
        prompt.private = fresh
        path = prompt.pages[: prompt.hold.matched]
        assert PageState.ARRIVING not in self._cache.pool.states(path), "a matched page was never written"
        coming = self._cache.pool.those(path, PageState.RESTORING)
        self._arrivals.restoring(page for page in coming if page not in self._arrivals)
        for page in coming:
            self._arrivals.follow(page, entry)
        self._check_begun(entry)

    def on_lost(self, entry: Entry, now: float) -> None:
        """(AdmissionRules)"""
        self.drop(entry)

    def _check_begun(self, entry: Entry) -> None:
        if not entry.missing:
            self._on_pages(entry)

    def _count_asked(self, prompt: BegunPrompt) -> None:
        self._unasked[prompt.namespace_id] -= prompt.unasked
        prompt.unasked = 0
