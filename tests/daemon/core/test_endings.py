"""Requests over an engine's blocks that end by being ready, since their Admit was their worker's last word."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import StartCopy, StartTransfer, StopTransfer
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import NO_BLOCKS, BlockShape
from kvferry.proto import worker_pb2 as wire
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Effects, digests, name

A, B = name(1), name(2)
SHAPE = BlockShape(blocks=40, block_tokens=2, page_size=PAGE)
PER_PAGE = SHAPE.per_page


class Decode(Effects):
    def __init__(self) -> None:
        super().__init__()
        cache = Cache(80, PAGE, host_pages=16, limits=CacheLimits(in_blocks=True))
        self.core = DecodeCore(cache, DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=8))

    def admit(self, pages: int = 2, *, prefill: str = "p", held: int = 0) -> None:
        """Of prompt x, in the first blocks."""
        request = wire.Admit(
            name=A.to_proto(),
            digests=digests("x", pages),
            tokens=pages * PAGE,
            prefill=prefill,
            max_new_tokens=1,
            held_tokens=held * PAGE,
            blocks=range(pages * PER_PAGE),
            ends_itself=True,
        )
        self.core.admit(1, NAMESPACE, A, request, DEADLINE, 0.0, SHAPE.named_by(request))
        self.take()

    def arrive(self, pages: int = 2) -> int:
        """All of it, and the first token; its transfer goes on. The transfer's number."""
        (transfer,) = self.of(StartTransfer)
        number = transfer.ask.transfer
        self.core.aux("p", A, b"first", 0.0)
        self.core.pages_arrived(number, range(pages), 0.0)
        self.take()
        assert self.told("ready") and A in self.core.leases
        return number

    def take(self) -> None:
        self.seen = self.core.take_effects()


def test_a_load_ends_with_the_word_that_its_transfer_is_whole() -> None:
    side = Decode()
    side.admit()
    number = side.arrive()
    assert not side.of(StopTransfer) and not side.told("ended"), "its last pages were just heard of"
    side.core.transfer_completed(number, 0.0)
    side.take()
    assert not side.told("ended") and not side.core.leases, "Ready was its end"
    assert (side.core.counters.finished, side.core.counters.aborted) == (1, 0)
    assert side.core.transfer_counters.completed == 1


def test_a_load_whose_token_comes_last_ends_at_once() -> None:
    side = Decode()
    side.admit()
    (transfer,) = side.of(StartTransfer)
    side.core.pages_arrived(transfer.ask.transfer, range(2), 0.0)
    side.core.transfer_completed(transfer.ask.transfer, 0.0)
    side.core.aux("p", A, b"first", 0.0)
    side.take()
    assert side.told("ready") and not side.told("ended") and not side.core.leases


def test_a_transfer_that_goes_on_is_stopped_with_the_next_tick() -> None:
    side = Decode()
    side.admit()
    number = side.arrive()
    side.core.tick(0.1)
    side.take()
    assert [stop.transfer for stop in side.of(StopTransfer)] == [number] and not side.told("ended")
    side.core.transfer_drained(number, 0.1)
    side.take()
    assert not side.core.leases and side.core.counters.finished == 1


@pytest.mark.parametrize("crosses", [True, False])
def test_one_end_answers_an_abort_whether_it_crosses_ready_or_not(crosses: bool) -> None:
    side = Decode()
    side.admit()
    number, told = side.arrive(), 0
    steps = [lambda: side.core.transfer_completed(number, 0.0), lambda: side.core.abort(1, A, 0.0)]
    for step in steps if crosses else [steps[1], lambda: side.core.transfer_drained(number, 0.0)]:
        step()
        side.take()
        told += len(side.told("ended"))
    assert told == 1 and not side.core.leases, "a second one would end the next request of its name"


def test_what_is_handed_in_ends_with_its_copy() -> None:
    side = Decode()
    side.admit(prefill="", held=2)
    (store,) = [effect.started for effect in side.of(StartCopy)]
    assert side.told("ready") and not side.told("ended")
    with pytest.raises(RequestError, match="another request's that has not ended"):
        side.core.admit(1, NAMESPACE, B, written(B), DEADLINE, 0.0, SHAPE.named_by(written(B)))
    side.core.copy_ended(store.number, [], 0, 0.0, 0.0)
    side.take()
    assert side.told("ended") and not side.core.leases
    assert side.core.cache.namespace(NAMESPACE).tree.match(digests("x", 2)).pages == 2


def written(number: object) -> wire.Admit:
    """A load into the same blocks."""
    return wire.Admit(
        name=B.to_proto(), digests=digests("y", 1), tokens=PAGE, prefill="p", max_new_tokens=1, blocks=range(PER_PAGE)
    )


@pytest.mark.parametrize("aborts", [True, False])
def test_one_that_is_aborted_or_lost_before_it_ends_did_not_finish(aborts: bool) -> None:
    side = Decode()
    side.admit()
    number = side.arrive()
    if aborts:
        side.core.abort(1, A, 0.0)
    else:
        side.core.worker_lost(1, 0.0)
    side.core.tick(0.1)
    side.core.transfer_drained(number, 0.1)
    side.take()
    assert (side.core.counters.finished, side.core.counters.aborted) == (0, 1)
    assert bool(side.core.leases) is not aborts
    side.core.worker_gone(1, 0.2)
    assert not side.core.leases


def test_who_waits_has_what_those_leave_that_end() -> None:
    side = Decode()
    side.core.cache.pool.allocate(side.core.cache.pool.pages - 2)
    side.admit()
    number = side.arrive()
    second = wire.Admit(
        name=B.to_proto(),
        digests=digests("y", 2),
        tokens=2 * PAGE,
        prefill="p",
        max_new_tokens=1,
        blocks=range(20, 20 + 2 * PER_PAGE),
    )
    side.core.admit(1, NAMESPACE, B, second, DEADLINE, 0.0, SHAPE.named_by(second))
    side.take()
    assert side.core.waiting_requests == 1
    side.core.transfer_completed(number, 0.0)
    side.take()
    assert [event.admitted.name for event in side.told("admitted")] == [B.to_proto()], "in the same step"


def test_what_needs_its_workers_words_does_not_end_itself() -> None:
    core = Decode().core
    plain = wire.Admit(
        name=A.to_proto(), digests=digests("x", 1), tokens=PAGE, prefill="p", max_new_tokens=1, ends_itself=True
    )
    with pytest.raises(RequestError, match="ends_itself is set; without blocks it cannot be"):
        core.admit(1, NAMESPACE, A, plain, DEADLINE, 0.0, NO_BLOCKS)
    held = wire.Admit(
        name=A.to_proto(),
        digests=digests("x", 2),
        tokens=2 * PAGE,
        prefill="p",
        max_new_tokens=1,
        held_tokens=PAGE,
        blocks=range(PER_PAGE, 2 * PER_PAGE),
        blocks_from=PAGE,
        held_blocks=range(PER_PAGE),
        ends_itself=True,
    )
    with pytest.raises(RequestError, match=f"ends_itself is set; with {PER_PAGE} held_blocks it cannot be"):
        core.admit(1, NAMESPACE, A, held, DEADLINE, 0.0, SHAPE.named_by(held))
    assert not core.leases
