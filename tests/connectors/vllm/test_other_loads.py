"""Loads of other connectors, told by what vLLM's scheduler counts as computed."""

from __future__ import annotations

from typing import Any

from kvferry.connectors.vllm.other_loads import OtherLoads
from tests.connectors.scheduling import Request


def admitted(held: int, ours: int, counted: int) -> tuple[OtherLoads, Any]:
    others, request = OtherLoads(), Request("a", 61)
    others.asked(request, held)  # type: ignore[arg-type]
    others.allocated(request, ours)  # type: ignore[arg-type]
    request.num_computed_tokens = counted
    return others, request


def test_what_the_engine_held_and_what_comes_from_here_is_no_others() -> None:
    for counted in (40, 39):  # of a whole hit vLLM computes the last token again
        others, request = admitted(16, 24, counted)
        assert not others.step({"a": 1})
        assert not others.within_steps and not others.ended(request)


def test_a_load_within_a_step_is_seen_in_that_step_and_remembered() -> None:
    others, request = admitted(16, 0, 40)
    others.step({"a": 21})
    assert others.within_steps and not others.ended(request)
    others.step({})
    assert others.within_steps


def test_a_load_between_steps_is_under_way_until_the_request_is_computed() -> None:
    others, request = admitted(16, 0, 40)
    assert others.step({"b": 1}) and not others.step({"b": 1})
    assert not others.within_steps
    request.num_computed_tokens = 40
    others.step({"b": 1})
    assert others.ended(request)
    assert not others.ended(request), "once"
    others, request = admitted(16, 0, 40)
    others.step({})
    others.allocated(request, 0)  # vLLM calls it once more when the load is over
    others.step({"a": 21})
    assert not others.within_steps and not others.ended(request)


def test_a_request_that_ends_before_it_had_blocks_is_forgotten() -> None:
    others, request = OtherLoads(), Request("a", 61)
    others.asked(request, 16)  # type: ignore[arg-type]
    assert not others.ended(request)  # type: ignore[arg-type]
    others.allocated(request, 0)  # type: ignore[arg-type]
    request.num_computed_tokens = 40
    others.step({"a": 1})
    assert not others.within_steps


def test_a_load_between_steps_is_over_with_its_report() -> None:
    others, request = admitted(16, 0, 40)
    others.step({"b": 1})
    others.received(["a"])
    assert not others.ended(request), "it ends before a step computes it"
