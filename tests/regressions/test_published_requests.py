"""Classes of bugs that were published for systems like this one: those of requests and caches. One test a class."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.effects import EndSend, FailAsk, OpenSend, SendDone, StartCopy, StartTransfer
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.limits import Name
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.radix.pool import PageState
from tests.regressions.request_cores import NAMESPACE, OTHER_TENANT, PAGE, Decode, Prefill, digests, name


def code(error: RequestError) -> str:
    return common.ErrorCode.Name(error.code)


def test_a_writer_that_reports_completion_proves_nothing_to_a_stopped_receiver() -> None:
    """Every write is complete, but the other daemon has not looked at any: it may still ask again, so the prompt's
    pages stay locked until it says Done.
    """
    side = Prefill(pages=8)
    side.ask(name(1), 1, "x", 4)
    side.begin(name(1), "x", 4)
    side.compute(name(1), 4)
    side.core.send_completed(1, 1, 0.0)
    assert side.cache.locks == 1
    side.begin(name(2), "y", 5)
    assert not side.told("begun"), "its pages were given to another prompt"
    side.ask(name(1), 2, "x", 4, first=2)
    assert [len(send.page_ids) for send in side.of(OpenSend)] == [2]
    side.core.send_completed(1, 2, 0.0)
    side.core.done(1, name(1), 0.0)
    side.ask(name(2), 3, "y", 5)
    assert side.told("begun") and not side.core.entries.get(name(1))


def test_a_stale_reference_is_not_answered_with_another_prompts_pages() -> None:
    """A name whose request has ended, a transfer number that was used, a range past the prompt."""
    side = Prefill()
    side.ask(name(1), 5, "x", 3)
    side.begin(name(1), "x", 3)
    side.compute(name(1), 3)
    side.core.send_completed(1, 5, 0.0)
    side.begin(name(2), "y", 3)
    for number, transfer, prompt, pages, first, why in (
        (name(2), 5, "y", 3, 0, "ERROR_FAILED_PRECONDITION"),  # stale transfer number
        (name(2), 6, "x", 3, 0, "ERROR_FAILED_PRECONDITION"),  # another prompt's digests
        (name(1), 7, "x", 9, 0, "ERROR_FAILED_PRECONDITION"),  # of another length
    ):
        side.ask(number, transfer, prompt, pages, first=first)
        assert [code(failed.error) for failed in side.of(FailAsk)] == [why]
        assert not side.of(OpenSend)
    last = digests("x", 3)[-32:]
    past = peer.Ask(transfer=8, name=name(1).to_proto(), namespace_id=NAMESPACE, pages=1, first_page=3, tokens=12)
    past.last_full_digest = last
    side.ask_as(past, name(1))
    assert [code(failed.error) for failed in side.of(FailAsk)] == ["ERROR_OUT_OF_RANGE"]
    assert not side.of(OpenSend)


def test_a_lost_acknowledgement_of_an_abort_is_asked_for_again() -> None:
    """Aborts are idempotent on both ways, also of what is long forgotten."""
    prefill = Prefill()
    prefill.ask(name(1), 1, "x", 3)
    prefill.begin(name(1), "x", 3)
    for _ in range(2):
        prefill.core.ask_end(1, 1)
        prefill.take()
        assert [end.transfer for end in prefill.of(EndSend)] == [1]
    prefill.core.send_ended(1, 1, 0.0)
    prefill.core.ask_end(1, 1)
    prefill.take()
    assert [end.transfer for end in prefill.of(EndSend)] == [1]
    decode = Decode(8)
    decode.admit(name(1), "x", 3)
    for _ in range(2):
        decode.core.abort(1, name(1), 0.0)
        decode.take()
        for started in decode.of(StartTransfer):
            decode.core.transfer_drained(started.ask.transfer, 0.0)
    decode.core.transfer_drained(1, 0.0)
    decode.core.abort(1, name(1), 0.0)
    decode.take()
    assert decode.told("ended") and decode.cache.locks == 0


def test_a_tenant_cannot_unlock_what_another_one_holds() -> None:
    """Locks are of a request, requests of a worker, and each worker's namespace comes from its own salt."""
    decode = Decode(16)
    decode.admit(name(1), "x", 3)
    locks, held = decode.cache.locks, decode.core.leases[name(1)].pages
    for act in (decode.core.abort, lambda w, n, now: decode.core.finish(w, n, 12, b"", now)):
        with pytest.raises(RequestError, match="another worker") as refused:
            act(2, name(1), 0.0)
        assert code(refused.value) == "ERROR_FAILED_PRECONDITION"
    assert decode.cache.locks == locks
    decode.admit(name(2), "x", 3, namespace=OTHER_TENANT)
    assert decode.core.leases[name(2)].matched == 0
    assert not set(decode.core.leases[name(2)].pages) & set(held)
    prefill = Prefill()
    prefill.begin(name(1), "x", 3)
    prefill.ask(name(1), 1, "x", 3, namespace=OTHER_TENANT)
    assert [code(failed.error) for failed in prefill.of(FailAsk)] == ["ERROR_FAILED_PRECONDITION"]
    assert not prefill.of(OpenSend)


