"""The scheduler's half where another connector of the same engine loads, maybe wrong bytes."""

from __future__ import annotations

import pytest

from kvferry.connectors.orders import Begin, Cancel, Drop, Load, Release, Save, StorePages
from kvferry.connectors.scheduler_prefill import PrefillScheduler
from tests.connectors.scheduling import TO_DECODE, TO_PREFILL, Daemon, Request, blocks, decode, orders, prefill


def begun(request: Request) -> PrefillScheduler:
    """A prefill side whose `request` another connector loads within a step."""
    side = prefill(Daemon())
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(request.prompt), 0)
    side.awaits_outcomes = True
    return side


def test_what_a_step_computes_is_saved_once_the_engine_counts_its_outcome() -> None:
    request = Request("a", 61, TO_PREFILL, num_computed_tokens=32)
    side = begun(request)
    assert [type(order) for order in orders(side, a=8)] == [Begin], "32 tokens are another's, of this very step"
    request.num_computed_tokens, request.num_in_flight_tokens = 40, 8
    assert orders(side, a=8) == [], "the step after it is scheduled before it ends"
    request.num_computed_tokens, request.num_in_flight_tokens = 48, 8
    assert orders(side, a=13) == [Save("a", 40, tuple(blocks(1000)[:5]))]
    request.num_computed_tokens, request.num_in_flight_tokens = 61, 0
    delay, told = side.finished(request, blocks(62))
    assert delay and told is not None
    assert orders(side) == [Save("a", 61, tuple(blocks(61))), Release("a")]


def test_what_another_connector_failed_to_load_is_saved_as_it_is_computed_again() -> None:
    request = Request("a", 61, TO_PREFILL, num_computed_tokens=32)
    side = begun(request)
    orders(side, a=29)
    request.num_computed_tokens = 16  # vLLM counts what is right
    assert orders(side, a=24) == [], "and of them no more than what it computes itself"
    request.num_computed_tokens = 40
    assert orders(side, a=21) == [Save("a", 40, tuple(blocks(40)))]
    request.num_computed_tokens = 61
    side.finished(request, blocks(62))
    assert orders(side) == [Save("a", 61, tuple(blocks(61))), Release("a")]


@pytest.mark.parametrize(("computed", "in_flight"), [(16, 0), (61, 29)])
def test_a_prompt_that_ends_before_its_outcome_is_known_is_dropped(computed: int, in_flight: int) -> None:
    request = Request("a", 61, TO_PREFILL, num_computed_tokens=32)
    side = begun(request)
    orders(side, a=29)
    request.num_computed_tokens, request.num_in_flight_tokens = computed, in_flight
    assert side.finished(request, blocks(62)) == (True, None)
    assert orders(side) == [Drop("a")]


def test_a_prompt_whose_blocks_another_connector_writes_is_neither_sent_nor_reported() -> None:
    request = Request("a", 61, TO_PREFILL)
    side = prefill(Daemon())
    side.new_request(request)
    side.allocated(request, blocks(61), 0)
    request.num_computed_tokens = 61  # counted before it is there
    side.loads_elsewhere("a")
    assert side.finished(request, blocks(61)) == (False, None), "vLLM frees its blocks by the other's report, once"
    assert [type(order) for order in orders(side)] == [Begin, Cancel]
    side.received(["a"])
    assert side.tracked == 0


def test_blocks_that_another_connector_writes_are_not_stored() -> None:
    side, request = decode(Daemon()), Request("a", 64)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(64), 0)
    request.num_computed_tokens = 64
    side.loads_elsewhere("a")
    assert side.finished(request, blocks(64)) == (False, None)
    assert orders(side) == [] and side.tracked == 0


def test_what_another_connector_loads_in_a_step_that_is_under_way_is_not_stored() -> None:
    for computed, in_flight, stored in ((61, 29, 0), (70, 9, 56)):
        side, request = decode(Daemon()), Request("a", 61)
        side.new_request(request)
        side.matched(request, 0)
        side.allocated(request, blocks(61), 0)
        side.awaits_outcomes = True
        request.num_computed_tokens = 32
        orders(side, a=29)
        request.num_computed_tokens, request.num_in_flight_tokens, request.output = computed, in_flight, 10
        assert side.finished(request, blocks(71)) == (stored > 0, None)
        assert [order.prompt.tokens for order in orders(side) if isinstance(order, StorePages)] == [stored] * (
            stored > 0
        )


def test_a_preempted_prompt_begins_anew() -> None:
    request = Request("a", 61, TO_PREFILL, num_computed_tokens=8)
    side = begun(request)
    orders(side, a=8)
    request.num_computed_tokens = 32  # it comes back with what another connector loads
    assert side.step({"a": 8}, ("a",), lambda request: blocks(61)).orders == []
    request.num_computed_tokens = 40
    assert orders(side, a=8) == [Save("a", 40, tuple(blocks(40)))]


def test_held_blocks_that_another_connector_may_fail_to_load_are_not_handed_in() -> None:
    side, request = decode(Daemon()), Request("a", 61, TO_DECODE)
    side.new_request(request)
    side.matched(request, 24)
    side.allocated(request, blocks(61), 37)
    side.awaits_outcomes = True
    (load,) = orders(side)
    assert isinstance(load, Load)
    assert (load.start, load.held_blocks, load.blocks) == (24, (), tuple(blocks(61)[3:]))
