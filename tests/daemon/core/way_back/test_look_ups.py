"""A prefill core that looks for what the asking decode daemon lacks: whom it asks, how long, and what it fetches."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import LookUp, StartFetch, StopFetch, WakeAt
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.way_back import choice, look_ups
from kvferry.daemon.core.way_back.choice import ALWAYS, AUTO, FETCH, NO_SESSION, NOT_HELD, WayBackLimits
from kvferry.proto import worker_pb2 as wire
from tests.daemon.core.way_back.fetched import measured
from tests.daemon.core.way_back.test_fetches import FULL, TAIL, A, B, Fetching, ask_of
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, digests, name

ASKER, OTHER, THIRD = 1, 2, 3


class Looking(Fetching):
    """Three sessions have a way back; those of OTHER and THIRD answer look-ups."""

    def __init__(self, setting: str = ALWAYS, *, closed: frozenset[bytes] = frozenset(), others: int = 2) -> None:
        super().__init__(setting)
        self.core = PrefillCore(self.cache, PrefillLimits(8, way_back=WayBackLimits(setting, 64, closed)))
        for session in range(1, 2 + others):
            self.core.fetches.session_up(session)
            self.core.fetches.look_ups.session_up(session)

    def asked_for(self, held: int = 0, *, now: float = 0.0) -> None:
        self.ask_a(held, now=now)
        self.begin_a(now=now)

    def another(self, number: Name, prompt: str, held: int, pages: int = FULL, engine: int = 0) -> None:
        """Of pages of the prompt, which OTHER's daemon asks for. `engine`: those that its engine has itself."""
        begin = wire.Begin(
            name=number.to_proto(),
            digests=digests(prompt, pages),
            tokens=pages * PAGE + 1,
            tail_digest=TAIL,
            held_tokens=engine * PAGE,
        )
        self.core.ask(OTHER, number, ask_of(number, begin.digests, held), DEADLINE, 0.0)
        self.core.begin(1, NAMESPACE, number, begin, DEADLINE, 0.0)
        self.take()

    def found(self, session: int, pages: int, number: int = 1, now: float = 0.0) -> None:
        self.core.found(session, number, pages, now)
        self.take()

    def asked_whom(self) -> list[int]:
        """In the last step."""
        return [effect.session for effect in self.of(LookUp)]


def searching(held: int = 0) -> Looking:
    side = Looking()
    side.asked_for(held)
    assert side.state is EntryState.LOOKING and not side.told("begun")
    return side


def test_what_the_asking_daemon_lacks_is_looked_up_at_the_others() -> None:
    side = searching(held=2)
    assert side.asked_whom() == [OTHER, THIRD]
    (message, same) = (effect.message for effect in side.of(LookUp))
    assert message == same and (message.namespace_id, message.digests) == (NAMESPACE, digests("x", FULL))


def test_what_the_asking_daemon_holds_is_looked_up_nowhere() -> None:
    side = Looking()
    side.asked_for(held=FULL)
    (start,) = side.of(StartFetch)
    assert not side.of(LookUp) and start.session == ASKER and not start.ask.digests


def test_who_holds_all_is_asked_for_it_without_the_others_answers() -> None:
    side = searching(held=2)
    side.found(THIRD, FULL)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.first_page, start.ask.pages) == (THIRD, 0, FULL)
    assert start.ask.digests == digests("x", FULL) and side.choices() == {FETCH: 1}
    side.found(OTHER, FULL)
    assert not side.of(StartFetch), "it is too late"
    counters = side.core.fetches.look_ups.counters
    assert (counters.found, counters.nothing, counters.late, counters.pages) == (1, 0, 0, FULL)


def test_who_holds_most_is_asked_once_all_have_answered() -> None:
    side = searching(held=1)
    side.found(OTHER, 3)
    assert not side.of(StartFetch)
    side.found(THIRD, 2)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages, start.ask.digests) == (OTHER, 3, digests("x", 3))
    side.step("arrived", 1, [0, 1, 2])
    side.step("completed", 1)
    assert side.matched() == 3
    fetches = side.core.fetches
    assert fetches.elsewhere_tokens == fetches.fetched_tokens == 3 * PAGE


@pytest.mark.parametrize(("rate", "session"), [(1e9, OTHER), (1e5, ASKER)])
def test_who_is_slow_is_not_asked_for_one_page_more(rate: float, session: int) -> None:
    """A page is computed in 0.4 ms."""
    side = searching(held=4)
    measured(side.core.fetches.judge.rates, OTHER, int(rate), 1.0, 0.0)
    measured(side.core.fetches.judge.rates, ASKER, 10**9, 1.0, 0.0)
    side.found(OTHER, FULL)
    assert [start.session for start in side.of(StartFetch)] == [session]


def test_the_asking_daemon_goes_before_one_that_holds_as_much() -> None:
    side = searching(held=2)
    side.found(OTHER, 2)
    side.found(THIRD, 1)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages, start.ask.digests) == (ASKER, 2, b"")
    side.step("arrived", 1, [0, 1])
    side.step("completed", 1)
    assert side.core.fetches.fetched_tokens == 2 * PAGE and side.core.fetches.elsewhere_tokens == 0


