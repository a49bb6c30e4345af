"""The way back of what a decode engine with blocks of its own holds itself, over real daemons: it comes out of its
blocks, not before what computes them has run, and the blocks are its own again when nobody reads them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.client.requests import RequestName
from kvferry.connectors.orders import Cancel, Fill, Load, News, Orders, PromptPages
from tests.connectors.engine_memory import BLOCK
from tests.connectors.worker_side.block_pair import CANARY, SharedEngine
from tests.connectors.worker_side.engine_pair import PAGE, Pair, new_prompt, received, until
from tests.connectors.worker_side.next_turn import (
    HISTORY,
    OURS,
    STORED,
    THEIRS,
    TOKENS,
    BothEnginesPair,
    arrived,
    begin,
    compute,
    fill,
    made,
    news,
    rest,
    store,
)
from tests.support.devices import DeviceStack
from tests.support.engines import courier_pids

IN_HISTORY = range(HISTORY // BLOCK)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with DeviceStack() as stack, made(BothEnginesPair, stack) as pair:
        yield pair


def memory(pair: Pair, role: str) -> np.ndarray:  # type: ignore[type-arg]
    engine = pair.engines[role]
    assert isinstance(engine, SharedEngine)
    return engine.memory


def holding(request: str, name: RequestName, prompt: PromptPages, start: int = HISTORY, named: bool = True) -> Load:
    """Decode's engine holds what is before `start` itself, in whole pages that may go back."""
    held = start // PAGE * PAGE if named else 0
    return Load(request, name, prompt, "p", start, OURS[: held // BLOCK], OURS[start // BLOCK :])


def computed(pair: Pair, seed: int) -> None:
    """The engine has these bytes in the blocks of the history."""
    blocks = memory(pair, "decode")
    shape = blocks[:, list(OURS)].shape
    blocks[:, list(OURS)] = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def came_back(pair: Pair, start: int = 0, end: int = HISTORY) -> bool:
    prefill, decode = pair.engines["prefill"], pair.engines["decode"]
    return all(prefill.block(THEIRS[i]) == decode.block(OURS[i]) for i in range(start // BLOCK, end // BLOCK))


def fetched(pair: Pair) -> int:
    return pair.stats("prefill").way_back.fetched_tokens


@pytest.mark.parametrize("start", [HISTORY, HISTORY - BLOCK])
def test_a_cold_prefill_server_has_back_what_decodes_engine_holds(pair: Pair, start: int) -> None:
    """In whole pages: behind the last of them the block is prefill's to send."""
    computed(pair, 1)
    held, before = start // PAGE * PAGE, fetched(pair)
    prompt = new_prompt(TOKENS)
    name = begin(pair, "cold", prompt)
    pair.give("decode", holding("cold", name, prompt, start))
    assert news(pair, "cold") == News(found={"cold": held})
    assert fill(pair, "cold", 0, held) == set()
    assert came_back(pair, 0, held) and fetched(pair) - before == held
    for i in range(held // BLOCK, start // BLOCK):  # what decode has of a page that it does not hold as a whole
        pair.engines["prefill"].take_from(pair.engines["decode"], OURS[i], THEIRS[i])
    compute(pair, "cold")
    assert received(pair.sides["decode"], "cold") == set() and arrived(pair)
    rest(pair)


def test_what_the_host_tier_restores_behind_it_goes_back_too(pair: Pair) -> None:
    prompt = store(pair)
    held, before = 2 * PAGE, fetched(pair)
    decode, prefill = pair.engines["decode"], pair.engines["prefill"]
    for i in range(held // BLOCK):
        decode.take_from(decode, STORED[i], OURS[i])
    name = begin(pair, "both", prompt)
    pair.give("decode", holding("both", name, prompt, held))
    assert news(pair, "both") == News(found={"both": HISTORY})
    assert fill(pair, "both", 0, HISTORY) == set()
    assert all(prefill.block(THEIRS[i]) == decode.block(STORED[i]) for i in IN_HISTORY)
    assert fetched(pair) - before == HISTORY
    compute(pair, "both")
    assert received(pair.sides["decode"], "both") == set() and arrived(pair)
    rest(pair)


def test_nothing_is_read_before_the_step_that_computes_it_has_run(pair: Pair) -> None:
    """The engine counts blocks as held when it begins the step that writes them."""
    prompt, prefill = new_prompt(TOKENS), memory(pair, "prefill")
    prefill[:, list(THEIRS)] = CANARY
    parts = pair.stats("decode").way_back.transfers.parts
    name = begin(pair, "early", prompt)
    pair.sides["decode"].take(Orders([holding("early", name, prompt)]))
    assert news(pair, "early") == News(found={"early": HISTORY}), "it is promised"
    pair.give("prefill", Fill("early", 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]))
    until(lambda: pair.stats("decode").way_back.transfers.active == 1)
    time.sleep(0.2)
    assert (prefill[:, list(THEIRS)] == CANARY).all() and pair.stats("decode").way_back.transfers.parts == parts
    computed(pair, 2)
    pair.sides["decode"].forward_done()
    assert received(pair.sides["prefill"], "early") == set() and came_back(pair)
    compute(pair, "early")
    assert received(pair.sides["decode"], "early") == set() and arrived(pair)
    rest(pair)


def test_blocks_that_are_there_before_the_offer_are_named_behind_it(pair: Pair) -> None:
    """As where another rank was told of it before, and the engine has heard of that."""
    computed(pair, 6)
    prompt = new_prompt(TOKENS)
    name = begin(pair, "ahead", prompt)
    pair.give("prefill", Fill("ahead", 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]))
    time.sleep(0.2)
    pair.give("decode", holding("ahead", name, prompt))
    assert received(pair.sides["prefill"], "ahead") == set() and came_back(pair)
    compute(pair, "ahead")
    assert received(pair.sides["decode"], "ahead") == set() and arrived(pair)
    rest(pair)


def test_what_no_blocks_are_named_of_does_not_go_back(pair: Pair) -> None:
    """Where the step may turn out to have failed, or an older connector asks."""
    computed(pair, 3)
    prompt = new_prompt(TOKENS)
    name = begin(pair, "unnamed", prompt)
    pair.give("decode", holding("unnamed", name, prompt, named=False))
    assert news(pair, "unnamed").found == {"unnamed": 0}
    for i in IN_HISTORY:
        pair.engines["prefill"].take_from(pair.engines["decode"], OURS[i], THEIRS[i])
    compute(pair, "unnamed")
    assert received(pair.sides["decode"], "unnamed") == set() and arrived(pair)
    rest(pair)


def test_a_client_that_leaves_has_its_blocks_read_no_more(pair: Pair) -> None:
    """They are reported once nothing is on its way out of them."""
    computed(pair, 4)
    prompt = new_prompt(TOKENS)
    couriers = courier_pids(pair.daemons["decode"].popen.pid)
    for pid in couriers:  # its parts stay where they are
        os.kill(pid, signal.SIGSTOP)
    try:
        name = begin(pair, "leaves", prompt)
        pair.give("decode", holding("leaves", name, prompt))
        assert news(pair, "leaves").found == {"leaves": HISTORY}
        pair.give("prefill", Fill("leaves", 0, HISTORY, (), THEIRS[: HISTORY // BLOCK]))
        until(lambda: pair.stats("prefill").way_back.transfers.active == 1)
        pair.give("decode", Cancel("leaves"))
    finally:
        for pid in couriers:
            os.kill(pid, signal.SIGCONT)
    assert received(pair.sides["decode"], "leaves") == set(OURS[HISTORY // BLOCK :])
    assert pair.at_rest("decode"), "it was reported while the daemon had the blocks"
    pair.give("prefill", Cancel("leaves"))
    received(pair.sides["prefill"], "leaves")
    rest(pair)


def test_a_step_that_never_ends_keeps_nobody(pair: Pair) -> None:
    """Prefill's daemon waits until its deadline, as for a fetch that stalls; then its engine computes."""
    computed(pair, 5)
    prompt = new_prompt(TOKENS)
    name = begin(pair, "stalls", prompt)
    pair.sides["decode"].take(Orders([holding("stalls", name, prompt)]))
    assert news(pair, "stalls").found == {"stalls": HISTORY}
    assert fill(pair, "stalls", 0, HISTORY) == set(THEIRS[: HISTORY // BLOCK]), "none of it has come"
    for i in IN_HISTORY:
        pair.engines["prefill"].take_from(pair.engines["decode"], OURS[i], THEIRS[i])
    compute(pair, "stalls")
    assert received(pair.sides["decode"], "stalls") == set() and arrived(pair)
    pair.sides["decode"].forward_done()
    rest(pair)
