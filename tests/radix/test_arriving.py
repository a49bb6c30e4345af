"""Radix tree: pages that arrive, and prunes of those that never will."""

from __future__ import annotations

import pytest

from kvferry.radix.pool import PageState
from tests.radix.letters import chain
from tests.radix.one_tier import OneTier

LEASED, ARRIVING, CACHED = PageState.LEASED, PageState.ARRIVING, PageState.CACHED


@pytest.fixture
def world() -> OneTier:
    return OneTier()


def test_arriving_pages_become_cached(world: OneTier) -> None:
    world.put("ab")
    lock, pages = world.arriving("abcde")
    assert (world.tree.arriving, world.tree.cached, world.tree.evictable) == (3, 2, 0)
    assert world.matched("abcde") == 5
    follower = world.hold("abcd")  # splits the arriving node
    world.check()
    world.tree.arrived(pages[1:2])
    world.tree.arrived([pages[2], pages[0]])
    assert (world.tree.arriving, world.tree.cached) == (0, 5)
    world.tree.unlock(lock)
    assert world.tree.evictable == 1
    world.tree.unlock(follower)
    assert world.tree.evictable == 5
    world.check()


def test_fresh_arriving_pages_are_not_evictable(world: OneTier) -> None:
    world.put("ab")
    pages = world.pool.allocate(2, ARRIVING)
    result = world.tree.insert(chain("abcd"), pages, start=2)
    assert world.evict(10) == []  # nor is what is above them
    assert world.tree.evictable == 2
    lock = world.tree.lock(result.match)
    assert world.tree.evictable == 0
    world.check()
    assert world.tree.prune(lock, 2) == pages
    assert world.tree.evictable == 2
    world.check()


def test_leased_and_arriving_pages_in_one_insert(world: OneTier) -> None:
    pages = world.pool.allocate(4)
    world.pool.move(pages[1:3], LEASED, ARRIVING)
    lock = world.tree.lock(world.tree.insert(chain("abcd"), pages).match)
    assert list(world.pool.states(pages)) == [CACHED, ARRIVING, ARRIVING, CACHED]
    assert (world.tree.arriving, world.tree.cached) == (2, 2)
    world.check()
    assert world.tree.prune(lock, 1) == pages[1:]
    assert world.tree.evictable == 1
    world.check()


def test_last_lock_over_arriving_pages_is_not_unlocked(world: OneTier) -> None:
    lock, _ = world.arriving("abc")
    with pytest.raises(AssertionError, match="ARRIVING"):
        world.tree.unlock(lock)


def test_prune_takes_only_what_no_other_lock_holds(world: OneTier) -> None:
    lock, pages = world.arriving("abcdef")
    follower = world.hold("abcd")
    assert world.tree.prune(lock, 1) == pages[4:]
    world.pool.free_pages(pages[4:])
    assert world.matched("abcdef") == 4
    world.check()
    world.tree.arrived(pages[:2])
    assert world.tree.prune(follower, 2) == pages[2:4]
    world.pool.free_pages(pages[2:4])
    assert (world.matched("abcdef"), world.tree.evictable, world.tree.locks) == (2, 2, 0)
    world.check()


def test_prune_takes_what_hangs_below(world: OneTier) -> None:
    lock, first = world.arriving("abc")
    longer, second = world.arriving("abcde")
    branch = world.put("abxy", start=2)
    world.tree.arrived(second)
    world.tree.unlock(longer)
    assert world.tree.evictable == 4
    removed = world.tree.prune(lock, 0)
    assert sorted(removed) == sorted([*first, *second, *branch])
    assert removed[:2] == first[:2]
    assert (world.tree.pages, world.tree.nodes, world.tree.evictable, world.tree.arriving) == (0, 0, 0, 0)
    world.pool.free_pages(removed)
    world.check()


def test_prune_inside_a_node_and_at_its_end(world: OneTier) -> None:
    lock, pages = world.arriving("abcdef")
    world.tree.arrived(pages[:4])
    assert world.tree.prune(lock, 4) == pages[4:]
    assert (world.matched("abcdef"), world.tree.evictable) == (4, 4)
    world.check()
    world.pool.free_pages(pages[4:])
    lock = world.hold("abcd")
    assert world.tree.prune(lock, 4) == []
    assert world.tree.evictable == 4
    with pytest.raises(AssertionError, match="start is 5"):
        world.tree.prune(world.hold("abcd"), 5)


def test_prune_of_readable_pages(world: OneTier) -> None:
    pages = world.put("abcd")
    pages += world.put("abcdef", start=4)
    assert sorted(world.tree.prune(world.hold("abcd"), 1)) == pages[1:]
    assert (world.tree.pages, world.tree.evictable, world.tree.nodes) == (1, 1, 1)
    world.check()


def test_prune_refuses_to_leave_arriving_pages_behind(world: OneTier) -> None:
    lock, _ = world.arriving("abcd")
    with pytest.raises(AssertionError, match="ARRIVING"):
        world.tree.prune(lock, 2)


def test_pages_of_another_tree_do_not_arrive(world: OneTier) -> None:
    page = world.pool.allocate(1, ARRIVING)
    with pytest.raises(AssertionError, match="another tree"):
        world.tree.arrived(page)


def test_a_page_does_not_arrive_for_two_places(world: OneTier) -> None:
    (page,) = world.pool.allocate(1, ARRIVING)
    with pytest.raises(AssertionError, match="named twice"):
        world.tree.insert(chain("ab"), [page, page])
    assert (world.tree.pages, world.tree.arriving) == (0, 0)
    world.check()
