"""Prompts that end where a page ends, with a draft model that looks ahead: what the last page's last token has there is
of a token that is still to be sampled, so no other request is given that page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connectors.orders import Begin, Load, PromptPages, StorePages
from kvferry.connectors.scheduler_side import SchedulerSide
from kvferry.radix.digests import split_digests
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

PAGES = 3
PROMPT = PAGES * BLOCK
OTHER = {"kvferry_request": "cd" * 16}


def new(side: SchedulerSide, name: str, params: dict[str, object] | None, tokens: int = PROMPT) -> Request:
    request = Request(name, tokens, params)
    side.new_request(request)
    return request


def begun(side: SchedulerSide, request: Request) -> PromptPages:
    """What the daemon beside a prefill engine is told of its prompt."""
    side.matched(request, 0)
    side.allocated(request, blocks(PROMPT), 0)
    (begin,) = orders(side)
    assert isinstance(begin, Begin)
    return begin.prompt


def loaded(side: SchedulerSide, request: Request) -> PromptPages:
    """What the daemon beside a decode engine is told of it."""
    assert side.matched(request, 0) == (PROMPT, True)
    side.allocated(request, blocks(PROMPT), PROMPT)
    (load,) = orders(side)
    assert isinstance(load, Load)
    side.received([request.request_id])
    return load.prompt


def test_both_halves_of_a_request_name_its_last_page_alike_and_no_other_request_does() -> None:
    to, at = prefill(Daemon(), looks_ahead=True), decode(Daemon(), looks_ahead=True)
    one, other = (
        (begun(to, new(to, name, TO_PREFILL | more)), loaded(at, new(at, name, TO_DECODE | more)))
        for name, more in (("a", {}), ("b", OTHER))
    )
    assert one[0] == one[1] and other[0] == other[1]
    ours, theirs = split_digests(one[0].digests), split_digests(other[0].digests)
    assert len(ours) == PAGES and ours[:-1] == theirs[:-1] and ours[-1] != theirs[-1]


def test_behind_a_reset_they_name_it_alike_too() -> None:
    to, at = prefill(Daemon(), weights="2", looks_ahead=True), decode(Daemon(), weights="2", looks_ahead=True)
    waiting = new(to, "a", TO_PREFILL), new(at, "a", TO_DECODE)
    for side in (to, at):
        side.reset(emptied=True)
        orders(side)
    assert begun(to, waiting[0]) == loaded(at, waiting[1])


@pytest.mark.parametrize("params", [None, TO_DECODE])
def test_once_a_reply_goes_on_its_page_is_found_by_its_name(params: dict[str, object] | None) -> None:
    daemon = Daemon()
    side = decode(daemon, looks_ahead=True)
    request = new(side, "a", params)
    if params is not None:
        loaded(side, request)
    request.output, request.num_computed_tokens = 2, PROMPT + 1
    assert side.finished(request, blocks(PROMPT + 2)) == (True, None)
    (store,) = orders(side)
    assert isinstance(store, StorePages) and len(split_digests(store.prompt.digests)) == PAGES

    daemon.asked.clear()
    side.matched(new(side, "b", None, PROMPT + 2), 0)
    assert daemon.asked == [store.prompt.digests]


@pytest.mark.parametrize(("made", "params"), [(decode, None), (prefill, TO_PREFILL)])
def test_no_look_up_asks_for_it(made: Callable[..., SchedulerSide], params: dict[str, object] | None) -> None:
    daemon = Daemon(pages=PAGES)
    side = made(daemon, looks_ahead=True)
    for name in "ab":
        assert side.matched(new(side, name, params), 0) == (PROMPT - BLOCK, True)
    assert daemon.asked[0] == daemon.asked[1]


def test_nor_does_one_for_a_reply_that_was_preempted_before_its_first_token() -> None:
    daemon = Daemon(pages=PAGES)
    side = decode(daemon, looks_ahead=True)
    loaded(side, request := new(side, "a", TO_DECODE))
    side.step({}, ["a"], lambda request: ())
    assert side.matched(request, 0) == (PROMPT - BLOCK, True)
