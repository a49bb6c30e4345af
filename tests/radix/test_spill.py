"""Spills to the host: locks, splits and prunes while a copy is under way; what is dropped without room."""

from __future__ import annotations

import pytest

from kvferry.radix.pool import PageState
from kvferry.radix.tree import OUTPUT, SPILL
from tests.radix.letters import chain
from tests.radix.two_tiers import TwoTiers

FREE, CACHED, SPILLING = PageState.FREE, PageState.CACHED, PageState.SPILLING
NO_PARENT = bytes(32)


@pytest.fixture
def world() -> TwoTiers:
    return TwoTiers()


def test_spill_keeps_the_pages_until_its_copy_ends(world: TwoTiers) -> None:
    pages = world.put("abcd")
    evicted = world.tree.evict(4)
    copy = evicted.spill
    assert copy is not None and evicted.freed == [] and evicted.dropped == 0
    assert (copy.kind, copy.device, len(set(copy.host))) == (SPILL, pages, 4)
    assert copy.digests == chain("abcd")
    assert copy.parents == NO_PARENT + chain("abc")
    assert copy.outputs == bytes(4)
    assert set(world.pool.states(pages)) == {SPILLING} == set(world.host.states(copy.host))
    tree = world.tree
    assert (tree.pages, tree.evictable, tree.spilling, tree.host_pages, tree.copies) == (4, 4, 4, 4, 1)
    assert world.matched("abcd") == (4, 4)
    assert world.evict(4) is None
    world.check()
    done = tree.finish_copy(copy.id)
    assert (done.freed, done.readable, done.lost, done.removed) == (pages, [], [], [])
    assert set(world.pool.states(pages)) == {FREE} and set(world.host.states(copy.host)) == {CACHED}
    assert (tree.pages, tree.evictable, tree.spilling, tree.host_pages, tree.host_evictable) == (0, 0, 0, 4, 4)
    assert (tree.nodes, tree.copies) == (1, 0)
    assert world.matched("abcd") == (4, 0)
    world.check()


def test_all_leaves_of_a_call_go_in_one_copy_and_the_last_is_cut(world: TwoTiers) -> None:
    first, second = world.put("abc"), world.put("xyz", kind=OUTPUT)
    copy = world.evict(5)
    assert copy is not None
    assert copy.device == first + second[1:]
    assert copy.digests == chain("abc") + chain("xyz")[32:]
    assert copy.parents == NO_PARENT + chain("ab") + chain("xy")
    assert copy.outputs == b"\0\0\0\1\1"
    assert world.evict(5) is None  # the head of xyz is no leaf before its tail has gone
    world.tree.finish_copy(copy.id)
    assert world.matched("xyz") == (3, 1)
    world.check()


def test_parents_wait_for_their_children(world: TwoTiers) -> None:
    world.put("ab")
    world.put("abcd")
    copy = world.evict(10)
    assert copy is not None and len(copy.device) == 2
    assert (world.tree.evictable, world.tree.spilling) == (4, 2)
    world.tree.finish_copy(copy.id)
    assert world.spill(2)
    assert world.matched("abcd") == (4, 0)


def test_a_host_copy_makes_eviction_immediate(world: TwoTiers) -> None:
    world.put("abcd")
    world.spill(4)
    world.tree.finish_copy(world.restore(lock := world.hold("abcd")).id)
    world.tree.unlock(lock)
    pages = world.tree.path_pages(world.hold("ab"))
    evicted = world.tree.evict(4)
    assert (len(evicted.freed), evicted.spill, evicted.dropped) == (2, None, 0)
    assert world.matched("abcd") == (4, 2)
    assert set(world.pool.states(pages)) == {CACHED}
    world.check()


def test_without_room_on_the_host_the_leaf_is_dropped_with_what_hangs_below() -> None:
    world = TwoTiers(host_pages=2)
    world.put("ab")
    world.put("abcd")
    world.spill(2)  # cd
    world.put("xy")
    assert world.host.free == 0
    evicted = world.tree.evict(1)
    assert (len(evicted.freed), evicted.spill, evicted.dropped) == (1, None, 1)
    assert world.matched("abcd") == (1, 1)
    assert (world.host.free, world.tree.host_pages) == (2, 0)
    world.check()
    assert world.evict(1) is not None  # there is room again


