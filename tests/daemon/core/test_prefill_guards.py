"""What keeps wrong bytes and stuck requests out of the prefill core, each by the shortest way to the harm."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, SendProgress, ZeroTail
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.regressions.request_cores import DEADLINE, NAMESPACE, OTHER_TENANT, PAGE, Prefill, digests, name

A, B = name(1), name(2)
TOKENS = 2 * PAGE + 1  # two full pages and a token behind them
TAIL = b"T" * 32
TOKEN = b"first token"


def begin(side: Prefill, *, worker: int = 1, warmup: bool = False) -> None:
    request = wire.Begin(name=A.to_proto(), digests=digests("x", 2), tokens=TOKENS, tail_digest=TAIL, warmup=warmup)
    side.core.begin(worker, NAMESPACE, A, request, DEADLINE, 0.0)
    side.take()


def ask_for(transfer: int = 1, *, pages: int = 3) -> peer.Ask:
    return peer.Ask(
        transfer=transfer,
        name=A.to_proto(),
        namespace_id=NAMESPACE,
        pages=pages,
        tokens=TOKENS,
        last_full_digest=digests("x", 2)[-32:],
        tail_digest=TAIL,
    )


def computing() -> Prefill:
    """A is asked for, as transfer 1 of session 1, and its worker computes it."""
    side = Prefill()
    side.ask_as(ask_for(), A)
    begin(side)
    assert side.told("begun") and side.of(OpenSend)
    return side


def computed() -> Prefill:
    side = computing()
    side.core.progress(1, A, TOKENS, 0.0)
    side.core.aux(1, A, TOKEN, 0.0)
    side.take()
    return side


def held(side: Prefill) -> int:
    """Pages that are neither free nor anybody's to evict."""
    return side.cache.pool.pages - side.cache.pool.free - side.cache.evictable


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["ask", "begin"])
@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("namespace_id", OTHER_TENANT),
        ("tokens", TOKENS + 1),
        ("last_full_digest", b"O" * 32),
        ("tail_digest", b"O" * 32),
    ],
)
def test_nothing_is_sent_where_the_sides_speak_of_other_tokens(field: str, other: object, first: str) -> None:
    side, ask = Prefill(), ask_for()
    setattr(ask, field, other)
    seen = []
    for step in ("ask", "begin") if first == "ask" else ("begin", "ask"):
        if step == "ask":
            side.ask_as(ask, A)
        else:
            begin(side)
        seen += side.seen
    failed = [effect for effect in seen if isinstance(effect, FailAsk)]
    assert [(effect.transfer, field in effect.error.message) for effect in failed] == [(1, True)]
    assert not any(isinstance(effect, OpenSend) for effect in seen)


def test_a_session_uses_no_transfer_number_twice() -> None:
    side = computing()
    side.ask(B, 1, "y", 2)
    (failed,) = side.of(FailAsk)
    assert failed.transfer == 1 and B not in side.core.entries


def test_so_many_asks_of_one_request() -> None:
    side = computing()
    for number in range(2, MAX_ASKS_PER_REQUEST + 1):
        side.ask_as(ask_for(number), A)
        assert side.of(OpenSend)
    side.ask_as(ask_for(MAX_ASKS_PER_REQUEST + 1), A)
    assert side.of(FailAsk) and not side.of(OpenSend)


# -- who may speak ---------------------------------------------------------------------------------------------------


def test_another_session_neither_asks_for_nor_ends_a_request() -> None:
    side = computing()
    side.core.ask(2, A, ask_for(), DEADLINE, 0.0)
    side.take()
    (failed,) = side.of(FailAsk)
    assert (failed.session, "another session" in failed.error.message) == (2, True)
    side.core.done(2, A, 0.0)
    side.take()
    assert not side.seen and side.core.entries[A].state is EntryState.COMPUTING


def test_another_session_withdraws_no_ask() -> None:
    side = Prefill()
    side.ask_as(ask_for(), A)
    side.core.ask_end(2, 1)
    begin(side)
    assert side.of(OpenSend)


def test_a_withdrawn_ask_is_not_opened() -> None:
    side = Prefill()
    side.ask_as(ask_for(), A)
    side.core.ask_end(1, 1)
    begin(side)
    assert not side.of(OpenSend)


def test_another_worker_says_nothing_of_a_request() -> None:
    side = computing()
    for word in (
        lambda: side.core.progress(2, A, TOKENS, 0.0),
        lambda: side.core.aux(2, A, TOKEN, 0.0),
        lambda: side.core.abort(2, A, 0.0),
    ):
        with pytest.raises(RequestError, match="belongs to another worker"):
            word()
    assert side.core.entries[A].state is EntryState.COMPUTING


