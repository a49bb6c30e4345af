"""Tenants that wait, by their own quota or by others' quotas, hold up no other tenant."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.daemon.core.effects import StopTransfer
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.namespaces import Namespace, Quota
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.reservations import Holds
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from tests.regressions.request_cores import NAMESPACE, OTHER_TENANT, PAGE, Decode, Prefill, digests, name

PAGES = 64
LATE = name(1000)
HARD = {NAMESPACE: Quota(hard=4)}


@pytest.mark.parametrize("waiting", [31, 32, 33, 200])
def test_decode_requests_over_their_tenants_quota_hold_up_no_other_tenant(waiting: int) -> None:
    side = Decode(PAGES, queue=1000, quotas=HARD)
    for number in range(waiting + 1):
        side.admit(name(number), f"{number}", 4)
    assert side.core.waiting_requests == waiting
    side.admit(LATE, "z", 4, namespace=OTHER_TENANT)
    assert side.core.leases[LATE].state is LeaseState.FILLING
    assert side.core.waiting_requests == waiting, "and none of the tenant's own was let in"


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("waiting", [31, 32, 33, 200])
def test_prompts_over_their_tenants_quota_hold_up_no_other_tenant(waiting: int, asked: bool) -> None:
    side = Prefill(PAGES, table=1000, quotas=HARD)
    pages = 4 if asked else 2  # those that nobody asks for have half of the quota
    for number in range(waiting + 1):
        if asked:
            side.ask(name(number), number, f"{number}", pages)
        side.begin(name(number), f"{number}", pages)
    assert side.core.waiting_requests == waiting
    side.begin(LATE, "z", 4, namespace=OTHER_TENANT)
    assert side.told("begun")


def test_prompts_that_rest_yield_to_the_tenant_behind_one_over_its_quota() -> None:
    """Of the tenant that came first nothing rests, and another's pages are of no use to it."""
    side = Prefill(16, quotas={NAMESPACE: Quota(hard=4)})
    side.ask(name(1), 1, "a", 4)
    side.begin(name(1), "a", 4)
    side.core.progress(1, name(1), 4 * PAGE, 0.0)  # it stands still: its first token does not come
    side.ask(name(2), 2, "b", 10, namespace=OTHER_TENANT)
    side.begin(name(2), "b", 10, namespace=OTHER_TENANT)
    side.compute(name(2), 10)
    side.core.send_completed(1, 1, 0.0)
    side.core.send_completed(1, 2, 0.0)
    side.core.tick(REST_SECONDS)
    side.core.aux(1, name(1), b"first token", REST_SECONDS)
    side.ask(name(3), 3, "c", 4)
    side.begin(name(3), "c", 4)
    side.ask(name(4), 4, "d", 8, namespace=OTHER_TENANT)
    side.begin(name(4), "d", 8, namespace=OTHER_TENANT)
    assert side.core.waiting_requests == 2
    side.core.tick(1.5 * REST_SECONDS)
    side.take()
    assert side.core.entries[name(2)].state is EntryState.YIELDED
    assert [event.begun.name.request_id for event in side.told("begun")] == [name(4).request_id]


def ready_and_finished(side: Decode, number: int, prompt: str, pages: int) -> bool:
    """A request of the other tenant, to its end; False: it waits."""
    side.admit(name(number), prompt, pages, namespace=OTHER_TENANT)
    lease = side.core.leases[name(number)]
    if lease.queued:
        return False
    (transfer,) = lease.transfers
    side.arrive(transfer, range(pages))
    side.core.transfer_completed(transfer, 0.0)
    side.core.aux("p", name(number), b"first token", 0.0)
    side.core.finish(1, name(number), pages * PAGE, b"", 0.0)
    side.take()
    return True


