"""Restores from the host: splits and followers while a copy is under way; pages that are lost."""

from __future__ import annotations

import pytest

from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE
from tests.radix.letters import chain
from tests.radix.two_tiers import TwoTiers

LEASED, ARRIVING, CACHED, RESTORING = PageState.LEASED, PageState.ARRIVING, PageState.CACHED, PageState.RESTORING


@pytest.fixture
def world() -> TwoTiers:
    return TwoTiers()


def test_restore_makes_the_path_readable(world: TwoTiers) -> None:
    head = world.put("ab")
    world.put("abcd")
    rows = world.spill(2)
    lock = world.hold("abcd")
    assert (lock.pages, lock.device_pages) == (4, 2)
    assert world.tree.path_pages(lock) == head
    pages = world.pool.allocate(2)
    copy = world.tree.restore(lock, pages)
    assert copy is not None
    assert (copy.kind, copy.device, copy.host, copy.digests) == (RESTORE, pages, rows, chain("abcd")[64:])
    assert copy.parents == chain("abcd")[32:96]
    assert set(world.pool.states(pages)) == {RESTORING} == set(world.host.states(rows))
    tree = world.tree
    assert (tree.pages, tree.restoring, tree.cached, tree.evictable, lock.device_pages) == (4, 2, 2, 0, 4)
    assert tree.path_pages(lock) == head + pages
    assert world.matched("abcd") == (4, 4)
    assert tree.host_evictable == 0
    world.check()
    done = tree.finish_copy(copy.id)
    assert (done.readable, done.lost, done.removed, done.freed) == (pages, [], [], [])
    assert (tree.restoring, tree.cached, tree.host_evictable) == (0, 4, 2)
    tree.unlock(lock)
    assert tree.evictable == 4
    world.check()


def test_restore_holds_the_path_by_itself(world: TwoTiers) -> None:
    world.put("abcd")
    world.spill(4)
    lock = world.hold("abcd")
    copy = world.restore(lock)
    world.tree.unlock(lock)
    assert (world.tree.locks, world.tree.evictable) == (0, 0)
    assert world.tree.evict(4).freed == [] and world.tree.evict_host(4) == 0
    assert world.tree.flush().skipped == 4
    world.check()
    assert world.tree.finish_copy(copy.id).readable == copy.device
    assert world.tree.evictable == 4
    world.check()


def test_nothing_to_restore(world: TwoTiers) -> None:
    world.put("ab")
    lock = world.hold("ab")
    assert world.tree.restore(lock, []) is None
    page = world.pool.allocate(1)
    with pytest.raises(ValueError, match="pages has 1 entries; the path has 0"):
        world.tree.restore(lock, page)
    assert world.pool.state(page[0]) is LEASED


def test_restored_nodes_may_be_split_and_followed(world: TwoTiers) -> None:
    world.put("abcd")
    world.spill(4)
    lock = world.hold("abcd")
    copy = world.restore(lock)
    follower = world.hold("ab")
    branch = world.put("abxy", start=2)
    world.check()
    world.tree.unlock(lock)
    assert world.tree.finish_copy(copy.id).readable == copy.device
    assert world.matched("abxy") == (4, 4)
    world.tree.unlock(follower)
    assert world.tree.evictable == 6
    assert world.pool.states(branch) == bytes([CACHED] * 2)
    world.check()


def test_lost_pages_arrive_by_other_means(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd")
    world.spill(2)
    world.spill(2)
    lock = world.hold("abcd")
    copy = world.restore(lock)
    a, b, c, d = copy.device
    done = world.tree.finish_copy(copy.id, [d])
    assert (done.readable, done.lost, done.removed) == ([a, b, c], [d], [])
    assert list(world.pool.states(copy.device)) == [CACHED, CACHED, CACHED, ARRIVING]
    assert (world.tree.arriving, world.tree.host_pages) == (1, 2)
    world.check()
    with pytest.raises(AssertionError, match="ARRIVING"):
        world.tree.unlock(lock)
    world.tree.arrived([d])
    world.tree.unlock(lock)
    assert world.tree.evictable == 4
    world.check()


def test_lost_pages_that_nobody_waits_for_go_with_what_hangs_below(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd")
    world.spill(2)
    world.spill(2)
    world.put("abcdef")
    assert world.matched("abcdef") == (6, 6)
    world.spill(2)
    world.evict(4)
    assert world.matched("abcdef") == (6, 0)
    lock = world.hold("abcd")
    copy = world.restore(lock)
    world.tree.unlock(lock)
    other = world.hold("ab")
    a, b, c, d = copy.device
    done = world.tree.finish_copy(copy.id, [c])
    assert (done.readable, done.lost, done.removed) == ([a, b], [], [c, d])
    assert world.pool.state(c) is ARRIVING and world.pool.state(d) is CACHED
    world.pool.free_pages(done.removed)
    assert world.matched("abcdef") == (2, 2)
    assert world.tree.host_pages == 2
    world.tree.unlock(other)
    world.check()


def test_pages_that_arrive_for_the_restore_alone_go_with_it(world: TwoTiers) -> None:
    """A failed restore leaves an ARRIVING page above host-only ones; its filler gives up while those are restored."""
    world.put("ab")
    world.put("abcd")
    world.spill(2)
    world.spill(2)
    lock = world.hold("ab")
    first = world.restore(lock)
    assert world.tree.finish_copy(first.id, [first.device[1]]).lost == [first.device[1]]
    longer = world.hold("abcd")
    copy = world.restore(longer)
    assert world.tree.prune(longer, 1) == []
    assert world.tree.prune(lock, 1) == []  # the copy holds it
    world.check()
    done = world.tree.finish_copy(copy.id)
    assert done.readable == done.lost == []
    assert done.removed == first.device + copy.device
    world.pool.free_pages(done.removed)
    assert (world.tree.pages, world.tree.arriving, world.tree.nodes) == (0, 0, 0)
    world.check()
