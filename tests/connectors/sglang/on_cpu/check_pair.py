"""A prefill and a decode engine of SGLang over two real daemons and real NIXL, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.connectors.sglang.rig import PAGE, Pair, new_prompt, stats_of, until
from tests.support.devices import DeviceStack

CANARY = 0x5A


@pytest.fixture(scope="module")
def pair(one_rank: None) -> Iterator[Pair]:
    with DeviceStack() as stack, ExitStack() as patches:
        made = Pair(stack, patches, deadline_seconds=6)  # one test waits for it
        try:
            yield made
        finally:
            made.close()


def mark_free(pair: Pair) -> dict[int, bytes]:
    """Overwrites the pages that decode has given back to its allocator."""
    shared = pair.decode.shared
    for page in pair.decode.free_pages:
        slots = range(page * PAGE, (page + 1) * PAGE)
        shared.write(slots, np.full_like(shared.slots(slots), CANARY))
    return {page: shared.slots(range(page * PAGE, (page + 1) * PAGE)).tobytes() for page in pair.decode.free_pages}


def untouched(pair: Pair, marked: dict[int, bytes]) -> bool:
    shared = pair.decode.shared
    return all(shared.slots(range(p * PAGE, (p + 1) * PAGE)).tobytes() == was for p, was in marked.items())


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 3])
def test_the_kv_of_a_prompt_is_in_the_pages_of_decode(pair: Pair, tokens: int) -> None:
    prompt = new_prompt(tokens)
    _, ours = pair.exchange(prompt)
    assert pair.is_right(ours, prompt)
    assert list(ours.output_ids) == [1000 + tokens]  # by the metadata row
    pair.decode.finish(ours)


def test_a_prompt_that_is_computed_in_chunks(pair: Pair) -> None:
    prompt = new_prompt(7 * PAGE + 5)
    _, ours = pair.exchange(prompt, chunk=2 * PAGE + 3)
    assert pair.is_right(ours, prompt)
    pair.decode.finish(ours)


def test_only_what_decode_lacks_travels(pair: Pair) -> None:
    first = new_prompt(4 * PAGE + 2)
    _, ours = pair.exchange(first)
    pair.decode.finish(ours)
    before = stats_of(pair, "decode").transfers.delta_pages
    second = new_prompt(6 * PAGE + 1, before=first)
    theirs, ours = pair.exchange(second)
    assert pair.prefill.held[theirs.rid] == 4 * PAGE  # they are handed in all the same
    assert stats_of(pair, "decode").transfers.delta_pages == before + 3
    assert pair.is_right(ours, second)
    pair.decode.finish(ours)


def test_a_prompt_that_decode_has_whole_needs_its_row_only(pair: Pair) -> None:
    prompt = new_prompt(3 * PAGE)
    _, ours = pair.exchange(prompt)
    pair.decode.finish(ours)
    before = stats_of(pair, "decode").transfers.delta_pages
    _, ours = pair.exchange(prompt)
    assert stats_of(pair, "decode").transfers.delta_pages == before
    assert pair.is_right(ours, prompt) and list(ours.output_ids) == [1000 + len(prompt)]
    pair.decode.finish(ours)


def test_prefill_computes_before_decode_has_asked(pair: Pair) -> None:
    prompt = new_prompt(3 * PAGE + 1)
    theirs, ours = pair.requests(prompt)
    pair.prefill.bootstrap(theirs)
    pair.prefill.compute(theirs)
    assert pair.prefill.inflight() == []  # its pages stay locked meanwhile
    pair.decode.admit(ours)
    assert pair.decode.arrived(ours) and pair.prefill.is_sent(theirs)
    assert pair.is_right(ours, prompt)
    pair.decode.finish(ours)


def test_many_at_once(pair: Pair) -> None:
    prompts = [new_prompt(PAGE * (1 + i % 4) + i) for i in range(6)]
    both = [pair.requests(prompt) for prompt in prompts]
    for theirs, ours in both:
        pair.decode.admit(ours)
        pair.prefill.bootstrap(theirs)
    for theirs, _ in both:
        pair.prefill.compute(theirs, chunk=PAGE)
    for prompt, (_, ours) in zip(prompts, both, strict=True):
        until(lambda ours=ours: pair.decode.turn() is not None and ours.output_ids)
        assert pair.is_right(ours, prompt)
        pair.decode.finish(ours)
    left = {theirs.rid for theirs, _ in both}
    until(lambda: left.difference_update(req.rid for req in pair.prefill.inflight()) or not left)


def test_pages_of_an_aborted_request_are_given_back_untouched(pair: Pair) -> None:
    """Half of it has come. Behind the abort prefill goes on; none of that reaches the pages, which others have then."""
    prompt = new_prompt(8 * PAGE)
    theirs, ours = pair.requests(prompt)
    free = pair.decode.free_pages
    before = stats_of(pair, "decode").transfers.delta_pages
    pair.decode.admit(ours)
    pair.prefill.bootstrap(theirs)
    pair.prefill.begin(theirs)
    pair.prefill.compute_chunk(theirs, 0, 4 * PAGE)
    until(lambda: pair.decode.turn() == [] and stats_of(pair, "decode").transfers.delta_pages >= before + 4)
    (queued,) = pair.decode.transfers.queue
    queued.kv_receiver.abort()
    assert not pair.decode.arrived(ours)
    assert pair.decode.free_pages == free
    marked = mark_free(pair)
    pair.prefill.compute_chunk(theirs, 4 * PAGE, 8 * PAGE)
    assert not pair.prefill.is_sent(theirs)
    assert untouched(pair, marked)


def test_a_prompt_that_prefill_gives_up_between_chunks(pair: Pair) -> None:
    """SGLang gives the pages of a chunked prompt away in the step that aborts it: nothing is read from them then."""
    prompt = new_prompt(6 * PAGE)
    theirs, ours = pair.requests(prompt)
    pair.decode.admit(ours)
    pair.prefill.bootstrap(theirs)
    pair.prefill.begin(theirs)
    pair.prefill.compute_chunk(theirs, 0, 2 * PAGE)
    theirs.disagg_kv_sender.abort()
    assert int(theirs.disagg_kv_sender.poll()) == 0
    assert not pair.decode.arrived(ours)
    pair.prefill.scheduler.tree_cache.cache_finished_req(theirs, is_insert=False, kv_len_to_handle=6 * PAGE)


def test_an_abort_before_there_are_pages(pair: Pair) -> None:
    theirs, ours = pair.requests(new_prompt(PAGE))
    pair.decode.queue.add(ours)
    pair.decode.queue.queue[-1].kv_receiver.abort()
    assert not pair.decode.arrived(ours)
    pair.prefill.queue.add(theirs, 1)
    theirs.disagg_kv_sender.abort()
    assert int(theirs.disagg_kv_sender.poll()) == 0
    with pytest.raises(Exception, match="aborted"):
        theirs.disagg_kv_sender.failure_exception()
    pair.prefill.queue.queue.clear()


def test_tenants_are_kept_apart(pair: Pair) -> None:
    """Prefill and decode name pages by the request's extra key, too: of other keys they are others."""
    prompt = new_prompt(2 * PAGE)
    theirs, _ = pair.requests(prompt, extra_key="a")
    _, ours = pair.requests(prompt, extra_key="b")
    ours.bootstrap_room = theirs.bootstrap_room
    pair.decode.admit(ours)
    pair.prefill.bootstrap(theirs)
    pair.prefill.compute(theirs)
    assert not pair.decode.arrived(ours)
    until(lambda: theirs in pair.prefill.inflight())
    _, ours = pair.exchange(prompt, extra_key="a")
    assert pair.is_right(ours, prompt)
    pair.decode.finish(ours)


def test_weights_that_change_in_place_are_refused(pair: Pair) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    updater = object.__new__(SchedulerWeightUpdaterManager)
    for way in ("disk", "distributed", "tensor", "ipc"):
        answer = getattr(updater, f"update_weights_from_{way}")(None)
        assert not answer.success and "start it anew" in answer.message
