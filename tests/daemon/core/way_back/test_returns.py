"""A decode core that sends back: what it promises, what it refuses, and what its locks wait for."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, SendProgress, StartCopy, StartTransfer
from kvferry.daemon.core.lease import LeaseState
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.radix.digests import DIGEST_BYTES
from tests.daemon.core.test_decode_guards import cached, end_copies, in_the_host_tier
from tests.regressions.request_cores import NAMESPACE, PAGE, Decode, digests, name

A, B = name(1), name(2)
SESSION = 7


def back(number: int = 1, *, first: int = 0, pages: int = 2, prompt_pages: int = 3, **fields: Any) -> peer.Ask:
    words: dict[str, Any] = {
        "transfer": number,
        "name": A.to_proto(),
        "namespace_id": NAMESPACE,
        "first_page": first,
        "pages": pages,
        "tokens": prompt_pages * PAGE,
        "last_full_digest": digests("x", prompt_pages)[-DIGEST_BYTES:],
    }
    return peer.Ask(**{**words, **fields})


def filling() -> Decode:
    """A holds two pages and asks for the third."""
    side = Decode(16)
    cached(side, "x", 2)
    side.admit(A, "x", 3)
    return side


def ask(side: Decode, asked: peer.Ask, *, prefill: str = "p", session: int = SESSION) -> None:
    side.core.returns.asked(session, prefill, A, asked, 0.0)
    side.take()


def over(side: Decode, number: int = 1, *, completed: bool = False) -> None:
    side.core.returns.over(SESSION, number, 0.0, completed=completed)
    side.take()


def refused(side: Decode) -> common.ErrorCode:
    (failed,) = side.of(FailAsk)
    assert not side.of(OpenSend) and side.core.returns.active == 0
    return failed.error.code


def test_an_ask_says_what_is_held() -> None:
    side = filling()
    (start,) = side.of(StartTransfer)
    assert (start.ask.held_tokens, start.ask.promised_tokens) == (2 * PAGE, 2 * PAGE)


def test_what_others_are_asked_for_is_promised_to_nobody() -> None:
    """Its bytes may come from the very daemon that would wait for them."""
    side = filling()
    side.admit(B, "x", 4)
    (start,) = side.of(StartTransfer)
    assert start.ask.promised_tokens == 3 * PAGE, "the third page is coming for A"
    assert start.ask.held_tokens == 2 * PAGE


def test_what_the_worker_holds_itself_is_not_the_daemons_to_send() -> None:
    side = Decode(16)
    side.admit(A, "x", 3, held=2)
    (start,) = side.of(StartTransfer)
    assert (start.ask.promised_tokens, start.ask.held_tokens) == (2 * PAGE, 0)


def test_pages_that_are_asked_back_are_sent() -> None:
    side = filling()
    ask(side, back())
    (send,) = side.of(OpenSend)
    assert (send.session, send.transfer, send.first_page, send.pages_ready) == (SESSION, 1, 0, 2)
    assert send.page_ids == tuple(side.core.leases[A].pages[:2])
    over(side, completed=True)
    counters = side.core.returns.counters
    assert (counters.opened, counters.completed, side.core.leases[A].returns) == (1, 1, 0)
    ask(side, back(2, first=1, pages=1))
    (send,) = side.of(OpenSend)
    assert (send.first_page, send.page_ids) == (1, (side.core.leases[A].pages[1],))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"namespace_id": b"o" * 32}, common.ERROR_FAILED_PRECONDITION),
        ({"tokens": 3 * PAGE - 1}, common.ERROR_FAILED_PRECONDITION),
        ({"last_full_digest": b"o" * 32}, common.ERROR_FAILED_PRECONDITION),
        ({"tail_digest": b"o" * 32}, common.ERROR_FAILED_PRECONDITION),
        ({"pages": 0}, common.ERROR_INVALID_ARGUMENT),
        ({"pages": 3}, common.ERROR_OUT_OF_RANGE),
        ({"first_page": 1}, common.ERROR_OUT_OF_RANGE),
        ({"first_page": 1 << 31, "pages": 1 << 31}, common.ERROR_OUT_OF_RANGE),
    ],
)
def test_what_cannot_be_sent_back_is_refused(fields: dict[str, Any], code: common.ErrorCode) -> None:
    side = filling()
    ask(side, back(**fields))
    assert refused(side) == code and side.core.leases[A].state is LeaseState.FILLING


def test_only_who_is_asked_for_the_rest_may_ask_back() -> None:
    side = filling()
    ask(side, back(), prefill="q")
    assert refused(side) == common.ERROR_ABORTED


def test_a_request_that_is_over_sends_nothing_back() -> None:
    side = filling()
    side.core.abort(1, A, 0.0)
    side.take()
    ask(side, back())
    assert refused(side) == common.ERROR_ABORTED


def test_one_transfer_of_a_request_goes_back_at_a_time_each_with_a_new_number() -> None:
    side = filling()
    ask(side, back(5))
    ask(side, back(6))
    (failed,) = side.of(FailAsk)
    assert failed.transfer == 6 and failed.error.code == common.ERROR_RESOURCE_EXHAUSTED
    over(side, 5, completed=True)
    ask(side, back(6))
    assert refused(side) == common.ERROR_FAILED_PRECONDITION


def test_pages_that_come_back_from_the_host_tier_follow() -> None:
    side = in_the_host_tier(4)
    side.admit(A, "x", 3)
    for spill in side.of(StartCopy):
        side.core.copy_ended(spill.started.number, [], 0, 0.0, 0.0)
    side.take()
    (start,) = side.of(StartTransfer)
    (restore,) = side.of(StartCopy)
    assert start.ask.held_tokens == 2 * PAGE
    ask(side, back())
    (send,) = side.of(OpenSend)
    assert send.pages_ready == 0
    side.core.copy_ended(restore.started.number, [], 0, 0.0, 0.0)
    side.take()
    (progress,) = side.of(SendProgress)
    assert (progress.session, progress.transfer, progress.pages_ready) == (SESSION, 1, 2)


def test_a_page_whose_restore_failed_ends_the_fetch() -> None:
    """It is asked of the prefill daemon, which waits for the fetch."""
    side = in_the_host_tier(4)
    side.admit(A, "x", 3)
    for spill in side.of(StartCopy):
        side.core.copy_ended(spill.started.number, [], 0, 0.0, 0.0)
    side.take()
    (restore,) = side.of(StartCopy)
    ask(side, back())
    side.core.copy_ended(restore.started.number, restore.started.copy.device[1:], 0, 0.0, 0.0)
    side.take()
    (progress,), (failed,), (end,) = side.of(SendProgress), side.of(FailAsk), side.of(EndSend)
    assert progress.pages_ready == 1 and failed.error.code == common.ERROR_UNAVAILABLE and end.transfer == 1
    (again,) = side.of(StartTransfer)
    assert (again.ask.first_page, again.ask.pages, again.ask.held_tokens) == (1, 1, PAGE)


def test_locks_live_until_nothing_of_it_is_gathered() -> None:
    side = filling()
    ask(side, back())
    pages = side.core.leases[A].pages[:2]
    side.core.abort(1, A, 0.0)
    side.take()
    (failed,), ends = side.of(FailAsk), side.of(EndSend)
    assert failed.error.code == common.ERROR_ABORTED and [end.transfer for end in ends] == [1]
    side.core.transfer_drained(side.core._asks._next - 1, 0.0)
    side.take()
    assert A in side.core.leases and side.cache.locks == 1 and not side.told("ended")
    assert not set(pages) & set(side.cache.take(side.cache.namespace(NAMESPACE), side.cache.pool.free) or ())
    over(side)
    assert A not in side.core.leases and side.cache.locks == 0 and side.told("ended")
    assert side.core.returns.counters.aborted == 1


def test_an_ask_end_ends_it_whatever_is_known_of_it() -> None:
    side = filling()
    ask(side, back())
    for number in (1, 2):
        side.core.returns.ask_end(SESSION, number, 0.0)
    side.take()
    assert [end.transfer for end in side.of(EndSend)] == [1, 2] and not side.of(FailAsk)
    side.core.abort(1, A, 0.0)
    side.take()
    assert not side.of(EndSend), "it was ended already"
    over(side, 2)
    assert side.core.leases[A].returns == 1
    over(side, 1)
    side.core.transfer_drained(side.core._asks._next - 1, 0.0)
    side.take()
    assert A not in side.core.leases


def test_the_end_of_a_session_is_the_end_of_its_sends() -> None:
    side = filling()
    ask(side, back())
    side.core.abort(1, A, 0.0)
    side.core.returns.session_down(SESSION + 1, 0.0)
    assert side.core.returns.active == 1
    side.core.returns.session_down(SESSION, 0.0)
    side.core.transfer_drained(side.core._asks._next - 1, 0.0)
    side.take()
    assert side.core.returns.active == 0 and A not in side.core.leases
    side.admit(A, "x", 3)
    ask(side, back(1))
    assert side.of(OpenSend), "numbers begin anew with a session"
    end_copies(side)
