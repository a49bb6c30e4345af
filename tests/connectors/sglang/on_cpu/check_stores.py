"""What decode has finished goes to its daemon's host tier, and comes back from there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from kvferry.connectors.sglang.plugin import _settle
from tests.connectors.sglang.rig import PAGE, Pair, new_prompt, stats_of, until
from tests.support.devices import DeviceStack


@pytest.fixture(scope="module")
def pair(one_rank: None) -> Iterator[Pair]:
    with DeviceStack() as stack, ExitStack() as patches:
        made = Pair(stack, patches)
        try:
            until(lambda: made.decode.manager.keeps)
            yield made
        finally:
            made.close()


def finish(pair: Pair, prompt: list[int]) -> None:
    """One prompt from its beginning to its end on both sides, and in the host tier."""
    _, ours = pair.exchange(prompt)
    pair.decode.finish(ours)
    until(lambda: settled(pair))


def settled(pair: Pair) -> bool:
    pair.decode.turn()
    return pair.decode.tree.protected_size() == 0


def evict(pair: Pair) -> None:
    """Has SGLang evict all that it may, and overwrites it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    pair.decode.tree.evict(EvictParams(num_tokens=1 << 20))
    for page in pair.decode.free_pages:
        slots = range(page * PAGE, (page + 1) * PAGE)
        pair.decode.shared.write(slots, np.full_like(pair.decode.shared.slots(slots), 0x5A))


def test_what_was_evicted_comes_back_and_does_not_travel_again(pair: Pair) -> None:
    first = new_prompt(5 * PAGE + 3)
    finish(pair, first)
    assert stats_of(pair, "decode").host.cached >= 5
    evict(pair)
    assert pair.decode.tree.evictable_size() == 0
    before = stats_of(pair, "decode").transfers.delta_pages
    second = new_prompt(7 * PAGE + 1, before=first)
    _, ours = pair.exchange(second)
    assert stats_of(pair, "decode").transfers.delta_pages == before + 3
    assert pair.is_right(ours, second)
    pair.decode.finish(ours)
    until(lambda: settled(pair))


def test_what_is_evicted_in_part(pair: Pair) -> None:
    """The radix cache has the first pages, the host tier those behind them, prefill the rest."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    first = new_prompt(2 * PAGE)
    finish(pair, first)
    second = new_prompt(6 * PAGE, before=first)
    finish(pair, second)
    pair.decode.tree.evict(EvictParams(num_tokens=4 * PAGE))
    before = stats_of(pair, "decode").transfers.delta_pages
    third = new_prompt(7 * PAGE + 5, before=second)
    _, ours = pair.exchange(third)
    assert stats_of(pair, "decode").transfers.delta_pages == before + 2
    assert pair.is_right(ours, third)
    pair.decode.finish(ours)
    until(lambda: settled(pair))


def test_an_engine_that_starts_anew_has_what_the_one_before_it_finished(pair: Pair) -> None:
    """As SGLang's radix cache knows nothing then: it is emptied."""
    prompt = new_prompt(4 * PAGE + 1)
    finish(pair, prompt)
    pair.decode.manager.settle_finished()
    pair.decode.tree.reset()
    pair.decode.allocator.clear()
    evict(pair)
    before = stats_of(pair, "decode").transfers.delta_pages
    _, ours = pair.exchange(prompt)
    assert stats_of(pair, "decode").transfers.delta_pages == before + 1
    assert pair.is_right(ours, prompt)
    pair.decode.finish(ours)
    until(lambda: settled(pair))


def test_pages_that_are_being_copied_are_not_evicted(pair: Pair) -> None:
    """Nor is the radix cache emptied meanwhile."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    prompt = new_prompt(4 * PAGE)
    _, ours = pair.exchange(prompt)
    until(lambda: not pair.decode.manager.carrier._transfers.behind)
    pair.daemons["decode"].popen.send_signal(signal.SIGSTOP)
    try:
        pair.decode.finish(ours)
        locked = pair.decode.tree.protected_size()
        assert locked == 4 * PAGE
        pair.decode.tree.evict(EvictParams(num_tokens=1 << 20))
        assert pair.decode.tree.protected_size() == locked
        with mock.patch("kvferry.connectors.sglang.manager.SETTLE_SECONDS", 0.3):
            flush = mock.Mock()
            assert _settle(flush, SimpleNamespace(tree_cache=pair.decode.tree)) is False and not flush.called
    finally:
        pair.daemons["decode"].popen.send_signal(signal.SIGCONT)
    until(lambda: settled(pair))


def test_what_was_given_up_or_never_computed_is_not_kept(pair: Pair) -> None:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    manager, prompt = pair.decode.manager, new_prompt(3 * PAGE)
    _, ours = pair.exchange(prompt)
    ours.bootstrap_host = FAKE_BOOTSTRAP_HOST  # SGLang warms itself up
    before = stats_of(pair, "decode").host.cached
    pair.decode.finish(ours)
    assert pair.decode.tree.protected_size() == 0
    _, ours = pair.requests(new_prompt(3 * PAGE))
    pair.decode.admit(ours)
    until(lambda: pair.decode.turn() == [] and pair.decode.transfers.queue)
    (queued,) = pair.decode.transfers.queue
    queued.kv_receiver.abort()
    assert not pair.decode.arrived(ours)
    manager.settle_finished()
    assert stats_of(pair, "decode").host.cached == before
