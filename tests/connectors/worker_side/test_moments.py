"""An engine with blocks of its own, on a GPU that takes its time: the daemon hears of blocks once what was begun before
is computed, orders keep their order meanwhile, and nothing is begun behind the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connectors.movers import HostMover, Moment
from kvferry.connectors.orders import Begin, Cancel, Drop, FirstToken, Forget, Load, Orders, Release, Save, StorePages
from tests.connectors.worker_side.block_pair import BlockPair, SharedEngine
from tests.connectors.worker_side.engine_pair import PAGE, PER_PAGE, heard, new_name, new_prompt, received, sent, until
from tests.connectors.worker_side.next_turn import up
from tests.support.devices import DeviceStack

THEIRS, OURS = tuple(range(30, 30 + PER_PAGE)), tuple(range(10, 10 + PER_PAGE))


class SlowMover(HostMover):
    """Moments that come when they are let."""

    records = True

    def __init__(self, inner: HostMover) -> None:
        super().__init__(inner._blocks)
        self.there = threading.Event()
        self.there.set()
        self.broken = False
        self.waits = 0

    def moment(self) -> Moment:
        moment: Any = object()
        return moment

    def computed(self, after: Moment) -> None:
        self.waits += 1
        assert self.there.wait(20.0)
        if self.broken:
            raise RuntimeError("the device is lost")

    def is_computed(self, after: Moment) -> bool:
        if self.broken:
            raise RuntimeError("the device is lost")
        return self.there.is_set()


class SlowPair(BlockPair):
    def engine(self, role: str, seed: int) -> SharedEngine:
        engine = super().engine(role, seed)
        assert isinstance(engine.mover, HostMover)
        engine.mover = SlowMover(engine.mover)
        return engine

    def mover(self, role: str) -> SlowMover:
        mover = self.engines[role].mover
        assert isinstance(mover, SlowMover)
        return mover


@pytest.fixture(scope="module")
def pair() -> Iterator[SlowPair]:
    with DeviceStack() as stack:
        made = SlowPair(stack)
        try:
            for role in made.sides:
                made.give(role, Forget())  # the first step: from there on a session is looked after
            up(made)
            yield made
        finally:
            for role, side in made.sides.items():
                made.mover(role).there.set()
                side.close()
                made.of(role).file.unlink()


def requests(pair: SlowPair, role: str) -> int:
    told = pair.stats(role).requests
    return told.running + told.waiting


def test_a_prompt_goes_when_it_is_computed_and_wakes_nobody_before(pair: SlowPair) -> None:
    prompt, name = new_prompt(PAGE), new_name()
    waits = pair.mover("prefill").waits
    pair.mover("prefill").there.clear()
    pair.give("prefill", Begin("a", name, prompt), Save("a", PAGE, THEIRS))
    pair.sides["prefill"].take(Orders([FirstToken("a", 5)]))
    pair.give("prefill", Release("a", 5))
    pair.give("decode", Load("a", name, prompt, "p", 0, (), OURS))
    until(lambda: requests(pair, "prefill") and requests(pair, "decode"))
    time.sleep(0.2)
    assert pair.sides["decode"].reports.take() == (set(), set())
    assert pair.mover("prefill").waits == waits + 1, "one for the chunk, none for the beginning"
    pair.mover("prefill").there.set()
    assert received(pair.sides["decode"], "a") == set()
    sent(pair.sides["prefill"], "a")
    assert pair.mover("prefill").waits == waits + 1, "what is computed is not waited for again"
    assert all(pair.of("prefill").block(a) == pair.of("decode").block(b) for a, b in zip(THEIRS, OURS, strict=True))


def test_the_daemon_hears_of_a_load_behind_what_may_use_its_blocks_and_of_its_end_behind_that(pair: SlowPair) -> None:
    pair.mover("decode").there.clear()
    pair.give("decode", Load("b", new_name(), new_prompt(PAGE), "p", 0, (), OURS))
    pair.give("decode", Cancel("b"))
    time.sleep(0.2)
    assert requests(pair, "decode") == 0
    pair.mover("decode").there.set()
    soon = pair.settings("decode").deadline_seconds / 2  # else the load has not heard of its end
    assert received(pair.sides["decode"], "b", soon) == set(OURS)
    until(lambda: pair.at_rest("decode"))


def test_what_one_has_computed_is_not_another_ones_of_the_same_id(pair: SlowPair) -> None:
    """A client's second request may have the id of its first, which it gave up."""
    mover, side = pair.mover("prefill"), pair.sides["prefill"]
    mover.there.clear()
    pair.give("prefill", Begin("h", new_name(), new_prompt(PAGE)), Save("h", PAGE, OURS))
    pair.give("prefill", Drop("h"))
    sent(side, "h")
    prompt, name = new_prompt(PAGE), new_name()
    pair.give("prefill", Begin("h", name, prompt))
    until(lambda: requests(pair, "prefill"))
    mover.there.set()
    side._flush()
    heard(side)
    pair.give("prefill", Save("h", PAGE, THEIRS), Release("h", 5))
    pair.give("decode", Load("h", name, prompt, "p", 0, (), OURS))
    assert received(pair.sides["decode"], "h") == set()
    sent(side, "h")
    assert all(pair.of("prefill").block(a) == pair.of("decode").block(b) for a, b in zip(THEIRS, OURS, strict=True))


