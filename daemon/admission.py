"""The queue of requests that wait for pages. Core: no I/O.

Smaller priorities go first; within one, who came first. One that does not fit may be overtaken by later ones that do,
but by at most `overtakes` of them: then nobody passes it, and what others give back is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList

OVERTAKES = 8
LOOK_AHEAD = 16  # requests that do not fit and are looked past in one step


class Waiting(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def order(self) -> int:
        """Grows with each request."""

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

    def admit(self, try_admit: Callable[[WaitingT], bool]) -> None:
        """Offers the waiting to `try_admit`, in order. One that is taken leaves the queue."""
        passed: list[WaitingT] = []
        while len(passed) < min(len(self._waiting), LOOK_AHEAD):
            if any(other.overtaken >= self.overtakes for other in passed):
                return
            request = self._waiting[len(passed)]
            if try_admit(request):
                self._waiting.remove(request)
                for other in passed:
                    other.overtaken += 1
                self.overtaken += len(passed)
            else:
                passed.append(request)


def _rank(request: Waiting) -> tuple[int, int]:
    return request.priority, request.order
