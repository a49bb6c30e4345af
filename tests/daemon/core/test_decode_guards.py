"""What keeps wrong bytes and stuck requests out of the decode core, each by the shortest way to the harm."""

from __future__ import annotations

import mmap

import pytest

from kvferry._core import HeldIndex, HeldIndexReader
from kvferry.daemon.core.decode import MAX_GROWTHS, DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import SendDone, StartCopy, StartTransfer, StopTransfer
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import RESTORE
from tests.regressions.request_cores import NAMESPACE, PAGE, Decode, digests, name

A, B, C = (name(number) for number in range(1, 4))
TOKEN = b"first token"


def asked(side: Decode) -> int:
    """The number of the transfer that the last step has asked for."""
    (start,) = side.of(StartTransfer)
    return start.ask.transfer


def cached(side: Decode, prompt: str, pages: int) -> None:
    """A request whose worker computes it all has come and gone."""
    number = name(90)
    side.admit(number, prompt, pages, prefill="")
    end_copies(side)
    side.core.finish(1, number, pages * PAGE, b"", 0.0)
    side.take()
    assert number not in side.core.leases


def end_copies(side: Decode, failed: slice = slice(0)) -> None:
    """Of the last step's, and of those that they lead to. `failed`: of the last one's pages."""
    while copies := side.of(StartCopy):
        side.seen = []
        for started in (effect.started for effect in copies):
            side.core.copy_ended(started.number, started.copy.device[failed], 0, 0.0, 0.0)
        side.take()


def decoding(side: Decode, prompt_pages: int = 2, new: int = 5) -> None:
    """A, whose worker has computed it and decodes."""
    side.admit(A, "x", prompt_pages, prefill="", new=new)
    assert side.told("ready")


def short_of_pages() -> Decode:
    """Less is promised than the whole growth: A, B and C hold the pool, and A wants more."""
    side = Decode(9)
    limits = DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=8, overcommit=9.0)
    side.core = DecodeCore(side.cache, limits)
    for worker, (number, prompt) in enumerate(((A, "x"), (B, "y"), (C, "z")), 1):
        side.admit(number, prompt, 2, prefill="", new=21, worker=worker)
    side.core.grow(1, A, 5 * PAGE, 0.0)
    side.take()
    assert side.told("grown") and side.cache.pool.free == 0
    side.core.grow(1, A, 6 * PAGE, 0.0)
    side.take()
    return side


# -- who may speak ---------------------------------------------------------------------------------------------------


def test_the_first_token_of_another_prefill_daemon_is_not_taken() -> None:
    side = Decode(16)
    side.admit(A, "x", 2, prefill="p")
    side.arrive(asked(side), [0, 1])
    side.core.aux("q", A, b"another's", 0.0)
    side.take()
    assert not side.told("ready")
    side.core.aux("p", A, TOKEN, 0.0)
    side.take()
    (ready,) = side.told("ready")
    assert ready.ready.aux == TOKEN


def test_another_worker_neither_ends_nor_finishes_a_request() -> None:
    side = Decode(16)
    decoding(side)
    with pytest.raises(RequestError, match="belongs to another worker"):
        side.core.abort(2, A, 0.0)
    with pytest.raises(RequestError, match="belongs to another worker"):
        side.core.finish(2, A, 2 * PAGE, b"", 0.0)
    assert side.core.leases[A].state is LeaseState.READY


def test_a_name_in_use_is_refused() -> None:
    side = Decode(16)
    decoding(side)
    first = side.core.leases[A]
    with pytest.raises(RequestError, match="already in use"):
        side.admit(A, "y", 2, worker=2)
    assert side.core.leases[A] is first


def test_a_lost_prefill_daemon_fails_its_own_requests_alone() -> None:
    side = Decode(16)
    side.admit(A, "x", 2, prefill="p")
    side.admit(B, "y", 2, prefill="q")
    side.core.prefill_down("p", unavailable("down"), 0.0)
    side.take()
    assert [event.failed.name.request_id for event in side.told("failed")] == [A.request_id]
    assert side.core.leases[B].state is LeaseState.FILLING


def test_the_place_of_a_retracted_request_is_its_own_workers() -> None:
    side = short_of_pages()
    side.core.finish(3, C, 2 * PAGE, b"", 0.0, continues=True)
    assert side.core.comes_back(3, C)
    assert not side.core.comes_back(1, C)