def test_an_idle_worker_is_not_reaped() -> None:
    """A ready request has no deadline: for all that time its worker may be decoding, and its pages are its own."""
    decode = Decode(8)
    decode.admit(name(1), "x", 2, new=PAGE)
    decode.core.pages_arrived(1, [0, 1], 0.0)
    decode.core.transfer_completed(1, 0.0)
    decode.core.aux("p", name(1), b"first token", 0.0)
    pages = list(decode.core.leases[name(1)].pages)
    for hours in range(24):
        decode.core.tick(hours * 3600.0)
    assert decode.core.leases[name(1)].state is LeaseState.READY
    assert decode.core.leases[name(1)].pages == pages
    assert not decode.told("failed")


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (peer.Ask(transfer=1, name=name(1).to_proto()), "ERROR_FAILED_PRECONDITION"),  # no namespace, no digests
        (
            peer.Ask(
                transfer=1,
                name=name(1).to_proto(),
                namespace_id=NAMESPACE,
                tokens=12,
                last_full_digest=digests("x", 3)[-32:],
                first_page=(1 << 32) - 1,
                pages=(1 << 32) - 1,
            ),
            "ERROR_OUT_OF_RANGE",
        ),
        (peer.Ask(transfer=1, name=name(1).to_proto(), namespace_id=bytes(1 << 20)), "ERROR_INVALID_ARGUMENT"),
        (peer.Ask(transfer=1, name=name(1).to_proto(), tail_digest=bytes(33)), "ERROR_INVALID_ARGUMENT"),
    ],
)
def test_a_message_with_missing_fields_or_absurd_sizes_fails_its_request_only(ask: peer.Ask, why: str) -> None:
    side = Prefill()
    side.begin(name(1), "x", 3)
    side.ask_as(ask, Name(name(1).request_id, 1))
    assert [code(failed.error) for failed in side.of(FailAsk)] == [why]
    side.ask(name(1), 2, "x", 3)
    assert side.of(OpenSend)


def test_promised_host_pages_do_not_vanish_before_their_restore() -> None:
    """A request that waits for device pages has locked what it matched on the host: nothing evicts it."""
    decode = Decode(8, host_pages=4)
    decode.admit(name(1), "x", 4, prefill="p")
    decode.core.pages_arrived(1, range(4), 0.0)
    decode.core.transfer_completed(1, 0.0)
    decode.core.aux("p", name(1), b"first token", 0.0)
    decode.core.finish(1, name(1), 4 * PAGE, b"", 0.0)
    assert decode.cache.eviction.spill(4) == 4
    (spill,) = decode.cache.copies.take_started()
    decode.core.copy_ended(spill.number, [], 0, 0.0, 0.0)
    tree = decode.cache.namespaces[NAMESPACE].tree
    assert (tree.pages, tree.host_pages) == (0, 4)
    decode.admit(name(2), "x", 4)  # it has matched, and its restore runs or waits
    assert tree.evict_host(4) == 0
    decode.take() if not decode.of(StartCopy) else None
    (restore,) = decode.of(StartCopy)
    assert [decode.cache.host.state(row) for row in restore.started.copy.host] == [PageState.RESTORING] * 4  # type: ignore[union-attr]
    assert tree.evict_host(4) == 0
    decode.core.copy_ended(restore.started.number, [], 0, 0.0, 0.0)
    decode.core.aux("p", name(2), b"first token", 0.0)
    decode.take()
    assert decode.told("ready") and decode.core.leases[name(2)].delta_pages == 0