def test_where_nobody_holds_it_it_is_computed() -> None:
    side = searching()
    side.found(OTHER, 0)
    side.found(THIRD, 0)
    assert side.matched() == 0 and side.choices() == {NOT_HELD: 1} and len(side.core.fetches.look_ups) == 0


def test_a_daemon_answers_for_itself_and_once() -> None:
    side = searching()
    side.found(ASKER, FULL)
    side.found(OTHER, 2, number=9)
    side.found(OTHER, 0)
    side.found(OTHER, FULL)
    assert side.state is EntryState.LOOKING and not side.of(StartFetch)


def test_more_than_was_looked_up_is_not_believed() -> None:
    side = searching()
    side.found(OTHER, 1 << 30)
    (start,) = side.of(StartFetch)
    assert start.ask.pages == FULL and side.core.fetches.look_ups.counters.pages == FULL


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are worth a fetch."""
    monkeypatch.setattr(choice, "LEAST_TOKENS", 1)
    monkeypatch.setattr(choice, "ROUND_TRIP_SECONDS", 0.0)


@pytest.mark.usefixtures("cheap")
def test_answers_are_waited_for_as_an_ask_is() -> None:
    """By 3 % of what is to be computed, counted from Begin."""
    side = Looking(AUTO)
    side.begin_a(now=5.0)
    (wake,) = side.of(WakeAt)
    side.ask_a(held=0, now=wake.at - 3e-5)
    assert side.asked_whom() == [OTHER, THIRD] and side.of(WakeAt) == [wake]
    side.found(OTHER, 3, now=wake.at - 2e-5)
    side.core.wake(wake.at - 1e-5)
    side.take()
    assert side.state is EntryState.LOOKING
    side.core.wake(wake.at)
    side.take()
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages) == (OTHER, 3), "what was found until then counts"
    assert side.core.fetches.look_ups.counters.late == 1


@pytest.mark.usefixtures("cheap")
def test_an_ask_that_comes_at_the_last_moment_leaves_no_time_for_look_ups() -> None:
    side = Looking(AUTO)
    side.begin_a()
    (wake,) = side.of(WakeAt)
    side.ask_a(held=2, now=wake.at)
    assert not side.of(LookUp) and side.of(StartFetch)


def test_what_would_not_be_fetched_is_not_looked_up() -> None:
    side = Looking(AUTO)
    side.asked_for()
    assert not side.of(LookUp) and side.matched() == 0 and side.choices() == {NOT_HELD: 1}


@pytest.mark.usefixtures("cheap")
def test_a_daemon_that_is_too_slow_is_not_asked() -> None:
    side = Looking(AUTO)
    measured(side.core.fetches.judge.rates, OTHER, 64, 1.0, 0.0)
    side.asked_for()
    assert side.asked_whom() == [THIRD]


def test_of_a_closed_namespace_nobody_is_asked() -> None:
    side = Looking(closed=frozenset({NAMESPACE}))
    side.asked_for()
    assert not side.of(LookUp) and side.matched() == 0


def test_a_session_that_did_not_agree_is_not_asked() -> None:
    side = Looking(others=0)
    side.core.fetches.session_up(OTHER)
    side.asked_for()
    assert not side.of(LookUp) and side.choices() == {NOT_HELD: 1}


def test_others_may_hold_it_where_the_asking_daemon_has_no_way_back() -> None:
    side = Looking()
    side.ask_a(FULL, session=9)
    side.begin_a()
    assert side.asked_whom() == [ASKER, OTHER, THIRD]
    side.found(OTHER, 0)
    side.found(ASKER, 0)
    side.found(THIRD, 2)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages) == (THIRD, 2), "what an Ask says is held there cannot be had"
    assert NO_SESSION not in side.choices()


def test_so_many_are_asked_for_a_prompt_those_that_found_something_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "MOST_ASKED", 2)
    side = Looking(others=4)
    side.asked_for()
    assert side.asked_whom() == [2, 3]
    side.found(2, 0)
    side.found(3, 1)
    side.another(B, "y", 0)
    assert side.asked_whom() == [3, ASKER]


def test_who_gives_no_answer_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "MOST_ASKED", 2)
    side = Looking(others=4)
    side.asked_for()
    assert side.asked_whom() == [2, 3]
    side.found(2, 0)
    side.core.wake(100.0)
    side.take()
    assert side.told("begun") and side.core.fetches.look_ups.counters.late == 1
    side.another(B, "y", 0)
    assert side.asked_whom() == [ASKER, 4]
    side.core.abort(1, B, 0.0)
    side.another(name(3), "z", 0)
    assert side.asked_whom() == [ASKER, 4], "who was not waited for keeps its place"
    assert side.core.fetches.look_ups.counters.late == 1


def test_so_many_prompts_wait_for_answers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "MOST_OPEN", 1)
    side = searching()
    side.another(B, "y", 0)
    assert not side.of(LookUp) and side.told("begun")
    side.core.abort(1, A, 0.0)
    side.take()
    side.another(name(3), "z", 0)
    assert side.asked_whom() == [ASKER, THIRD]


def test_of_a_long_prompt_the_beginning_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "MAX_LOOKED_UP_PAGES", 2)
    side = searching()
    assert {effect.message.digests for effect in side.of(LookUp)} == {digests("x", 2)}
    side.found(OTHER, 2)
    (start,) = side.of(StartFetch)
    assert start.ask.pages == 2


def test_the_asking_daemon_is_asked_where_another_refuses() -> None:
    side = searching(held=4)
    side.found(OTHER, FULL)
    assert side.of(StartFetch)[0].session == OTHER
    side.step("stopped", 1, OTHER, "refused")
    side.step("drained", 1)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages, start.ask.digests) == (ASKER, 4, b"") and not side.told("begun")
    side.step("stopped", 2, ASKER, "refused")
    side.step("drained", 2)
    assert side.matched() == 0 and side.state is EntryState.COMPUTING


def test_what_came_before_another_refused_is_all_that_is_fetched() -> None:
    side = searching(held=4)
    side.found(OTHER, FULL)
    side.step("arrived", 1, [0])
    side.step("stopped", 1, OTHER, "refused")
    side.step("drained", 1)
    assert side.matched() == 1


@pytest.mark.usefixtures("cheap")
def test_answers_are_worth_what_they_may_add() -> None:
    """By 3 % of what the asking daemon lacks, where that is less than what is left of the prompt's own patience."""
    side = Looking(AUTO)
    side.asked_for(held=4)
    assert side.asked_whom() == [OTHER, THIRD]
    (until,) = {wake.at for wake in side.of(WakeAt)}
    assert until == pytest.approx(0.03 * PAGE / choice.TOKENS_PER_SECOND)


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_session_that_ends_is_not_waited_for() -> None:
    side = searching()
    side.found(OTHER, 2)
    side.core.session_down(THIRD, 0.0)
    side.take()
    (start,) = side.of(StartFetch)
    assert start.session == OTHER


