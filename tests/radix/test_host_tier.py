"""The host tier of a tree: inserts over it, its own eviction, write-through, flush and views."""

from __future__ import annotations

import pytest

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import BACKUP, OUTPUT, PagedRadixTree
from tests.radix.letters import chain
from tests.radix.two_tiers import TwoTiers

LEASED, ARRIVING, SPILLING = PageState.LEASED, PageState.ARRIVING, PageState.SPILLING


@pytest.fixture
def world() -> TwoTiers:
    return TwoTiers()


# -- inserting below and over the host tier -------------------------------------------------------------------------


def test_insert_gives_pages_to_what_is_on_the_host(world: TwoTiers) -> None:
    world.put("abcd")
    world.spill(4)
    pages = world.pool.allocate(6)
    result = world.tree.insert(chain("abcdef"), pages)
    assert (result.existing, result.duplicates, result.match.device_pages) == (0, [], 6)
    assert world.tree.host_evictable == 4
    assert world.tree.path_pages(world.hold("abcdef")) == pages
    world.check()


@pytest.mark.parametrize("path", ["ab", "abx"])
def test_insert_splits_what_it_completes_in_part(world: TwoTiers, path: str) -> None:
    world.put("abcd")
    world.spill(4)
    pages = world.put(path)
    assert len(pages) == len(path)
    assert world.matched("abcd") == (4, 2)
    assert world.tree.host_pages == 4


def test_insert_behind_a_start_on_the_host_is_refused(world: TwoTiers) -> None:
    world.put("abcd")
    world.spill(2)
    pages = world.pool.allocate(2)
    with pytest.raises(ValueError, match="start is 3; only 2 pages of the path are held on the device"):
        world.tree.insert(chain("abcde"), pages, 3)
    world.pool.move(pages[:1], LEASED, ARRIVING)
    with pytest.raises(AssertionError, match="ARRIVING for a page that the host holds"):
        world.tree.insert(chain("abcd"), pages, 2)
    assert list(world.pool.states(pages)) == [ARRIVING, LEASED]
    world.check()


