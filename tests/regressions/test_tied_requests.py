"""Requests of one prefix, of which one's worker hangs or one's prefill daemon never answers: the others are served."""

from __future__ import annotations

import time

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import StartTransfer, StopTransfer
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.daemon.core.take_over import PATIENCE_SECONDS
from kvferry.daemon.observe.stats import side_stats
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.proto import common_pb2 as common
from kvferry.radix.pool import PageState
from tests.regressions.request_cores import NAMESPACE, PAGE, Decode, name

PAGES = 32
HUNG, OTHER = 1, 2  # workers
A, B, C = (name(number) for number in range(1, 4))


def bring(side: Decode, request: Name, pages: range, now: float = 0.0) -> None:
    """The newest transfer of a request brings these pages, which are all that it asked for, and the first token."""
    lease = side.core.leases[request]
    side.arrive(max(lease.transfers), pages, now)
    side.core.transfer_completed(max(lease.transfers), now)
    side.core.aux("p", request, b"first token", now)
    side.take()


def asked(side: Decode) -> list[tuple[str, int, int]]:
    """Prefill daemon, first page and pages of what was asked for in the last step."""
    return [(start.prefill, start.ask.first_page, start.ask.pages) for start in side.of(StartTransfer)]


# -- a worker that hangs -------------------------------------------------------------------------------------------


def test_pages_that_a_worker_is_to_fill_itself_are_asked_for_by_others() -> None:
    """Before its request fails, and after: nobody waits for it."""
    side = Decode(PAGES)
    side.admit(A, "x", 4, worker=HUNG, held=2, deadline=5.0)
    assert asked(side) == [("p", 2, 2)]
    side.admit(B, "x", 4, worker=OTHER)
    assert asked(side) == [("p", 0, 4)]
    bring(side, B, range(4))
    assert side.core.leases[B].state is LeaseState.READY
    side.tick(5.0)
    assert side.core.leases[A].state is LeaseState.FAILED
    for stop in side.of(StopTransfer):
        side.core.transfer_drained(stop.transfer, 5.0)
    side.admit(C, "x", 5, worker=OTHER, now=5.0)
    assert side.core.leases[C].matched == 4 and asked(side) == [("p", 4, 1)]


@pytest.mark.parametrize("end", ["abort", "gone"])
def test_pages_of_a_hung_worker_are_orphaned_until_its_word_or_the_proof_of_its_end(end: str) -> None:
    side = Decode(PAGES)
    side.admit(A, "x", 4, worker=HUNG, held=2, deadline=5.0)
    unfilled = side.core.leases[A].pages[:2]
    (start,) = side.of(StartTransfer)
    side.arrive(start.ask.transfer, range(2, 4), 1.0)
    side.core.transfer_completed(start.ask.transfer, 1.0)
    side.tick(5.0)
    assert side.told("failed") and set(side.cache.pool.states(unfilled)) == {int(PageState.ORPHANED)}
    assert side.cache.namespace(NAMESPACE).tree.pages == 0
    side.admit(B, "x", PAGES - 4, worker=OTHER, now=5.0)
    assert not set(side.core.leases[B].pages) & set(unfilled)
    if end == "abort":
        side.core.abort(HUNG, A, 6.0)
    else:
        side.core.worker_lost(HUNG, 6.0)
        assert set(side.cache.pool.states(unfilled)) == {int(PageState.ORPHANED)}
        side.core.worker_gone(HUNG, 7.0)
    side.cache.settle()
    assert set(side.cache.pool.states(unfilled)) == {int(PageState.FREE)}
    side.cache.pool.check()


def test_what_a_worker_has_filled_is_shared_once_its_request_is_ready() -> None:
    side = Decode(PAGES)
    side.admit(A, "x", 4, worker=HUNG, held=2)
    side.core.filled(HUNG, A, 2 * PAGE, 1.0)
    assert side.core.matched_tokens(NAMESPACE, side.core.leases[A].digests) == 0
    bring(side, A, range(2, 4))
    assert side.core.leases[A].state is LeaseState.READY
    side.admit(B, "x", 6, worker=OTHER)
    assert side.core.leases[B].matched == 4 and side.core.leases[B].pages[:4] == side.core.leases[A].pages
    side.core.finish(HUNG, A, 4 * PAGE, b"", 1.0)
    side.cache.namespace(NAMESPACE).tree.check()


