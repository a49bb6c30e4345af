"""The way of a request to its pages: a reservation (locks and a promise), then the pages themselves. Core: no I/O.

A reservation is made only if the promise can be kept; the pages may come later, when evicted ones have been spilled.
What of the locked path is only in the host tier is restored into pages of the same promise.

`AdmissionLoop` leads both roles' requests that way: whoever the queue lets go first is reserved, and in the order of
their reservations they claim their pages as these become free. One that loses what it matched, or whose promise was
used up by growth, gives its reservation back and waits for its turn again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvferry.daemon.core.admission_queue import Admission, AdmissionQueue, Waiting
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import Lock


@dataclass(slots=True, eq=False)
class Hold:
    """A request's hold on the pool: `wanted` pages now and up to `growth` more later, for a prompt whose first pages
    `digests` names."""

    namespace: Namespace
    digests: bytes  # of the pages that may be matched
    wanted: int
    growth: int
    priority: int
    readable_only: bool  # matched pages that arrive for others are of no use: it could not bring them itself
    overcommit: float
    lock: Lock | None = None
    matched: int = 0  # pages
    host_matched: int = 0  # of them, those that were only in the host tier
    pages: list[int] = field(default_factory=list)  # device ids, once claimed
    counted: int = 0  # its part of the namespace's promised pages

    def promise(self, now: int, later: int) -> None:
        """Promises from here on `now` pages that are wanted, and `later` that it may grow by."""
        counted = now + math.ceil(later / self.overcommit)
        self.namespace.promised += counted - self.counted
        self.counted = counted


class Abandoned(Protocol):
    """The record of pages on their way, as far as it is needed here."""

    def abandoned(self, path: Sequence[int]) -> int | None:
        """Index of the first page of the path that nobody brings."""

    def forget(self, pages: Sequence[int]) -> None:
        """Forgets pages that are gone."""


class Holds:
    def __init__(self, cache: Cache, arriving: Abandoned) -> None:
        self._cache = cache
        self._arriving = arriving

    def reserve(self, hold: Hold) -> Admission:
        """Locks the longest match and promises the rest, if that can be kept; else nothing has changed."""
        namespace = hold.namespace
        total = hold.wanted + hold.growth
        if hold.wanted + self._later(hold) > self._cache.reachable(namespace):
            return Admission.PROTECTED  # whatever it matches: that is in the pool, too
        match = namespace.tree.match(hold.digests)
        if refusal := self._refusal(hold, hold.wanted - match.device_pages):
            return refusal  # locking the match can only make it worse; a request that waits should not look like use
        lock = self._lock(hold)
        if refusal := self.refusal_once_locked(hold, lock):
            namespace.tree.unlock(lock)
            return refusal
        assert total >= lock.pages
        hold.lock = lock
        hold.promise(hold.wanted - lock.device_pages, hold.growth)
        return Admission.TAKEN

    def is_good(self, hold: Hold) -> bool:
        """Whether what the hold reserved can still be read by it: no restore of it has failed meanwhile."""
        assert hold.lock is not None
        if not hold.readable_only:
            return True
        return PageState.ARRIVING not in self._cache.pool.states(hold.namespace.tree.path_pages(hold.lock))

    def claim(self, hold: Hold) -> list[int] | None:
        """Claims the pages behind the matched ones, and a restore of those that are in the host tier alone. None: not
        yet."""
        namespace, tree = hold.namespace, hold.namespace.tree
        assert hold.lock is not None and not hold.pages
        if tree.match(hold.digests).pages > hold.lock.pages:  # more has come since it was reserved
            longer = self._lock(hold)
            tree.unlock(hold.lock)
            hold.lock = longer
        lock = hold.lock
        hold.promise(hold.wanted - lock.device_pages, hold.growth)
        taken = self._cache.take(namespace, hold.wanted - lock.device_pages)
        if taken is None:
            return None
        hold.host_matched = lock.pages - lock.device_pages
        if self._cache.limits.in_blocks:  # they are the request's own: what is held is copied into them
            hold.matched, hold.pages = lock.pages, taken
            hold.promise(0, hold.growth)
            return taken[lock.pages :]
        fresh = taken[hold.host_matched :]
        if hold.host_matched:
            self._cache.restore(namespace, lock, taken[: hold.host_matched])
        hold.matched = lock.pages
        hold.pages = tree.path_pages(lock) + fresh
        hold.promise(0, hold.growth)
        return fresh

    def grow(self, hold: Hold, extra: int) -> bool:
        """Takes `extra` pages of the promised growth. False: not yet."""
        hold.promise(extra, hold.growth - extra)
        taken = self._cache.take(hold.namespace, extra)
        if taken is None:
            return False
        hold.growth -= extra
        hold.pages += taken
        hold.promise(0, hold.growth)
        return True

    def drop(self, hold: Hold, own: Sequence[int]) -> None:
        """The end of it: `own` of its pages are freed, the path is unlocked, what nobody brings is taken out."""
        hold.promise(0, 0)
        self._arriving.forget(own)
        self._cache.release(hold.namespace, own)
        if hold.lock is not None:
            self.unlock(hold.namespace, hold.lock)
        hold.lock, hold.pages, hold.matched, hold.host_matched = None, [], 0, 0

    def abandoned(self, namespace: Namespace, lock: Lock) -> int | None:
        """Index of the first page of the locked path that is on its way and brought by nobody."""
        return self._arriving.abandoned(namespace.tree.path_pages(lock))

    def lock_readable(self, namespace: Namespace, digests: bytes) -> Lock:
        """Locks the leading pages of these that can be read: see `Cache.readable`."""
        readable = self._cache.readable(namespace, digests)
        return namespace.tree.lock(namespace.tree.match(digests[: readable * DIGEST_BYTES]))

    def lengthen(self, hold: Hold) -> list[int]:
        """Has what came to the tree since the hold claimed its pages take the place of as many of its own behind its
        matched ones, whose bytes nobody has written. Returns these, which are freed. No promise suffers: what becomes
        locked is no more than what becomes free."""
        namespace, tree = hold.namespace, hold.namespace.tree
        assert hold.lock is not None
        lock = self.lock_readable(namespace, hold.digests)
        if lock.pages <= hold.matched:
            tree.unlock(lock)
            return []
        theirs, own = tree.path_pages(lock)[hold.matched :], hold.pages[hold.matched : lock.pages]
        hold.pages[hold.matched : lock.pages] = theirs
        tree.unlock(hold.lock)
        hold.lock, hold.matched = lock, lock.pages
        self._cache.release(namespace, own)
        return own

    def unlock(self, namespace: Namespace, lock: Lock) -> None:
        """Gives the lock up, whatever has become of its pages."""
        abandoned = self.abandoned(namespace, lock)
        if abandoned is None:
            namespace.tree.unlock(lock)
            return
        self.removed(namespace, namespace.tree.prune(lock, abandoned))

    def removed(self, namespace: Namespace, removed: list[int]) -> None:
        """Frees pages that are out of the tree now, by whatever step."""
        self._arriving.forget(removed)
        self._cache.pruned(namespace, removed)

    def extend(self, hold: Hold, digests: bytes, own: list[int], start: int, kind: int) -> list[int]:
        """Moves the hold's pages `own`, behind `start` held ones of `digests`, into the tree, and the lock over them.
        Returns those that another request had brought first: they stay its own.
        """
        tree = hold.namespace.tree
        assert hold.lock is not None
        self._cache.name(hold.namespace, own, digests[start * DIGEST_BYTES :])
        result = tree.insert(digests, own, start, kind, hold.priority)
        tree.relock(hold.lock, result.match)
        self._cache.publish(hold.namespace, len(own) - len(result.duplicates))
        return result.duplicates

    def refusal_once_locked(self, hold: Hold, lock: Lock) -> Admission | None:
        """Guard: the promise is judged with the path locked, since its pages may be those that could be evicted."""
        return self._refusal(hold, hold.wanted - lock.device_pages)

    def _refusal(self, hold: Hold, now: int) -> Admission | None:
        pages = max(0, now) + self._later(hold)
        if self._cache.fits(hold.namespace, pages):
            return None
        return Admission.NO_ROOM if hold.namespace.within_hard(pages) else Admission.OVER_QUOTA

    def _later(self, hold: Hold) -> int:
        """Pages that are promised for its growth."""
        return math.ceil(hold.growth / hold.overcommit)

    def _lock(self, hold: Hold) -> Lock:
        tree = hold.namespace.tree
        lock = tree.lock(tree.match(hold.digests), hold.priority)
        if not hold.readable_only:
            return lock
        end = self._cache.pool.states(tree.path_pages(lock)).find(PageState.ARRIVING)
        if end < 0:
            return lock
        shorter = tree.lock(tree.match(hold.digests[: end * DIGEST_BYTES]), hold.priority)
        tree.unlock(lock)
        return shorter


class Reserving(Waiting, Protocol):
    """A request of either role."""

    @property
    def hold(self) -> Hold: ...


ReservingT = TypeVar("ReservingT", bound=Reserving)
_ReservingT = TypeVar("_ReservingT", bound=Reserving, contravariant=True)


class AdmissionRules(Protocol[_ReservingT]):
    """The rules of admission that the roles have in ways of their own."""

    def reserve(self, request: _ReservingT, now: float) -> Admission:
        """Locks and promises, if the rules and the pool allow it."""

    def on_claimed(self, request: _ReservingT, fresh: list[int], now: float) -> None:
        """The request has its pages; `fresh` are those behind the matched ones."""

    def on_lost(self, request: _ReservingT, now: float) -> None:
        """The request's reservation is of no use: it is given back."""


