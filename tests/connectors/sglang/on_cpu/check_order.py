"""Which prompts go first, with SGLang's own queues over two real daemons."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.sglang.order import asked_first
from tests.connectors.sglang.engine_on_cpu import HEADS
from tests.connectors.sglang.rig import PAGE, Pair, new_prompt, stats_of, until
from tests.support.devices import DeviceStack

CHATS = 8
FIRST = 5 * PAGE
DECODES_SECONDS = 0.02  # an answer's tokens


@pytest.fixture
def pairs(one_rank: None) -> Iterator[Callable[[int], Pair]]:
    """Makes a pair whose decode has so many pages."""
    with DeviceStack() as stack, ExitStack() as patches:

        def pair(pages: int) -> Pair:
            made = Pair(stack, patches, prefill_tokens=64 * PAGE, decode_tokens=pages * PAGE, deadline_seconds=15)
            patches.callback(made.close)
            return made

        yield pair


def test_decode_takes_in_first_what_it_holds_and_prefill_computes_that_first(pairs: Callable[[int], Pair]) -> None:
    pair = pairs(12)
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


def test_of_chats_that_come_at_once_those_in_the_pool_need_not_come_back(pairs: Callable[[int], Pair]) -> None:
    """Decode has room for half of them. In the order of their coming each would be evicted by those before it."""
    pair = pairs(24)
    until(lambda: stats_of(pair, "decode").host.pages > 0)
    chats = [new_prompt(FIRST) for _ in range(CHATS)]
    take_a_turn(pair, chats)
    before = stats_of(pair, "decode").tiers.restored_pages
    chats = [new_prompt(FIRST + PAGE // 2, chat) for chat in chats]
    take_a_turn(pair, chats)
    restored = stats_of(pair, "decode").tiers.restored_pages - before
    assert restored <= CHATS * FIRST // PAGE * 5 // 8, "in the order of their coming 30 of 40"


def take_a_turn(pair: Pair, chats: Sequence[list[int]]) -> None:
    """All chats at once, one prompt a step of prefill's."""
    decode, prefill = pair.decode, pair.prefill
    both = [pair.requests(chat) for chat in chats]
    for theirs, ours in both:
        decode.admit(ours)
        prefill.queue.add(theirs, HEADS)
    waiting: list[Any] = []
    decoding: dict[Any, float] = {}
    finished = 0

    def step() -> bool:
        nonlocal finished
        waiting.extend(prefill.queue.pop_bootstrapped())
        waiting[:] = asked_first(waiting, prefill.manager.agree)
        if waiting:
            prefill.compute(waiting.pop(0))
        prefill.inflight()
        decoding.update({ours: time.monotonic() + DECODES_SECONDS for ours in decode.turn()})
        for ours in [each for each, end in decoding.items() if end <= time.monotonic()]:
            del decoding[ours]
            decode.finish(ours)
            finished += 1
        return finished == len(chats)

    until(step)
    until(lambda: decode.turn() or not decode.manager.finished._running)