def test_a_prefill_that_is_not_wanted_any_more_is_let_go() -> None:
    """Found by the simulation: the decode leg ended while it waited for admission, and had asked for nothing; the
    prefill daemon held the computed prompt until its deadline.
    """
    decode = Decode(4)
    decode.admit(name(1), "x", 4)
    decode.admit(name(2), "y", 4)
    assert decode.core.leases[name(2)].state is LeaseState.WAITING
    decode.core.abort(1, name(2), 0.0)
    decode.take()
    (done,) = decode.of(SendDone)
    assert done.name == name(2)
    side = Prefill()
    side.begin(name(2), "y", 4)
    side.compute(name(2), 4)
    side.core.done(1, name(2), 0.0)
    side.take()
    assert side.told("ended") and side.cache.locks == 0 and not side.core.entries


def test_what_arrived_for_a_failed_attempt_is_not_asked_for_again() -> None:
    decode = Decode(16)
    decode.admit(name(1), "x", 4)
    decode.core.pages_arrived(1, [0, 1], 0.0)
    decode.core.transfer_failed(1, unavailable("the prefill worker is gone"), 0.0)
    decode.take()
    assert decode.told("failed")
    decode.core.transfer_drained(1, 0.0)
    decode.core.abort(1, name(1), 0.0)
    decode.admit(name(1, attempt=2), "x", 4, prefill="other")
    (started,) = decode.of(StartTransfer)
    assert (started.prefill, started.ask.first_page, started.ask.pages) == ("other", 2, 2)


@pytest.mark.parametrize("prefills", ["ppp", "abc"])
def test_each_follower_takes_over_when_the_one_before_it_fails(prefills: str) -> None:
    """The leader brings the pages and fails; its heir asks and is told UNAVAILABLE; the next one asks at once, for what
    is missing alone. Nobody waits for a deadline, and nobody asks while the one before it may still be written to.
    """
    decode = Decode(16)
    open_asks: dict[Name, StartTransfer] = {}
    for number, prefill in enumerate(prefills, 1):
        decode.admit(name(number), "x", 4, prefill=prefill)
        (open_asks[name(number)],) = decode.of(StartTransfer)
    pages = list(decode.core.leases[name(1)].pages)
    assert [open_asks[name(i)].ask.pages for i in (1, 2, 3)] == [4, 0, 0], "followers wait, and ask for the aux alone"
    decode.core.pages_arrived(open_asks[name(1)].ask.transfer, [0], 0.0)
    filling = open_asks[name(1)]
    for failing, heir in ((name(1), name(2)), (name(2), name(3))):
        assert decode.core.leases[heir].missing == set(pages[1:])
        decode.core.transfer_failed(filling.ask.transfer, unavailable("the prefill worker is gone"), 0.0)
        decode.take()
        assert [told.failed.name for told in decode.told("failed")] == [failing.to_proto()]
        assert not decode.of(StartTransfer), "the transfer that failed may still be written to its pages"
        decode.core.transfer_drained(filling.ask.transfer, 0.0)
        decode.take()
        if failing == name(2):  # the one that it began with
            decode.core.transfer_drained(open_asks[failing].ask.transfer, 0.0)
            decode.seen += decode.core.take_effects()
        (filling,) = decode.of(StartTransfer)
        prefill = prefills[int.from_bytes(heir.request_id, "big") - 1]
        assert (filling.ask.name, filling.prefill) == (heir.to_proto(), prefill)
        assert (filling.ask.first_page, filling.page_ids) == (1, tuple(pages[1:]))
    decode.core.pages_arrived(filling.ask.transfer, [1, 2, 3], 0.0)
    decode.core.transfer_completed(filling.ask.transfer, 0.0)
    decode.core.aux(prefills[2], name(3), b"first token", 0.0)
    decode.take()
    assert [ready.ready.name for ready in decode.told("ready")] == [name(3).to_proto()]