def test_what_a_worker_has_filled_stays_its_own_where_others_were_first() -> None:
    """The worker reads its own pages to its request's end, and then they are free."""
    side = Decode(PAGES)
    side.admit(A, "x", 4, worker=HUNG, held=2)
    side.admit(B, "x", 4, worker=OTHER)
    bring(side, B, range(4))
    side.core.filled(HUNG, A, 2 * PAGE, 1.0)
    bring(side, A, range(2, 4))
    own = side.core.leases[A].pages
    assert side.core.leases[A].state is LeaseState.READY
    assert set(side.cache.pool.states(own)) == {int(PageState.LEASED)}
    side.core.finish(HUNG, A, 4 * PAGE, b"", 1.0)
    side.cache.settle()
    assert set(side.cache.pool.states(own)) == {int(PageState.FREE)}
    assert side.cache.namespace(NAMESPACE).tree.pages == 4


def test_orphaned_pages_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the bound, at it and past it."""
    monkeypatch.setattr(SideTiers, "page_bytes", 64)
    monkeypatch.setattr(SideTiers, "row_bytes", 64)
    side = Decode(PAGES)
    shell = DecodeSide(DaemonConfig(role="decode", orphaned_share=2 / PAGES), bytes(16), time.monotonic)
    shell.core = side.core
    side.admit(A, "x", 2, worker=HUNG, held=2, deadline=5.0)
    side.admit(B, "y", 1, worker=OTHER, held=1)
    assert side_stats(shell).quarantine.orphaned_pages == 0
    shell.check_quarantine()
    side.tick(5.0)
    for pages in (2, 3):
        assert side_stats(shell).quarantine.orphaned_pages == pages
        with pytest.raises(RequestError, match=rf"^{pages} pages of workers .* are orphaned .* bound is 2 ") as refused:
            shell.check_quarantine()
        assert refused.value.code == common.ERROR_RESOURCE_EXHAUSTED
        side.core.worker_lost(OTHER, 6.0)
    side.core.abort(HUNG, A, 6.0)
    for transfer in list(side.core.leases[A].transfers):
        side.core.transfer_drained(transfer, 6.0)
    assert side_stats(shell).quarantine.orphaned_pages == 1
    shell.check_quarantine()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_pool_of_one_page_is_usable_until_it_is_orphaned(share: float) -> None:
    side = Decode(1)
    shell = DecodeSide(DaemonConfig(role="decode", orphaned_share=share), bytes(16), time.monotonic)
    shell.core = side.core
    assert shell.orphaned_bound == 0
    shell.check_quarantine()
    side.admit(A, "x", 1, worker=HUNG, held=1)
    shell.check_quarantine()
    side.core.worker_lost(HUNG, 1.0)
    with pytest.raises(RequestError, match=r"^1 pages of workers .* are orphaned .* bound is 0 "):
        shell.check_quarantine()


# -- a prefill daemon that never answers ---------------------------------------------------------------------------


def two_prefills(side: Decode, beyond: int) -> None:
    """A is to bring 4 pages by a prefill daemon that never answers; B's has computed them, and `beyond` more."""
    side.admit(A, "x", 4, prefill="silent")
    side.admit(B, "x", 4 + beyond, worker=OTHER)
    assert asked(side) == [("p", 4, beyond)]