def test_who_cannot_fit_beside_soft_quotas_is_passed_uncounted_by_who_needs_only_its_own_pages() -> None:
    side = Decode(16, queue=1000, quotas={OTHER_TENANT: Quota(soft=8)})
    assert ready_and_finished(side, 1, "cached", 8)
    side.admit(LATE, "large", 12)
    for number in range(2, 2 + 3 * OVERTAKES):
        assert ready_and_finished(side, number, f"turn {number}", 8), f"request {number} waits"
    large = side.core.leases[LATE]
    assert large.queued and large.overtaken == 0
    side.tick(29.9)
    assert large.queued, "it is not refused before its time"
    side.cache.flush([side.cache.namespace(OTHER_TENANT)])
    side.tick(29.95)
    assert large.state is LeaseState.FILLING, "it is let in when nothing is protected any more"


def test_who_could_fit_once_others_are_idle_is_passed_only_so_often() -> None:
    """The quota protects what lies in the cache, and no more than that."""
    side = Decode(16, queue=1000, quotas={OTHER_TENANT: Quota(soft=4)})
    side.admit(name(1), "running", 6, namespace=OTHER_TENANT)
    side.admit(LATE, "large", 12)
    passed = 0
    while passed < 100 and ready_and_finished(side, 2 + passed, f"turn {passed}", 2):
        passed += 1
    assert passed == OVERTAKES
    side.core.abort(1, name(1), 1.0)
    for stop in list(side.core.leases[name(1)].transfers):
        side.core.transfer_drained(stop, 1.0)
    assert side.core.leases[LATE].state is LeaseState.FILLING


def test_who_is_above_its_own_hard_quota_is_refused_at_once() -> None:
    side = Prefill(16, quotas=HARD)
    with pytest.raises(Exception, match="needs 5 pages; its namespace may have 4"):
        side.begin(name(1), "a", 5)
    ask = peer.Ask(transfer=1, name=name(2).to_proto(), namespace_id=NAMESPACE, pages=5, tokens=5 * PAGE)
    ask.last_full_digest = digests("a", 5)[-32:]
    side.ask_as(ask, name(2))
    with pytest.raises(Exception, match="its namespace may have 4"):
        side.begin(name(2), "a", 5)
    (failed,) = [effect for effect in side.core.take_effects() if hasattr(effect, "error")]
    assert failed.error.code == common.ERROR_INVALID_ARGUMENT


# -- its own requests ----------------------------------------------------------------------------------------------

PROTECTED = {OTHER_TENANT: Quota(soft=16)}


def protected_pages(side: Decode) -> None:
    """Half of a pool of 32 is the other tenant's."""
    side.admit(name(1), "o", 16, namespace=OTHER_TENANT, prefill="")
    side.core.finish(1, name(1), 16 * PAGE, b"", 0.0)
    side.take()
    assert side.cache.namespaces[OTHER_TENANT].soft_pages == 16


@pytest.mark.parametrize("waiting", [8, 40])
def test_who_cannot_fit_beside_soft_quotas_holds_up_nobody_of_its_own_tenant(waiting: int) -> None:
    side = Decode(32, queue=64, quotas=PROTECTED)
    protected_pages(side)
    for number in range(waiting):
        side.admit(name(10 + number), f"{number}", 20, prefill="", worker=2)
    side.admit(LATE, "small", 2, prefill="", worker=2)
    assert side.core.waiting_requests == waiting and not side.core.leases[LATE].queued


def test_small_requests_pass_those_over_their_own_tenants_quota() -> None:
    side = Decode(PAGES, queue=64, quotas={NAMESPACE: Quota(hard=16)})
    side.admit(name(1), "running", 10, prefill="")
    for number in range(31):
        side.admit(name(10 + number), f"{number}", 10, prefill="", worker=2)
    side.admit(LATE, "small", 2, prefill="", worker=2)
    assert side.core.waiting_requests == 31 and not side.core.leases[LATE].queued


