"""The worker's half against real daemons (gRPC, NIXL over TCP): what arrives in the engine's blocks. With
TEST_DEVICES=cuda:0 the engines' blocks and the daemons' pools are on that GPU."""

from __future__ import annotations

from kvferry.connectors.orders import Begin, Load, PromptPages, Release, Restore, Save
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
