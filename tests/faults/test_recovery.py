"""The measures of the recovery from a fault."""

from __future__ import annotations

import math

import pytest

from kvferry.proto import cache_pb2
from tests.faults.recovery import Look, Row, Watch, late, look, rate_back

AT = 100.0


def looked(at: float, *, oldest: float = math.inf, unproven: int = 0, workers: int = 1, up: str = "") -> Look:
    return Look(at, oldest, unproven, 0, workers, frozenset(up.split()))


def watch_of(**looks: list[Look]) -> Watch:
    watch = Watch(dict.fromkeys(looks, "unix:/nowhere"))
    watch._looks = looks
    return watch


def test_a_look_tells_what_live_requests_do_not_explain() -> None:
    side = cache_pb2.SideStats()
    assert not look(AT, side).holds(AT)
    side.requests.oldest_seconds = 2.0
    assert look(AT, side).holds(AT - 1)
    assert not look(AT, side).holds(AT - 3)
    side.requests.running, side.pool.locks = 1, 1
    assert not look(AT, side).holds(AT - 3)
    side.pool.locks = 2
    assert look(AT, side).holds(AT - 3)
    side.pool.locks, side.pool.orphaned = 1, 1
    assert look(AT, side).holds(AT - 3)
    side.pool.orphaned, side.quarantine.lost_workers = 0, 1
    assert look(AT, side).holds(AT - 3)


def test_the_last_daemon_to_see_a_loss_counts() -> None:
    up, alone = looked(AT - 1, up="p"), looked(AT - 1)
    watch = watch_of(p=[alone], q=[up, looked(AT + 1, up="p"), looked(AT + 2)], d=[up, looked(AT + 0.5)], e=[alone])
    assert watch.seen(["p"], AT) == 2.0
    assert watch.seen(["d"], AT) is None
    blind = watch_of(p=[alone], q=[up, looked(AT + 1, up="p")], d=[up, looked(AT + 0.5)])
    assert blind.seen(["p"], AT) is None
    workers = watch_of(d=[alone, looked(AT + 0.1), looked(AT + 0.2, workers=0), looked(AT + 0.3)])
    assert workers.seen(["d-worker"], AT) == pytest.approx(0.2)


def test_released_is_behind_the_last_look_at_something_held() -> None:
    looks = [
        looked(AT - 1),
        looked(AT + 1, oldest=AT - 1),
        looked(AT + 2),
        looked(AT + 3, unproven=1),
        looked(math.inf),
    ]
    watch = watch_of(d=[*looks[:-1], looked(AT + 4), looks[-1]], p=[looked(AT - 1), looked(math.inf)])
    assert watch.wait_for_release(AT, 1) == 4.0
    with pytest.raises(AssertionError, match="still held"):
        watch_of(d=[looked(math.inf, unproven=1)]).wait_for_release(AT, 0.0)


def test_the_rate_is_back_once_it_stays_until_all_is_served() -> None:
    steady = [AT - 10 + i / 10 for i in range(100)]
    behind = [AT + 3 + i / 10 for i in range(200)]
    assert rate_back([*steady, *behind], AT, AT + 1, AT + 20, 10.0) == pytest.approx(AT + 3)
    assert rate_back([*steady, *behind], AT, AT + 1, AT + 7, 10.0) is None
    burst = [AT + i / 10 for i in range(60)]  # without what is gone, and then nothing
    later = [AT + 12 + i / 10 for i in range(200)]
    assert rate_back([*steady, *burst, *later], AT, AT + 12, AT + 30, 10.0) == pytest.approx(AT + 12)
    assert rate_back([*steady, *burst], AT, AT + 12, AT + 30, 10.0) is None


def test_what_is_late_is_said() -> None:
    row = Row("a fault", 1, 0, 0, 0.5, 9.0, 3.0, None, None)
    assert late(row, 1.0) == late(row, None) == ""
    assert late(row, 0.4) == "a fault: seen after 0.5 s, not within 0.4 s"
    unseen = Row("a fault", 1, 0, 0, None, 10.5, 3.0, None, None)
    assert late(unseen, None) == "a fault: released after 10.5 s, not within 10 s"
    assert "seen after None s" in late(unseen, 5.0)