def test_a_cut_leaf_that_is_dropped_loses_what_hangs_below() -> None:
    world = TwoTiers(host_pages=1)
    pages = world.put("abcd")
    world.spill(1)
    evicted = world.tree.evict(1)
    assert evicted.freed == [pages[2]]
    assert world.matched("abcd") == (2, 2)
    world.check()


def test_spilled_within_a_bound(world: TwoTiers) -> None:
    first, second = world.put("ab"), world.put("xy")
    evicted = world.tree.evict(4, host_room=3)
    assert evicted.spill is not None and evicted.spill.device == first
    assert (evicted.freed, evicted.dropped) == (second, 2)
    world.check()


def test_a_lock_keeps_a_spilled_node_on_the_device(world: TwoTiers) -> None:
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    lock = world.hold("ab")  # splits it
    assert (world.tree.evictable, world.tree.spilling, lock.device_pages) == (2, 2, 2)
    world.check()
    world.tree.unlock(lock)
    assert (world.tree.evictable, world.tree.spilling) == (4, 2)
    done = world.tree.finish_copy(copy.id)
    assert done.freed == pages[2:]
    assert world.matched("abcd") == (4, 2)
    assert world.tree.host_evictable == 4
    world.check()
    assert world.tree.evict(2).freed == pages[:2]


def test_a_child_keeps_a_spilled_node_on_the_device(world: TwoTiers) -> None:
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    world.put("abcdef", start=4)
    assert world.tree.spilling == 0
    assert world.tree.finish_copy(copy.id).freed == []
    assert set(world.pool.states(pages)) == {CACHED}
    world.check()


def test_both_halves_of_a_split_spill_leave(world: TwoTiers) -> None:
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    branch = world.put("abx", start=2)
    assert world.tree.spilling == 2
    assert world.tree.prune(world.hold("abx"), 2) == branch
    world.pool.free_pages(branch)
    world.check()
    # That lock was over ab: it stays. Without one it goes as well.
    assert world.tree.finish_copy(copy.id).freed == pages[2:]
    world.check()


def test_a_split_without_a_lock_lets_both_halves_leave() -> None:
    world = TwoTiers(host_pages=8)
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    world.put("abx", start=2)
    world.host.allocate(world.host.free)
    dropped = world.tree.evict(1)
    assert dropped.dropped == 1 and world.tree.spilling == 4
    world.check()
    assert sorted(world.tree.finish_copy(copy.id).freed) == pages
    assert world.matched("abcd") == (4, 0)
    world.check()


def test_prune_takes_a_node_from_under_its_copy(world: TwoTiers) -> None:
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    assert world.tree.prune(world.hold("abcd"), 1) == []
    assert (world.tree.pages, world.tree.host_pages, world.tree.spilling) == (1, 1, 0)
    assert world.matched("abcd") == (1, 1)
    assert set(world.pool.states(pages)) == {SPILLING}
    world.check()
    again = world.put("abcd")  # other pages
    assert set(again).isdisjoint(pages)
    assert world.tree.finish_copy(copy.id).freed == pages[1:]
    assert world.host.free == world.host.pages - 1
    world.check()


def test_a_failed_spill_is_not_tried_again(world: TwoTiers) -> None:
    first, second = world.put("ab"), world.put("xy")
    copy = world.evict(4)
    assert copy is not None
    done = world.tree.finish_copy(copy.id, [first[1]])
    assert done.freed == second
    assert set(world.pool.states(first)) == {CACHED}
    assert (world.tree.host_pages, world.tree.evictable) == (2, 2)
    world.check()
    evicted = world.tree.evict(2)
    assert (sorted(evicted.freed), evicted.spill, evicted.dropped) == (first, None, 2)
    world.check()


def test_finish_names_what_is_wrong(world: TwoTiers) -> None:
    world.put("ab")
    copy = world.evict(2)
    assert copy is not None
    with pytest.raises(IndexError, match="copy_id is 7"):
        world.tree.finish_copy(7)
    with pytest.raises(ValueError, match="failed: 1 of its pages"):
        world.tree.finish_copy(copy.id, [*copy.device, 9])
    with pytest.raises(IndexError, match="page is 32"):
        world.tree.finish_copy(copy.id, [32])
    world.check()
    world.tree.finish_copy(copy.id)
    with pytest.raises(IndexError, match="no such copy"):
        world.tree.finish_copy(copy.id)
