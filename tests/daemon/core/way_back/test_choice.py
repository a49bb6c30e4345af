"""Whether pages are fetched or computed: estimates, and what they are made by."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.way_back.choice import (
    ALWAYS,
    AUTO,
    BYTES_PER_SECOND,
    FETCH,
    FEW,
    FORCED_SECONDS,
    LEAST_SECONDS,
    LEAST_TOKENS,
    MOST_SECONDS,
    RATE_SECONDS,
    ROUND_TRIP_SECONDS,
    SLOW,
    SLOW_TIMES,
    TOKENS_PER_SECOND,
    WINDOW_SECONDS,
    Judge,
    SessionRates,
    Throughput,
    WayBackLimits,
)
from tests.daemon.core.way_back.fetched import measured

PAGE, PAGE_BYTES = 64, 1 << 20


def engine() -> Throughput:
    return Throughput(TOKENS_PER_SECOND, WINDOW_SECONDS)


def rate(rates: SessionRates, session: int, now: float) -> float:
    """Bytes a second, by the estimate of many."""
    return 1e15 / (rates.seconds(session, 10**15, now) - ROUND_TRIP_SECONDS)


def judge(setting: str = AUTO) -> Judge:
    return Judge(WayBackLimits(setting, PAGE_BYTES), PAGE)


def test_an_engine_of_which_nothing_was_measured_has_the_assumed_speed() -> None:
    speed = engine()
    speed.begins("a", 1000, 5.0)
    assert speed.per_second == TOKENS_PER_SECOND


def test_time_in_which_nothing_is_computed_does_not_count() -> None:
    speed = engine()
    speed.begins("a", 1000, 10.0)
    speed.progress("a", 100, 11.0)
    speed.ends("a")
    speed.begins("b", 1000, 50.0)
    speed.progress("b", 100, 51.0)
    assert speed.per_second == pytest.approx(100.0)


def test_requests_that_are_computed_together_share_the_time() -> None:
    speed = engine()
    speed.begins("a", 1000, 0.0)
    speed.begins("b", 1000, 0.5)
    speed.progress("a", 100, 1.0)
    speed.ends("a")
    speed.ends("a")
    speed.progress("b", 100, 2.0)
    assert speed.per_second == pytest.approx(100.0)


def test_what_is_left_to_compute_is_of_what_has_begun_and_not_ended() -> None:
    speed = engine()
    speed.begins("a", 1000, 0.0)
    speed.begins("b", 500, 0.0)
    speed.progress("a", 400, 1.0)
    speed.progress("c", 600, 2.0)
    assert speed.seconds_left == pytest.approx(1100 / 500)
    speed.progress("b", 600, 3.2)
    assert speed.seconds_left == pytest.approx(600 / 500)
    speed.ends("a")
    assert speed.seconds_left == 0


def test_what_was_measured_long_ago_weighs_less() -> None:
    speed = engine()
    speed.begins("a", 1000, 0.0)
    speed.progress("a", 1000, WINDOW_SECONDS + 1)
    speed.progress("a", 10_000, WINDOW_SECONDS + 2)
    assert speed.per_second == pytest.approx(10_500 / (WINDOW_SECONDS / 2 + 1.5))


def test_a_rate_is_a_sessions_own_and_is_forgotten() -> None:
    rates = SessionRates()
    measured(rates, 1, 100, 10.0, 0.0)
    assert rate(rates, 1, 1.0) == pytest.approx(10.0)
    assert rate(rates, 2, 1.0) == pytest.approx(BYTES_PER_SECOND)
    assert rate(rates, 1, RATE_SECONDS + 1) == pytest.approx(BYTES_PER_SECOND)
    measured(rates, 1, 100, 10.0, 0.0)
    rates.forget(1)
    assert rate(rates, 1, 1.0) == pytest.approx(BYTES_PER_SECOND)


def test_fetches_that_share_a_session_share_its_time() -> None:
    rates = SessionRates()
    for fetch in range(4):
        rates.begins(1, fetch, 10**9, 0.0)
    for step in range(1, 11):
        for fetch in range(4):
            rates.progress(1, fetch, 10**8, ROUND_TRIP_SECONDS + step / 100)
    assert rate(rates, 1, 0.2) == pytest.approx(4e10)
    rates.begins(1, 9, 8 * 10**9, 0.2)
    assert rates.seconds(1, 4 * 10**9, 0.2) == pytest.approx(ROUND_TRIP_SECONDS + 0.2 + 0.1), "it is behind the others"


@pytest.mark.parametrize(("nbytes", "seconds", "bound"), [(2_100_000, 0.0041, 1.1e9), (20_000_000, 0.0019, 22e9)])
def test_many_small_fetches_say_what_a_session_carries(nbytes: int, seconds: float, bound: float) -> None:
    """The round trip in each is left out, but for half of its time at most."""
    rates = SessionRates()
    for fetch in range(1000):
        rates.begins(1, fetch, nbytes, fetch / 100)
        rates.progress(1, fetch, nbytes, fetch / 100 + seconds)
        rates.ends(1, fetch, fetch / 100 + seconds)
    assert 0.9e9 < rate(rates, 1, 10.0) < bound


def test_a_session_that_brought_nothing_is_slow_not_broken() -> None:
    rates = SessionRates()
    measured(rates, 1, 1, 3.0, 0.0)
    assert rate(rates, 1, 1.0) == pytest.approx(1 / 3)
    assert rates.seconds(1, 10**9, 1.0) == pytest.approx(3e9)


def test_both_estimates_are_kept_and_the_faster_way_is_chosen() -> None:
    chosen = judge()
    measured(chosen.rates, 1, 10**9, 1.0, 0.0)
    choice = chosen.choose(1, 100, 0.0)
    assert chosen.compute_seconds == pytest.approx(6400 / TOKENS_PER_SECOND)
    assert chosen.fetch_seconds == pytest.approx(ROUND_TRIP_SECONDS + 100 * PAGE_BYTES / 10**9)
    assert choice.why == FETCH and choice.seconds == pytest.approx(4 * chosen.fetch_seconds)
    assert chosen.choices == {FETCH: 1}


@pytest.mark.parametrize("tokens_per_second", [TOKENS_PER_SECOND, 50_000])
def test_the_first_fetch_of_a_session_is_made_and_has_a_quarter_of_the_time(tokens_per_second: int) -> None:
    """Of an 8B model's bytes, 128 KiB a token, on engines as fast as its GPUs make it."""
    chosen = Judge(WayBackLimits(AUTO, 128 * 1024 * PAGE), PAGE)
    chosen.speed.begins("a", 1000, 0.0)
    chosen.speed.progress("a", tokens_per_second, 1.0)
    choice = chosen.choose(1, 150, 0.0)
    assert choice.why == FETCH and 0.2 * chosen.compute_seconds < choice.seconds < 0.6 * chosen.compute_seconds


