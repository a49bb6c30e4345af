"""What keeps wrong bytes out of an engine's blocks, each by the shortest way to the harm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.daemon.core import tier_copies
from kvferry.daemon.core.cache import Cache, CacheLimits, FlushCount
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import BindPages, StartCopy, StartTransfer
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.prefill import PrefillCore, PrefillLimits
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.services import admin
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.tree import BACKUP, RESTORE
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Effects, digests, name

A, B, C, D = (name(number) for number in range(1, 5))
SHAPE = BlockShape(blocks=40, block_tokens=2, page_size=PAGE)
PER_PAGE = SHAPE.per_page
NO_QUOTA = Quota()


def blocks_of(first: int, pages: int) -> range:
    return range(first, first + pages * PER_PAGE)


class Decode(Effects):
    def __init__(self, host_pages: int = 16, quota: Quota = NO_QUOTA) -> None:
        super().__init__()
        limits = CacheLimits(in_blocks=True, default_quota=quota)
        self.cache = Cache(80, PAGE, host_pages=host_pages, limits=limits)
        self.core = DecodeCore(self.cache, DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=8))

    def admit(self, number: Name, pages: int, first: int, *, prefill: str = "p", held: int = 0) -> None:
        """Of prompt x, with blocks from `first` on for the pages that are not held."""
        request = wire.Admit(
            name=number.to_proto(),
            digests=digests("x", pages),
            tokens=pages * PAGE,
            prefill=prefill,
            max_new_tokens=1,
            held_tokens=held * PAGE,
            blocks=blocks_of(first, pages if held == pages else pages - held),
            blocks_from=0 if held == pages else held * PAGE,
        )
        self.core.admit(1, NAMESPACE, number, request, DEADLINE, 0.0, SHAPE.named_by(request))
        self.take()

    def store(self, number: Name, pages: int, first: int) -> list[CopyStarted]:
        """Hands so many pages of prompt x in. Returns the copies that it has started."""
        self.admit(number, pages, first, prefill="", held=pages)
        assert self.told("ready")
        self.core.finish(1, number, pages * PAGE, b"", 0.0)
        self.take()
        return self.copies()

    def copies(self) -> list[CopyStarted]:
        return [effect.started for effect in self.of(StartCopy)]

    def end(self, copy: CopyStarted, *failed: int) -> None:
        self.core.copy_ended(copy.number, failed, len(failed), 0.0, 0.0)
        self.take()

    def stored(self, pages: int) -> None:
        (copy,) = self.store(name(90), pages, 0)
        self.end(copy)
        assert self.held() == pages and not self.core.leases

    def held(self) -> int:
        """Pages of prompt x that the tree holds, all in the host tier."""
        return self.cache.namespace(NAMESPACE).tree.match(digests("x", 10)).pages

    def behind(self) -> int:
        """Rows that wait for what is before them."""
        return self.core._keeper.blocks.rows_behind(self.cache.namespace(NAMESPACE))

    def take(self) -> None:
        self.seen = self.core.take_effects()


def test_a_block_that_is_written_is_nobody_elses_until_its_request_has_ended() -> None:
    side = Decode()
    side.admit(A, 2, 0)
    with pytest.raises(RequestError, match="blocks has 3, which is another request's that has not ended"):
        side.admit(B, 2, 3)
    assert B not in side.core.leases
    side.core.abort(1, A, 0.0)
    for effect in side.core.take_effects():
        assert not isinstance(effect, StartCopy)
    assert A in side.core.leases, "its transfer has not drained"
    with pytest.raises(RequestError, match="another request's"):
        side.admit(B, 2, 3)
    side.core.transfer_drained(1, 0.0)
    side.take()
    assert side.told("ended")
    side.admit(B, 2, 3)


def test_a_request_has_not_ended_while_a_load_of_it_runs() -> None:
    side = Decode()
    side.stored(2)
    side.admit(A, 2, 10, prefill="", held=0)
    (load,) = side.copies()
    assert load.copy.kind == RESTORE
    side.core.abort(1, A, 0.0)
    side.take()
    assert not side.told("ended")
    with pytest.raises(RequestError, match="another request's"):
        side.admit(B, 2, 10)
    side.end(load)
    assert side.told("ended") and not side.core.leases


def test_a_request_has_not_ended_while_a_store_of_it_runs() -> None:
    side = Decode()
    (store,) = side.store(A, 2, 0)
    assert store.copy.kind == BACKUP and not side.told("ended")
    side.end(store)
    assert side.told("ended")


def test_pages_are_bound_before_a_copy_touches_them() -> None:
    side = Decode()
    side.stored(2)
    side.admit(A, 3, 10)
    kinds = [type(effect) for effect in side.seen]
    (bound,) = side.of(BindPages)
    assert bound.pages == tuple(side.core.leases[A].pages) and bound.blocks == tuple(blocks_of(10, 3))
    assert kinds.index(BindPages) < kinds.index(StartCopy)


def test_a_load_begins_with_the_step_that_admits_while_prefill_computes_the_rest() -> None:
    side = Decode()
    side.stored(2)
    side.admit(A, 4, 10)
    (load,), (asks,) = side.copies(), side.of(StartTransfer)
    assert (load.copy.kind, load.copy.device) == (RESTORE, side.core.leases[A].pages[:2])
    assert (asks.ask.first_page, asks.page_ids) == (2, tuple(side.core.leases[A].pages[2:]))
    assert side.told("admitted")


def test_what_was_loaded_wrongly_is_forgotten() -> None:
    side = Decode()
    side.stored(3)
    side.admit(A, 4, 10)
    (load,) = side.copies()
    assert len(load.copy.device) == 3
    side.end(load, load.copy.device[1])
    assert side.held() == 1, "what is behind the first wrong page is forgotten with it"
    side.core.abort(1, A, 0.0)
    side.take()
    assert side.held() == 1


def test_a_page_on_its_way_to_the_tier_is_not_stored_again() -> None:
    side = Decode()
    (first,) = side.store(A, 2, 0)
    assert side.store(B, 2, 10) == []
    (longer,) = side.store(C, 3, 20)
    assert len(longer.copy.host) == 1
    side.end(first)
    side.end(longer)
    assert side.held() == 3 and side.cache.host_pages == 3


@pytest.mark.parametrize("wrong", [False, True])
def test_what_two_requests_share_is_stored_whichever_copy_ends_first(wrong: bool) -> None:
    side = Decode()
    (first,) = side.store(A, 2, 0)
    (second,) = side.store(B, 4, 10)
    (third,) = side.store(C, 5, 20)
    for behind in (third, second):
        side.end(behind)
        assert side.held() == 0 and side.told("ended"), "its blocks are not needed any more"
    assert side.cache.host_pages == 5 and side.behind() == 3
    side.end(first, *first.copy.device[:wrong])
    assert side.held() == side.cache.host_pages == (0 if wrong else 5)
    assert side.cache.tiers.unstored == ({"prefix": 1 + 3} if wrong else {}) and not side.behind()
    copies = side.store(D, 5, 30)
    for again in copies:
        side.end(again)
    assert side.held() == 5 and len(copies) == wrong, "nothing is still on its way"


def test_rows_wait_for_what_is_before_them_as_far_as_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.daemon.core.blocks.block_tier.MAX_BEHIND", 1)
    side = Decode()
    (first,) = side.store(A, 2, 0)
    (second,) = side.store(B, 3, 10)
    (third,) = side.store(C, 4, 20)
    side.end(second)
    side.end(third)
    assert side.cache.host_pages == 3 and side.cache.tiers.unstored == {"behind": 1}
    side.end(first)
    assert side.held() == side.cache.host_pages == 3


def test_rows_that_wait_for_what_is_before_them_count_in_a_quota() -> None:
    side = Decode(quota=Quota(host_hard=2))
    side.store(A, 1, 0)
    (second,) = side.store(B, 3, 10)
    side.end(second)
    assert side.behind() == 2 and not side.store(C, 5, 20)
    assert side.cache.host_pages == 3 and side.cache.tiers.unstored == {"room": 2}


class Full(Decode):
    """One copy to the tier at a time, and one store that waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvferry.daemon.core.tier_copies.MAX_COPIES", 1)
        monkeypatch.setattr("kvferry.daemon.core.blocks.block_tier.MAX_WAITING", 1)
        super().__init__()
        (self.first,) = self.store(A, 1, 0)
        assert not self.store(B, 3, 10) and not self.told("ended"), "its blocks are to be read yet"