def test_prompts_that_cannot_fit_beside_soft_quotas_hold_up_nobody_of_their_own_tenant() -> None:
    """Nor do they hide who is waited for by those that rest."""
    for resting in (0, 14):
        side = Prefill(32, table=64, quotas=PROTECTED)
        side.ask(name(1), 1, "o", 16, namespace=OTHER_TENANT)
        side.begin(name(1), "o", 16, namespace=OTHER_TENANT)
        side.compute(name(1), 16)
        side.core.send_completed(1, 1, 0.0)
        side.core.done(1, name(1), 0.0)
        if resting:
            side.ask(name(2), 2, "rest", resting)
            side.begin(name(2), "rest", resting)
            side.compute(name(2), resting)
            side.core.send_completed(1, 2, 0.0)
        for number in range(8):
            side.ask(name(10 + number), 10 + number, f"{number}", 20)
            side.begin(name(10 + number), f"{number}", 20)
        side.ask(LATE, 50, "small", 6)
        side.begin(LATE, "small", 6)
        assert bool(side.told("begun")) is not bool(resting)
        side.core.tick(1.1 * REST_SECONDS)
        side.take()
        assert side.core.entries[LATE].state is EntryState.COMPUTING


def test_running_requests_whose_pages_will_be_free_are_not_protected() -> None:
    """Of less than a page: nothing of them stays, so who waits for room is passed only so often."""
    side = Decode(32, queue=64, quotas=PROTECTED)

    def small(number: int) -> None:
        request = wire.Admit(name=name(number).to_proto(), tokens=2, tail_digest=bytes(32), max_new_tokens=1)
        side.core.admit(1, OTHER_TENANT, name(number), request, 60.0, 0.0)

    for number in range(16):
        small(number)
    side.admit(LATE, "large", 20, prefill="", worker=2)
    passed = 0
    while side.core.leases[LATE].queued and passed < 200:
        small(100 + passed)
        side.core.finish(1, name(passed if passed < 16 else 84 + passed), 2, b"", 0.0)
        passed += 1
    assert OVERTAKES <= passed <= 2 * OVERTAKES


def test_a_tenant_is_looked_at_again_once_something_of_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Decode(PAGES, queue=1000, quotas=HARD)
    for number in range(20):
        side.admit(name(number), f"{number}", 4)
    looked: list[object] = []
    reserve = Holds.reserve
    monkeypatch.setattr(Holds, "reserve", lambda self, hold: (looked.append(hold), reserve(self, hold))[1])
    for tick in range(10):
        side.tick(0.01 * tick)
    assert not looked
    side.admit(name(500), "new", 4)
    assert len(looked) == 20, "who comes may be let in where others are not"
    side.core.abort(1, name(0), 0.1)
    side.take()
    for stop in side.of(StopTransfer):
        side.core.transfer_drained(stop.transfer, 0.1)
    assert not side.core.leases[name(1)].queued


def test_a_tenant_is_looked_at_again_once_pages_that_it_shares_are_readable() -> None:
    """A request whose worker computes the rest itself can use them only then; that they come changes no count."""
    side = Decode(PAGES, quotas={NAMESPACE: Quota(hard=12)})
    side.admit(name(1), "x", 8, new=1)
    (transfer,) = side.core.leases[name(1)].transfers
    side.admit(name(2), "x", 9, prefill="", worker=2, new=1)
    assert side.core.leases[name(2)].queued, "without them it is over its quota"
    side.tick(0.05)
    side.arrive(transfer, range(8), 0.1)
    assert side.core.leases[name(2)].state is LeaseState.READY


def test_what_asked_prompts_could_have_is_added_up_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step: however many wait whom others' soft quotas keep out."""
    side = Prefill(16, table=1000, quotas={OTHER_TENANT: Quota(soft=8)})
    side.ask(name(1), 1, "o", 8, namespace=OTHER_TENANT)
    side.begin(name(1), "o", 8, namespace=OTHER_TENANT)
    side.compute(name(1), 8)
    side.core.send_completed(1, 1, 0.0)
    side.core.done(1, name(1), 0.0)
    protected = Namespace.soft_pages.fget
    counted = [0]

    def soft_pages(namespace: Namespace) -> int:
        counted[0] += 1
        assert protected is not None
        return int(protected(namespace))

    for number in range(2, 102):
        side.ask(name(number), number, f"{number}", 16)
        side.begin(name(number), f"{number}", 16)
    assert side.core.waiting_requests >= 100
    monkeypatch.setattr(Namespace, "soft_pages", property(soft_pages))
    assert side.core._supply.first_asked() == []
    assert 0 < counted[0] <= 8