def test_a_session_that_was_too_slow_is_tried_again_and_again_but_seldom() -> None:
    """Its first fetch may have been: connections and mappings are made for it."""
    chosen = judge()
    measured(chosen.rates, 1, 1, 1.0, 0.0)
    tried = [chosen.choose(1, 100, 0.0).why == FETCH for _ in range(SLOW_TIMES + 1)]
    assert tried == [False] * SLOW_TIMES + [True]
    assert [chosen.choose(1, 100, 0.0).why for _ in range(2)] == [SLOW] * 2, "one is a trial, or was declined"
    measured(chosen.rates, 1, 1, 1.0, 0.0)
    assert chosen.choose(1, 100, 0.0).why == SLOW
    measured(chosen.rates, 1, 10**12, 1.0, 0.0)
    assert chosen.choose(1, 100, 0.0).why == FETCH


def test_a_fetch_has_no_longer_than_its_tokens_would_take_to_compute() -> None:
    chosen = judge()
    measured(chosen.rates, 1, 300 * PAGE_BYTES, 0.9, 0.0)
    choice = chosen.choose(1, 100, 0.0)
    assert choice.seconds == pytest.approx(chosen.compute_seconds) and 2 * chosen.fetch_seconds < chosen.compute_seconds


def test_a_fetch_has_a_quarter_of_that_at_least() -> None:
    chosen = judge()
    measured(chosen.rates, 1, 100_000 * PAGE_BYTES, 0.001, 0.0)
    choice = chosen.choose(1, 100, 0.0)
    assert choice.seconds == pytest.approx(chosen.compute_seconds / 4) and choice.seconds > 10 * chosen.fetch_seconds


