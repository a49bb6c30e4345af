"""Computed prompts that decode has not asked for wait in SGLang's pages up to a share of them, then in the prefill
daemon's host tier, and only then does prefill wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.connectors.sglang.engine_on_cpu import HEADS
from tests.connectors.sglang.rig import PAGE, Pair, kv_of, new_prompt, stats_of, until
from tests.support.devices import DeviceStack

PAGES = 64  # of prefill's pool
SHARE = 16
TOKENS = 7 * PAGE + 5  # of a prompt: the last of its 8 pages is a partial one
PAGE_BYTES = 2048


def made(stack: DeviceStack, patches: ExitStack, host_pages: int) -> Pair:
    words = ("--host-bytes", str(host_pages * PAGE_BYTES))
    share = (SHARE - 0.5) / (PAGES + 1)
    pair = Pair(stack, patches, prefill_tokens=PAGES * PAGE, prefill_words=words, waiting_share=share)
    until(lambda: pair.prefill.manager.carrier.stows and stats_of(pair, "prefill").host.pages == host_pages)
    return pair


@pytest.fixture(scope="module")
def pair(one_rank: None) -> Iterator[Pair]:
    with DeviceStack() as stack, ExitStack() as patches:
        pair = made(stack, patches, 256)
        try:
            yield pair
        finally:
            pair.close()


class Waiting:
    """Prompts that prefill has computed, or is to, and decode knows nothing of."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.places = pair.prefill.req_pool.available_size()
        self.over: list[Any] = []  # prefill's requests
        self.prompts: list[list[int]] = []
        self.both: list[tuple[Any, Any]] = []

    def turn(self) -> None:
        self.over += self.pair.prefill.inflight()

    def may_begin(self, theirs: Any) -> bool:
        self.turn()
        return theirs in self.pair.prefill.queue.pop_bootstrapped()

    def add(self, prompt: list[int]) -> Any:
        both = self.pair.requests(prompt)
        self.prompts.append(prompt)
        self.both.append(both)
        self.pair.prefill.queue.add(both[0], HEADS)
        return both[0]

    def compute(self, count: int = 1, chunk: int = 0) -> None:
        """Computes `count` more, each as soon as it may begin."""
        for _ in range(count):
            theirs = self.add(new_prompt(TOKENS))
            until(lambda theirs=theirs: self.may_begin(theirs))
            self.pair.prefill.compute(theirs, chunk)

    def receive(self) -> None:
        """Decode asks for all of them, one after the other, and each byte is right."""
        decode = self.pair.decode
        for (theirs, ours), prompt in zip(self.both, self.prompts, strict=True):
            decode.admit(ours)
            assert decode.arrived(ours), ours.finished_reason
            got = decode.shared.slots(decode.slots(ours, 0, len(prompt)))
            assert np.array_equal(got, kv_of(prompt, 0, len(prompt)))
            assert list(ours.output_ids) == [1000 + len(prompt)]  # by the metadata row
            decode.finish(ours)
            until(lambda theirs=theirs: self.turn() or theirs in self.over)
        self.settled()

    def settled(self) -> None:
        """Nothing is held any more, by prefill nor by its daemon."""

        def nothing_held() -> bool:
            self.pair.decode.turn()
            side = stats_of(self.pair, "prefill")
            rows = side.host.leased
            return rows == 0 and side.requests.running == 0 and self.pair.decode.tree.protected_size() == 0

        until(nothing_held)
        tree, allocator = self.pair.prefill.tree, self.pair.prefill.allocator
        assert tree.protected_size() == 0
        assert allocator.available_size() + tree.evictable_size() == allocator.size
        assert self.pair.prefill.row_numbers.available_size() == 8
        assert self.pair.prefill.req_pool.available_size() == self.places

    @property
    def locked(self) -> int:
        """Pages that prefill cannot give to others."""
        tree, allocator = self.pair.prefill.tree, self.pair.prefill.allocator
        return int(allocator.size - allocator.available_size() - tree.evictable_size()) // PAGE


def rows_used(pair: Pair) -> int:
    return int(stats_of(pair, "prefill").host.leased)


def test_beyond_the_share_the_oldest_go_to_the_tier_and_are_sent_from_there(pair: Pair) -> None:
    waiting = Waiting(pair)
    waiting.compute(2)
    assert waiting.locked == SHARE and rows_used(pair) == 0, "within the share they stay where they are"
    waiting.compute(5)
    waiting.turn()
    assert waiting.locked <= SHARE and rows_used(pair) == 7 * 8 - waiting.locked
    assert not waiting.over and len(pair.prefill.scheduler.disagg_prefill_inflight_queue) == 7
    places = [theirs.disagg_kv_sender.order.gave_back for theirs, _ in waiting.both]
    assert places == sorted(places, reverse=True) and places.count(False) == 2, "the oldest are there"
    overwrite_free(pair)
    waiting.receive()


