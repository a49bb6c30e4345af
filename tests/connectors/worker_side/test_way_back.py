"""The way back for a prefill engine with blocks of its own, over real daemons: what decode's daemon holds comes into
its blocks before it computes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.connectors.orders import Begin, Cancel, Fill, Load, News, PromptPages, Release, Save
from tests.connectors.engine_memory import BLOCK
from tests.connectors.worker_side.engine_pair import (
    PAGE,
    PER_PAGE,
    Pair,
    exchange,
    new_name,
    new_prompt,
    received,
    sent,
    until,
)
from tests.connectors.worker_side.next_turn import (
    HISTORY,
    OURS,
    STORED,
    THEIRS,
    TOKENS,
    BackPair,
    BothEnginesPair,
    EngineBackPair,
    arrived,
    begin,
    compute,
    fill,
    history_is_in,
    history_is_whole,
    load,
    made,
    news,
    rest,
    store,
    up,
)
from tests.support.devices import DeviceStack, WrappedStack
from tests.support.engines import courier_pids

WITH_FLIPS = [sys.executable, str(Path(__file__).parents[2] / "support" / "with_flips.py")]
# By whose pool is an engine's: prefill's, or both. There decode's daemon holds what it does in its host tier.
KINDS: dict[str, type[Pair]] = {"engine": EngineBackPair, "engines": BothEnginesPair}


@pytest.fixture(scope="module")
def pool_pair() -> Iterator[Pair]:
    with DeviceStack() as stack, made(BackPair, stack) as pair:
        yield pair


@pytest.fixture(scope="module", params=["daemon", *KINDS])
def pair(request: pytest.FixtureRequest, pool_pair: Pair) -> Iterator[Pair]:
    if request.param == "daemon":
        yield pool_pair
        return
    with DeviceStack() as stack, made(KINDS[request.param], stack) as pair:
        yield pair


@pytest.mark.parametrize("held", [0, PAGE + BLOCK])
def test_a_cold_prefill_server_has_the_history_back_and_computes_the_rest(pair: Pair, held: int) -> None:
    before = pair.stats("prefill").way_back
    prompt = store(pair)
    name = begin(pair, "cold", prompt, held)
    load(pair, "cold", name, prompt)
    assert news(pair, "cold") == News(found={"cold": HISTORY})
    own = [pair.engines["prefill"].block(block) for block in THEIRS[: held // BLOCK]]
    assert fill(pair, "cold", held, HISTORY) == set()
    assert history_is_in(pair, start=held // BLOCK)
    assert [pair.engines["prefill"].block(block) for block in THEIRS[: held // BLOCK]] == own, "its own blocks stay"
    for block, there in zip(THEIRS[: held // BLOCK], STORED, strict=False):
        pair.engines["prefill"].take_from(pair.engines["decode"], there, block)
    compute(pair, "cold")
    assert received(pair.sides["decode"], "cold") == set() and arrived(pair)
    back = pair.stats("prefill").way_back
    # Into the daemon's own pages all of it comes, so that it has no gap there.
    fetched = HISTORY - held // PAGE * PAGE if isinstance(pair, EngineBackPair) else HISTORY
    assert back.fetched_tokens - before.fetched_tokens == fetched
    rest(pair)


def test_the_next_turn_finds_what_was_fetched_without_a_wait(pool_pair: Pair) -> None:
    pair = pool_pair
    prompt = store(pair)
    name = begin(pair, "first", prompt)
    load(pair, "first", name, prompt)
    assert news(pair, "first").found == {"first": HISTORY}
    fill(pair, "first", 0, HISTORY)
    compute(pair, "first")
    received(pair.sides["decode"], "first")
    rest(pair)
    completed = pair.stats("prefill").way_back.transfers.completed
    name = begin(pair, "second", prompt)
    assert news(pair, "second").found == {"second": HISTORY + PAGE}, "its daemon holds all of it but the tail"
    load(pair, "second", name, prompt)
    compute(pair, "second")
    assert received(pair.sides["decode"], "second") == set()
    assert pair.stats("prefill").way_back.transfers.completed == completed
    rest(pair)


def test_where_decode_holds_nothing_the_engine_computes_at_once(pair: Pair) -> None:
    prompt = new_prompt(TOKENS)
    name = new_name()
    load(pair, "new", name, prompt)
    until(lambda: pair.stats("decode").requests.running == 1)
    began = time.monotonic()
    pair.give("prefill", Begin("new", name, prompt, waits=True))
    assert news(pair, "new").found == {"new": 0}
    assert time.monotonic() - began < 0.5, "an Ask that says so ends the wait"
    compute(pair, "new")
    assert received(pair.sides["decode"], "new") == set() and arrived(pair)
    rest(pair)


def test_where_nobody_asks_the_engine_waits_no_longer_than_the_daemon_says(pair: Pair) -> None:
    prompt = new_prompt(TOKENS)
    name = begin(pair, "unasked", prompt)
    assert news(pair, "unasked").found == {"unasked": 0}
    pair.give("prefill", Save("unasked", TOKENS, THEIRS))
    load(pair, "unasked", name, prompt)
    pair.give("prefill", Release("unasked", 7))
    assert received(pair.sides["decode"], "unasked") == set() and arrived(pair)
    sent(pair.sides["prefill"], "unasked")
    rest(pair)


def test_pages_of_the_daemons_are_not_waited_for_longer_than_that(pool_pair: Pair) -> None:
    """Another prompt has them: the engine computes, and what it has computed is sent when they are there."""
    pair = pool_pair
    large, prompt = new_prompt(20 * PAGE), store(pair)
    others, name = new_name(), new_name()
    pair.give("decode", Load("large", others, large, "p", 0, (), tuple(range(40))))
    pair.give("prefill", Begin("large", others, large))
    until(lambda: pair.stats("prefill").pool.leased == 20)
    began = time.monotonic()
    pair.give("prefill", Begin("short", name, prompt, waits=True))
    assert news(pair, "short").found == {"short": 0}
    assert time.monotonic() - began < 10.0
    pair.give("prefill", Save("short", TOKENS, THEIRS), Save("large", 20 * PAGE, tuple(range(40))))
    pair.give("prefill", Release("large", 7), Release("short", 7))
    assert received(pair.sides["decode"], "large") == set()
    load(pair, "short", name, prompt)
    assert received(pair.sides["decode"], "short") == set()
    assert arrived(pair, start=len(STORED)) and history_is_whole(pair), "decode's daemon may still have the history"
    until(lambda: pair.at_rest("prefill"))
    pair.sides["prefill"].reports.take()
    assert {each.reason: each.count for each in pair.stats("prefill").way_back.choices}["no_pages"] == 1
    rest(pair)


def test_a_begin_that_does_not_wait_has_nothing_fetched(pair: Pair) -> None:
    prompt, name = store(pair), new_name()
    before = pair.stats("prefill").way_back.transfers.completed
    load(pair, "not waiting", name, prompt)
    pair.give("prefill", Begin("not waiting", name, prompt), Save("not waiting", TOKENS, THEIRS))
    pair.give("prefill", Release("not waiting", 7))
    assert received(pair.sides["decode"], "not waiting") == set()
    sent(pair.sides["prefill"], "not waiting")
    assert pair.stats("prefill").way_back.transfers.completed == before
    rest(pair)


def test_a_client_that_leaves_while_the_engine_waits_leaves_nothing(pair: Pair) -> None:
    """Its decode half never comes, or its daemon stands still."""
    prompt = store(pair)
    os.kill(pair.daemons["decode"].popen.pid, signal.SIGSTOP)
    try:
        begin(pair, "left", prompt)
        until(lambda: pair.stats("prefill").requests.running or pair.stats("prefill").requests.waiting)
        pair.give("prefill", Cancel("left"))
        until(lambda: pair.at_rest("prefill"))
        assert pair.sides["prefill"].reports.take() == (set(), set())
    finally:
        os.kill(pair.daemons["decode"].popen.pid, signal.SIGCONT)
    rest(pair)


def fetch(pair: Pair, request: str, prompt: PromptPages) -> None:
    """Has a fetch under way; however loaded the host is, the Ask is there first."""
    name = new_name()
    load(pair, request, name, prompt)
    until(lambda: pair.stats("prefill").requests.running == 1)
    pair.give("prefill", Begin(request, name, prompt, waits=True))
    if isinstance(pair, EngineBackPair):
        assert news(pair, request).found == {request: HISTORY}
        pair.give("prefill", Fill(request, 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]))
    until(lambda: pair.stats("prefill").way_back.transfers.active == 1)


def test_a_client_that_leaves_during_the_fetch_leaves_nothing_on_either_side(pair: Pair) -> None:
    prompt = store(pair)
    couriers = courier_pids(pair.daemons["decode"].popen.pid)
    for pid in couriers:  # its parts stay where they are
        os.kill(pid, signal.SIGSTOP)
    try:
        fetch(pair, "leaves", prompt)
        pair.give("prefill", Cancel("leaves"))
        pair.give("decode", Cancel("leaves"))
    finally:
        for pid in couriers:
            os.kill(pid, signal.SIGCONT)
    assert received(pair.sides["decode"], "leaves") == set(OURS)
    if isinstance(pair, EngineBackPair):
        assert received(pair.sides["prefill"], "leaves") == set(THEIRS[: HISTORY // BLOCK])
        assert pair.at_rest("prefill"), "it was reported while the daemon had the blocks"
    rest(pair)
    assert pair.sides["prefill"].reports.take() == (set(), set()), "the engine had no block of it"
    told = pair.sides["prefill"].reports.take_news()
    assert told is None or not told.found


def test_a_client_that_leaves_while_the_blocks_are_filled_is_reported_once(pair: Pair) -> None:
    prompt = store(pair)
    name = begin(pair, "filled", prompt)
    load(pair, "filled", name, prompt)
    assert news(pair, "filled").found == {"filled": HISTORY}
    pair.give("prefill", Fill("filled", 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]), Cancel("filled"))
    received(pair.sides["prefill"], "filled")
    pair.give("decode", Cancel("filled"))
    assert received(pair.sides["decode"], "filled") == set(OURS)
    rest(pair)
    assert pair.sides["prefill"].reports.take() == (set(), set())


def test_blocks_that_are_taken_away_behind_a_fill_are_computed_anew(pool_pair: Pair) -> None:
    """The engine preempts it between the fill and its last chunk: what it computes then lies elsewhere."""
    pair = pool_pair
    prompt = store(pair)
    name = begin(pair, "preempted", prompt)
    load(pair, "preempted", name, prompt)
    assert news(pair, "preempted").found == {"preempted": HISTORY}
    assert fill(pair, "preempted", 0, HISTORY) == set()
    pair.give("prefill", preempted=("preempted",))
    elsewhere = tuple(range(2, 2 + len(THEIRS)))
    for block, there in zip(elsewhere, THEIRS, strict=True):
        pair.engines["prefill"].take_from(pair.engines["prefill"], there, block)
    pair.give("prefill", Save("preempted", TOKENS, elsewhere), Release("preempted", 7))
    sent(pair.sides["prefill"], "preempted")
    assert received(pair.sides["decode"], "preempted") == set() and arrived(pair)
    rest(pair)


def test_a_fill_behind_a_failure_is_all_bad(pair: Pair) -> None:
    prompt = store(pair)
    name = begin(pair, "failed", prompt)
    load(pair, "failed", name, prompt)
    assert news(pair, "failed").found == {"failed": HISTORY}
    pair.give("decode", Cancel("failed"))
    assert received(pair.sides["decode"], "failed") == set(OURS)
    assert news(pair, "failed").failed == {"failed"}, "it is not waited for until the engine has blocks"
    assert fill(pair, "failed", 0, HISTORY) == set(THEIRS[: HISTORY // BLOCK])
    pair.give("prefill", Release("failed"))
    sent(pair.sides["prefill"], "failed")
    rest(pair)


# One slot: parts come in their order, each once the one before it is out. Else NIXL may tell of a later one first.
ONE_SMALL_SLOT = ["--slots", "1", "--slot-bytes", "4096"]


class SmallSlot(BackPair):
    def pool_words(self, role: str) -> list[str]:
        return [*super().pool_words(role), *ONE_SMALL_SLOT]


class EngineSmallSlot(EngineBackPair):
    def pool_words(self, role: str) -> list[str]:
        return [*super().pool_words(role), *ONE_SMALL_SLOT]


@pytest.mark.parametrize(
    ("kind", "pages"),
    [(SmallSlot, 4), pytest.param(EngineSmallSlot, 4, marks=pytest.mark.nightly), (EngineSmallSlot, 0)],
)
def test_what_came_before_a_wrong_part_counts(kind: type[Pair], pages: int) -> None:
    """A bit flips in a part of the fetch: what came before it is loaded, the rest is computed. A part has four
    pages."""
    flips = {"FLIP_FROM": str(pages // 4)}
    with WrappedStack("prefill-daemon", WITH_FLIPS, flips) as stack, made(kind, stack) as pair:
        prompt = store(pair)
        good = pages * PER_PAGE
        before = [pair.engines["prefill"].block(block) for block in THEIRS]
        name = begin(pair, "broken", prompt)
        load(pair, "broken", name, prompt)
        found = news(pair, "broken").found["broken"]
        assert found == (pages * PAGE if kind is SmallSlot else HISTORY), "an offer, or what has come"
        if found:
            assert fill(pair, "broken", 0, found) == set(THEIRS[good : found // BLOCK])
        assert history_is_in(pair, good)
        behind = THEIRS[found // BLOCK :]
        assert [pair.engines["prefill"].block(block) for block in behind] == before[found // BLOCK :]
        blocks = THEIRS
        if pages == 0:  # the engine gave its blocks back, and has others
            blocks = tuple(range(2, 2 + len(THEIRS)))
            for block, there in zip(blocks, THEIRS, strict=True):
                pair.engines["prefill"].take_from(pair.engines["prefill"], there, block)
        pair.give("prefill", Save("broken", 2 * PAGE, blocks[: 2 * PER_PAGE]))
        pair.give("prefill", Save("broken", TOKENS, blocks))
        pair.give("prefill", Release("broken", 7))
        sent(pair.sides["prefill"], "broken")
        assert received(pair.sides["decode"], "broken") == set()
        decode, prefill = pair.engines["decode"], pair.engines["prefill"]
        assert all(prefill.block(blocks[i]) == decode.block(OURS[i]) for i in range(HISTORY // BLOCK, len(OURS) - 1))
        rest(pair)
        back = pair.stats("prefill").way_back
        assert {each.reason: each.count for each in back.transfers.aborts} == {"wrong_parts": 1}
        assert back.fetched_tokens == pages * PAGE


@pytest.mark.parametrize("filled", [True, False])
def test_engine_blocks_that_are_taken_away_are_read_and_written_no_more(pair: Pair, filled: bool) -> None:
    """The engine preempts a prompt whose blocks were filled, or are: the daemon lets go of them first."""
    if not isinstance(pair, EngineBackPair):
        pytest.skip("its daemon has pages of its own")
    prompt = store(pair)
    name = begin(pair, "taken", prompt)
    load(pair, "taken", name, prompt)
    assert news(pair, "taken").found == {"taken": HISTORY}
    if filled:
        assert fill(pair, "taken", 0, HISTORY) == set()
    else:
        pair.give("prefill", Fill("taken", 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]))
    pair.give("prefill", preempted=("taken",))
    assert pair.at_rest("prefill"), "the engine gives the blocks away, and the daemon may write them"
    assert news(pair, "taken").failed == {"taken"}
    pair.give("prefill", Save("taken", TOKENS, THEIRS), Release("taken"))
    until(lambda: "taken" in pair.sides["prefill"].reports.take()[0])
    pair.sides["prefill"].reports.take_bad()
    pair.give("decode", Cancel("taken"))
    received(pair.sides["decode"], "taken")
    rest(pair)


def test_what_an_engine_wants_no_more_is_not_fetched(pair: Pair) -> None:
    """It holds more itself by the time that it is offered: it has no blocks to be filled, and says what it computes."""
    if not isinstance(pair, EngineBackPair):
        pytest.skip("its daemon fetches first, and says what it has then")
    before = pair.stats("prefill").way_back
    prompt = store(pair)
    name = begin(pair, "declined", prompt)
    load(pair, "declined", name, prompt)
    assert news(pair, "declined").found == {"declined": HISTORY}
    compute(pair, "declined")
    assert received(pair.sides["decode"], "declined") == set()
    back = pair.stats("prefill").way_back
    assert back.transfers == before.transfers and back.fetched_tokens == before.fetched_tokens
    rest(pair)


def test_a_session_that_ends_during_the_fetch_leaves_the_engine_alone(pair: Pair) -> None:
    """Decode's courier dies."""
    prompt = store(pair)
    for pid in courier_pids(pair.daemons["decode"].popen.pid):
        os.kill(pid, signal.SIGSTOP)
    fetch(pair, "broken", prompt)
    for pid in courier_pids(pair.daemons["decode"].popen.pid):
        os.kill(pid, signal.SIGKILL)
    told = news(pair, "broken")
    assert told.failed == {"broken"} and not told.found
    if isinstance(pair, EngineBackPair):
        assert received(pair.sides["prefill"], "broken") == set(THEIRS[: HISTORY // BLOCK])
    pair.give("prefill", Release("broken"))
    sent(pair.sides["prefill"], "broken")
    pair.give("decode", Cancel("broken"))
    received(pair.sides["decode"], "broken")
    rest(pair)
    up(pair)
    for number in range(20):  # all is as before
        if exchange(pair, f"again {number}", new_name(), new_prompt(PAGE), range(PER_PAGE), range(PER_PAGE)) == set():
            return
        time.sleep(0.3)
    raise AssertionError("no prompt comes any more")