def test_a_session_that_is_not_twice_as_fast_is_not_asked() -> None:
    chosen = judge()
    measured(chosen.rates, 1, 100 * PAGE_BYTES, 0.4, 0.0)
    choice = chosen.choose(1, 100, 0.0)
    assert (choice.why, choice.seconds) == (SLOW, 0.0)


def test_few_tokens_are_not_worth_a_round_trip() -> None:
    pages = LEAST_TOKENS // PAGE
    assert judge().choose(1, pages - 1, 0.0).why == FEW
    assert judge().choose(1, pages, 0.0).why == FETCH


def test_always_is_always_and_has_time() -> None:
    chosen = judge(ALWAYS)
    measured(chosen.rates, 1, 1, 10.0, 0.0)
    choice = chosen.choose(1, 1, 0.0)
    assert choice.why == FETCH and choice.seconds >= LEAST_SECONDS


def test_a_session_of_no_speed_has_a_bounded_time_all_the_same() -> None:
    chosen = judge(ALWAYS)
    measured(chosen.rates, 1, 1, 10.0, 0.0)
    assert chosen.choose(1, 16_384, 0.0).seconds == MOST_SECONDS


def test_an_ask_is_waited_for_by_three_percent_of_the_estimate() -> None:
    assert judge().patience(10_000) == pytest.approx(0.03 * 10_000 / TOKENS_PER_SECOND)
    assert judge(ALWAYS).patience(1) == FORCED_SECONDS


def test_an_ask_is_waited_for_on_while_the_engine_computes_others() -> None:
    chosen = judge()
    assert chosen.more_patience(10_000, 0.03) == 0
    chosen.speed.begins("a", 8000, 0.0)
    assert chosen.more_patience(10_000, 0.03) == pytest.approx(0.75 * 8000 / TOKENS_PER_SECOND)
    assert chosen.more_patience(10_000, 0.7) == pytest.approx(0.3), "no longer than its own tokens take"
    assert chosen.more_patience(10_000, 0.98) == 0
    chosen.speed.progress("a", 7800, 0.78)
    assert chosen.more_patience(10_000, 0.03) == 0, "what is left is little"
    forced = judge(ALWAYS)
    forced.speed.begins("a", 8000, 0.0)
    assert forced.more_patience(10_000, FORCED_SECONDS) == 0


def test_a_busy_engine_leaves_more_time_for_a_fetch() -> None:
    chosen = judge()
    measured(chosen.rates, 1, 100 * PAGE_BYTES, 0.4, 0.0)
    assert chosen.choose(1, 100, 0.0).why == SLOW
    chosen.speed.begins("a", 2000, 0.0)
    choice = chosen.choose(1, 100, 0.0)
    assert choice.why == FETCH and chosen.compute_seconds == pytest.approx(8400 / TOKENS_PER_SECOND)
    chosen.speed.begins("b", 1_000_000, 0.0)
    assert chosen.choose(2, 100, 0.0).seconds == pytest.approx(0.25 * 6400 / TOKENS_PER_SECOND), "of its own tokens"
    assert chosen.worth_waiting(100, 100.0) and not chosen.worth_waiting(100, 101.0)
