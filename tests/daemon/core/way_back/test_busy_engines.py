"""A prefill core with long prompts: who waits on while its engine computes others, what sessions are seen to bring."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import LookUp, StartFetch, WakeAt
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back.choice import (
    AUTO,
    BYTES_PER_SECOND,
    FETCH,
    NO_ASK,
    ROUND_TRIP_SECONDS,
    TOKENS_PER_SECOND,
)
from kvferry.proto import worker_pb2 as wire
from tests.daemon.core.way_back.test_fetches import TAIL, A, B, Fetching, ask_of
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, digests, name

C = name(3)
LONG = 1000  # pages
OWN_SECONDS = LONG * PAGE / TOKENS_PER_SECOND
ASKER, OTHER = 1, 2


class Busy(Fetching):
    """Two sessions have a way back."""

    def __init__(self, *, pool: int = 40_000) -> None:
        super().__init__(AUTO, pool=pool)
        self.core.fetches.session_up(OTHER)

    def begin(
        self, number: Name, prompt: str, pages: int = LONG, *, computes: bool = False, held: int = 0, now: float = 0.0
    ) -> None:
        """computes: its engine does so without waiting. held: pages that it has itself."""
        request = wire.Begin(
            name=number.to_proto(),
            digests=digests(prompt, pages),
            tokens=pages * PAGE + 1,
            tail_digest=TAIL,
            patience=wire.PATIENCE_NONE if computes else wire.PATIENCE_PAGES,
            held_tokens=held * PAGE,
        )
        self.core.begin(1, NAMESPACE, number, request, DEADLINE, now)
        self.take()

    def ask(self, number: Name, prompt: str, held: int, pages: int = LONG, *, now: float = 0.0) -> None:
        self.core.ask(ASKER, number, ask_of(number, digests(prompt, pages), held), DEADLINE, now)
        self.take()

    def wake(self, now: float) -> list[float]:
        """When it wants to be woken again."""
        self.core.wake(now)
        self.take()
        return [each.at for each in self.of(WakeAt)]

    def state_of(self, number: Name) -> EntryState:
        return self.core.entries[number].state


def waiting_on() -> tuple[Busy, float]:
    """A is computed, and B, which has waited its share, waits on; the time."""
    side = Busy()
    side.begin(A, "x", computes=True)
    side.begin(B, "y")
    now = side.core.fetches.judge.patience(LONG * PAGE + 1)
    (later,) = side.wake(now)
    assert side.state_of(B) is EntryState.LOOKING and now < later <= OWN_SECONDS
    return side, now


def test_nobody_waits_on_for_an_engine_that_is_idle() -> None:
    side, now = waiting_on()
    side.core.abort(1, A, now + 0.001)
    side.take()
    (at_once,) = (each.at for each in side.of(WakeAt))
    assert at_once <= now + 0.001
    side.wake(now + 0.001)
    assert side.state_of(B) is EntryState.COMPUTING and side.choices() == {NO_ASK: 1}


def test_one_that_waits_for_its_share_waits_for_an_idle_engine_too() -> None:
    side = Busy()
    side.begin(A, "x", computes=True)
    side.begin(B, "y")
    side.core.abort(1, A, 0.001)
    side.wake(0.001)
    assert side.state_of(B) is EntryState.LOOKING


def test_the_ask_of_one_that_waited_on_is_heard_and_others_are_asked() -> None:
    side, now = waiting_on()
    side.core.fetches.look_ups.session_up(OTHER)
    side.ask(B, "y", 0, now=now + 0.01)
    assert [each.session for each in side.of(LookUp)] == [OTHER]


def test_one_whose_pages_come_late_waits_on_too() -> None:
    side = Busy(pool=1500)
    for number, prompt in ((A, "x"), (C, "z")):
        side.ask(number, prompt, 0, 600)
        side.begin(number, prompt, 600, computes=True)
    side.begin(B, "y", 350)
    late = side.core.fetches.judge.patience(350 * PAGE) + 0.01
    side.core.abort(1, A, late)
    side.core.send_ended(ASKER, int.from_bytes(A.request_id, "big"), late)
    side.take()
    assert side.state_of(B) is EntryState.LOOKING


def test_what_waits_for_pages_keeps_no_engine_busy() -> None:
    """Its engine has computed it by now, as far as is known."""
    side = Busy(pool=1500)
    side.ask(C, "z", 0, LONG)
    side.begin(C, "z", LONG, computes=True)
    side.core.progress(1, C, LONG * PAGE + 1, 0.4)
    side.core.aux(1, C, b"", 0.4)
    side.begin(A, "x", 700, computes=True, now=0.5)
    speed = side.core.fetches.judge.speed
    assert side.state_of(A) is EntryState.WAITING and speed.seconds_left == 0 and not speed.idle


@pytest.mark.parametrize("busy", [False, True])
def test_pages_are_fetched_once_in_a_busy_engine_too(busy: bool) -> None:
    side = Busy()
    if busy:
        side.begin(C, "z", 2000, computes=True)
    for number, fetches in ((A, 1), (B, 0)):
        side.ask(number, "x", 200, 200)
        side.begin(number, "x", 200)
        assert len(side.of(StartFetch)) == fetches


def test_what_a_session_brings_is_seen_part_by_part() -> None:
    side = Busy()
    pages, rates = 400, side.core.fetches.judge.rates
    side.ask(A, "x", pages, pages)
    side.begin(A, "x", pages)
    assert side.choices() == {FETCH: 1}
    nbytes = pages * side.core.fetches.judge.limits.page_bytes
    for step in range(1, 5):
        side.core.fetch_arrived(1, list(range((step - 1) * 100, step * 100)), ROUND_TRIP_SECONDS + step * 0.01)
        left = nbytes * (4 - step) / 4
        expected = ROUND_TRIP_SECONDS + (left + nbytes) / (nbytes / 0.04)
        assert rates.seconds(ASKER, nbytes, 0.1) == pytest.approx(expected)
    side.core.fetch_completed(1, 0.05)
    assert rates.seconds(ASKER, nbytes, 0.1) == pytest.approx(ROUND_TRIP_SECONDS + 0.048, rel=0.01)


def fetching() -> Busy:
    """400 pages of A."""
    side = Busy()
    side.ask(A, "x", 400, 400)
    side.begin(A, "x", 400)
    return side


def knows_nothing_of_the_session(side: Busy) -> bool:
    seconds = side.core.fetches.judge.rates.seconds(ASKER, 10**12, 1.0)
    return seconds == pytest.approx(ROUND_TRIP_SECONDS + 1e12 / BYTES_PER_SECOND)


def test_of_a_session_that_has_ended_nothing_is_kept() -> None:
    side = fetching()
    side.core.fetch_arrived(1, list(range(100)), 0.5)
    side.core.session_down(ASKER, 1.0)
    side.take()
    assert knows_nothing_of_the_session(side)


def test_a_fetch_that_its_client_left_says_nothing_of_the_session() -> None:
    side = fetching()
    side.core.abort(1, A, 0.004)
    side.core.fetch_drained(1, 0.004)
    side.take()
    assert knows_nothing_of_the_session(side)


def test_one_that_brings_nothing_in_its_time_is_slow() -> None:
    side = fetching()
    end = max(each.at for each in side.of(WakeAt))
    side.wake(end)
    side.core.fetch_drained(1, end)
    side.take()
    rates = side.core.fetches.judge.rates
    assert rates.seconds(ASKER, 10**6, end) > 1000
    assert rates.seconds(ASKER, 1, end) < 2, "nothing of it is on its way any more"