def test_what_is_given_up_is_not_begun_afterwards(pair: SlowPair) -> None:
    """An engine that is to sleep takes its blocks away then."""
    mover = pair.mover("decode")
    mover.there.clear()
    pair.give("decode", Load("c", new_name(), new_prompt(PAGE), "p", 0, (), OURS))
    pair.give("decode", StorePages("d", new_name(), new_prompt(PAGE), THEIRS))
    threading.Timer(0.3, mover.there.set).start()
    pair.sides["decode"].give_up()
    assert mover.there.is_set() and not pair.sides["decode"]._works
    assert pair.sides["decode"].reports.take() == ({"d"}, {"c"})
    assert pair.sides["decode"].reports.take_bad() == set(OURS)


def test_an_engine_that_cannot_give_up_what_it_ordered_is_told(pair: SlowPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would sleep, its blocks taken away, and the order begin behind that."""
    mover = pair.mover("decode")
    monkeypatch.setattr("kvferry.connectors.worker_side.PREEMPT_SECONDS", 0.3)
    mover.there.clear()
    pair.give("decode", Load("g", new_name(), new_prompt(PAGE), "p", 0, (), OURS))
    with pytest.raises(TimeoutError, match=r"not computed within 0\.3 s"):
        pair.sides["decode"].give_up()
    pair.give("decode", Cancel("g"))
    mover.there.set()
    assert received(pair.sides["decode"], "g") == set(OURS)


def test_a_device_that_is_lost_fails_requests_and_no_thread(pair: SlowPair) -> None:
    mover = pair.mover("decode")
    mover.broken = True
    pair.give("decode", Load("e", new_name(), new_prompt(PAGE), "p", 0, (), OURS))
    soon = pair.settings("decode").deadline_seconds / 2  # its daemon does not hear of it
    assert received(pair.sides["decode"], "e", soon) == set(OURS)
    mover.broken = False
    pair.give("decode", StorePages("f", new_name(), new_prompt(PAGE), THEIRS))
    sent(pair.sides["decode"], "f")


def test_what_a_lost_device_was_to_compute_is_not_sent(pair: SlowPair) -> None:
    mover, side = pair.mover("prefill"), pair.sides["prefill"]
    failed, prompt, name = side.moved.failed, new_prompt(PAGE), new_name()
    pair.give("decode", Load("i", name, prompt, "p", 0, (), OURS))
    mover.broken = True
    pair.give("prefill", Begin("i", name, prompt), Save("i", PAGE, THEIRS))
    until(lambda: side.moved.failed == failed + 1, pair.settings("prefill").deadline_seconds / 2)
    mover.broken = False
    pair.give("prefill", Release("i", 5))
    sent(side, "i")
    assert received(pair.sides["decode"], "i") == set(OURS)


def test_the_end_of_one_is_not_taken_for_another_ones_of_the_same_id(pair: SlowPair) -> None:
    """What waits was given up, and the other thread has not heard of it when the next one of its id is over: that is
    reported all the same, else the engine had its blocks never again."""
    side, prompt, name = pair.sides["prefill"], new_prompt(PAGE), new_name()
    pair.give("prefill", Begin("j", new_name(), new_prompt(PAGE), waits=True))
    until(lambda: requests(pair, "prefill"))
    side._loop.call_soon_threadsafe(time.sleep, 0.3)
    pair.give("prefill", Cancel("j"), Begin("j", name, prompt), Save("j", PAGE, THEIRS))
    pair.give("prefill", Release("j", 5))
    pair.give("decode", Load("j", name, prompt, "p", 0, (), OURS))
    assert received(pair.sides["decode"], "j") == set()
    sent(side, "j")