# -- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [PAGE - 1, TOKENS + 1])
def test_progress_goes_forward_and_not_past_the_prompt(tokens: int) -> None:
    side = computing()
    side.core.progress(1, A, PAGE, 0.0)
    side.core.progress(1, A, tokens, 0.0)
    side.take()
    assert side.told("failed") and side.of(FailAsk)


def test_the_first_token_comes_behind_the_whole_prompt() -> None:
    side = computing()
    side.core.progress(1, A, 2 * PAGE, 0.0)
    side.core.aux(1, A, TOKEN, 0.0)
    side.take()
    assert side.told("failed")


def test_a_page_is_sent_once_it_is_whole_and_its_tail_cleared_before() -> None:
    side = computing()
    side.core.progress(1, A, PAGE + 2, 0.0)
    side.take()
    assert side.seen == [SendProgress(1, 1, 1)], "the second page is computed in part"
    side.core.progress(1, A, TOKENS, 0.0)
    side.take()
    last = side.core.entries[A].prompt
    assert last is not None
    assert side.seen == [ZeroTail(A, last.pages[2], 1), SendProgress(1, 1, 3)]


def test_a_page_is_nobody_elses_while_its_tail_is_cleared() -> None:
    side = computed()
    side.core.send_completed(1, 1, 0.0)
    side.core.done(1, A, 0.0)
    assert held(side) == 3
    side.core.tail_zeroed(A, 0.0)
    assert held(side) == 0 and A not in side.core.entries


def test_pages_are_nobody_elses_while_they_are_sent() -> None:
    side = computed()
    side.core.tail_zeroed(A, 0.0)
    side.core.done(1, A, 0.0)
    assert held(side) == 3
    side.core.send_completed(1, 1, 0.0)
    assert held(side) == 0 and A not in side.core.entries


def test_a_token_is_left_to_compute() -> None:
    side = Prefill()
    side.begin(B, "x", 2)
    side.compute(B, 2)
    side.begin(A, "x", 2)
    (begun,) = side.told("begun")
    assert begun.begun.matched_tokens == PAGE


def test_pages_of_a_warm_up_are_kept_for_nobody() -> None:
    for warmup in (True, False):
        side = Prefill()
        begin(side, warmup=warmup)
        side.core.progress(1, A, TOKENS, 0.0)
        assert side.core.matched_tokens(NAMESPACE, digests("x", 2)) == (0 if warmup else 2 * PAGE)


# -- ends ------------------------------------------------------------------------------------------------------------


def test_pages_of_a_lost_worker_are_kept_until_the_proof_of_its_end() -> None:
    side = computing()
    side.core.worker_lost(1, 0.0)
    side.core.send_ended(1, 1, 0.0)
    assert (held(side), side.cache.pool.counts().orphaned) == (3, 3)
    side.core.worker_gone(1, 0.0)
    assert held(side) == 0 and side.cache.pool.free == side.cache.pool.pages


def test_pages_of_a_failed_request_are_kept_until_its_worker_answers() -> None:
    side = computing()
    side.core.done(1, A, 0.0)
    side.take()
    assert side.told("failed") and [end.transfer for end in side.of(EndSend)] == [1]
    side.core.send_ended(1, 1, 0.0)
    assert held(side) == 3
    side.core.abort(1, A, 0.0)
    assert held(side) == 0


def test_a_broken_session_ends_what_it_asked_for() -> None:
    side = computing()
    side.core.session_down(1, 0.0)
    side.take()
    assert side.told("failed") and {end.transfer for end in side.of(EndSend)} == {1}


def test_a_broken_session_ends_what_is_sent_behind_done() -> None:
    side = computed()
    side.core.tail_zeroed(A, 0.0)
    side.core.done(1, A, 0.0)
    side.core.session_down(1, 0.0)
    side.take()
    assert [end.transfer for end in side.of(EndSend)] == [1]
    side.core.send_ended(1, 1, 0.0)
    assert held(side) == 0


def test_deadlines_end_who_waits_for_the_other_half() -> None:
    side = Prefill()
    side.ask_as(ask_for(), A)
    side.begin(B, "y", 2)
    side.core.tick(DEADLINE)
    side.take()
    assert [failed.transfer for failed in side.of(FailAsk)] == [1]
    assert [event.failed.name.request_id for event in side.told("failed")] == [B.request_id]
    assert A not in side.core.entries


def test_a_deadline_ends_what_is_sent_to_one_that_grants_no_credit_behind_done() -> None:
    side = computed()
    side.core.tail_zeroed(A, 0.0)
    side.core.done(1, A, 0.0)
    side.take()
    assert not side.of(EndSend)
    side.core.tick(DEADLINE)
    side.take()
    assert [end.transfer for end in side.of(EndSend)] == [1]