class AdmissionLoop(Generic[ReservingT]):
    def __init__(
        self, queue: AdmissionQueue[ReservingT], cache: Cache, holds: Holds, rules: AdmissionRules[ReservingT]
    ) -> None:
        self.reserved: deque[ReservingT] = deque()
        self._queue = queue
        self._cache = cache
        self._holds = holds
        self._rules = rules

    def run(self, now: float) -> list[ReservingT]:
        """One step. Returns those whose reservations were of no use, which are to wait again."""
        lost = self._claim(now)
        if not self._queue:
            return lost
        walk = self._queue.walk()
        while (request := walk.next()) is not None:
            admission = self._rules.reserve(request, now)
            walk.judge(admission)
            if admission is Admission.TAKEN:
                self.reserved.append(request)
                lost += self._claim(now)
        return lost

    def _claim(self, now: float) -> list[ReservingT]:
        """Claims the pages of reserved requests, as far as pages are free."""
        lost: list[ReservingT] = []
        while self.reserved:
            request = self.reserved[0]
            fresh = None
            if self._holds.is_good(request.hold):
                fresh = self._holds.claim(request.hold)
                if fresh is None and self._cache.copies.yielding:
                    break
            self.reserved.popleft()
            if fresh is None:
                self._rules.on_lost(request, now)
                lost.append(request)
            else:
                self._rules.on_claimed(request, fresh, now)
        return lost
