"""The worker's half against real daemons (gRPC, NIXL over TCP): what arrives in the engine's blocks. With
TEST_DEVICES=cuda:0 the engines' blocks and the daemons' pools are on that GPU."""

from __future__ import annotations

import time

import pytest

from kvferry.connectors.orders import Begin, FirstToken, Load, PromptPages, Release, Restore, Save
from tests.connectors.engine_memory import BLOCK
from tests.connectors.worker_side.engine_pair import (
    PAGE,
    Pair,
    exchange,
    new_name,
    new_prompt,
    received,
    same,
    sent,
    until,
)


def test_a_prompt_arrives_in_the_decode_engines_blocks(pair: Pair) -> None:
    prompt = new_prompt(3 * PAGE + 5)
    assert not same(pair, range(7), range(20, 27), last=5)
    assert exchange(pair, "a", new_name(), prompt, range(7), range(20, 27)) == set()
    assert same(pair, range(7), range(20, 27), last=5)
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_what_the_decode_engine_holds_does_not_travel_and_the_daemon_gets_it_from_there(pair: Pair) -> None:
    prompt = new_prompt(4 * PAGE)
    for i in range(5):  # the engines agree on what both hold: two pages and the first block of the third
        pair.engines["decode"].take_from(pair.engines["prefill"], 10 + i, 30 + i)
    before = pair.stats("decode").transfers.delta_pages
    assert exchange(pair, "a", new_name(), prompt, range(10, 18), range(30, 38), 2 * PAGE, 2 * PAGE + BLOCK) == set()
    assert same(pair, range(10, 18), range(30, 38))
    assert pair.stats("decode").transfers.delta_pages - before == 2
    # the pages that the engine held are in the daemon's tree now, as are those that came
    again = new_prompt(5 * PAGE, prompt)
    pair.give(
        "decode",
        Restore(
            "b", new_name(), PromptPages(again.digests[: 4 * 32], 4 * PAGE + 1, bytes(32)), 0, tuple(range(40, 48))
        ),
    )
    assert received(pair.sides["decode"], "b") == set()
    assert same(pair, range(10, 18), range(40, 48))
    until(lambda: pair.at_rest("decode"))


def test_a_restore_of_what_is_not_held_reports_its_blocks(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE + 1)
    before = [pair.engines["decode"].block(n) for n in range(64)]
    pair.give("decode", Restore("a", new_name(), prompt, BLOCK, (8, 9, 10)))
    assert received(pair.sides["decode"], "a") == {8, 9, 10}
    assert [pair.engines["decode"].block(n) for n in range(64)] == before
    until(lambda: pair.at_rest("decode"))


def test_prefill_loads_what_its_daemon_holds(pair: Pair) -> None:
    prompt = new_prompt(2 * PAGE)
    exchange(pair, "a", new_name(), prompt, range(4), range(20, 24))
    engine = pair.engines["prefill"]
    wanted = [engine.block(n) for n in range(4)]
    longer, name = new_prompt(3 * PAGE, prompt), new_name()
    pair.give("prefill", Begin("b", name, longer, 0, 2 * PAGE, (40, 41, 42, 43)))
    assert received(pair.sides["prefill"], "b") == set()
    assert [engine.block(n) for n in range(40, 44)] == wanted
    pair.give("prefill", Save("b", 3 * PAGE, tuple(range(40, 46))), Release("b"))
    pair.give("decode", Load("b", name, longer, "p", 0, (), tuple(range(30, 36))))
    assert received(pair.sides["decode"], "b") == set()
    sent(pair.sides["prefill"], "b")
    assert same(pair, range(40, 46), range(30, 36))


@pytest.mark.parametrize("token", [None, 0, 49151])
def test_the_first_token_comes_with_the_prompt(pair: Pair, token: int | None) -> None:
    name, prompt, request = new_name(), new_prompt(PAGE), f"first {token}"
    pair.give("prefill", Begin(request, name, prompt), Save(request, PAGE, (0, 1)))
    pair.give("decode", Load(request, name, prompt, "p", 0, (), (20, 21)))
    until(lambda: pair.stats("decode").requests.running)
    time.sleep(0.1)
    assert not pair.sides["decode"].reports.received, "it waits for the token"
    pair.give("prefill", Release(request, token))
    assert received(pair.sides["decode"], request) == set()
    news = pair.sides["decode"].reports.take_news()
    assert (news.first if news else {}) == ({} if token is None else {request: token})
    sent(pair.sides["prefill"], request)


def test_the_first_token_does_not_wait_for_the_end_of_a_request_that_goes_on(pair: Pair) -> None:
    name, prompt = new_name(), new_prompt(PAGE)
    pair.give("prefill", Begin("on", name, prompt), Save("on", PAGE, (0, 1)))
    pair.give("prefill", FirstToken("on", 5))
    pair.give("decode", Load("on", name, prompt, "p", 0, (), (20, 21)))
    until(lambda: pair.sides["decode"].reports.received)
    assert pair.sides["decode"].reports.take_good() == (set(), {"on"}, {"on": 5})
    assert pair.sides["prefill"].reports.take() == (set(), set()), "the engine has its blocks back when it is over"
    pair.give("prefill", Release("on", 5))
    sent(pair.sides["prefill"], "on")