def test_a_session_that_ends_is_asked_no_more_and_the_others_are_waited_for() -> None:
    side = searching()
    side.core.session_down(THIRD, 0.0)
    side.take()
    assert side.state is EntryState.LOOKING and side.core.fetches.look_ups.counters.late == 1
    side.another(B, "y", 0)
    assert side.asked_whom() == [ASKER]
    side.found(OTHER, 2)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages) == (OTHER, 2)


def test_what_a_session_has_found_goes_with_it() -> None:
    side = searching(held=1)
    side.found(OTHER, 2)
    side.core.session_down(OTHER, 0.0)
    side.take()
    assert side.state is EntryState.LOOKING and side.core.fetches.look_ups.counters.late == 0, "it had answered"
    side.found(THIRD, 0)
    (start,) = side.of(StartFetch)
    assert (start.session, start.ask.pages) == (ASKER, 1)


def test_a_request_outlives_the_session_that_it_fetches_from() -> None:
    side = searching()
    side.found(OTHER, FULL)
    side.step("arrived", 1, [0, 1])
    side.core.session_down(OTHER, 0.0)
    side.take()
    assert side.matched() == 2 and side.state is EntryState.COMPUTING and not side.told("failed")
    assert dict(side.core.fetches.counters.aborts) == {"session_ended": 1}
    assert side.core.matched_tokens(NAMESPACE, digests("x", FULL)) == 2 * PAGE


def test_the_end_of_the_asking_session_ends_a_fetch_from_another() -> None:
    side = searching()
    side.found(OTHER, FULL)
    side.core.session_down(ASKER, 0.0)
    side.take()
    (stop,) = side.of(StopFetch)
    assert side.told("failed") and stop.session == OTHER and A in side.core.entries, "a copy may run"
    side.step("drained", 1)
    assert A not in side.core.entries and side.cache.pool.counts().leased == 0 and side.cache.locks == 0


def test_the_end_of_the_asking_session_ends_a_search() -> None:
    side = searching()
    side.core.session_down(ASKER, 0.0)
    side.take()
    assert side.told("failed") and len(side.core.fetches.look_ups) == 0 and A not in side.core.entries
    side.found(OTHER, FULL)
    assert not side.of(StartFetch)


@pytest.mark.parametrize("who", ["worker", "decode", "deadline"])
def test_who_ends_while_answers_are_waited_for_leaves_nothing(who: str) -> None:
    side = searching()
    if who == "worker":
        side.core.abort(1, A, 0.0)
    elif who == "decode":
        side.core.done(ASKER, A, 0.0)
    else:
        side.core.tick(DEADLINE + 1)
    side.take()
    assert len(side.core.fetches.look_ups) == 0
    if who == "deadline":  # the search ended before, and it was computing
        return
    side.core.wake(100.0)
    side.found(OTHER, FULL)
    assert A not in side.core.entries and side.cache.locks == 0 and not side.told("begun")