# -- ready -----------------------------------------------------------------------------------------------------------


def test_a_request_is_not_ready_before_all_of_it_is_there() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    transfer = asked(side)
    side.core.aux("p", A, TOKEN, 0.0)
    side.take()
    assert not side.told("ready")
    side.arrive(transfer, [0])
    assert not side.told("ready")
    side.arrive(transfer, [1])
    assert side.told("ready")


@pytest.mark.parametrize("tokens", [PAGE, 3 * PAGE])
def test_a_worker_that_fills_other_pages_than_it_holds_fails(tokens: int) -> None:
    side = Decode(16)
    side.admit(A, "x", 4, held=2)
    side.core.filled(1, A, tokens, 0.0)
    side.take()
    assert side.told("failed")


def test_who_computes_its_prompt_is_left_a_token_to_compute() -> None:
    side = Decode(16)
    cached(side, "x", 2)
    side.admit(A, "x", 2, prefill="")
    (admitted,) = side.told("admitted")
    assert admitted.admitted.matched_tokens == PAGE


def test_who_computes_its_prompt_waits_for_no_page_that_another_brings() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    side.admit(B, "x", 3, prefill="", worker=2)
    (admitted,) = side.told("admitted")
    assert admitted.admitted.matched_tokens == 0


def test_pages_of_a_warm_up_are_kept_for_nobody() -> None:
    side = Decode(16)
    for warmup in (True, False):
        request = wire.Admit(name=A.to_proto(), digests=digests("x", 2), tokens=8, max_new_tokens=1, warmup=warmup)
        side.core.admit(1, NAMESPACE, A, request, 60.0, 0.0)
        side.core.finish(1, A, 2 * PAGE, b"", 0.0)
        assert side.core.matched_tokens(NAMESPACE, digests("x", 2)) == (0 if warmup else 2 * PAGE)


# -- from the host tier ----------------------------------------------------------------------------------------------


def in_the_host_tier(pages: int) -> Decode:
    """`x`, of two pages."""
    side = Decode(pages, host_pages=16)
    cached(side, "x", 2)
    cached(side, "y", pages)
    return side


def test_a_restore_begins_with_the_step_that_admits_while_prefill_computes_the_rest() -> None:
    side = Decode(8, host_pages=16)
    cached(side, "x", 2)
    side.cache.eviction.spill(2)
    side.core.tick(0.0)
    side.take()
    end_copies(side)
    side.admit(A, "x", 4)
    (restore,), (asks,) = side.of(StartCopy), side.of(StartTransfer)
    assert (restore.started.copy.kind, len(restore.started.copy.device)) == (RESTORE, 2)
    assert (asks.ask.first_page, len(asks.page_ids)) == (2, 2) and side.told("admitted")


def test_a_page_whose_restore_failed_is_asked_for() -> None:
    side = in_the_host_tier(4)
    side.admit(A, "x", 3)
    side.core.aux("p", A, TOKEN, 0.0)
    end_copies(side, failed=slice(1, 2))
    side.take()
    lease = side.core.leases[A]
    assert lease.state is LeaseState.FILLING and lease.pages[1] in lease.filling
    assert lease.pages[0] not in lease.missing


def test_who_computes_its_prompt_is_admitted_once_the_rest_is_restored() -> None:
    side = in_the_host_tier(4)
    side.admit(A, "x", 3, prefill="")
    spills = side.of(StartCopy)
    for spill in spills:
        side.core.copy_ended(spill.started.number, [], 0, 0.0, 0.0)
    side.take()
    (restore,) = side.of(StartCopy)
    assert not side.told("admitted")
    side.core.copy_ended(restore.started.number, [], 0, 0.0, 0.0)
    side.take()
    (admitted,) = side.told("admitted")
    assert admitted.admitted.matched_tokens == 2 * PAGE


def test_what_a_failed_restore_takes_out_of_the_tree_is_not_in_the_index_once_the_step_is_over() -> None:
    """A page that was restored goes with the lost one behind it: it is released, and readable until it is freed."""
    side = in_the_host_tier(4)
    memory = mmap.mmap(-1, HeldIndex.bytes_for(20))
    index = HeldIndex(memory)
    side.cache.index_held(index)
    side.admit(A, "x", 3, prefill="")
    for spill in side.of(StartCopy):
        side.core.copy_ended(spill.started.number, [], 0, 0.0, 0.0)
    side.take()
    (restore,) = side.of(StartCopy)
    held = HeldIndexReader(memory)
    assert held.held_pages(digests("x", 2), NAMESPACE) == 2, "in the host tier"
    side.core.abort(1, A, 0.0)
    side.core.copy_ended(restore.started.number, restore.started.copy.device[1:], 0, 0.0, 0.0)
    assert held.held_pages(digests("x", 2), NAMESPACE) == 0 == side.core.matched_tokens(NAMESPACE, digests("x", 2))


