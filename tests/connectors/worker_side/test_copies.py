"""Copies between an engine's blocks and a daemon's pages wait for what computes or uses the blocks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from kvferry.client.requests import RequestFailed
from kvferry.connectors import worker_side
from kvferry.connectors.blocks import BlockPlaces, Memory, PoolPages, Tail
from kvferry.connectors.orders import (
    Begin,
    Cancel,
    Load,
    Order,
    Orders,
    PromptPages,
    Release,
    Restore,
    Save,
    StorePages,
)
from kvferry.connectors.worker_side import WorkerSide
from kvferry.proto import common_pb2
from tests.connectors.engine_memory import EngineMemory
from tests.connectors.worker_side.engine_pair import (
    PAGE,
    SECONDS,
    Pair,
    exchange,
    heard,
    new_name,
    new_prompt,
    push,
    received,
    same,
    sent,
    until,
)


class Numbered:
    """A mover whose moments are numbers: what was told to wait for which."""

    records = False

    def __init__(self, engine: EngineMemory) -> None:
        self.seen: list[tuple[str, int]] = []
        self._inner = engine.mover
        self._moments = 0

    def moment(self) -> Any:
        self._moments += 1
        return self._moments

    def misfit(self, memories: Sequence[Memory]) -> str:
        return self._inner.misfit(memories)

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Any, tail: Tail | None = None) -> None:
        self.seen.append(("to pages", after))
        self._inner.to_pages(pool, places, self._inner.moment(), tail)

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Any) -> None:
        self.seen.append(("to blocks", after))
        self._inner.to_blocks(pool, places, self._inner.moment())


def test_copies_of_a_decode_engine_wait_for_what_computes_or_uses_the_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, mover = pair.sides["decode"], Numbered(pair.engines["decode"])
    monkeypatch.setattr(side._tools, "mover", mover)
    prompt, name = new_prompt(2 * PAGE), new_name()
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    pair.give("decode", Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43)))  # between 1 and 2
    assert received(side, "a") == set()
    sent(pair.sides["prefill"], "a")
    assert mover.seen == [("to pages", 2), ("to blocks", 1)], (
        "held blocks may be computed in this step, others were used"
    )
    pair.give("decode", Restore("b", new_name(), PromptPages(prompt.digests[:32], PAGE + 1, bytes(32)), 0, (50, 51)))
    assert received(side, "b") == set()
    assert mover.seen[2:] == [("to blocks", 3)]
    pair.give("decode")  # no orders, no moments
    pair.give("decode", StorePages("c", new_name(), new_prompt(PAGE), (4, 5)))
    sent(side, "c")
    assert mover.seen[3:] == [("to pages", 4)]
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_copies_of_a_prefill_engine_wait_for_what_computes_or_uses_the_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, mover = pair.sides["prefill"], Numbered(pair.engines["prefill"])
    prompt = new_prompt(2 * PAGE)
    exchange(pair, "a", new_name(), prompt, range(4), range(20, 24))
    monkeypatch.setattr(side._tools, "mover", mover)
    longer, name = new_prompt(4 * PAGE, prompt), new_name()
    blocks = tuple(range(40, 48))
    pair.give("prefill", Begin("b", name, longer, 0, 2 * PAGE, blocks[:4]))  # behind 1
    assert received(side, "b") == set()
    pair.give("prefill", Save("b", 3 * PAGE, blocks))  # before 2
    until(lambda: len(mover.seen) == 2)
    pair.give("prefill", Save("b", 4 * PAGE, blocks))  # before 3
    until(lambda: len(mover.seen) == 3)
    assert mover.seen == [("to blocks", 1), ("to pages", 2), ("to pages", 3)]
    pair.give("prefill", Release("b"))
    pair.give("decode", Load("b", name, longer, "p", 0, (), tuple(range(30, 38))))
    assert received(pair.sides["decode"], "b") == set()
    sent(side, "b")
    assert same(pair, range(40, 48), range(30, 38))


def test_blocks_that_are_held_are_read_when_the_step_that_computes_them_is_over(pair: Pair) -> None:
    """vLLM lets a request hold blocks that another computes in the same step."""
    prompt, name = new_prompt(2 * PAGE), new_name()
    engine, side = pair.engines["decode"], pair.sides["decode"]
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    side.take(Orders([Load("a", name, prompt, "p", PAGE, (40, 41), (42, 43))]))
    until(lambda: pair.stats("decode").requests.running)
    time.sleep(0.2)
    for layer in engine.layers:
        layer[40:42] += 1
    wanted = [engine.block(40), engine.block(41)]
    side.forward_done()
    assert received(side, "a") == set()
    sent(pair.sides["prefill"], "a")
    pair.give("decode", Restore("b", new_name(), PromptPages(prompt.digests[:32], PAGE + 1, bytes(32)), 0, (50, 51)))
    assert received(side, "b") == set()
    assert [engine.block(50), engine.block(51)] == wanted


def test_blocks_of_a_preempted_prompt_are_waited_for_before_its_push_is_taken_in(pair: Pair) -> None:
    side, engine = pair.sides["prefill"], pair.engines["prefill"]
    prompt, name = new_prompt(2 * PAGE), new_name()
    gate = threading.Event()
    side._loop.call_soon_threadsafe(gate.wait, SECONDS)  # the loop takes nothing in meanwhile
    pair.give("prefill", Begin("a", name, prompt), Save("a", PAGE, (0, 1)))
    opening = threading.Timer(0.2, gate.set)
    opening.start()
    try:
        pair.give("prefill", preempted=("a",))
    finally:
        gate.set()
        opening.join()
    assert side._pushes["a"].save is None, "nothing more is to be read from them"
    for layer in engine.layers:  # they are another request's now
        layer[0:2] += 1
    pair.give("prefill", Save("a", 2 * PAGE, (10, 11, 12, 13)), Release("a"))
    pair.give("decode", Load("a", name, prompt, "p", 0, (), (20, 21, 22, 23)))
    assert received(pair.sides["decode"], "a") == set()
    sent(side, "a")
    assert same(pair, range(10, 14), range(20, 24))
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_decode_engine_waits_for_no_push_of_what_is_preempted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the engine's thread waits")

    side = pair.sides["decode"]
    monkeypatch.setattr(worker_side, "wait_for", never)
    side.take(Orders([], ("a",)))
    monkeypatch.undo()


def test_blocks_are_reported_when_their_copy_is_over_however_often_it_is_cancelled(pair: Pair) -> None:
    side, prompt, name = pair.sides["decode"], new_prompt(2 * PAGE), new_name()
    push(pair, "a", name, prompt, (0, 1, 2, 3))
    gate = threading.Event()
    side._copier.submit(partial(gate.wait, SECONDS))  # the copies wait behind it
    try:
        load = Load("a", name, prompt, "p", 0, (), (20, 21, 22, 23))
        pair.give("decode", load, StorePages("b", new_name(), new_prompt(PAGE), (30, 31)))
        until(lambda: side._copier._calls.qsize() == 2)
        for _ in range(3):
            pair.give("decode", Cancel("a"), Cancel("b"))
            heard(side)
        time.sleep(0.1)
        assert side.reports.take() == (set(), set())
    finally:
        gate.set()
    told: set[str] = set()
    until(lambda: [told.update(names) for names in side.reports.take()] and told == {"a", "b"})
    assert side.reports.take_bad() == {20, 21, 22, 23}
    assert same(pair, range(4), range(20, 24)), "it had been copied all the same"
    sent(pair.sides["prefill"], "a")
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


@contextlib.contextmanager
def a_copy_waits(side: WorkerSide) -> Iterator[Callable[[], None]]:
    """The copies wait until this ends; what it gives waits until there is one."""
    begun, gate = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(SECONDS)

    side._copier.submit(hold)
    assert begun.wait(SECONDS)
    try:
        yield lambda: until(lambda: side._copier._calls.qsize() == 1)
    finally:
        gate.set()


def test_blocks_whose_pages_were_taken_away_while_they_were_copied_are_bad(pair: Pair) -> None:
    side, client = pair.sides["decode"], pair.sides["decode"]._sessions.client
    assert client is not None
    prompt = new_prompt(2 * PAGE)
    assert exchange(pair, "a", new_name(), prompt, range(4), range(20, 24)) == set()
    until(lambda: pair.at_rest("decode"))
    again, other = new_prompt(2 * PAGE), new_name()
    push(pair, "b", other, again, (0, 1, 2, 3))
    name = new_name()
    orders: list[tuple[Any, Order]] = [
        (name, Restore("r", name, PromptPages(prompt.digests[:32], PAGE + 1, bytes(32)), 0, (50, 51))),
        (other, Load("b", other, again, "p", 0, (), (30, 31, 32, 33))),
    ]
    for failing, order in orders:
        assert isinstance(order, Load | Restore)
        with a_copy_waits(side) as there_is_one:
            pair.give("decode", order)
            there_is_one()
            client._requests[failing].failure = RequestFailed(common_pb2.ERROR_ABORTED, "its pages are another's")
        assert received(side, order.request) == set(order.blocks)
    sent(pair.sides["prefill"], "b")
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))


def test_a_chunk_is_told_of_and_its_blocks_are_given_back_behind_its_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, mover = pair.sides["prefill"], Numbered(pair.engines["prefill"])
    client = side._sessions.client
    assert client is not None
    done: list[object] = []
    told, to_pages = client.progress, mover.to_pages
    monkeypatch.setattr(side._tools, "mover", mover)
    monkeypatch.setattr(mover, "to_pages", lambda *words: (to_pages(*words), done.append("copied")))
    monkeypatch.setattr(client, "progress", lambda name, tokens: (done.append(tokens), told(name, tokens)))
    prompt, name = new_prompt(2 * PAGE), new_name()
    with a_copy_waits(side) as there_is_one:
        pair.give("prefill", Begin("a", name, prompt), Save("a", 2 * PAGE, (0, 1, 2, 3)))
        pair.give("prefill", Release("a"))
        there_is_one()
        heard(side)
        assert (side.reports.take(), done) == ((set(), set()), [])
    pair.give("decode", Load("a", name, prompt, "p", 0, (), (20, 21, 22, 23)))
    assert received(pair.sides["decode"], "a") == set()
    sent(side, "a")
    assert done == ["copied", 2 * PAGE]
    until(lambda: pair.at_rest("decode") and pair.at_rest("prefill"))