def test_a_store_waits_for_a_copy_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Full(monkeypatch)
    with pytest.raises(RequestError, match="another request's"):
        side.admit(D, 2, 10)
    assert not side.store(C, 4, 20) and side.told("ended"), "a second one does not wait"
    assert side.cache.tiers.unstored == {"copies": 3}
    side.end(side.first)
    (second,) = side.copies()
    assert len(second.copy.host) == 2
    side.end(second)
    assert side.held() == 3 and side.told("ended") and not side.core.leases


def test_what_waits_is_stored_from_the_first_page_that_is_lacking_then(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Full(monkeypatch)
    side.end(side.first, side.first.copy.device[0])
    (again,) = side.copies()
    assert again.copy.digests == digests("x", 3)
    side.end(again)
    assert side.held() == 3 and not side.core.leases


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_waits_ends_with_its_request(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    side = Full(monkeypatch)
    if lost:
        side.core.worker_lost(1, 0.0)
    else:
        side.core.abort(1, B, 0.0)
    side.take()
    assert B not in side.core.leases and side.cache.tiers.unstored == {"ended": 2}
    side.end(side.first)
    assert not side.copies() and not side.core.leases and side.held() == 1


def test_what_the_tier_has_no_room_for_is_counted() -> None:
    side = Decode(host_pages=2)
    (store,) = side.store(A, 5, 0)
    side.end(store)
    assert side.held() == 2 and side.cache.tiers.unstored == {"room": 3}


def test_a_store_ends_at_its_first_wrong_page() -> None:
    side = Decode()
    (store,) = side.store(A, 3, 0)
    side.end(store, store.copy.device[1])
    assert side.held() == side.cache.host_pages == 1


def test_a_prompt_is_computed_as_far_as_its_blocks_are_named() -> None:
    side = Effects()
    core = PrefillCore(Cache(40, PAGE, limits=CacheLimits(in_blocks=True)), PrefillLimits(table=8))
    begin = wire.Begin(name=A.to_proto(), digests=digests("x", 2), tokens=2 * PAGE, blocks=[7])
    core.begin(1, NAMESPACE, A, begin, DEADLINE, 0.0, SHAPE.of_begin(begin))
    side.seen = core.take_effects()
    (begun,) = side.told("begun")
    assert not begun.begun.pages
    first, second = core.entries[A].prompt.pages
    assert [(bound.pages, bound.blocks) for bound in side.of(BindPages)] == [((first, second), (7, -1, -1, -1))]
    core.progress(1, A, PAGE, 0.0, [5])
    side.seen = core.take_effects()
    assert not side.told("failed")
    assert [(bound.pages, bound.blocks) for bound in side.of(BindPages)] == [((first,), (7, 5))]
    core.progress(1, A, 2 * PAGE, 0.0, [9])
    side.seen = core.take_effects()
    (failed,) = side.told("failed")
    assert failed.failed.error.message == "tokens is 8; blocks of 6 are named"
    assert not side.of(BindPages)


def flush(side: Decode) -> FlushCount:
    return side.cache.flush([side.cache.namespace(NAMESPACE)])


def test_what_is_being_stored_when_all_is_flushed_enters_the_tree_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Decode()
    (first,) = side.store(A, 2, 0)
    (second,) = side.store(B, 4, 10)
    side.end(second)
    assert side.behind() == 2, "it waits for the first"
    monkeypatch.setattr(tier_copies, "MAX_COPIES", 1)
    assert not side.store(C, 5, 20), "it waits for a copy"
    assert flush(side) == FlushCount(device=0, host=2, skipped=2)
    side.end(first)
    assert not side.held() and not side.behind() and not side.core.leases
    assert side.cache.host is not None and side.cache.host.counts().free == 16, "every row is free"
    assert side.cache.tiers.unstored == {"flushed": 2 + 2 + 5}


def test_what_is_stored_behind_a_flush_waits_for_nothing_before_it() -> None:
    side = Decode()
    (before,) = side.store(A, 2, 0)
    flush(side)
    (after,) = side.store(B, 2, 10)
    side.end(before)
    assert side.copies() == [] and not side.held()
    side.end(after)
    assert side.held() == 2 and not side.core.leases


def test_what_was_admitted_before_a_flush_and_handed_in_behind_it_enters_the_tree_no_more() -> None:
    side = Decode()
    side.admit(A, 2, 0, prefill="", held=2)
    flush(side)
    side.core.finish(1, A, 2 * PAGE, b"", 0.0)
    side.take()
    assert side.copies() == [] and not side.held() and not side.core.leases
    assert side.cache.tiers.unstored == {"flushed": 2}


def test_a_flush_that_is_to_free_all_is_refused_beside_a_store() -> None:
    side = Decode()
    (store,) = side.store(A, 2, 0)
    daemon = SimpleNamespace(cache=side.cache)
    with pytest.raises(RequestError, match=r"0 pages are held by requests, .* \(1 under way\); nothing was freed"):
        admin._check_nothing_held(cast(AnySide, daemon), [side.cache.namespace(NAMESPACE)])
    side.end(store)
    admin._check_nothing_held(cast(AnySide, daemon), [side.cache.namespace(NAMESPACE)])
