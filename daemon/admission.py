"""The queue of requests that wait for pages. Core: no I/O.

Smaller priorities go first; within one, who came first. One that does not fit may be overtaken by later ones that do,
but by at most `overtakes` of them: then nobody passes it, and what others give back is its own. One that only its
namespace's own hard quota keeps out waits for its namespace alone: others pass it uncounted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList

OVERTAKES = 8
LOOK_AHEAD = 32  # requests that are looked past in one step


class Admission(enum.Enum):
    TAKEN = "taken"
    NO_ROOM = "no room"
    OVER_QUOTA = "over quota"  # its namespace's own hard quota is in the way


class Waiting(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def order(self) -> int:
        """Grows with each request."""

    @property
    def scope(self) -> object:
        """Its namespace."""

    overtaken: int


WaitingT = TypeVar("WaitingT", bound=Waiting)


class AdmissionQueue(Generic[WaitingT]):
    def __init__(self, overtakes: int = OVERTAKES) -> None:
        self.overtakes = overtakes
        self.overtaken = 0  # ever
        self._waiting: SortedKeyList[WaitingT, tuple[int, int]] = SortedKeyList(key=_rank)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingT]:
        return iter(self._waiting)

    def push(self, request: WaitingT) -> None:
        self._waiting.add(request)

    def remove(self, request: WaitingT) -> None:
        """ValueError if it does not wait."""
        self._waiting.remove(request)

    def admit(self, try_admit: Callable[[WaitingT], Admission]) -> None:
        """Offers the waiting to `try_admit`, in order. One that is taken leaves the queue."""
        passed: list[WaitingT] = []  # over which only so many go
        quota_passed: dict[object, list[WaitingT]] = {}  # the same for those of one namespace
        at = 0
        while at < min(len(self._waiting), LOOK_AHEAD) and not self._is_due(passed):
            request = self._waiting[at]
            mine = quota_passed.get(request.scope, [])
            if self._is_due(mine):
                at += 1
                continue
            admission = try_admit(request)
            if admission is Admission.TAKEN:
                self._waiting.remove(request)
                for other in (*passed, *mine):
                    other.overtaken += 1
                self.overtaken += len(passed) + len(mine)
                continue
            if admission is Admission.NO_ROOM:
                passed.append(request)
            else:
                quota_passed.setdefault(request.scope, []).append(request)
            at += 1

    def _is_due(self, passed: list[WaitingT]) -> bool:
        """One of them may not be overtaken any more."""
        return any(other.overtaken >= self.overtakes for other in passed)


def _rank(request: Waiting) -> tuple[int, int]:
    return request.priority, request.order
