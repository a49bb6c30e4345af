"""Which prompts go first, with SGLang's own queues over two real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.connectors.sglang.engine_on_cpu import HEADS
from tests.connectors.sglang.rig import PAGE, Pair, new_prompt, until
from tests.support.devices import DeviceStack


@pytest.fixture
def pair(one_rank: None) -> Iterator[Pair]:
    with DeviceStack() as stack, ExitStack() as patches:
        made = Pair(stack, patches, decode_tokens=12 * PAGE, deadline_seconds=10)
        try:
            yield made
        finally:
            made.close()


def test_decode_takes_in_first_what_it_holds_and_prefill_computes_that_first(pair: Pair) -> None:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    held = new_prompt(5 * PAGE)
    _, ours = pair.exchange(held)
    pair.decode.finish(ours)
    names = ("large", "held", "small")
    prompts = dict(zip(names, (new_prompt(7 * PAGE), [*held, *new_prompt(PAGE)], new_prompt(2 * PAGE)), strict=True))
    both = {name: pair.requests(prompt) for name, prompt in prompts.items()}
    decode, prefill = pair.decode, pair.prefill
    for _, mine in both.values():
        decode.admit(mine)
    until(lambda: decode.turn() or len(decode.queue.queue) < 3)
    assert [each.req for each in decode.queue.queue] == [both["large"][1], both["small"][1]], (
        "the first has no room now"
    )

    for theirs, _ in both.values():
        prefill.queue.add(theirs, HEADS)
    waiting = prefill.scheduler.waiting_queue
    until(lambda: waiting.extend(prefill.queue.pop_bootstrapped()) or len(waiting) == 3)
    until(lambda: both["held"][0].disagg_kv_sender.asked)
    assert waiting == [theirs for theirs, _ in both.values()]
    prefill.scheduler.process_pending_chunked_abort = SimpleNamespace  # where SGLang's own begins
    with pytest.raises(AttributeError, match="resolve_waiting_queue_bootstrap"):
        SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run(
            prefill.scheduler, prefill.scheduler.running_batch, None
        )
    assert waiting == [both[name][0] for name in ("held", "large", "small")]

    for name in ("held", "large", "small"):
        theirs, mine = both[name]
        prefill.compute(theirs)
        assert decode.arrived(mine) and prefill.is_sent(theirs)
        decode.finish(mine)