def test_prune_frees_host_copies(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd")
    world.spill(2)
    lock = world.hold("abcd")
    assert len(world.tree.prune(lock, 1)) == 1
    assert (world.tree.host_pages, world.tree.nodes, world.host.free) == (0, 1, world.host.pages)
    world.check()


# -- the host's own eviction ----------------------------------------------------------------------------------------


def test_the_host_gives_up_what_the_device_has_first(world: TwoTiers) -> None:
    world.put("ab")
    world.put("xy")
    world.spill(4)
    lock = world.hold("xy")
    world.tree.finish_copy(world.restore(lock).id)
    assert world.tree.oldest_host() is not None and world.tree.oldest_host() < (0, 0.0)  # type: ignore[operator]
    assert world.tree.host_evictable == 4
    assert world.tree.evict_host(1) == 1
    assert world.matched("ab") == (2, 0)
    world.check()
    assert world.tree.evict_host(1) == 1
    assert world.tree.evict_host(1) == 1
    assert world.matched("ab") == (1, 0)
    assert world.matched("xy") == (2, 2)
    assert world.tree.evict_host(9) == 1
    assert (world.tree.host_pages, world.tree.oldest_host()) == (0, None)
    world.check()


def test_host_leaves_go_in_order_and_locked_ones_stay(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd")
    world.put("xy")
    copy = world.evict(4)
    assert copy is not None
    world.tree.finish_copy(copy.id)
    world.spill(2)
    lock = world.hold("ab")
    assert world.tree.host_evictable == 4
    assert world.tree.evict_host(3) == 3
    assert world.matched("abcd") == (2, 0)
    assert world.matched("xy") == (1, 0)
    assert world.tree.evict_host(9) == 1
    world.tree.unlock(lock)
    assert world.tree.evict_host(9) == 2
    assert world.tree.nodes == 0
    world.check()


def test_pages_under_a_copy_are_not_evicted_from_the_host(world: TwoTiers) -> None:
    world.put("ab")
    copy = world.evict(2)
    assert copy is not None
    assert (world.tree.evict_host(2), world.tree.host_evictable, world.tree.host_pages) == (0, 0, 2)
    world.tree.finish_copy(copy.id)
    assert world.tree.evict_host(2) == 2
    world.check()


# -- write-through --------------------------------------------------------------------------------------------------


def test_backups_wait_for_enough_hits() -> None:
    world = TwoTiers(write_through_hits=2)
    pages = world.put("abcd")
    world.tree.unlock(world.hold("abcd"))
    assert world.tree.backups(8) is None
    lock = world.hold("ab")
    copy = world.tree.backups(8)
    assert copy is not None and (copy.kind, copy.device) == (BACKUP, pages[:2])
    assert set(world.pool.states(copy.device)) == {SPILLING} == set(world.host.states(copy.host))
    assert world.tree.backups(8) is None
    world.check()
    world.tree.unlock(lock)
    assert world.tree.evictable == 4 and world.tree.spilling == 0
    spill = world.evict(4)
    assert spill is not None and spill.device == pages[2:]
    world.tree.finish_copy(spill.id)
    assert world.tree.evict(2).freed == []
    assert world.tree.finish_copy(copy.id).freed == []
    assert world.matched("abcd") == (4, 2)
    assert world.tree.evict(2).freed == pages[:2]
    world.check()


def test_backups_take_no_more_than_is_asked_and_free() -> None:
    world = TwoTiers(host_pages=5, write_through_hits=1)
    pages = world.put("abcdefgh")
    world.tree.unlock(world.hold("abcdefgh"))
    first = world.tree.backups(3)
    assert first is not None and first.device == pages[:3]
    world.check()
    second = world.tree.backups(9)
    assert second is not None and second.device == pages[3:5]
    assert world.tree.backups(9) is None
    world.check()
    for copy in (second, first):
        world.tree.finish_copy(copy.id)
    world.check()


def test_backups_wait_for_what_arrives() -> None:
    world = TwoTiers(write_through_hits=1)
    pages = world.pool.allocate(2, ARRIVING)
    lock = world.tree.lock(world.tree.insert(chain("ab"), pages).match)
    assert world.tree.backups(9) is None
    world.tree.arrived(pages)
    copy = world.tree.backups(9)
    assert copy is not None and copy.device == pages
    world.tree.finish_copy(copy.id, pages[:1])
    assert (world.tree.host_pages, world.host.free) == (0, world.host.pages)
    assert world.tree.backups(9) is None  # it failed
    world.tree.unlock(lock)
    world.check()


def test_what_goes_next_is_copied_ahead() -> None:
    """Chats in the order of their use, from each the end first; a part that two chats share goes behind both."""
    world = TwoTiers()
    old, new, other = world.put("abcd"), world.put("xyz"), world.put("abq", start=2)
    first = world.tree.backups_ahead(9, 2)
    assert first is not None and (first.kind, first.device) == (BACKUP, old[2:])
    world.tree.finish_copy(first.id)
    world.check()
    second = world.tree.backups_ahead(9, 5)
    assert second is not None and second.device == new
    world.tree.finish_copy(second.id)
    third = world.tree.backups_ahead(9, 9)
    assert third is not None and sorted(third.device) == sorted([*old[:2], *other])
    world.tree.finish_copy(third.id)
    assert world.tree.backups_ahead(9, 9) is None
    world.check()
    result = world.tree.evict(9)
    assert result.spill is None and len(result.freed) == 8, "each eviction was free"


def test_copies_ahead_take_the_end_of_a_long_path_and_what_is_free() -> None:
    world = TwoTiers(host_pages=5)
    pages = world.put("abcdefgh")
    first = world.tree.backups_ahead(3, 8)
    assert first is not None and first.device == pages[5:]
    world.check()
    world.tree.finish_copy(first.id)
    second = world.tree.backups_ahead(9, 8)
    assert second is not None and second.device == pages[3:5], "the host has no more room"
    world.tree.finish_copy(second.id)
    assert world.tree.backups_ahead(9, 8) is None
    assert sorted(world.tree.evict(5).freed) == pages[3:]


def test_nothing_that_is_held_is_copied_ahead() -> None:
    world = TwoTiers()
    pages = world.put("abcd")
    lock = world.hold("ab")
    copy = world.tree.backups_ahead(9, 9)
    assert copy is not None and copy.device == pages[2:]
    world.tree.finish_copy(copy.id)
    assert world.tree.backups_ahead(9, 9) is None
    world.tree.unlock(lock)
    assert world.tree.backups_ahead(9, 9) is not None
    world.check()


def test_no_backups_without_a_host() -> None:
    tree = PagedRadixTree(PagePool(4), write_through_hits=1)
    tree.lock(tree.insert(chain("ab"), tree.device.allocate(2)).match)
    assert tree.backups(4) is None and tree.backups_ahead(4, 4) is None


# -- flush, views ---------------------------------------------------------------------------------------------------


def test_flush_takes_what_nothing_holds(world: TwoTiers) -> None:
    world.put("abcd")
    world.put("xyz")
    world.spill(4)
    world.put("uvw")
    copy = world.evict(4)  # xyz, and w
    assert copy is not None
    lock = world.hold("ab")
    flushed = world.tree.flush()
    # cd, v and u are below and above what stays: ab is locked, xyz and w are copied.
    assert (flushed.device, flushed.host, flushed.skipped) == (0, 2, 8)
    world.check()
    world.tree.finish_copy(copy.id)
    world.tree.unlock(lock)
    flushed = world.tree.flush()
    assert (flushed.device, flushed.host, flushed.skipped) == (2, 6, 0)
    assert (world.tree.nodes, world.pool.free, world.host.free) == (0, world.pool.pages, world.host.pages)
    world.check()


def test_the_device_is_not_forgotten_while_its_pages_are_in_use(world: TwoTiers) -> None:
    world.put("ab")
    lock = world.hold("ab")
    with pytest.raises(AssertionError, match="in use"):
        world.tree.forget_device()
    world.tree.unlock(lock)
    copy = world.evict(2)
    assert copy is not None
    with pytest.raises(AssertionError, match="in use"):
        world.tree.forget_device()
    world.tree.finish_copy(copy.id)
    pages = world.pool.allocate(1, ARRIVING)
    world.tree.insert(chain("x"), pages)
    with pytest.raises(AssertionError, match="in use"):
        world.tree.forget_device()
    world.tree.arrived(pages)
    assert world.tree.forget_device() == 1
    assert world.matched("ab") == (2, 0)
    world.check()


def test_dump_shows_the_nodes(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd", kind=OUTPUT)
    world.spill(2)
    lock = world.tree.lock(world.tree.match(chain("abcd")), priority=-3)
    upper, lower = world.tree.dump(10)
    assert (upper.depth, upper.pages, upper.device, upper.host, upper.output) == (0, 2, True, False, False)
    assert (lower.depth, lower.pages, lower.device, lower.host, lower.output) == (2, 2, False, True, True)
    assert (lower.first_digest, lower.last_digest) == (chain("abc")[-32:], chain("abcd")[-32:])
    assert (lower.locks, lower.hits, lower.priority, lower.orphan, lower.copying) == (1, 1, -3, False, False)
    world.restore(lock)
    assert [view.copying for view in world.tree.dump(10)] == [False, True]
    assert len(world.tree.dump(1)) == 1
    assert world.tree.index_bytes > 4 * 36


def test_trees_need_two_pools() -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError, match="host: the same pool"):
        PagedRadixTree(pool, pool)


def test_the_pages_of_a_match_are_those_on_the_device(world: TwoTiers) -> None:
    pages = world.put("abcd")
    world.spill(2)
    for path in ("ab", "abc", "abcde"):
        match = world.tree.match(chain(path))
        assert match.pages == min(len(path), 4) and world.tree.match_pages(match) == pages[:2]
    world.spill(2)
    assert world.tree.match_pages(world.tree.match(chain("abcd"))) == []
