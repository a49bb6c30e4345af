"""Pages that are read before a step is launched are those that SGLang would have read behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.connectors.sglang.rig import PAGE, Pair, new_prompt
from tests.support.devices import DeviceStack

CANARY = 0x5A


@pytest.fixture
def pair(one_rank: None) -> Iterator[Pair]:
    with ExitStack() as patches, DeviceStack() as stack:
        pair = Pair(stack, patches)
        yield pair
        pair.close()


@pytest.fixture
def asked() -> Iterator[list[Any]]:
    """What was read ahead and given to SGLang; None: SGLang read for itself."""
    from kvferry.connectors.sglang import read_ahead

    answers: list[Any] = []
    answer = read_ahead.pages_being_sent

    def noted(tokens: int, page_size: int) -> Any:
        answers.append(answer(tokens, page_size))
        return answers[-1]

    with mock.patch.object(read_ahead, "pages_being_sent", noted):
        yield answers


@pytest.mark.parametrize("chunk", [0, PAGE, 3 * PAGE - 5])
def test_what_was_read_is_sent(pair: Pair, asked: list[Any], chunk: int) -> None:
    prompt = new_prompt(5 * PAGE + 3)
    _, ours = pair.exchange(prompt, chunk)
    assert pair.is_right(ours, prompt)
    sent = [page for read in asked[: -(-len(prompt) // (chunk or len(prompt)))] for page in read.tolist()]
    assert len(sent) == len(set(sent)) == 6


def test_results_that_are_looked_at_behind_the_next_launch(pair: Pair, asked: list[Any]) -> None:
    """Steps of two prompts of the same tokens, which overlap: what is sent of a step was read by then, also of a prompt
    whose next chunk is launched. The second has the first's pages in the end: of its last chunk SGLang reads itself."""
    prompt = new_prompt(5 * PAGE + 3)
    both = [pair.requests(prompt) for _ in range(2)]
    steps = [(theirs, end) for theirs, _ in both for end in (2 * PAGE, 4 * PAGE + 5, len(prompt))]
    behind: tuple[Any, int] | None = None
    sent: list[bool] = []
    for theirs, ours in both:
        pair.decode.admit(ours)
        pair.prefill.bootstrap(theirs)
        pair.prefill.begin(theirs)
    for theirs, end in steps:
        start = theirs.extend_range.end if theirs.extend_range is not None else 0
        if start:
            launched_anew(pair, theirs)
        theirs.set_extend_range(start, end)
        pair.prefill.launch(theirs)
        slots = pair.prefill.slots(theirs, start, end)
        if behind is not None:
            pair.prefill.look_at_results(*behind)
            sent.append(asked[-1] is not None)
        pair.prefill.shared.write(slots, pair.prefill.shared.kv_of(prompt, start, end))
        behind = theirs, end
    assert behind is not None
    pair.prefill.look_at_results(*behind)
    assert asked[-1] is None
    for theirs, ours in both:
        assert pair.decode.arrived(ours) and pair.prefill.is_sent(theirs)
        assert pair.is_right(ours, prompt)
    assert sent == [True] * 5


def launched_anew(pair: Pair, request: Any) -> None:
    """What SGLang does with the chunk before, when it is about to launch the next one of a prompt."""
    from sglang.srt.disaggregation import prefill

    prefill.maybe_cache_unfinished_req(request, pair.prefill.tree, chunked=True)


def test_pages_that_gave_way_to_others_are_not_sent(pair: Pair, asked: list[Any]) -> None:
    """Two prompts of the same tokens are computed at once: the second's pages go, and are soon somebody else's."""
    prompt = new_prompt(3 * PAGE)
    both = [pair.requests(prompt) for _ in range(2)]
    for theirs, _ in both:
        pair.prefill.bootstrap(theirs)
    for theirs, _ in both:
        pair.prefill.begin(theirs)
    free, shared = pair.prefill.allocator.free, pair.prefill.shared

    def overwritten(slots: Any) -> None:
        shared.write(slots, np.full_like(shared.slots(slots), CANARY))
        free(slots)

    pair.prefill.allocator.free = overwritten
    read = []
    for theirs, ours in both:
        pair.decode.admit(ours)
        pair.prefill.compute_chunk(theirs, 0, len(prompt))
        read.append(asked[-1])
        assert pair.decode.arrived(ours) and pair.prefill.is_sent(theirs)
        assert pair.is_right(ours, prompt)
    assert read[0] is not None and read[1] is None
    assert vars(pair.prefill.allocator)["free"] is overwritten