def test_a_pin_ends_before_a_page_that_was_lost() -> None:
    """Nobody brings it: its pages behind it would stay locked and of no use until its time."""
    side = in_the_host_tier(4)
    namespace = side.cache.namespace(NAMESPACE)
    assert side.core.pins.pin(namespace, digests("x", 2), 10.0).pages == 2
    side.admit(A, "x", 3, prefill="")
    end_copies(side, failed=slice(1, 2))
    (pin,) = side.core.pins.all()
    assert (pin.pages, namespace.pinned_pages) == (1, 1)
    assert side.core.leases[A].state is LeaseState.READY


def test_a_pin_ends_before_a_lost_page_whose_filler_fails() -> None:
    side = in_the_host_tier(4)
    namespace = side.cache.namespace(NAMESPACE)
    assert side.core.pins.pin(namespace, digests("x", 2), 10.0).pages == 2
    side.admit(A, "x", 3)
    side.core.aux("p", A, TOKEN, 0.0)
    end_copies(side, failed=slice(1, 2))
    assert side.core.pins.all()[0].pages == 2, "it is asked for"
    side.core.prefill_down("p", unavailable("gone"), 0.0)
    for moving in list(side.core.leases[A].transfers):
        side.core.transfer_drained(moving, 0.0)
    (pin,) = side.core.pins.all()
    assert (pin.pages, namespace.pinned_pages) == (1, 1)


# -- whose pages -----------------------------------------------------------------------------------------------------


def test_pages_of_a_lost_worker_are_kept_until_the_proof_of_its_end() -> None:
    side = Decode(16)
    decoding(side)
    side.core.worker_lost(1, 0.0)
    assert (side.cache.pool.free, side.cache.pool.counts().orphaned) == (14, 2)
    side.core.worker_gone(1, 0.0)
    assert (side.cache.pool.free, side.cache.pool.counts().orphaned) == (16, 0)


def test_pages_of_a_failed_request_are_kept_until_its_worker_answers() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    transfer = asked(side)
    side.core.prefill_down("p", unavailable("down"), 0.0)
    side.core.transfer_drained(transfer, 0.0)
    assert side.cache.pool.free == 14
    side.core.abort(1, A, 0.0)
    assert side.cache.pool.free == 16


def test_pages_of_an_ended_request_are_kept_while_copies_into_them_run() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    transfer = asked(side)
    side.core.abort(1, A, 0.0)
    side.take()
    assert [stop.transfer for stop in side.of(StopTransfer)] == [transfer]
    assert side.of(SendDone), "its prefill daemon need not hold it until the deadline"
    assert side.cache.pool.free == 14 and not side.told("ended")
    side.core.transfer_drained(transfer, 0.0)
    side.take()
    assert side.cache.pool.free == 16 and side.told("ended")
    assert side.core.matched_tokens(NAMESPACE, digests("x", 2)) == 0, "pages that nobody brings are matched by nobody"


def test_who_waits_for_pages_brings_them_once_those_of_the_ended_request_have_drained() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    transfer = asked(side)
    side.admit(B, "x", 2, prefill="q", worker=2)
    side.core.abort(1, A, 0.0)
    side.take()
    assert not side.of(StartTransfer)
    side.core.transfer_drained(transfer, 0.0)
    side.take()
    (start,) = side.of(StartTransfer)
    assert (start.prefill, start.ask.pages) == ("q", 2)


def test_a_request_keeps_its_pages_while_a_transfer_drains_that_is_of_no_use_any_more() -> None:
    """The last of its pages came behind the stop: it is ready, and copies may run yet."""
    side = Decode(16)
    side.admit(A, "x", 2)
    transfer = asked(side)
    side.core.aux("p", A, TOKEN, 0.0)
    side.core.transfer_broken(transfer, "checksum", 0.0)
    side.arrive(transfer, [0, 1])
    assert side.told("ready")
    side.core.finish(1, A, 2 * PAGE, b"", 0.0)
    assert A in side.core.leases and side.core.draining_transfers == 1
    side.core.transfer_drained(transfer, 0.0)
    assert A not in side.core.leases


