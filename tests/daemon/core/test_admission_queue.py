"""The admission queue: order, overtaking and its bound."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvferry.daemon.core.admission_queue import LOOK_AHEAD, Admission, AdmissionQueue


@dataclass(eq=False)
class Request:
    order: int
    size: int = 1
    priority: int = 0
    overtaken: int = 0
    scope: str = ""


def filled(queue: AdmissionQueue[Request], *requests: Request) -> list[Request]:
    for request in requests:
        queue.push(request)
    return list(requests)


def admitted(queue: AdmissionQueue[Request], room: int, over_quota: tuple[str, ...] = ()) -> list[int]:
    """Orders of those that are taken, each of which takes `size` of the room."""
    taken: list[int] = []

    def try_admit(request: Request) -> Admission:
        nonlocal room
        if request.scope in over_quota:
            return Admission.OVER_QUOTA
        if request.size > room:
            return Admission.NO_ROOM
        room -= request.size
        taken.append(request.order)
        return Admission.TAKEN

    walk = queue.walk()
    while (request := walk.next()) is not None:
        walk.judge(try_admit(request))
    return taken


def test_first_come_first_served_within_a_priority_and_smaller_priorities_first() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue()
    filled(queue, Request(1), Request(2, priority=5), Request(3, priority=-1), Request(4))
    assert admitted(queue, 3) == [3, 1, 4]
    assert [request.order for request in queue] == [2]


def test_a_small_request_passes_a_large_one_but_only_so_often() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue(overtakes=3)
    filled(queue, Request(1, size=10))
    passed = []
    for order in range(2, 12):
        queue.push(Request(order))
        passed += admitted(queue, room=5)
    assert passed == [2, 3, 4], "exactly `overtakes` later ones pass"
    assert admitted(queue, room=10) == [1], "then it is first, and all others wait for it"
    assert queue.overtaken == 3


def test_nobody_passes_with_no_overtakes() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue(overtakes=0)
    filled(queue, Request(1, size=10), Request(2))
    assert admitted(queue, room=5) == []


def test_looks_past_a_bounded_number() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue(overtakes=1000)
    filled(queue, *(Request(order, size=10) for order in range(LOOK_AHEAD)), Request(LOOK_AHEAD))
    assert admitted(queue, room=5) == []


def test_a_namespace_at_its_quota_holds_up_only_itself() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue(overtakes=2)
    filled(queue, Request(0, scope="a"), *(Request(order, scope="b") for order in range(1, 11)))
    assert admitted(queue, room=100, over_quota=("a",)) == list(range(1, 11))
    assert queue.overtaken == 0
    assert admitted(queue, room=1) == [0]


def test_removes_what_gave_up() -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue()
    first, second = filled(queue, Request(1), Request(2))
    queue.remove(first)
    assert admitted(queue, 10) == [2]
    with pytest.raises(ValueError):
        queue.remove(second)


def test_a_namespace_is_looked_at_again_once_another_waits_there_or_one_has_gone() -> None:
    """Its own state is as it was."""
    queue: AdmissionQueue[Request] = AdmissionQueue(states=lambda: lambda scope: "as before")
    first, _ = filled(queue, Request(1, size=10, scope="a"), Request(2, size=10, scope="a"))
    assert admitted(queue, room=10, over_quota=("a",)) == []
    assert admitted(queue, room=10) == [], "nothing has changed"
    queue.remove(first)
    assert admitted(queue, room=10) == [2]
    filled(queue, Request(3, scope="a"))
    assert admitted(queue, room=10, over_quota=("a",)) == []
    filled(queue, Request(4, scope="a"))
    assert admitted(queue, room=10) == [3, 4]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(-1, 1)), max_size=40),
    rooms=st.lists(st.integers(0, 8), min_size=1, max_size=60),
    overtakes=st.integers(0, 4),
)
def test_nobody_is_overtaken_more_often_than_stated(
    sizes: list[tuple[int, int]], rooms: list[int], overtakes: int
) -> None:
    queue: AdmissionQueue[Request] = AdmissionQueue(overtakes)
    requests = [Request(order, size, priority) for order, (size, priority) in enumerate(sizes)]
    coming = list(requests)
    times_passed: dict[int, int] = {request.order: 0 for request in requests}
    for room in rooms:
        for request in coming[:2]:
            queue.push(request)
        del coming[:2]
        ranked = [request.order for request in queue]
        taken = set(admitted(queue, room))
        for rank, order in enumerate(ranked):
            if order not in taken:
                times_passed[order] += sum(other in taken for other in ranked[rank + 1 :])
    assert all(times <= overtakes for times in times_passed.values())
