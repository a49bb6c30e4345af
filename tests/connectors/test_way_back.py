"""The prefill engine's scheduler half where its daemon fetches: for what it has the engine wait, and how waits end."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, Cancel, Fill, News, Release, Save
from kvferry.connectors.scheduler_prefill import LINE_SECONDS, LINE_SPEED, MOST_WAITING, PrefillScheduler
from kvferry.connectors.worth import SELDOM, TRY_AGAIN
from tests.connectors.scheduling import BLOCK, TO_PREFILL, Daemon, Request, blocks, orders, prefill

pytestmark = pytest.mark.usefixtures("short_prompts")

TOKENS = 61


def waiting(daemon: Daemon | None = None, computed: int = 0) -> tuple[PrefillScheduler, Request, Begin]:
    side, request = prefill(daemon or Daemon(fetch_tokens=16)), Request("a", TOKENS, TO_PREFILL)
    side.new_request(request)
    assert side.matched(request, computed) == (None, False)
    (begin,) = orders(side)
    assert isinstance(begin, Begin)
    return side, request, begin


def found(side: PrefillScheduler, tokens: int) -> None:
    side.hear(News(found={"a": tokens}))


def test_a_prompt_waits_until_the_daemon_says_what_it_has() -> None:
    side, request, begin = waiting(computed=16)
    assert begin.waits and begin.held == 16 and begin.blocks == () and begin.prompt.tokens == TOKENS
    for _ in range(2):  # vLLM asks in each step
        assert side.matched(request, 16) == (None, False)
        assert orders(side) == []
    found(side, 40)
    assert side.matched(request, 16) == (24, True)
    assert side.matched(request, 24) == (16, True), "the engine may hold more meanwhile"
    side.allocated(request, blocks(40), 24)
    assert orders(side) == [Fill("a", 16, 40, tuple(blocks(40)[:2]), tuple(blocks(40)[2:]))]
    side.allocated(request, blocks(61), 0)  # vLLM calls it once more when the load is over
    side.received(["a"])
    request.num_computed_tokens = 40
    (save,) = orders(side, a=21)
    assert isinstance(save, Save) and save.tokens == TOKENS and save.blocks == tuple(blocks(61))
    request.num_computed_tokens, request.output = TOKENS, 1
    awaited, told = side.finished(request, blocks(61))
    assert awaited and told is not None
    assert orders(side) == [Release("a", TOKENS)]
    assert (side.counts.begins, side.counts.waits, side.counts.fills, side.counts.fill_tokens) == (1, 1, 1, 24)


def test_a_daemon_that_stands_still_is_not_waited_for() -> None:
    daemon = Daemon(fetch_tokens=16)
    side, request, _ = waiting(daemon)
    daemon.up = False
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(61), 0)
    daemon.up = True
    found(side, 40)
    assert orders(side) == [], "what it says later comes too late"
    (save,) = orders(side, a=61)
    assert isinstance(save, Save) and save.tokens == TOKENS


@pytest.mark.parametrize("tokens", [0, 16])
def test_where_nothing_has_come_the_engine_computes(tokens: int) -> None:
    side, request, _ = waiting(computed=16)
    found(side, tokens)
    assert side.matched(request, 16) == (0, False)
    side.allocated(request, blocks(61), 0)
    assert orders(side) == []
    request.num_computed_tokens = 16
    (save,) = orders(side, a=45)
    assert isinstance(save, Save) and save.tokens == TOKENS
    request.num_computed_tokens = 0
    assert side.step({}, ("a",), lambda _: []).preempted == ("a",)
    assert side.matched(request, 16) == (0, False), "it is computed anew"


def asked(side: PrefillScheduler, name: str, fetched: int | None) -> bool:
    """Whether a new prompt is held up; then `fetched` of its tokens come."""
    request = Request(name, TOKENS, TO_PREFILL)
    side.new_request(request)
    answers = [side.matched(request, 0) for _ in range(3)]
    assert answers == answers[:1] * 3, "as it was decided, so it stays"
    if answers[0][0] is None and fetched is not None:
        side.hear(News(found={name: fetched}))
        matched, _ = side.matched(request, 0)
        side.allocated(request, blocks(TOKENS), matched or 0)
    return answers[0][0] is None


def test_prompts_are_not_held_up_again_and_again_for_nothing() -> None:
    side = prefill(Daemon(fetch_tokens=16))
    held_up = [asked(side, f"{number}", fetched=0) for number in range(16 + 2 * (TRY_AGAIN + 2))]
    assert held_up == [True] * 16 + 2 * ([False] * (TRY_AGAIN + 1) + [True])
    assert held_up.count(True) == side.counts.waits == 18
    assert all(asked(prefill(Daemon(fetch_tokens=16)), f"{number}", fetched=40) for number in range(20))
    forced = prefill(Daemon(fetch_tokens=1))  # --way-back always
    assert all(asked(forced, f"{number}", fetched=0) for number in range(20))


@pytest.mark.parametrize("pages", [2, 3])
def test_what_the_daemon_had_itself_was_not_worth_a_wait(pages: int) -> None:
    side = prefill(Daemon(fetch_tokens=16, pages=2))
    held_up = [asked(side, f"{number}", fetched=pages * BLOCK) for number in range(40)]
    assert all(held_up) == (pages == 3)


def test_a_daemon_that_fell_silent_says_nothing_of_what_is_worth_a_wait() -> None:
    daemon = Daemon(fetch_tokens=16)
    side, request, _ = waiting(daemon)
    daemon.up = False
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(TOKENS), 0)
    daemon.up = True
    assert asked(side, "b", fetched=40)


@pytest.mark.parametrize(
    ("least", "pages", "computed", "waits"),
    [(0, 0, 0, False), (56, 0, 0, True), (57, 0, 0, False), (40, 2, 0, True), (41, 2, 0, False), (40, 0, 24, False)],
)
def test_waits_are_for_what_is_lacking_here_and_there(least: int, pages: int, computed: int, waits: bool) -> None:
    daemon = Daemon(fetch_tokens=least, pages=pages)
    side, request = prefill(daemon), Request("a", TOKENS, TO_PREFILL)
    side.new_request(request)
    if waits:
        assert side.matched(request, computed) == (None, False)
    else:
        held = pages * BLOCK
        assert side.matched(request, computed) == ((held - computed, True) if held > computed else (0, False))
        assert orders(side) == []


@pytest.mark.parametrize("why", ["down", "no session", "too long", "log probabilities", "plain"])
def test_nothing_is_waited_for_where_nothing_can_come(why: str) -> None:
    daemon = Daemon(fetch_tokens=1, up=why != "down", most_pages=7 if why == "too long" else 0)
    side = prefill(daemon)
    request = Request("a", TOKENS, None if why == "plain" else TO_PREFILL)
    request.skip_reading_prefix_cache = why == "log probabilities"
    if why == "no session":
        side.hear(News(sessions={0: True, 1: False}))
    side.new_request(request)
    assert side.matched(request, 0) == (0, False)
    assert orders(side) == []


def test_one_that_ends_while_it_waits_is_cancelled_and_the_engine_waits_for_nothing() -> None:
    side, request, _ = waiting()
    assert side.finished(request, []) == (False, None)
    assert orders(side) == [Cancel("a")] and side.tracked == 0
    found(side, 40)
    side.hear(News(failed=frozenset({"a"})))
    assert side.tracked == 0


def test_one_that_ends_before_it_has_blocks_likewise() -> None:
    side, request, _ = waiting()
    found(side, 40)
    side.matched(request, 0)
    assert side.finished(request, []) == (False, None)
    assert orders(side) == [Cancel("a")] and side.tracked == 0


def test_one_that_ends_while_it_is_filled_is_reported_by_its_load() -> None:
    side, request, _ = waiting()
    found(side, 40)
    side.allocated(request, blocks(40), 40)
    orders(side)
    assert side.finished(request, blocks(40)) == (False, None)
    assert orders(side) == [Cancel("a")] and side.tracked == 1
    side.received(["a"])
    assert side.tracked == 0


@pytest.mark.parametrize("first", ["found", "failed"])
def test_one_whose_push_has_failed_is_computed_and_no_router_is_told_of_it(first: str) -> None:
    side, request, _ = waiting()
    if first == "found":
        found(side, 40)
    side.hear(News(failed=frozenset({"a"})))
    found(side, 40)
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(61), 0)
    request.num_computed_tokens = 0
    orders(side, a=61)
    request.num_computed_tokens, request.output = TOKENS, 1
    assert side.finished(request, blocks(61)) == (True, None)


def test_a_reset_ends_the_wait() -> None:
    side, request, _ = waiting()
    assert side.reset(emptied=True)
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(61), 0)
    found(side, 40)
    orders(side, a=61)
    assert side.finished(request, blocks(61)) == (True, None)
    assert any(isinstance(order, Release) for order in orders(side))


def test_ranks_say_what_they_have_one_after_the_other() -> None:
    side, request, _ = waiting()
    side.hear(News(found={"a": 40}).then(News(found={"a": 40})))
    assert side.matched(request, 0) == (40, True)
    side.allocated(request, blocks(40), 40)
    found(side, 40)
    (fill,) = orders(side)
    assert isinstance(fill, Fill) and fill.end == 40
    assert side.matched(request, 0) == (0, False), "a fill that failed is not tried again"


@pytest.mark.parametrize("how", ["allocated", "finished", "allocated behind a reset"])
def test_few_prompts_have_the_daemons_pages_before_they_have_blocks(how: str) -> None:
    side = prefill(Daemon(fetch_tokens=16))
    requests = [Request(f"r{i}", TOKENS, TO_PREFILL) for i in range(MOST_WAITING + 2)]
    for request in requests:
        side.new_request(request)
    answers = [side.matched(request, 0) for request in requests]
    assert answers == [(None, False)] * (MOST_WAITING + 2)
    assert len(orders(side)) == MOST_WAITING == side.counts.begins, "the others stay in the engine's queue"
    assert side.matched(requests[-1], 0) == (None, False) and not orders(side)
    if how == "finished":
        side.finished(requests[0], [])
    else:
        if how == "allocated":
            side.hear(News(found={"r0": 40}))
        else:
            side.reset(emptied=True)
        side.allocated(requests[0], blocks(TOKENS), 40 if how == "allocated" else 0)
    assert side.matched(requests[-1], 0) == side.matched(requests[-2], 0) == (None, False)
    assert side.counts.begins == MOST_WAITING + 1
    side.hear(News(sessions={0: False}))
    assert side.matched(requests[-2], 0) == (0, False), "nothing can come any more"


def line(side: PrefillScheduler) -> Request:
    """As many wait as may; one more."""
    for i in range(MOST_WAITING):
        assert asked(side, f"r{i}", fetched=None)
    request = Request("a", TOKENS, TO_PREFILL)
    side.new_request(request)
    return request


def test_nobody_lines_up_for_long() -> None:
    side, now = prefill(Daemon(fetch_tokens=16)), [5.0]
    side.now = lambda: now[0]
    request = line(side)
    assert side.matched(request, 0) == (None, False)
    now[0] += (TOKENS - 1) / LINE_SPEED - 0.001
    assert side.matched(request, 0) == (None, False)
    now[0] += 0.002
    assert side.matched(request, 0) == side.matched(request, 0) == (0, False)
    assert side.counts.begins == MOST_WAITING
    long = Request("b", 100_000, TO_PREFILL)
    side.new_request(long)
    assert side.matched(long, 0) == (None, False)
    now[0] += LINE_SECONDS - 0.01
    assert side.matched(long, 0) == (None, False)
    now[0] += 0.02
    assert side.matched(long, 0) == (0, False)


def test_one_in_many_that_lines_up_is_tried_all_the_same() -> None:
    side = prefill(Daemon(fetch_tokens=16))
    for _ in range(100):
        side._worth.waited(TOKENS - 1, 0)
    held_up = [side._worth.hold_up(TOKENS - 1) for _ in range(SELDOM)]
    assert not any(held_up)
    side._waiting |= {f"w{i}" for i in range(MOST_WAITING)}
    request = Request("a", TOKENS, TO_PREFILL)
    side.new_request(request)
    assert side.matched(request, 0) == (None, False) and side.counts.begins == 0
    side._waiting.clear()
    assert side.matched(request, 0) == (None, False) and side.counts.begins == 1


def test_those_that_line_up_are_asked_about_once() -> None:
    daemon = Daemon(fetch_tokens=16)
    side = prefill(daemon)
    request = line(side)
    assert side.matched(request, 0) == (None, False)
    daemon.pages = 3
    assert side.matched(request, 0) == (None, False)
    side.allocated(Request("r0", TOKENS, TO_PREFILL), blocks(TOKENS), 0)
    assert side.matched(request, TOKENS - 1) == (0, False), "the engine has it by now"
    assert side.counts.begins == MOST_WAITING


def test_what_was_found_of_another_of_the_same_id_is_no_more_than_this_prompt() -> None:
    """The engine would end if it were told of more: word of a prompt that its client gave up may come behind the
    next one of its id."""
    side, request, _ = waiting()
    side.finished(request, [])
    again = Request("a", 21, {**TO_PREFILL, "kvferry_attempt": 2})
    side.new_request(again)
    assert side.matched(again, 0) == (None, False)
    found(side, 40)
    assert side.matched(again, 0) == (16, True)