def test_wrong_parts_are_asked_for_again_when_no_copy_of_them_runs_and_only_so_often() -> None:
    side = Decode(16)
    side.admit(A, "x", 2)
    for _ in range(MAX_ASKS_PER_REQUEST):
        transfer = asked(side)
        side.core.transfer_broken(transfer, "checksum", 0.0)
        side.take()
        assert side.of(StopTransfer) and not side.of(StartTransfer)
        side.core.transfer_drained(transfer, 0.0)
        side.take()
    assert side.told("failed") and not side.of(StartTransfer)


# -- promises and bounds ---------------------------------------------------------------------------------------------


def test_a_promise_is_judged_with_the_matched_pages_locked() -> None:
    """These are what could have been evicted for it."""
    side = Decode(8)
    cached(side, "x", 4)
    side.admit(A, "y", 2, prefill="")
    side.admit(B, "x", 5, new=13)
    assert (side.core.waiting_requests, side.cache.promised) == (1, 0)
    side.core.finish(1, A, 2 * PAGE, b"", 0.0)
    assert side.core.waiting_requests == 0


def test_growth_beyond_the_promise_fails() -> None:
    side = Decode(16)
    decoding(side)
    side.core.grow(1, A, 3 * PAGE + 1, 0.0)
    side.take()
    assert side.told("failed") and not side.told("grown")


def test_so_many_growths_wait() -> None:
    side = short_of_pages()
    for _ in range(MAX_GROWTHS - 1):
        side.core.grow(1, A, 6 * PAGE, 0.0)
    side.take()
    assert not side.told("failed")
    side.core.grow(1, A, 6 * PAGE, 0.0)
    side.take()
    assert side.told("failed")


def test_one_request_is_retracted_at_a_time() -> None:
    side = short_of_pages()
    assert [event.retract.name.request_id for event in side.told("retract")] == [C.request_id]
    side.tick(1.0)
    assert not side.told("retract")


def test_neither_growth_nor_a_retracted_request_is_waited_for_without_end() -> None:
    side = short_of_pages()
    side.tick(side.core.limits.growth_seconds - 1.0)
    assert not side.told("failed")
    side.tick(side.core.limits.growth_seconds)
    failed = {event.failed.name.request_id: event.failed.error.message for event in side.told("failed")}
    assert failed.keys() == {A.request_id, C.request_id}
    assert "none could be had" in failed[A.request_id] and "no Finish came" in failed[C.request_id]


def test_one_request_more_than_may_wait_is_refused() -> None:
    side = Decode(4, queue=1)
    decoding(side, prompt_pages=4, new=1)
    side.admit(B, "y", 2)
    with pytest.raises(RequestError, match="the bound is 1"):
        side.admit(C, "z", 2)


def test_deadlines_end_who_waits_for_admission_and_who_waits_for_pages() -> None:
    side = Decode(4)
    side.admit(A, "x", 4)
    side.admit(B, "y", 4, worker=2)
    side.tick(29.0)
    assert not side.told("failed")
    side.tick(31.0)
    assert [event.failed.name.request_id for event in side.told("failed")] == [B.request_id]
    side.tick(60.0)
    assert [event.failed.name.request_id for event in side.told("failed")] == [A.request_id]


@pytest.mark.parametrize(
    ("tokens", "pages_named"),
    [(3 * PAGE, 0), (2 * PAGE, 1), (2 * PAGE - 1, 0), (3 * PAGE + 1, 1)],
    ids=["a digest is missing", "a digest too many", "less than the prompt", "more than was asked for"],
)
def test_a_finish_that_cannot_be_keeps_nothing(tokens: int, pages_named: int) -> None:
    side = Decode(16)
    decoding(side)
    side.core.grow(1, A, 3 * PAGE, 0.0)
    side.core.finish(1, A, tokens, bytes(pages_named * DIGEST_BYTES), 0.0)
    side.take()
    assert side.told("failed")
    assert side.core.leases[A].state is LeaseState.FAILED


def test_a_request_that_the_pool_could_never_hold_is_refused() -> None:
    side = Decode(4)
    with pytest.raises(RequestError, match="the pool has 4"):
        side.admit(A, "x", 4, new=2)
    side.admit(A, "x", 4, new=1)
    assert asked(side)
