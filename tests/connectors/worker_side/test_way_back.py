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

from kvferry.client.requests import RequestName
from kvferry.connectors.orders import Begin, Cancel, Fill, Load, News, PromptPages, Release, Save, StorePages
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
from tests.support.devices import DeviceStack, WrappedStack
from tests.support.engines import courier_pids

HISTORY = 6 * PAGE
TOKENS = HISTORY + PAGE + 3
STORED = range(40, 40 + HISTORY // BLOCK)  # decode's blocks with the history
THEIRS = tuple(range(20, 20 + -(-TOKENS // BLOCK)))  # prefill's
OURS = tuple(range(-(-TOKENS // BLOCK)))  # decode's, of the next turn


class BackPair(Pair):
    """With a way back that is always taken."""

    def pool_words(self) -> list[str]:
        return [*super().pool_words(), "--way-back", "always", "--checksums", "on"]


class SmallSlots(BackPair):
    def pool_words(self) -> list[str]:
        return [*super().pool_words(), "--slot-bytes", "4096"]


@pytest.fixture(scope="module")
def pair() -> Iterator[BackPair]:
    with DeviceStack() as stack:
        made = BackPair(stack)
        try:
            up(made)
            yield made
        finally:
            for side in made.sides.values():
                side.close()


def up(pair: Pair) -> None:
    """Waits for the daemons' session."""
    until(lambda: [peer.state for peer in pair.stats("decode").peers] == ["up"])


def store(pair: Pair) -> PromptPages:
    """A conversation's history, which decode's daemon holds and prefill's has never seen: its next turn's prompt."""
    history = new_prompt(HISTORY)
    pair.give("decode", StorePages("history", new_name(), history, tuple(STORED)))
    sent(pair.sides["decode"], "history")
    return new_prompt(TOKENS, shared=history)


def begin(pair: Pair, request: str, prompt: PromptPages, held: int = 0) -> RequestName:
    name = new_name()
    pair.give("prefill", Begin(request, name, prompt, waits=True, held=held))
    return name


def load(pair: Pair, request: str, name: RequestName, prompt: PromptPages) -> None:
    """Decode's engine holds nothing itself."""
    pair.give("decode", Load(request, name, prompt, "p", 0, (), OURS))


def news(pair: Pair, request: str) -> News:
    """Waits for what prefill's scheduler is told of the request."""
    told = News()

    def there() -> bool:
        nonlocal told
        told = pair.sides["prefill"].reports.take_news() or News()
        return request in told.found or request in told.failed

    until(there)
    return News(told.failed & {request}, found={each: n for each, n in told.found.items() if each == request})


def fill(pair: Pair, request: str, start: int, end: int) -> set[int]:
    pair.give("prefill", Fill(request, start, end, THEIRS[start // BLOCK : end // BLOCK]))
    return received(pair.sides["prefill"], request)


def compute(pair: Pair, request: str) -> None:
    """The rest of it, whatever that is."""
    pair.give("prefill", Save(request, TOKENS, THEIRS))
    pair.give("prefill", Release(request, 7))
    sent(pair.sides["prefill"], request)


def history_is_in(pair: Pair, upto: int = HISTORY // BLOCK, start: int = 0) -> bool:
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    return all(prefill.block(THEIRS[i]) == decode.block(STORED[i]) for i in range(start, upto))


def arrived(pair: Pair) -> bool:
    """The next turn's prompt is in decode's blocks, byte for byte as it is in prefill's."""
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    last = prefill.beginning(THEIRS[-1], (TOKENS - 1) % BLOCK + 1) == decode.block(OURS[-1])
    return last and all(prefill.block(a) == decode.block(b) for a, b in zip(THEIRS[:-1], OURS[:-1], strict=True))


def rest(pair: Pair) -> None:
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
    for role in pair.daemons:
        assert pair.stats(role).way_back.transfers.active == 0


@pytest.mark.parametrize("held", [0, PAGE + BLOCK])
def test_a_cold_prefill_server_has_the_history_back_and_computes_the_rest(pair: BackPair, held: int) -> None:
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
    assert back.fetched_tokens - before.fetched_tokens == HISTORY
    rest(pair)


def test_the_next_turn_finds_what_was_fetched_without_a_wait(pair: BackPair) -> None:
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


def test_where_decode_holds_nothing_the_engine_computes_at_once(pair: BackPair) -> None:
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


def test_where_nobody_asks_the_engine_waits_no_longer_than_the_daemon_says(pair: BackPair) -> None:
    prompt = new_prompt(TOKENS)
    name = begin(pair, "unasked", prompt)
    assert news(pair, "unasked").found == {"unasked": 0}
    pair.give("prefill", Save("unasked", TOKENS, THEIRS))
    load(pair, "unasked", name, prompt)
    pair.give("prefill", Release("unasked", 7))
    assert received(pair.sides["decode"], "unasked") == set() and arrived(pair)
    sent(pair.sides["prefill"], "unasked")
    rest(pair)


def test_pages_of_the_daemons_are_not_waited_for_longer_than_that(pair: BackPair) -> None:
    """Another prompt has them: the engine computes, and what it has computed is sent when they are there."""
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
    assert received(pair.sides["decode"], "short") == set() and arrived(pair)
    until(lambda: pair.at_rest("prefill"))
    pair.sides["prefill"].reports.take()
    assert {each.reason: each.count for each in pair.stats("prefill").way_back.choices}["no_pages"] == 1
    rest(pair)


def test_a_begin_that_does_not_wait_has_nothing_fetched(pair: BackPair) -> None:
    prompt, name = store(pair), new_name()
    before = pair.stats("prefill").way_back.transfers.completed
    load(pair, "not waiting", name, prompt)
    pair.give("prefill", Begin("not waiting", name, prompt), Save("not waiting", TOKENS, THEIRS))
    pair.give("prefill", Release("not waiting", 7))
    assert received(pair.sides["decode"], "not waiting") == set()
    sent(pair.sides["prefill"], "not waiting")
    assert pair.stats("prefill").way_back.transfers.completed == before
    rest(pair)


def test_a_client_that_leaves_while_the_engine_waits_leaves_nothing(pair: BackPair) -> None:
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


def test_a_client_that_leaves_during_the_fetch_leaves_nothing_on_either_side(pair: BackPair) -> None:
    prompt = store(pair)
    couriers = courier_pids(pair.daemons["decode"].popen.pid)
    for pid in couriers:  # its parts stay where they are
        os.kill(pid, signal.SIGSTOP)
    try:
        name = begin(pair, "leaves", prompt)
        load(pair, "leaves", name, prompt)
        until(lambda: pair.stats("prefill").way_back.transfers.active == 1)
        pair.give("prefill", Cancel("leaves"))
        pair.give("decode", Cancel("leaves"))
    finally:
        for pid in couriers:
            os.kill(pid, signal.SIGCONT)
    assert received(pair.sides["decode"], "leaves") == set(OURS)
    rest(pair)
    assert pair.sides["prefill"].reports.take() == (set(), set()), "the engine had no block of it"
    told = pair.sides["prefill"].reports.take_news()
    assert told is None or not told.found


def test_a_client_that_leaves_while_the_blocks_are_filled_is_reported_once(pair: BackPair) -> None:
    prompt = store(pair)
    name = begin(pair, "filled", prompt)
    load(pair, "filled", name, prompt)
    assert news(pair, "filled").found == {"filled": HISTORY}
    pair.give("prefill", Fill("filled", 0, HISTORY, THEIRS[: HISTORY // BLOCK]), Cancel("filled"))
    received(pair.sides["prefill"], "filled")
    pair.give("decode", Cancel("filled"))
    assert received(pair.sides["decode"], "filled") == set(OURS)
    rest(pair)
    assert pair.sides["prefill"].reports.take() == (set(), set())


def test_blocks_that_are_taken_away_behind_a_fill_are_computed_anew(pair: BackPair) -> None:
    """The engine preempts it between the fill and its last chunk: what it computes then lies elsewhere."""
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


def test_a_fill_behind_a_failure_is_all_bad(pair: BackPair) -> None:
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


def test_what_came_before_a_wrong_part_counts() -> None:
    """A bit flips in the second part of the fetch: what came before it is loaded, the rest is computed."""
    with_flips = str(Path(__file__).parents[2] / "support" / "with_flips.py")
    with WrappedStack("prefill-daemon", [sys.executable, with_flips], {"FLIP_FROM": "1"}) as stack:
        pair = SmallSlots(stack)
        try:
            up(pair)
            prompt = store(pair)
            before = [pair.engines["prefill"].block(block) for block in THEIRS]
            name = begin(pair, "half", prompt)
            load(pair, "half", name, prompt)
            found = news(pair, "half").found["half"]
            assert found == 4 * PAGE, "a part has four pages"
            assert fill(pair, "half", 0, found) == set()
            assert history_is_in(pair, found // BLOCK)
            assert [pair.engines["prefill"].block(block) for block in THEIRS[found // BLOCK :]] == before[
                found // BLOCK :
            ]
            compute(pair, "half")
            assert received(pair.sides["decode"], "half") == set()
            rest(pair)
            back = pair.stats("prefill").way_back
            assert {each.reason: each.count for each in back.transfers.aborts} == {"wrong_parts": 1}
            assert back.fetched_tokens == found
        finally:
            for side in pair.sides.values():
                side.close()


def test_a_session_that_ends_during_the_fetch_leaves_the_engine_alone(pair: BackPair) -> None:
    """Decode's courier dies."""
    prompt = store(pair)
    for pid in courier_pids(pair.daemons["decode"].popen.pid):
        os.kill(pid, signal.SIGSTOP)
    name = begin(pair, "broken", prompt)
    load(pair, "broken", name, prompt)
    until(lambda: pair.stats("prefill").way_back.transfers.active == 1)
    for pid in courier_pids(pair.daemons["decode"].popen.pid):
        os.kill(pid, signal.SIGKILL)
    told = news(pair, "broken")
    assert told.failed == {"broken"} and not told.found
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
