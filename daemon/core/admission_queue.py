"""The queue of requests that wait for pages. Core: no I/O.

Smaller priorities go first; within one, who came first. One that does not fit may be overtaken by later ones that do,
but by at most `overtakes` of them: then nobody passes it, and what others give back is its own. One that only its
namespace's own hard quota keeps out waits for its namespace alone: others pass it uncounted. So does everybody pass one
that could not fit if all others were idle: what the other namespaces' soft quotas protect is not its to wait for.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList

OVERTAKES = 8
LOOK_AHEAD = 32  # requests without room that are looked past in one step, and of each namespace those over its quota
PROTECTED_LOOK_AHEAD = 256  # of each namespace, those kept out by what others' soft quotas protect: that is soon judged


class Admission(enum.Enum):
    TAKEN = "taken"
    NO_ROOM = "no room"
    OVER_QUOTA = "over quota"  # its namespace's own hard quota is in the way
    PROTECTED = "protected"  # what other namespaces' soft quotas protect is in the way


class Waiting(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def order(self) -> int:
        """The request's order; grows with each request."""

    @property
    def scope(self) -> object:
        """The request's namespace."""

    overtaken: int


WaitingT = TypeVar("WaitingT", bound=Waiting)
_Rank = tuple[int, int]
StateOf = Callable[[object], Hashable]
"""Of a namespace: all that decides which of its requests are over its quota, or kept out by what others' protect."""


class AdmissionQueue(Generic[WaitingT]):
    """The waiting requests by priority and order. `states`, in each step, gives what namespaces are judged by: one
    where nobody got on is not looked at again before that, or who waits there, has changed.
    """

    def __init__(self, overtakes: int = OVERTAKES, states: Callable[[], StateOf] | None = None) -> None:
        self.overtakes = overtakes
        self.overtaken = 0  # ever
        self._states = states
        self._waiting: dict[object, SortedKeyList[WaitingT, _Rank]] = {}  # by namespace; none is empty
        self._judged: dict[object, Hashable] = {}  # the state of those where nobody got on

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[WaitingT]:
        return heapq.merge(*self._waiting.values(), key=_rank)

    def push(self, request: WaitingT) -> None:
        queue = self._waiting.get(request.scope)
        if queue is None:
            queue = self._waiting[request.scope] = SortedKeyList(key=_rank)
        assert request not in queue, f"{request!r} waits already"
        queue.add(request)
        self._judged.pop(request.scope, None)

    def remove(self, request: WaitingT) -> None:
        """ValueError if it does not wait."""
        queue = self._waiting.get(request.scope)
        if queue is None:
            raise ValueError(f"{request!r} does not wait")
        queue.remove(request)
        self._judged.pop(request.scope, None)
        if not queue:
            del self._waiting[request.scope]

    def walk(self) -> QueueWalk[WaitingT]:
        """A walk over who waits, in order. Until it ends the queue changes by it alone."""
        state_of = self._states() if self._states is not None else None
        return QueueWalk(self, [self._waiting[scope] for scope in self._changed(state_of)], state_of)

    def take(self, request: WaitingT, passed: list[WaitingT]) -> None:
        """Takes the request out of the queue before those that it passes."""
        self.remove(request)
        for other in passed:
            other.overtaken += 1
        self.overtaken += len(passed)

    def judged(self, scope: object, state: Hashable) -> None:
        """Notes that nobody of that namespace, which is in that state, got on."""
        self._judged[scope] = state

    def is_due(self, passed: list[WaitingT]) -> bool:
        """Whether one of them may not be overtaken any more."""
        return any(other.overtaken >= self.overtakes for other in passed)

    def _changed(self, state_of: StateOf | None) -> list[object]:
        """Namespaces that are to be looked at."""
        if state_of is None or not self._judged:
            return list(self._waiting)
        return [scope for scope in self._waiting if scope not in self._judged or self._judged[scope] != state_of(scope)]


class QueueWalk(Generic[WaitingT]):
    """One walk over the queue: `judge` says what became of the request that `next` gave."""

    def __init__(
        self,
        queue: AdmissionQueue[WaitingT],
        waiting: list[SortedKeyList[WaitingT, _Rank]],
        state_of: StateOf | None,
    ) -> None:
        self._queue = queue
        self._state_of = state_of
        self._tenants: list[_Tenant[WaitingT]] = [_Tenant(each) for each in waiting]
        self._turns = [(tenant.rank, number) for number, tenant in enumerate(self._tenants)]
        heapq.heapify(self._turns)
        self._number = -1  # of the tenant whose turn it is
        self._passed: list[WaitingT] = []  # without room: over these only so many go, of whatever namespace

    def next(self) -> WaitingT | None:
        """The request to be judged now; None at the end."""
        if not self._turns or len(self._passed) >= LOOK_AHEAD or self._queue.is_due(self._passed):
            return None
        _, self._number = heapq.heappop(self._turns)
        return self._tenants[self._number].first

    def judge(self, admission: Admission) -> None:
        """One that is taken leaves the queue."""
        tenant = self._tenants[self._number]
        request = tenant.first
        if admission is Admission.TAKEN:
            tenant.others += 1
            self._queue.take(request, [*self._passed, *tenant.own])
        else:
            tenant.at += 1
            if admission is Admission.NO_ROOM:
                tenant.others += 1
                self._passed.append(request)
            elif admission is Admission.OVER_QUOTA:
                tenant.own.append(request)
            else:
                tenant.protected += 1
        if not tenant.is_over and not self._queue.is_due(tenant.own):
            heapq.heappush(self._turns, (tenant.rank, self._number))
        elif self._state_of is not None and not tenant.others:
            self._queue.judged(request.scope, self._state_of(request.scope))


@dataclass(slots=True)
class _Tenant(Generic[WaitingT]):
    """The state of looking at one namespace's requests."""

    queue: SortedKeyList[WaitingT, _Rank]
    at: int = 0  # the next one
    own: list[WaitingT] = field(default_factory=list)  # over their namespace's quota
    protected: int = 0  # kept out by what others' soft quotas protect
    others: int = 0  # taken, or without room

    @property
    def first(self) -> WaitingT:
        """The request whose turn it is."""
        first: WaitingT = self.queue[self.at]
        return first

    @property
    def rank(self) -> _Rank:
        return _rank(self.first)

    @property
    def is_over(self) -> bool:
        bound = len(self.own) >= LOOK_AHEAD or self.protected >= PROTECTED_LOOK_AHEAD
        return bound or self.at == len(self.queue)


def _rank(request: Waiting) -> _Rank:
    return request.priority, request.order