def overwrite_free(pair: Pair) -> None:
    """Has prefill give what it may to others, who overwrite it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    pair.prefill.tree.evict(EvictParams(num_tokens=1 << 20))
    for page in pair.prefill.free_pages:
        slots = range(page * PAGE, (page + 1) * PAGE)
        pair.prefill.shared.write(slots, np.full_like(pair.prefill.shared.slots(slots), 0x5A))


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, 9 * PAGE])
def test_prompts_of_every_length(pair: Pair, tokens: int) -> None:
    waiting = Waiting(pair)
    theirs = waiting.add(new_prompt(tokens))
    until(lambda: waiting.may_begin(theirs))
    pair.prefill.compute(theirs)
    waiting.compute(3)
    until(lambda: waiting.turn() or theirs.disagg_kv_sender.order.gave_back)
    overwrite_free(pair)
    waiting.receive()


def test_decode_has_the_first_pages_of_one_that_waits(pair: Pair) -> None:
    first = new_prompt(3 * PAGE)
    _, ours = pair.exchange(first)
    pair.decode.finish(ours)
    waiting = Waiting(pair)
    theirs = waiting.add(new_prompt(TOKENS, before=first))
    until(lambda: waiting.may_begin(theirs))
    pair.prefill.compute(theirs, chunk=2 * PAGE)
    waiting.compute(2)
    until(lambda: waiting.turn() or theirs.disagg_kv_sender.order.gave_back)
    overwrite_free(pair)
    before = stats_of(pair, "decode").transfers.delta_pages
    waiting.receive()
    assert stats_of(pair, "decode").transfers.delta_pages == before + 5 + 2 * 8


def test_what_is_given_up_in_the_tier_holds_nothing(pair: Pair) -> None:
    waiting = Waiting(pair)
    waiting.compute(4)
    until(lambda: waiting.turn() or rows_used(pair) >= 16)
    for theirs, _ in waiting.both:
        theirs.disagg_kv_sender.abort()
    until(lambda: waiting.turn() or len(waiting.over) == 4)
    waiting.settled()


def test_where_the_tier_is_full_prefill_waits(one_rank: None) -> None:
    with DeviceStack() as stack, ExitStack() as patches:
        pair = made(stack, patches, 12)
        try:
            waiting = Waiting(pair)
            waiting.compute(3)
            assert rows_used(pair) == 8
            fourth = waiting.add(new_prompt(TOKENS))
            for _ in range(300):
                assert not waiting.may_begin(fourth), "it began with neither share nor tier having room"
            first = waiting.both.pop(0), waiting.prompts.pop(0)
            receive_one(pair, waiting, *first)
            until(lambda: waiting.may_begin(fourth))
            pair.prefill.compute(fourth)
            waiting.receive()
        finally:
            pair.close()


def receive_one(pair: Pair, waiting: Waiting, both: tuple[Any, Any], prompt: list[int]) -> None:
    one = Waiting(pair)
    one.both, one.prompts = [both], [prompt]
    decode, (theirs, ours) = pair.decode, both
    decode.admit(ours)
    assert decode.arrived(ours)
    got = decode.shared.slots(decode.slots(ours, 0, len(prompt)))
    assert np.array_equal(got, kv_of(prompt, 0, len(prompt)))
    decode.finish(ours)
    until(lambda: waiting.turn() or theirs in waiting.over)


def test_a_daemon_that_is_killed_with_prompts_in_its_tier(one_rank: None) -> None:
    """They fail on prefill, with decode they fail in time, and what comes later is served."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    with DeviceStack() as stack, ExitStack() as patches:
        pair = made(stack, patches, 256)
        try:
            waiting = Waiting(pair)
            waiting.compute(4)
            assert rows_used(pair) >= 8
            pair.daemons["prefill"].popen.send_signal(signal.SIGKILL)
            pair.daemons["prefill"].popen.wait(10)
            until(lambda: waiting.turn() or len(waiting.over) == 4)
            assert all(isinstance(theirs.finished_reason, FINISH_ABORT) for theirs, _ in waiting.both)
            assert waiting.locked == 0
            _, ours = waiting.both[0]
            pair.decode.admit(ours)
            assert not pair.decode.arrived(ours)
            pair.start("prefill")
            until(lambda: pair.prefill.manager.carrier.stows)
            again = Waiting(pair)
            again.compute(4)
            again.receive()
        finally:
            pair.close()
