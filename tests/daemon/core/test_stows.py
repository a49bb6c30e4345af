"""Computed prompts that wait in the host tier: whose pages and rows are whose, whatever comes between."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import EndSend, OpenSend, StartCopy
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.tree import BACKUP
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Effects, digests, name

A, B = name(1), name(2)
TOKENS = 2 * PAGE + 1  # two full pages and a partial one
TAIL = b"t" * 32
SHAPE = BlockShape(blocks=40, block_tokens=PAGE, page_size=PAGE)


class Prefill(Effects):
    def __init__(self, host_pages: int = 4, *, in_blocks: bool = True) -> None:
        super().__init__()
        self.cache = Cache(40, PAGE, host_pages=host_pages, limits=CacheLimits(in_blocks=in_blocks))
        self.core = PrefillCore(self.cache, PrefillLimits(table=8))
        self.transfers = iter(range(1, 100))

    def compute(self, number: Name, first_block: int = 0, *, blocks: bool = True) -> None:
        begin = wire.Begin(name=number.to_proto(), digests=digests("x", 2), tokens=TOKENS, tail_digest=TAIL)
        named = SHAPE.of_begin(begin) if blocks else None
        self.core.begin(1, NAMESPACE, number, begin, DEADLINE, 0.0, named)
        self.core.progress(1, number, TOKENS, 0.0, range(first_block, first_block + 3) if blocks else ())
        self.core.tail_zeroed(number, 0.0)
        self.core.aux(1, number, b"first token", 0.0)
        self.take()

    def stow(self, number: Name) -> list[CopyStarted]:
        self.core.stow(1, number, 0.0)
        self.take()
        return [effect.started for effect in self.of(StartCopy)]

    def stowed(self, number: Name) -> list[int]:
        """Has it be in the tier. Returns its rows."""
        (copy,) = self.stow(number)
        self.end(copy)
        (event,) = self.told("stowed")
        assert event.stowed.stored and self.free == 40
        return copy.copy.host

    def end(self, copy: CopyStarted, *failed: int) -> None:
        self.core.copy_ended(copy.number, failed, len(failed), 0.0, 0.0)
        self.take()

    def ask(self, number: Name, first: int = 0) -> list[OpenSend]:
        ask = peer.Ask(
            transfer=next(self.transfers),
            name=number.to_proto(),
            namespace_id=NAMESPACE,
            first_page=first,
            pages=3 - first,
            tokens=TOKENS,
            last_full_digest=digests("x", 2)[-32:],
            tail_digest=TAIL,
        )
        self.core.ask(7, number, ask, DEADLINE, 0.0)
        self.take()
        return self.of(OpenSend)

    def take(self) -> None:
        self.seen = self.core.take_effects()

    @property
    def free(self) -> int:
        self.cache.settle()
        return self.cache.pool.free

    @property
    def nothing_is_held(self) -> bool:
        return not self.core.entries and self.free == 40 and self.cache.host_pages == 0


def test_a_prompt_in_the_tier_holds_no_page_and_is_sent_from_its_rows() -> None:
    side = Prefill()
    side.compute(A)
    (copy,) = side.stow(A)
    assert copy.copy.kind == BACKUP and copy.copy.device == side.core.entries[A].prompt.pages
    assert len(copy.copy.host) == 3 and copy.copy.digests == digests("x", 2) + TAIL
    assert copy.copy.parents == bytes(32) + digests("x", 2)
    assert not side.told("stowed") and side.free == 37
    side.end(copy)
    (event,) = side.told("stowed")
    assert event.stowed.stored and not side.told("ended")
    assert side.free == 40 and side.cache.host_pages == 3
    (send,) = side.ask(A, first=1)
    assert send.from_rows and send.page_ids == tuple(copy.copy.host[1:]) and send.pages_ready == 3
    side.core.done(7, A, 0.0)
    side.take()
    assert side.cache.host_pages == 3, "a gather may still read them"
    side.core.send_completed(7, send.transfer, 0.0)
    side.take()
    assert side.told("ended") and side.nothing_is_held


def test_one_that_is_asked_for_again_is_sent_from_its_rows_again() -> None:
    side = Prefill()
    side.compute(A)
    rows = side.stowed(A)
    (first,) = side.ask(A)
    side.core.send_completed(7, first.transfer, 0.0)
    side.take()
    (again,) = side.ask(A, first=2)
    assert again.from_rows and again.page_ids == (rows[2],)


def test_one_that_is_asked_for_while_it_is_copied_keeps_its_pages() -> None:
    side = Prefill()
    side.compute(A)
    (copy,) = side.stow(A)
    (send,) = side.ask(A)
    assert not send.from_rows and send.page_ids == tuple(copy.copy.device)
    side.end(copy)
    (event,) = side.told("stowed")
    assert not event.stowed.stored and event.stowed.asked
    assert side.cache.host_pages == 0 and side.free == 37


def test_one_that_is_sent_whole_while_it_is_copied_ends_behind_the_copy() -> None:
    side = Prefill()
    side.compute(A)
    (copy,) = side.stow(A)
    (send,) = side.ask(A)
    side.core.send_completed(7, send.transfer, 0.0)
    side.core.done(7, A, 0.0)
    side.take()
    assert not side.told("ended") and side.free == 37, "the copy still reads its blocks"
    side.end(copy)
    assert side.told("ended") and not side.told("stowed") and side.nothing_is_held


def test_one_that_was_asked_for_is_not_moved() -> None:
    side = Prefill()
    side.compute(A)
    side.ask(A)
    assert side.stow(A) == []
    (event,) = side.told("stowed")
    assert not event.stowed.stored and event.stowed.asked


@pytest.mark.parametrize("host_pages", [0, 2, 5])
def test_where_the_tier_has_no_room_the_pages_stay(host_pages: int) -> None:
    side = Prefill(host_pages)
    if host_pages == 5:
        side.compute(B, 10)
        side.stowed(B)
    side.compute(A)
    assert side.stow(A) == []
    (event,) = side.told("stowed")
    assert not event.stowed.stored and not event.stowed.asked and side.free == 37
    if host_pages == 5:
        side.core.abort(1, B, 0.0)
        side.take()
        side.stowed(A)


def test_what_cannot_be_moved_stays_and_what_is_over_is_not_answered() -> None:
    side = Prefill()
    side.core.stow(1, A, 0.0, can=False)
    side.take()
    assert not side.seen
    side.compute(A)
    side.core.stow(1, A, 0.0, can=False)
    side.take()
    (event,) = side.told("stowed")
    assert not event.stowed.stored and not event.stowed.asked and not side.of(StartCopy)


def test_an_abort_in_the_tier() -> None:
    side = Prefill()
    side.compute(A)
    side.stowed(A)
    side.core.abort(1, A, 0.0)
    side.take()
    assert side.told("ended") and side.nothing_is_held


def test_an_abort_while_it_is_copied_ends_behind_the_copy() -> None:
    side = Prefill()
    side.compute(A)
    (copy,) = side.stow(A)
    side.core.abort(1, A, 0.0)
    side.take()
    assert not side.told("ended") and side.free == 37 and side.cache.host_pages == 3
    side.end(copy)
    assert side.told("ended") and not side.told("stowed") and side.nothing_is_held


def test_an_abort_while_it_is_sent_from_its_rows() -> None:
    side = Prefill()
    side.compute(A)
    side.stowed(A)
    (send,) = side.ask(A)
    side.core.abort(1, A, 0.0)
    side.take()
    assert side.of(EndSend) and not side.told("ended") and side.cache.host_pages == 3, "a gather may read them"
    side.core.send_ended(7, send.transfer, 0.0)
    side.take()
    assert side.told("ended") and side.nothing_is_held


def test_a_wrong_copy_leaves_it_where_it_was() -> None:
    side = Prefill()
    side.compute(A)
    (copy,) = side.stow(A)
    side.end(copy, copy.copy.device[2])
    (event,) = side.told("stowed")
    assert not event.stowed.stored and not event.stowed.asked
    assert side.free == 37 and side.cache.host_pages == 0
    side.stowed(A)


def test_a_deadline_in_the_tier() -> None:
    side = Prefill()
    side.compute(A)
    side.stowed(A)
    side.core.tick(DEADLINE + 1)
    side.take()
    (failed,) = side.told("failed")
    assert "no decode daemon asked for it" in failed.failed.error.message
    assert side.nothing_is_held


def test_an_engine_that_ends_has_nothing_in_the_tier() -> None:
    side = Prefill(8)
    side.compute(A)
    side.stowed(A)
    side.compute(B, 10)
    (copy,) = side.stow(B)
    side.core.worker_gone(1, 0.0)
    side.core.pool_leaves(0.0)
    side.take()
    assert A not in side.core.entries and B in side.core.entries and side.cache.copies.running == 1
    side.end(copy)
    assert side.nothing_is_held


def test_what_a_worker_may_not_say() -> None:
    side = Prefill()
    side.core.stow(1, A, 0.0)  # it crossed Ended
    side.take()
    assert not side.seen
    side.compute(A)
    (copy,) = side.stow(A)
    with pytest.raises(RequestError, match="it comes once, behind aux"):
        side.core.stow(1, A, 0.0)
    side.end(copy)
    with pytest.raises(RequestError, match="it comes once, behind aux"):
        side.core.stow(1, A, 0.0)
    with pytest.raises(RequestError, match="another worker"):
        side.core.stow(2, A, 0.0)
    pages = Prefill(in_blocks=False)
    pages.compute(A, blocks=False)
    with pytest.raises(RequestError, match="no blocks to be given back"):
        pages.core.stow(1, A, 0.0)
