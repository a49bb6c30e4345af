"""The scheduler's half in a prefill engine: what it answers vLLM, and what it tells the worker."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, Cancel, Drop, News, Release, Save
from kvferry.connectors.scheduler_prefill import PrefillScheduler
from tests.connectors.scheduling import (
    BLOCK,
    ID,
    TO_DECODE,
    TO_PREFILL,
    Daemon,
    Request,
    blocks,
    decode,
    orders,
    prefill,
)


def test_prefill_begins_with_its_blocks_and_saves_chunk_by_chunk() -> None:
    daemon = Daemon()
    side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(20), 0)
    first, chunk = orders(side, a=20)
    assert isinstance(first, Begin) and first.blocks == () and first.name.request_id.hex() == ID
    assert chunk == Save("a", 20, tuple(blocks(1000)[:3]))
    request.num_computed_tokens = 20
    assert orders(side, a=2) == [], "no page is full"
    request.num_computed_tokens = 22
    assert orders(side, a=39) == [Save("a", 61, tuple(blocks(1000)[:8]))]
    request.num_computed_tokens = 61
    delay, told = side.finished(request, blocks(61))
    assert delay and told is not None
    assert (told["kvferry_request"], told["kvferry_prefill"], told["do_remote_prefill"]) == (ID, "p", True)
    assert orders(side) == [Release("a")]
    side.sent(["a"])
    assert side.tracked == 0


def test_what_the_prefill_daemon_holds_is_loaded_before_the_rest_is_computed() -> None:
    daemon = Daemon()
    side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    daemon.pages = 5
    assert side.matched(request, 16) == (24, True)
    side.allocated(request, blocks(40), 24)
    (begin,) = orders(side)
    assert isinstance(begin, Begin)
    assert (begin.start, begin.end, begin.blocks) == (16, 40, tuple(blocks(40)[2:]))
    assert side.matched(request, 0) == (0, False), "where it failed, it is computed"
    side.received(["a"])
    request.num_computed_tokens = 40
    assert [type(order) for order in orders(side, a=21)] == [Save]


def test_an_aborted_prefill_is_dropped_or_where_it_loads_cancelled() -> None:
    for loads, kind, delay in ((0, Drop, True), (40, Cancel, False)):
        daemon = Daemon()
        side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
        side.new_request(request)
        daemon.pages = loads // BLOCK
        side.allocated(request, blocks(61), side.matched(request, 0)[0] or 0)
        assert side.finished(request, blocks(61)) == (delay, None)
        assert [type(order) for order in orders(side)] == [Begin, kind]


def test_a_preempted_prefill_is_saved_again_as_it_is_computed_again() -> None:
    daemon = Daemon()
    side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    daemon.pages = 0
    side.allocated(request, blocks(61), 0)
    orders(side, a=32)
    told = side.step({}, ("a",), lambda request: [])
    assert told.preempted == ("a",)
    assert [type(order) for order in orders(side, a=16)] == [Save]


def test_a_prefill_that_is_preempted_and_computed_again_in_one_step_is_saved_from_its_beginning() -> None:
    side, request = prefill(Daemon(pages=2)), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    side.allocated(request, blocks(61), side.matched(request, 0)[0])
    side.received(["a"])
    request.num_computed_tokens = 16
    orders(side, a=32)
    request.num_computed_tokens = 0
    assert side.matched(request, 0) == (0, False), "its push has begun, and loads no more"
    side.allocated(request, blocks(61), 0)
    again = side.step({"a": 24}, ("a",), lambda request: blocks(24))
    assert (again.orders, again.preempted) == ([Save("a", 24, tuple(blocks(24)))], ("a",))


def test_a_request_whose_load_is_under_way_is_not_asked_for_again() -> None:
    side, request = decode(Daemon(pages=3)), Request("a", 30, TO_DECODE)
    side.new_request(request)
    side.allocated(request, blocks(30), side.matched(request, 0)[0])
    side.step({}, ("a",), lambda request: [])
    assert side.matched(request, 0) == (0, False)


def test_a_plain_request_costs_prefill_nothing() -> None:
    daemon = Daemon()
    side, plain = prefill(daemon), Request("plain", 61)
    side.new_request(plain)
    assert side.matched(plain, 0) == (0, False) and daemon.asked == []
    side.allocated(plain, blocks(61), 0)
    assert orders(side, plain=61) == [] and side.tracked == 0


def test_while_the_daemon_seems_down_prompts_are_begun_all_the_same() -> None:
    daemon = Daemon(up=False)
    side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    assert side.matched(request, 0) == (0, False) and daemon.asked == []
    side.allocated(request, blocks(61), 0)
    assert [type(order) for order in orders(side, a=61)] == [Begin, Save]
    assert side.counts.not_asked == 1
    assert side.finished(request, blocks(61)) == (True, None), "decode is not told to wait for it"


def computed(side: PrefillScheduler, news: tuple[News, ...] = ()) -> dict[str, object] | None:
    """What the answer to a prompt of two steps says, where the worker says `news` between them: what it says of
    the last step comes behind the answer."""
    request = Request("a", 61, TO_PREFILL)
    side.new_request(request)
    side.allocated(request, blocks(61), 0)
    assert [type(order) for order in orders(side, a=32)] == [Begin, Save]
    for told in news:
        side.hear(told)
    request.num_computed_tokens = 32
    assert [type(order) for order in orders(side, a=29)] == [Save]
    delay, answer = side.finished(request, blocks(61))
    assert delay and [type(order) for order in orders(side)] == [Release]
    side.sent(["a"])
    assert side.tracked == 0
    return answer


@pytest.mark.parametrize(
    ("news", "told"),
    [
        ((), True),
        ((News(frozenset({"a"})),), False),
        ((News(sessions={0: False}),), False),
        ((News(sessions={0: False}), News(sessions={0: True})), True),
        ((News(sessions={0: False}), News(sessions={1: True})), False),
        ((News(frozenset({"a"}), sessions={0: False}), News(sessions={0: True})), False),
    ],
)
def test_decode_is_not_told_of_what_the_worker_does_not_send(news: tuple[News, ...], told: bool) -> None:
    assert (computed(prefill(Daemon()), news) is not None) is told


def test_what_the_worker_said_of_its_session_holds_for_later_prompts() -> None:
    side = prefill(Daemon())
    side.hear(News(sessions={0: False}))
    assert computed(side) is None
    assert computed(side, (News(sessions={0: True}),)) is not None
    assert computed(side) is not None


@pytest.mark.parametrize(("most", "per_page", "told"), [(0, 1, True), (7, 1, False), (8, 1, True), (3, 2, False)])
def test_decode_is_not_told_of_a_prompt_that_its_daemon_has_no_room_for(most: int, per_page: int, told: bool) -> None:
    assert (computed(prefill(Daemon(most_pages=most), per_page)) is not None) is told


def test_news_that_nobody_has_taken_are_told_together() -> None:
    both = News(frozenset({"a"}), sessions={0: False}).then(News(frozenset({"b"})))
    assert both == News(frozenset({"a", "b"}), sessions={0: False})
    ranks = News(first={"a": 1}).then(News(sessions={1: False}, bad=frozenset({"a"})))
    assert ranks == News(sessions={1: False}, first={"a": 1}, bad=frozenset({"a"})), "of all of an engine's ranks"
    assert ranks.then(News(sessions={0: True})).sessions == {0: True, 1: False}


def test_blocks_promised_before_the_daemon_seemed_down_are_reported() -> None:
    daemon = Daemon()
    side, request = prefill(daemon), Request("a", 61, TO_PREFILL)
    side.new_request(request)
    daemon.pages = 3
    assert side.matched(request, 0) == (24, True)
    daemon.up = False
    side.allocated(request, blocks(24), 24)
    (begin,) = orders(side)
    assert isinstance(begin, Begin) and (begin.start, begin.end, len(begin.blocks)) == (0, 24, 3)
