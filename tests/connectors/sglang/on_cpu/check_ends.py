"""Daemons that end while prompts of SGLang's engines are on their way."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.connectors.sglang.rig import PAGE, Pair, kv_of, new_prompt, stats_of, until
from tests.support.devices import DeviceStack


@pytest.fixture
def pair(one_rank: None) -> Iterator[Pair]:
    with DeviceStack() as stack, ExitStack() as patches:
        made = Pair(stack, patches, deadline_seconds=8)
        try:
            yield made
        finally:
            made.close()


def half_sent(pair: Pair) -> tuple[object, object, set[int]]:
    """A prompt of which half has come, and decode's free pages before it."""
    prompt, free = new_prompt(8 * PAGE), pair.decode.free_pages
    theirs, ours = pair.requests(prompt)
    pair.decode.admit(ours)
    pair.prefill.bootstrap(theirs)
    pair.prefill.begin(theirs)
    pair.prefill.compute_chunk(theirs, 0, 4 * PAGE)
    until(lambda: pair.decode.turn() == [] and stats_of(pair, "decode").transfers.delta_pages >= 4)
    return theirs, ours, free


def works_again(pair: Pair) -> None:
    until(lambda: all(engine.manager.carrier.there for engine in pair.engines.values()))
    for _ in range(20):  # until the daemons have found each other
        prompt = new_prompt(3 * PAGE + 1)
        theirs, ours = pair.requests(prompt)
        pair.decode.admit(ours)
        pair.prefill.bootstrap(theirs)
        pair.prefill.compute(theirs)
        there = pair.decode.arrived(ours)
        pair.prefill.is_sent(theirs)
        if there:
            got = pair.decode.shared.slots(pair.decode.slots(ours, 0, len(prompt)))
            assert np.array_equal(got, kv_of(prompt, 0, len(prompt)))
            return
    raise AssertionError("no prompt came again")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_daemon_that_is_killed(pair: Pair, role: str) -> None:
    """Both engines give the prompt up, have their pages back, and go on with the next daemon."""
    theirs, ours, free = half_sent(pair)
    killed = pair.daemons[role]
    pair.stack.kill(killed)
    pair.stack.processes.remove(killed)
    assert not pair.decode.arrived(ours)
    assert pair.decode.free_pages == free
    pair.prefill.compute_chunk(theirs, 4 * PAGE, 8 * PAGE)
    assert not pair.prefill.is_sent(theirs)
    pair.start(role)
    works_again(pair)


def test_pages_stay_where_a_daemon_stands_still(pair: Pair) -> None:
    """It may write them when it goes on: an aborted request has them until then, whatever passes."""
    _, ours, free = half_sent(pair)
    pair.daemons["decode"].popen.send_signal(signal.SIGSTOP)
    try:
        (queued,) = pair.decode.transfers.queue
        queued.kv_receiver.abort()
        with pytest.raises(AssertionError, match="not within"):
            pair.decode.arrived(ours, seconds=1.5)
        assert pair.decode.free_pages < free
    finally:
        pair.daemons["decode"].popen.send_signal(signal.SIGCONT)
    assert not pair.decode.arrived(ours)
    assert pair.decode.free_pages == free


def test_prefill_computes_ahead_up_to_a_share_of_its_pages(one_rank: None) -> None:
    """Then it waits, until decode has asked for what is computed or that is given up, with a word of SGLang's or
    without."""
    with DeviceStack() as stack, ExitStack() as patches:
        pair = Pair(stack, patches, waiting_share=0.2)
        try:
            both = [pair.requests(new_prompt(8 * PAGE)) for _ in range(5)]
            for theirs, _ in both:
                pair.prefill.queue.add(theirs, 1)
            may_begin = pair.prefill.queue.pop_bootstrapped()
            assert may_begin == [both[0][0], both[1][0]]  # of 65 pages
            assert pair.prefill.queue.pop_bootstrapped() == []
            theirs, ours = both[0]
            pair.prefill.compute(theirs)
            pair.decode.admit(ours)
            assert pair.decode.arrived(ours) and pair.prefill.is_sent(theirs)
            assert pair.prefill.queue.pop_bootstrapped() == [both[2][0]]
            both[2][0].disagg_kv_sender.abort()
            assert pair.prefill.queue.pop_bootstrapped() == [both[3][0]]
            both[3][0].disagg_kv_sender = None
            gc.collect()
            assert pair.prefill.queue.pop_bootstrapped() == [both[4][0]]
        finally:
            pair.close()


def test_a_prompt_that_prefill_never_computes(pair: Pair) -> None:
    """Decode's request ends by its deadline, and its pages are free again."""
    free = pair.decode.free_pages
    _, ours = pair.requests(new_prompt(3 * PAGE))
    pair.decode.admit(ours)
    assert not pair.decode.arrived(ours)
    assert pair.decode.free_pages == free
