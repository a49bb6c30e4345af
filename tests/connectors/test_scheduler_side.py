"""The scheduler's half: what it answers vLLM, and what it tells the worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connectors.orders import Begin, Cancel, Load, News, Restore, StorePages
from kvferry.connectors.scheduler_side import SchedulerSide
from tests.connectors.scheduling import (
    BLOCK,
    ID,
    TO_DECODE,
    TO_PREFILL,
    Daemon,
    Request,
    blocks,
    decode,
    orders,
    prefill,
)


def test_a_new_session_may_be_with_another_daemon() -> None:
    daemon = Daemon()
    side = prefill(daemon)
    side.hear(News(sessions={0: False}))
    assert daemon.asked_again == 0
    side.hear(News(sessions={0: True}))
    assert daemon.asked_again == 1


@pytest.mark.parametrize("per_page", [1, 2])
def test_a_prompt_from_prefill_is_promised_once_the_engine_has_pinned_its_blocks(per_page: int) -> None:
    daemon = Daemon()
    side, request = decode(daemon, per_page), Request("a", 61, TO_DECODE)
    side.new_request(request)
    for _ in range(3):  # vLLM may ask again and again
        assert side.matched(request, 24) == (37, True)
    assert orders(side) == []
    side.allocated(request, blocks(61), 37)
    (load,) = orders(side)
    assert isinstance(load, Load)
    assert (load.name.request_id.hex(), load.prefill, load.start) == (ID, "p", 24)
    held = 24 // (BLOCK * per_page) * per_page
    assert load.held_blocks == tuple(blocks(61)[:held])
    assert load.blocks == tuple(blocks(61)[3:])
    assert load.prompt.tokens == 61
    side.allocated(request, blocks(61), 0)  # vLLM calls it once more when the load is over
    side.received(["a"])
    assert orders(side) == [] and daemon.asked == [], "all of it comes, whoever holds it"


def test_a_load_that_failed_is_not_tried_again() -> None:
    side, request = decode(Daemon()), Request("a", 61, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(61), 61)
    side.received(["a"])
    assert side.matched(request, 0) == (0, False)


def test_without_prefill_what_the_daemon_holds_is_loaded() -> None:
    daemon = Daemon(pages=5)
    side, request = decode(daemon), Request("a", 64)
    side.new_request(request)
    for _ in range(2):
        assert side.matched(request, 16) == (24, True)
    assert daemon.asked == [request.digests(56, BLOCK)] * 2, "the last token is left to compute"
    side.allocated(request, blocks(40), 24)
    (restore,) = orders(side)
    assert isinstance(restore, Restore)
    assert (restore.start, restore.blocks, restore.prompt.tokens) == (16, tuple(blocks(40)[2:]), 41)
    assert len(restore.prompt.digests) == 5 * 32 and len(restore.prompt.tail_digest) == 32


def test_what_is_gone_since_the_engine_last_asked_is_not_promised() -> None:
    daemon = Daemon(pages=5)
    side, request = decode(daemon), Request("a", 64)
    side.new_request(request)
    assert side.matched(request, 0) == (40, True)
    daemon.pages = 2
    assert side.matched(request, 0) == (16, True)
    side.allocated(request, blocks(16), 16)
    (restore,) = orders(side)
    assert isinstance(restore, Restore) and restore.prompt.tokens == 17


@pytest.mark.parametrize("side", [decode, prefill])
def test_nothing_is_asked_where_nothing_could_be_loaded(side: Callable[[Daemon], SchedulerSide]) -> None:
    daemon = Daemon(pages=9)
    here, request = side(daemon), Request("a", 61, TO_PREFILL if side is prefill else None)
    here.new_request(request)
    assert here.matched(request, 56) == (0, False) and daemon.asked == []


@pytest.mark.parametrize("side", [decode, prefill])
def test_a_session_that_is_fed_as_it_goes_is_the_engines_alone(side: Callable[[Daemon], SchedulerSide]) -> None:
    """Its prompt changes under its name."""
    here, request = side(Daemon(pages=9)), Request("a", 61, TO_PREFILL if side is prefill else None, resumable=True)
    here.new_request(request)
    assert here.matched(request, 0) == (0, False)
    here.allocated(request, blocks(61), 0)
    here.step({}, ("a",), lambda request: [])
    assert here.matched(request, 0) == (0, False)
    request.num_computed_tokens = 61
    assert here.finished(request, blocks(61)) == (False, None)
    assert orders(here, a=61) == [] and here.tracked == 0


@pytest.mark.parametrize("tokens", [61, BLOCK - 3])
@pytest.mark.parametrize("side", [decode, prefill])
def test_a_prompt_that_cannot_be_named_does_not_end_the_engine(
    side: Callable[[Daemon], SchedulerSide], tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    params = TO_PREFILL if side is prefill else TO_DECODE
    here, request = side(Daemon(pages=9)), Request("a", tokens, params, adapter="?")
    here.new_request(request)
    assert "a is computed here alone" in caplog.text
    assert here.matched(request, 0) == (0, False)
    here.allocated(request, blocks(tokens), 0)
    request.num_computed_tokens, request.output = tokens + 19, 20
    assert here.finished(request, blocks(tokens + 19)) == (False, None)
    assert orders(here, a=tokens) == [] and here.tracked == 0


@pytest.mark.parametrize("params", [None, TO_DECODE, TO_PREFILL])
def test_what_is_to_be_computed_for_its_log_probabilities_is_not_loaded(params: dict[str, object] | None) -> None:
    daemon = Daemon(pages=7)
    side = prefill(daemon) if params is TO_PREFILL else decode(daemon)
    request = Request("a", 64, params, skip_reading_prefix_cache=True)
    side.new_request(request)
    assert side.matched(request, 0) == (0, False)


def test_what_the_engine_has_itself_is_not_loaded() -> None:
    side, request = decode(Daemon(pages=3)), Request("a", 64)
    side.new_request(request)
    assert side.matched(request, 24) == (0, False)
    side.allocated(request, blocks(64), 0)
    assert orders(side) == []


def test_with_the_daemon_down_all_is_computed_here() -> None:
    daemon = Daemon(up=False)
    side = decode(daemon)
    for params in (TO_DECODE, None):
        request = Request(f"{params}", 64, params)
        side.new_request(request)
        assert side.matched(request, 0) == (0, False)
        side.allocated(request, blocks(64), 0)
        request.output, request.num_computed_tokens = 9, 72
        assert side.finished(request, blocks(72)) == (False, None)
    assert daemon.asked == [] and orders(side) == [] and side.tracked == 0


@pytest.mark.parametrize("per_page", [1, 2])
def test_at_the_end_full_pages_of_prompt_and_output_are_stored(per_page: int) -> None:
    side, request = decode(Daemon(), per_page), Request("a", 30, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(30), 30)
    side.received(["a"])
    orders(side)
    request.output, request.num_computed_tokens = 11, 40  # the last token's KV is not computed
    assert side.finished(request, blocks(41)) == (True, None)
    (store,) = orders(side)
    assert isinstance(store, StorePages)
    tokens = 40 // (BLOCK * per_page) * BLOCK * per_page
    assert (store.prompt.tokens, store.blocks) == (tokens, tuple(blocks(tokens)))
    assert store.prompt.digests == request.digests(tokens, BLOCK * per_page)
    assert store.name.request_id.hex() != ID
    side.sent(["a"])
    assert side.tracked == 0


@pytest.mark.parametrize(("held", "stored"), [(4, True), (5, False)])
def test_what_the_daemon_holds_whole_is_not_stored_again(held: int, stored: bool) -> None:
    daemon = Daemon(pages=held)
    side, request = decode(daemon), Request("a", 30)
    side.new_request(request)
    request.output, request.num_computed_tokens = 11, 40  # 5 pages
    assert side.finished(request, blocks(41)) == (stored, None)
    assert [type(order) for order in orders(side)] == [StorePages] * stored
    assert side.tracked == stored, "what is not stored is over"


def test_nothing_is_handed_in_to_a_daemon_that_keeps_nothing() -> None:
    side, request = decode(Daemon(keeps=False)), Request("a", 30)
    side.new_request(request)
    request.output, request.num_computed_tokens = 11, 40
    assert side.finished(request, blocks(41)) == (False, None)
    assert orders(side) == [] and side.tracked == 0


def test_what_a_step_under_way_computes_is_not_stored() -> None:
    side, request = decode(Daemon()), Request("a", 64)
    side.new_request(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 64, 40
    assert side.finished(request, blocks(64)) == (True, None)
    (store,) = orders(side)
    assert isinstance(store, StorePages) and store.prompt.tokens == 24


def test_an_abort_while_it_loads_is_reported_as_received() -> None:
    side, request = decode(Daemon()), Request("a", 61, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(61), 61)
    assert side.finished(request, blocks(61)) == (False, None), "vLLM keeps the blocks by itself"
    assert [type(order) for order in orders(side)] == [Load, Cancel]
    side.received(["a"])
    assert side.tracked == 0


def test_an_abort_before_anything_leaves_nothing() -> None:
    side, request = decode(Daemon()), Request("a", 61, TO_DECODE)
    side.new_request(request)
    assert side.finished(request, []) == (False, None)
    assert side.tracked == 0 and orders(side) == []


def test_a_preempted_request_comes_back_to_what_the_daemon_holds() -> None:
    daemon = Daemon()
    side, request = decode(daemon), Request("a", 30, TO_DECODE)
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, blocks(30), 30)
    side.received(["a"])
    request.output = 20
    side.step({}, ("a",), lambda request: [])
    daemon.pages = 3
    assert side.matched(request, 8) == (16, True)
    assert len(daemon.asked[-1]) == 6 * 32, "prompt and output"


def test_a_request_that_a_router_names_wrongly_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon()
    side, request = decode(daemon), Request("a", 61, {**TO_DECODE, "kvferry_request": "nonsense"})
    side.new_request(request)
    daemon.pages = 0
    assert side.matched(request, 0) == (0, False)
    assert "kvferry_request is 'nonsense'" in caplog.text


@pytest.mark.parametrize("side", [decode, prefill])
def test_parameters_that_are_no_object_do_not_end_the_engine(
    side: Callable[[Daemon], SchedulerSide], caplog: pytest.LogCaptureFixture
) -> None:
    here = side(Daemon())
    for number, params in enumerate(("x", ["do_remote_prefill", "do_remote_decode"], 7)):
        here.new_request(Request(f"a{number}", 61, params))  # type: ignore[arg-type]
        assert f"kv_transfer_params is {str(params)!r}; it must be an object" in caplog.text


def test_a_tail_is_named_by_what_its_tokens_do_not_say() -> None:
    prompts = []
    for adapter in ("", "one", "other"):
        side, request = decode(Daemon()), Request("a", 61, TO_DECODE, adapter=adapter)
        side.new_request(request)
        assert side.matched(request, 0) == (61, True)
        side.allocated(request, blocks(61), 61)
        (load,) = orders(side)
        assert isinstance(load, Load) and load.prompt.digests == request.digests(61, BLOCK)
        prompts.append(load.prompt)
    assert len({prompt.digests for prompt in prompts}) == len({prompt.tail_digest for prompt in prompts}) == 3


def test_orders_carry_the_span_that_the_engine_traces_the_request_in() -> None:
    traced = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
    daemon = Daemon()
    for side, params in ((decode(daemon), TO_DECODE), (decode(daemon), None), (prefill(daemon), TO_PREFILL)):
        request = Request("a", 61, params, trace_headers=traced)
        side.new_request(request)
        daemon.pages = 7
        tokens, _ = side.matched(request, 0)
        side.allocated(request, blocks(61), tokens)
        (order,) = orders(side)
        assert isinstance(order, (Load, Restore, Begin)) and order.traceparent == traced["traceparent"]
