"""Requests that are put off for another's load, which brings half of what they lack."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, News
from kvferry.connectors.scheduler_prefill import LINE_SPEED
from kvferry.connectors.scheduler_side import WORTH_JOINING, SchedulerSide
from tests.connectors.scheduling import (
    BLOCK,
    TO_DECODE,
    TO_PREFILL,
    Daemon,
    Request,
    blocks,
    decode,
    orders,
    prefill,
)

pytestmark = pytest.mark.usefixtures("short_prompts")

LONG = 2 * WORTH_JOINING


def loading(tokens: int = LONG, params: dict[str, object] | None = TO_DECODE) -> tuple[SchedulerSide, Request]:
    """A decode scheduler, one of whose prompts is being loaded."""
    side, first = decode(Daemon()), Request("a", tokens, params)
    side.new_request(first)
    assert side.matched(first, 0) == (tokens, True)
    side.allocated(first, blocks(tokens), tokens)
    assert len(orders(side)) == 1
    return side, first


@pytest.mark.parametrize("over", ["received", "failed", "finished"])
def test_a_prompt_whose_half_is_being_loaded_for_another_waits_for_it(over: str) -> None:
    side, first = loading()
    second = Request("b", LONG + 40, TO_DECODE)
    side.new_request(second)
    for _ in range(3):
        assert side.matched(second, 0) == (None, False)
    assert (side.counts.joins, orders(side)) == (1, [])
    if over == "finished":
        side.finished(first, blocks(LONG))
    else:
        side.hear(News(bad=frozenset("a" if over == "failed" else "")))
        side.received(["a"])
    held = LONG if over == "received" else 0
    assert side.matched(second, held) == (LONG + 40 - held, True)
    side.allocated(second, blocks(LONG + 40), LONG + 40 - held)
    assert side.counts.loads == 2


def test_what_another_load_brings_little_of_is_not_put_off() -> None:
    side, _ = loading()
    for name, tokens, adapter in (("long", 2 * LONG + 2 * BLOCK, ""), ("other", LONG, "adapter")):
        request = Request(name, tokens, TO_DECODE, adapter=adapter)
        side.new_request(request)
        assert side.matched(request, 0) == (tokens, True)
    held = Request("held", LONG, TO_DECODE)  # most of it the engine has already
    side.new_request(held)
    assert side.matched(held, LONG - WORTH_JOINING) == (WORTH_JOINING, True)
    short, request = loading(WORTH_JOINING - BLOCK)[0], Request("b", WORTH_JOINING - BLOCK, TO_DECODE)
    short.new_request(request)
    assert short.matched(request, 0) == (WORTH_JOINING - BLOCK, True)
    assert side.counts.joins == short.counts.joins == 0


def test_nothing_is_put_off_where_the_engine_would_not_find_it() -> None:
    side, _ = loading()
    side.shares_blocks = False
    second = Request("b", LONG, TO_DECODE)
    side.new_request(second)
    assert side.matched(second, 0) == (LONG, True)


def test_loads_that_fail_one_after_the_other_are_not_waited_for_one_after_the_other() -> None:
    side, _ = loading()
    late = [Request(name, LONG + 40, TO_DECODE) for name in ("b", "c", "d")]
    for request in late:
        side.new_request(request)
        assert side.matched(request, 0) == (None, False)
    side.hear(News(bad=frozenset("a")))
    side.received(["a"])
    for request in late:
        assert side.matched(request, 0) == (LONG + 40, True)
        side.allocated(request, blocks(LONG + 40), LONG + 40)
    assert (side.counts.joins, side.counts.loads) == (3, 4)


def test_behind_a_load_that_brought_something_another_one_is_waited_for() -> None:
    side, _ = loading()
    second, third = (Request(name, 2 * LONG, TO_DECODE) for name in ("b", "c"))
    for request in (second, third):
        side.new_request(request)
    assert side.matched(third, 0) == (None, False)
    side.received(["a"])
    assert side.matched(second, LONG) == (LONG, True)
    side.allocated(second, blocks(2 * LONG), LONG)
    assert side.matched(third, LONG) == (None, False)
    side.received(["b"])
    assert side.matched(third, 2 * LONG - BLOCK) == (BLOCK, True) and side.counts.joins == 1


def test_a_prompt_does_not_wait_for_one_of_less_weight() -> None:
    side, first = loading()
    first.priority = 1  # as vLLM's, the greater the later
    for name, priority, put_off in (("sooner", 0, False), ("alike", 1, True), ("later", 2, True)):
        request = Request(name, LONG, TO_DECODE, priority=priority)
        side.new_request(request)
        assert side.matched(request, 0) == ((None, False) if put_off else (LONG, True))


def test_a_load_is_put_off_for_half_of_a_deadline_at_most() -> None:
    """Prefill may have no room to compute the first one while it keeps what it has of those behind it."""
    side, _ = loading()
    clock, second = [100.0], Request("b", LONG + 40, TO_DECODE)
    side.now, side.put_off_seconds = lambda: clock[0], 2.0
    side.new_request(second)
    for clock[0] in (100.0, 101.9):
        assert side.matched(second, 0) == (None, False)
    clock[0] = 102.0
    assert side.matched(second, 0) == (LONG + 40, True)


@pytest.mark.parametrize("over", ["found", "nothing", "finished", "failed"])
def test_a_prompt_whose_half_may_be_fetched_for_another_lines_up_behind_it(over: str) -> None:
    side, first = prefill(Daemon(fetch_tokens=16)), Request("a", LONG, TO_PREFILL)
    second, other = Request("b", LONG + 40, TO_PREFILL), Request("c", LONG, TO_PREFILL, adapter="other")
    for request in (first, second, other):
        side.new_request(request)
        assert side.matched(request, 0) == (None, False)
    assert side.matched(second, 0) == (None, False)
    assert [order.request for order in orders(side) if isinstance(order, Begin)] == ["a", "c"]
    assert side.counts.joins == 1
    if over == "finished":
        side.finished(first, [])
    else:
        half = LONG // 2 if over == "found" else 0
        side.hear(News(found={"a": half}) if over != "failed" else News(failed=frozenset("a")))
        assert side.matched(first, 0) == (half, half > 0)
        side.allocated(first, blocks(LONG), half)
    if over == "found":
        assert side.matched(second, 0) == (None, False) and side.counts.begins == 2, "it is being loaded"
        side.received(["a"])
    assert side.matched(second, 0) == (None, False) and side.counts.begins == 3, "it is begun itself"


def test_what_another_prompt_brought_is_not_fetched_again() -> None:
    side, first, second = prefill(Daemon(fetch_tokens=16)), *(Request(name, LONG, TO_PREFILL) for name in "ab")
    for request in (first, second):
        side.new_request(request)
        assert side.matched(request, 0) == (None, False)
    side.hear(News(found={"a": LONG - BLOCK}))
    side.matched(first, 0)
    side.allocated(first, blocks(LONG), LONG - BLOCK)
    side.received(["a"])
    assert side.matched(second, LONG - BLOCK) == (0, False) and side.counts.begins == 1


def test_who_has_lined_up_behind_another_for_long_is_begun_itself() -> None:
    side, now = prefill(Daemon(fetch_tokens=16)), [5.0]
    side.now = lambda: now[0]
    first, second = (Request(name, LONG, TO_PREFILL) for name in "ab")
    for request in (first, second):
        side.new_request(request)
        assert side.matched(request, 0) == (None, False)
    now[0] += (LONG - BLOCK) / LINE_SPEED - 0.01
    assert side.matched(second, 0) == (None, False) and side.counts.begins == 1
    now[0] += 0.02
    assert side.matched(second, 0) == (None, False) and side.counts.begins == 2
