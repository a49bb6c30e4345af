"""The first token of a reply: its blob, and what the schedulers' halves do with it."""

from __future__ import annotations

import pytest

from kvferry.connectors.first_token import blob_of, token_of
from kvferry.connectors.orders import Cancel, Drop, FirstToken, News, Release, Save
from kvferry.connectors.scheduler_decode import DecodeScheduler
from kvferry.connectors.scheduler_side import SchedulerSide
from kvferry.connectors.worker_state import Reports
from tests.connectors.scheduling import TO_DECODE, TO_PREFILL, Daemon, Request, blocks, decode, orders, prefill


@pytest.mark.parametrize("token", [0, 7, 2**32 - 1])
def test_a_blob_names_its_token(token: int) -> None:
    assert token_of(blob_of(token)) == token


@pytest.mark.parametrize(
    "blob", [b"", b"KVT1", b"KVT1\0\0\0", b"KVT1\0\0\0\0\0", b"KVT2\0\0\0\0", bytes(8), bytes(4096)]
)
def test_other_blobs_name_none(blob: bytes) -> None:
    assert token_of(blob) is None
    assert blob_of(None) == b""


def computing() -> tuple[SchedulerSide, Request]:
    """A prefill engine's, whose blocks it has."""
    side, request = prefill(Daemon()), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    side.allocated(request, blocks(61), 0)
    return side, request


def test_a_prompt_that_is_over_tells_the_token_that_the_engine_sampled() -> None:
    side, request = computing()
    orders(side, a=61)
    request.num_computed_tokens, request.output = 61, 1
    side.finished(request, blocks(61))
    assert orders(side) == [Release("a", request.all_token_ids[61])]


def test_a_request_that_goes_on_tells_its_first_token_once() -> None:
    """Decode does not wait for the end of what nobody reads."""
    side, request = computing()
    orders(side, a=61)
    request.num_computed_tokens, request.output = 61, 1
    assert orders(side, a=1) == [FirstToken("a", 61)]
    request.num_computed_tokens, request.output = 62, 2
    assert orders(side, a=1) == []
    side.finished(request, blocks(62))
    assert orders(side) == [Release("a", 61)]


@pytest.mark.parametrize("computed", [40, 61])
def test_a_prompt_that_was_aborted_has_no_token(computed: int) -> None:
    side, request = computing()
    assert isinstance(orders(side, a=computed)[-1], Save)
    side.finished(request, blocks(61))
    assert orders(side) == [Release("a") if computed == 61 else Drop("a")]


def loading() -> tuple[DecodeScheduler, Request]:
    side, request = decode(Daemon()), Request("a", 61, TO_DECODE)
    assert isinstance(side, DecodeScheduler)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(61), 61)
    orders(side)
    return side, request


@pytest.mark.parametrize("together", [True, False])
def test_a_reply_begins_with_its_token_when_the_prompt_has_come(together: bool) -> None:
    side, request = loading()
    side.begin_with_first_tokens()
    side.hear(News(first={"a": 77}).then(News(sessions={0: True})))
    if not together:
        assert side.take_first_tokens() == ()
    side.received(["a"])
    assert list(side.take_first_tokens()) == [(request, 77)]
    assert side.take_first_tokens() == ()
    request.num_computed_tokens = 61
    side.step({}, ("a",), lambda request: [])  # preempted
    side.received(["a"])
    assert side.take_first_tokens() == (), "it has its token"


def test_a_reply_whose_token_did_not_come_is_sampled_here() -> None:
    side, _ = loading()
    side.begin_with_first_tokens()
    side.received(["a"])
    assert side.take_first_tokens() == ()


def test_nothing_is_kept_for_a_scheduler_that_takes_no_tokens() -> None:
    side, _ = loading()
    side.hear(News(first={"a": 77}))
    side.received(["a"])
    side.begin_with_first_tokens()
    assert side.take_first_tokens() == ()


@pytest.mark.parametrize("what", ["over", "reset"])
def test_a_request_that_is_over_or_of_other_weights_begins_with_nothing(what: str) -> None:
    side, request = loading()
    side.begin_with_first_tokens()
    side.hear(News(first={"a": 77}))
    if what == "over":
        side.finished(request, blocks(61))
        assert orders(side) == [Cancel("a")]
    else:
        side.reset(emptied=True)
    side.received(["a"])
    assert side.take_first_tokens() == ()


def test_a_token_is_told_with_its_prompt() -> None:
    reports = Reports()
    reports.add_first("a", 1)
    reports.add_first("b", 2)
    reports.add_received("a")
    assert reports.take_news() is None
    assert reports.take() == (set(), {"a"})
    news = reports.take_news()
    assert news is not None and news.first == {"a": 1}
    reports.add_received("b")
    assert reports.take_good() == (set(), {"b"}, {"b": 2})
    assert (reports.take(), reports.take_news(), reports.take_good(), reports.first) == ((set(), set()), None, None, {})


def test_what_failed_is_told_by_the_step_that_tells_its_blocks() -> None:
    reports = Reports()
    reports.add_received("bad", (3, 4))
    assert reports.take_good() is None
    reports.add_received("good")
    reports.add_sent("over")
    reports.add_news(News(sessions={0: False}))
    assert reports.take_good() == ({"over"}, {"good"}, {})
    assert reports.take_bad() == {3, 4}
    assert reports.take_good() is None, "its blocks are on their way, by which it is to be judged"
    assert reports.take() == (set(), {"bad"})
    assert reports.take_news() == News(sessions={0: False}, bad=frozenset({"bad"})), "in their order, by the steps"
    reports.add_received("bad")
    assert reports.take_good() == (set(), {"bad"}, {})


def test_news_of_tokens_adds_up() -> None:
    news = News(first={"a": 1}).then(News(frozenset({"x"}))).then(News(first={"b": 2}))
    assert (news.first, news.failed) == ({"a": 1, "b": 2}, frozenset({"x"}))