@pytest.mark.parametrize("beyond", [0, 2])
def test_who_is_served_sooner_by_its_own_prefill_daemon_waits_for_no_other(beyond: int) -> None:
    """Known by its first token, or by pages behind those that it waits for."""
    side = Decode(PAGES)
    two_prefills(side, beyond)
    if beyond:
        (transfer,) = side.core.leases[B].transfers
        side.arrive(transfer, [4], 1.0)
    else:
        side.core.aux("p", B, b"first token", 1.0)
    side.tick(1.0 + 0.9 * PATIENCE_SECONDS)
    assert not side.of(StopTransfer)
    side.tick(1.0 + PATIENCE_SECONDS)
    (stop,) = side.of(StopTransfer)
    assert stop.prefill == "silent"
    side.core.transfer_drained(stop.transfer, 1.5)
    side.take()
    assert asked(side) == [("p", 0, 4), ("silent", 0, 0)], "and A still hears whether its first token will come"
    side.arrive(max(side.core.leases[B].transfers), range(4), 2.0)
    if beyond:
        side.arrive(min(side.core.leases[B].transfers), [5], 2.0)
        side.core.aux("p", B, b"first token", 2.0)
    assert side.core.leases[B].state is LeaseState.READY
    assert not side.core.leases[A].missing, "what B brought A has, too"
    side.core.aux("silent", A, b"first token", 3.0)
    assert side.core.leases[A].state is LeaseState.READY
    assert side.core.transfer_counters.aborts == {"taken_over": 1}


def test_who_came_later_is_served_as_well() -> None:
    side = Decode(PAGES)
    side.admit(A, "x", 4, prefill="silent")
    side.tick(20.0)
    side.admit(C, "x", 4, worker=OTHER, now=20.0)
    side.core.aux("p", C, b"first token", 20.1)
    side.tick(20.1 + PATIENCE_SECONDS)
    (stop,) = side.of(StopTransfer)
    side.core.transfer_drained(stop.transfer, 20.5)
    side.take()
    side.arrive(max(side.core.leases[C].transfers), range(4), 20.6)
    assert side.core.leases[C].state is LeaseState.READY


def test_pages_that_still_come_are_waited_for() -> None:
    """However long all of them take: nothing is moved twice."""
    side = Decode(PAGES)
    two_prefills(side, 0)
    (transfer,) = side.core.leases[A].transfers
    side.core.aux("p", B, b"first token", 1.0)
    for page in range(3):
        side.arrive(transfer, [page], 1.0 + page * 0.9 * PATIENCE_SECONDS)
        side.tick(1.0 + (page + 0.9) * 0.9 * PATIENCE_SECONDS)
        assert not side.of(StopTransfer)
    side.arrive(transfer, [3], 1.0 + 3 * 0.9 * PATIENCE_SECONDS)
    assert side.core.leases[B].state is LeaseState.READY
    assert side.core.asked_again == 0


def test_who_cannot_be_served_sooner_waits() -> None:
    side = Decode(PAGES)
    two_prefills(side, 2)
    side.tick(30.0)
    assert not side.of(StopTransfer)


def test_only_what_is_waited_for_is_taken_over() -> None:
    """The rest is asked for again where it was, and so it is if who wanted it is gone by then."""
    for gone in (False, True):
        side = Decode(PAGES)
        side.admit(A, "x", 6, prefill="slow")
        side.admit(B, "x", 2, worker=OTHER)
        side.core.aux("p", B, b"first token", 1.0)
        side.tick(1.0 + PATIENCE_SECONDS)
        (stop,) = side.of(StopTransfer)
        if gone:
            side.core.abort(OTHER, B, 1.5)
        side.core.transfer_drained(stop.transfer, 1.5)
        side.take()
        assert asked(side) == ([("slow", 0, 6)] if gone else [("p", 0, 2), ("slow", 2, 4)])


def test_a_refusal_that_comes_while_it_drains_is_not_lost() -> None:
    side = Decode(PAGES)
    two_prefills(side, 0)
    side.core.aux("p", B, b"first token", 1.0)
    side.tick(1.0 + PATIENCE_SECONDS)
    (stop,) = side.of(StopTransfer)
    side.core.transfer_failed(stop.transfer, unavailable("the prefill worker is gone"), 1.4)
    side.core.transfer_drained(stop.transfer, 1.5)
    side.take()
    (failed,) = side.told("failed")
    assert failed.failed.name.request_id == A.request_id
    assert asked(side) == [("p", 0, 4)], "and B goes on"


def test_patience_is_short() -> None:
    """Of any deadline, and of the time for which a prefill daemon surely keeps what it has sent."""
    assert PATIENCE_SECONDS < REST_SECONDS / 2
