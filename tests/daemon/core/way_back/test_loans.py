"""A decode core that lends what it has cached: what it finds, what it locks and for how long, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, StartCopy, VerifyRows
from kvferry.daemon.core.way_back.loans import MAX_LOANS
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_LOOKED_UP_PAGES
from kvferry.radix.digests import DIGEST_BYTES
from tests.daemon.core.test_block_guards import Decode as BlockDecode
from tests.daemon.core.test_decode_guards import cached, end_copies, in_the_host_tier
from tests.regressions.request_cores import NAMESPACE, OTHER_TENANT, PAGE, Decode, digests, name

A, B = name(1), name(2)
SESSION = 7


def holding(pages: int = 16) -> Decode:
    """`x`, of three pages, was computed and is cached."""
    side = Decode(pages)
    cached(side, "x", 3)
    return side


def wanted(number: int = 1, *, first: int = 0, pages: int = 3, **fields: Any) -> peer.Ask:
    words: dict[str, Any] = {
        "transfer": number,
        "name": A.to_proto(),
        "namespace_id": NAMESPACE,
        "first_page": first,
        "pages": pages,
        "digests": digests("x", first + pages),
    }
    return peer.Ask(**{**words, **fields})


def lend(side: Decode, ask: peer.Ask, *, session: int = SESSION, deadline: float = 10.0) -> None:
    side.core.returns.lend(session, ask, deadline, 0.0)
    side.take()


def over(side: Decode, number: int = 1, *, completed: bool = True, now: float = 0.0) -> None:
    side.core.returns.over(SESSION, number, now, completed=completed)
    side.take()


def refusal(side: Decode) -> common.ErrorCode:
    (failed,) = side.of(FailAsk)
    assert not side.of(OpenSend) and side.core.returns.active == 0 and side.cache.locks == 0
    return failed.error.code


# -- look-ups ------------------------------------------------------------------------------------------------------


def test_what_can_be_read_now_is_found_and_nothing_is_held_for_it() -> None:
    side = holding()
    assert side.core.returns.found(NAMESPACE, digests("x", 5)) == 3
    assert side.core.returns.found(NAMESPACE, digests("x", 2)) == 2
    assert side.core.returns.found(NAMESPACE, digests("y", 2)) == 0
    look_ups = side.core.returns.look_ups
    assert (look_ups.found, look_ups.nothing, look_ups.pages) == (2, 1, 5)
    assert side.cache.locks == 0 and side.cache.evictable == 3


def test_what_is_on_its_way_is_not_found() -> None:
    side = holding()
    side.admit(A, "x", 5)
    assert side.core.returns.found(NAMESPACE, digests("x", 5)) == 3


def test_what_lies_in_the_host_tier_alone_is_not_found() -> None:
    side = in_the_host_tier(4)
    assert side.core.returns.found(NAMESPACE, digests("x", 2)) == 0


def test_a_namespace_that_no_worker_here_has_holds_nothing() -> None:
    assert holding().core.returns.found(OTHER_TENANT, digests("x", 3)) == 0


def test_of_a_closed_namespace_nothing_is_told_or_lent() -> None:
    side = holding()
    closed = frozenset({NAMESPACE})
    limits = DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=8, closed_namespaces=closed)
    side.core = DecodeCore(side.cache, limits)
    assert side.core.returns.found(NAMESPACE, digests("x", 3)) == 0
    lend(side, wanted())
    assert refusal(side) == common.ERROR_UNAVAILABLE


def test_a_look_up_and_a_refused_ask_leave_no_trace() -> None:
    """Nodes, their use and priority, and spills that run are as they were."""
    side = Decode(4, host_pages=16)
    cached(side, "x", 3)
    side.admit(A, "y", 3, prefill="")
    tree, spills = side.cache.namespaces[NAMESPACE].tree, side.of(StartCopy)
    views = [(node.depth, node.pages, node.hits, node.priority, node.copying) for node in tree.dump(9)]
    before = side.cache.clock.tick, tree.spilling
    assert tree.spilling == 2 and not side.told("admitted")
    for pages in (1, 2, 3):
        assert side.core.returns.found(NAMESPACE, digests("x", pages)) == pages
    lend(side, wanted(pages=4))
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_UNAVAILABLE
    assert (side.cache.clock.tick, tree.spilling) == before
    assert views == [(node.depth, node.pages, node.hits, node.priority, node.copying) for node in tree.dump(9)]
    side.seen = list(spills)
    end_copies(side)
    assert side.told("admitted")


# -- loans ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_sent_and_locked_for_that_time() -> None:
    side = holding()
    lend(side, wanted(first=1, pages=2))
    (send,) = side.of(OpenSend)
    assert (send.session, send.transfer, send.first_page, send.pages_ready) == (SESSION, 1, 1, 3)
    assert len(send.page_ids) == 2 and side.cache.locks == 1 and side.cache.evictable == 0 and not side.of(FailAsk)
    over(side)
    assert side.cache.locks == 0 and side.cache.evictable == 3
    counters = side.core.returns.counters
    assert (counters.opened, counters.completed, side.core.returns.active) == (1, 1, 0)


def test_one_page_is_lent() -> None:
    side = holding()
    lend(side, wanted(first=2, pages=1))
    (send,) = side.of(OpenSend)
    assert (send.first_page, len(send.page_ids)) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"pages": 0}, common.ERROR_INVALID_ARGUMENT),
        ({"digests": digests("x", 2)}, common.ERROR_INVALID_ARGUMENT),
        ({"digests": digests("x", 3)[:-1]}, common.ERROR_INVALID_ARGUMENT),
        ({"pages": 4, "digests": digests("x", 4)}, common.ERROR_UNAVAILABLE),
        ({"digests": digests("y", 3)}, common.ERROR_UNAVAILABLE),
        ({"namespace_id": OTHER_TENANT}, common.ERROR_UNAVAILABLE),
        ({"namespace_id": b"short"}, common.ERROR_UNAVAILABLE),
    ],
)
def test_what_cannot_be_lent_is_refused(fields: dict[str, Any], code: common.ErrorCode) -> None:
    side = holding()
    lend(side, wanted(**fields))
    assert refusal(side) == code


def test_the_pages_of_an_ask_are_bounded() -> None:
    side = holding()
    most = MAX_LOOKED_UP_PAGES
    lend(side, wanted(1, pages=most, digests=bytes(most * DIGEST_BYTES)))
    assert refusal(side) == common.ERROR_UNAVAILABLE
    lend(side, wanted(2, pages=most + 1, digests=bytes((most + 1) * DIGEST_BYTES)))
    assert refusal(side) == common.ERROR_INVALID_ARGUMENT


def test_numbers_of_transfers_grow_whatever_they_are_for() -> None:
    side = holding()
    lend(side, wanted(5))
    over(side, 5)
    lend(side, wanted(5))
    assert refusal(side) == common.ERROR_FAILED_PRECONDITION
    side.admit(B, "x", 4)
    side.core.returns.asked(SESSION, "p", B, peer.Ask(transfer=4, pages=1), 0.0)
    side.take()
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_FAILED_PRECONDITION


def test_a_session_has_so_many_at_a_time() -> None:
    side = holding()
    for number in range(1, MAX_LOANS + 2):
        lend(side, wanted(number))
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_RESOURCE_EXHAUSTED and side.core.returns.active == MAX_LOANS
    lend(side, wanted(1), session=SESSION + 1)
    assert side.of(OpenSend), "another session has its own"


def test_pages_that_were_promised_to_running_requests_are_not_lent() -> None:
    side = holding(8)
    side.admit(A, "y", 2, prefill="", new=6 * PAGE)
    assert side.told("ready") and side.cache.available() == 0
    locks = side.cache.locks
    lend(side, wanted())
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_RESOURCE_EXHAUSTED and side.core.returns.active == 0
    assert side.cache.locks == locks


def test_all_that_nobody_was_promised_is_lent() -> None:
    side = holding(8)
    side.admit(A, "y", 2, prefill="", new=3 * PAGE)
    assert side.told("ready") and side.cache.available() == 3
    lend(side, wanted())
    assert side.of(OpenSend) and side.cache.available() == 0


def test_a_request_waits_for_what_is_lent_and_gets_it_behind_that() -> None:
    side = holding(4)
    lend(side, wanted())
    side.admit(A, "y", 3)
    assert not side.told("admitted"), "what is sent cannot be evicted"
    over(side)
    assert side.told("admitted")


def test_nothing_more_is_lent_while_a_request_waits_here() -> None:
    side = holding(4)
    lend(side, wanted(1))
    side.admit(A, "y", 3)
    assert not side.told("admitted")
    lend(side, wanted(2))
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_RESOURCE_EXHAUSTED and side.core.returns.active == 1
    over(side, 1)
    assert side.told("admitted"), "the loan that was open has ended"


def test_pages_that_nobody_takes_are_lent_until_the_deadline() -> None:
    side = holding()
    lend(side, wanted(), deadline=3.0)
    side.tick(2.9)
    assert not side.of(EndSend)
    side.tick(3.0)
    (failed,), (end,) = side.of(FailAsk), side.of(EndSend)
    assert failed.error.code == common.ERROR_DEADLINE_EXCEEDED and end.transfer == 1
    assert side.cache.locks == 1, "a gather may run"
    side.tick(4.0)
    assert not side.of(EndSend), "it is ended once"
    over(side, completed=False, now=4.0)
    assert side.cache.locks == 0 and dict(side.core.returns.counters.aborts) == {"deadline_exceeded": 1}


def test_what_is_wanted_no_more_is_unlocked_once_no_gather_runs() -> None:
    side = holding()
    lend(side, wanted())
    side.core.returns.ask_end(SESSION, 1, 0.0)
    side.take()
    assert side.of(EndSend) and side.cache.locks == 1
    side.tick(11.0)
    assert not side.of(EndSend) and not side.of(FailAsk), "its deadline passes while it ends"
    over(side, completed=False, now=11.0)
    assert side.cache.locks == 0 and dict(side.core.returns.counters.aborts) == {"request_ended": 1}


def test_the_end_of_a_session_ends_its_loans_alone() -> None:
    side = holding()
    lend(side, wanted())
    lend(side, wanted(), session=SESSION + 1)
    side.core.returns.session_down(SESSION, 0.0)
    side.take()
    assert side.core.returns.active == 1 and side.cache.locks == 1
    over(side)  # it is late
    assert side.core.returns.active == 1


# -- out of the host tier, below an engine's blocks ----------------------------------------------------------------


def below_blocks(pages: int = 3) -> BlockDecode:
    side = BlockDecode()
    side.stored(pages)
    return side


def lend_rows(side: BlockDecode, ask: peer.Ask, deadline: float = 10.0) -> tuple[int, ...]:
    """Rows that are to be verified before they are sent."""
    side.core.returns.lend(SESSION, ask, deadline, 0.0)
    side.take()
    (verify,) = side.of(VerifyRows)
    assert (verify.session, verify.transfer) == (SESSION, ask.transfer) and not side.of(OpenSend)
    return verify.rows


def verified(side: BlockDecode, *wrong: int, number: int = 1) -> None:
    side.core.returns.verified(SESSION, number, wrong, 0.0)
    side.take()


def test_what_an_engine_with_blocks_has_in_the_host_tier_is_lent_once_it_is_verified() -> None:
    side = below_blocks()
    assert side.core.returns.found(NAMESPACE, digests("x", 5)) == 3
    rows = lend_rows(side, wanted(first=1, pages=2))
    assert len(rows) == 2 and side.cache.locks == 1
    verified(side)
    (send,) = side.of(OpenSend)
    assert send.from_rows and (send.first_page, send.page_ids, send.pages_ready) == (1, rows, 3)
    side.core.returns.over(SESSION, 1, 0.0, completed=True)
    assert side.cache.locks == 0 and side.core.returns.counters.completed == 1


def test_rows_that_are_not_as_they_were_written_are_sent_to_nobody() -> None:
    side = below_blocks()
    rows = lend_rows(side, wanted())
    verified(side, rows[1])
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_UNAVAILABLE and not side.of(OpenSend)
    assert side.cache.locks == 0 and side.core.returns.active == 0
    assert side.held() == 1, "what is behind the first wrong page is forgotten with it"
    assert side.cache.tiers.mismatched == 1


def test_rows_of_which_nothing_could_be_found_out_are_lent_to_nobody_and_stay() -> None:
    side = below_blocks()
    lend_rows(side, wanted())
    side.core.returns.verified(SESSION, 1, None, 0.0)
    side.take()
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_UNAVAILABLE and side.cache.locks == 0
    assert side.held() == 3 and side.cache.tiers.mismatched == 0


def test_what_is_verified_counts_until_it_is_though_nobody_wants_it_any_more() -> None:
    side = below_blocks()
    for number in range(1, MAX_LOANS + 1):
        lend_rows(side, wanted(number))
        side.core.returns.ask_end(SESSION, number, 0.0)
        side.core.returns.over(SESSION, number, 0.0, completed=False)
    side.take()
    side.core.returns.lend(SESSION, wanted(MAX_LOANS + 1), 10.0, 0.0)
    side.take()
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_RESOURCE_EXHAUSTED and side.core.returns.active == 0
    verified(side, number=3)
    lend_rows(side, wanted(MAX_LOANS + 2))


@pytest.mark.parametrize("ends", ["no longer wanted", "session over", "too late"])
def test_what_ends_while_it_is_verified_is_not_sent(ends: str) -> None:
    side = below_blocks()
    rows = lend_rows(side, wanted(), deadline=1.0)
    if ends == "session over":
        side.core.returns.session_down(SESSION, 0.0)
    else:
        if ends == "too late":
            side.core.tick(2.0)
        else:
            side.core.returns.ask_end(SESSION, 1, 0.0)
        side.take()
        assert side.of(EndSend) and bool(side.of(FailAsk)) is (ends == "too late")
        verified(side, rows[0])
        assert not side.of(OpenSend) and not side.of(FailAsk), "its end is said already"
        side.core.returns.over(SESSION, 1, 2.0, completed=False)
        assert side.cache.locks == 0 and side.held() == 3
        return
    assert side.cache.locks == 0
    verified(side)
    assert not side.seen and side.held() == 3
