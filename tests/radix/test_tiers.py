"""Two tiers: spill, restore, backup; locks, splits and prunes while a copy is under way; what goes from the host."""

from __future__ import annotations

import hashlib

import pytest

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import BACKUP, OUTPUT, RESTORE, SPILL, Copy, Lock, PagedRadixTree

FREE, LEASED, ARRIVING, CACHED = PageState.FREE, PageState.LEASED, PageState.ARRIVING, PageState.CACHED
SPILLING, RESTORING = PageState.SPILLING, PageState.RESTORING
NO_PARENT = bytes(32)


def chain(path: str) -> bytes:
    """One page a letter; chained."""
    digests, parent = b"", b"root"
    for letter in path:
        parent = hashlib.sha256(parent + letter.encode()).digest()
        digests += parent
    return digests


class World:
    def __init__(self, pages: int = 32, host_pages: int = 32, write_through_hits: int = 0) -> None:
        self.pool = PagePool(pages)
        self.host = PagePool(host_pages, tier="host")
        self.tree = PagedRadixTree(self.pool, self.host, write_through_hits=write_through_hits)

    def put(self, path: str, *, start: int = 0, kind: int = 0) -> list[int]:
        """Inserts LEASED pages; frees the duplicates. Returns the pages that stayed."""
        pages = self.pool.allocate(len(path) - start)
        result = self.tree.insert(chain(path), pages, start, kind)
        self.pool.free_pages(result.duplicates)
        self.check()
        return pages[len(result.duplicates) :]

    def hold(self, path: str) -> Lock:
        return self.tree.lock(self.tree.match(chain(path)))

    def evict(self, pages: int) -> Copy | None:
        spill = self.tree.evict(pages).spill
        self.check()
        return spill

    def spill(self, pages: int) -> list[int]:
        """To the end: host-only then. Returns the host pages."""
        copy = self.evict(pages)
        assert copy is not None and len(copy.device) == pages
        assert self.tree.finish_copy(copy.id).freed
        self.check()
        return copy.host

    def restore(self, lock: Lock) -> Copy:
        pages = self.pool.allocate(lock.pages - lock.device_pages)
        copy = self.tree.restore(lock, pages)
        assert copy is not None
        self.check()
        return copy

    def matched(self, path: str) -> tuple[int, int]:
        match = self.tree.match(chain(path))
        return match.pages, match.device_pages

    def check(self) -> None:
        self.tree.check()
        self.pool.check()
        self.host.check()


@pytest.fixture
def world() -> World:
    return World()


# -- spill ----------------------------------------------------------------------------------------------------------


def test_spill_keeps_the_pages_until_its_copy_ends(world: World) -> None:
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


def test_all_leaves_of_a_call_go_in_one_copy_and_the_last_is_cut(world: World) -> None:
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


def test_parents_wait_for_their_children(world: World) -> None:
    world.put("ab")
    world.put("abcd")
    copy = world.evict(10)
    assert copy is not None and len(copy.device) == 2
    assert (world.tree.evictable, world.tree.spilling) == (4, 2)
    world.tree.finish_copy(copy.id)
    assert world.spill(2)
    assert world.matched("abcd") == (4, 0)


def test_a_host_copy_makes_eviction_immediate(world: World) -> None:
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
    world = World(host_pages=2)
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
    world = World(host_pages=1)
    pages = world.put("abcd")
    world.spill(1)
    evicted = world.tree.evict(1)
    assert evicted.freed == [pages[2]]
    assert world.matched("abcd") == (2, 2)
    world.check()


def test_spilled_within_a_bound(world: World) -> None:
    first, second = world.put("ab"), world.put("xy")
    evicted = world.tree.evict(4, host_room=3)
    assert evicted.spill is not None and evicted.spill.device == first
    assert (evicted.freed, evicted.dropped) == (second, 2)
    world.check()


def test_a_lock_keeps_a_spilled_node_on_the_device(world: World) -> None:
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


def test_a_child_keeps_a_spilled_node_on_the_device(world: World) -> None:
    pages = world.put("abcd")
    copy = world.evict(4)
    assert copy is not None
    world.put("abcdef", start=4)
    assert world.tree.spilling == 0
    assert world.tree.finish_copy(copy.id).freed == []
    assert set(world.pool.states(pages)) == {CACHED}
    world.check()


def test_both_halves_of_a_split_spill_leave(world: World) -> None:
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
    world = World(host_pages=8)
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


def test_prune_takes_a_node_from_under_its_copy(world: World) -> None:
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


def test_a_failed_spill_is_not_tried_again(world: World) -> None:
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


def test_finish_names_what_is_wrong(world: World) -> None:
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


# -- restore --------------------------------------------------------------------------------------------------------


def test_restore_makes_the_path_readable(world: World) -> None:
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


def test_restore_holds_the_path_by_itself(world: World) -> None:
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


def test_nothing_to_restore(world: World) -> None:
    world.put("ab")
    lock = world.hold("ab")
    assert world.tree.restore(lock, []) is None
    page = world.pool.allocate(1)
    with pytest.raises(ValueError, match="pages has 1 entries; the path has 0"):
        world.tree.restore(lock, page)
    assert world.pool.state(page[0]) is LEASED


def test_restored_nodes_may_be_split_and_followed(world: World) -> None:
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


def test_lost_pages_arrive_by_other_means(world: World) -> None:
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


def test_lost_pages_that_nobody_waits_for_go_with_what_hangs_below(world: World) -> None:
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


def test_pages_that_arrive_for_the_restore_alone_go_with_it(world: World) -> None:
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


# -- inserting below and over the host tier -------------------------------------------------------------------------


def test_insert_gives_pages_to_what_is_on_the_host(world: World) -> None:
    world.put("abcd")
    world.spill(4)
    pages = world.pool.allocate(6)
    result = world.tree.insert(chain("abcdef"), pages)
    assert (result.existing, result.duplicates, result.match.device_pages) == (0, [], 6)
    assert world.tree.host_evictable == 4
    assert world.tree.path_pages(world.hold("abcdef")) == pages
    world.check()


@pytest.mark.parametrize("path", ["ab", "abx"])
def test_insert_splits_what_it_completes_in_part(world: World, path: str) -> None:
    world.put("abcd")
    world.spill(4)
    pages = world.put(path)
    assert len(pages) == len(path)
    assert world.matched("abcd") == (4, 2)
    assert world.tree.host_pages == 4


def test_insert_behind_a_start_on_the_host_is_refused(world: World) -> None:
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


def test_prune_frees_host_copies(world: World) -> None:
    world.put("ab")
    world.put("abcd")
    world.spill(2)
    lock = world.hold("abcd")
    assert len(world.tree.prune(lock, 1)) == 1
    assert (world.tree.host_pages, world.tree.nodes, world.host.free) == (0, 1, world.host.pages)
    world.check()


# -- the host's own eviction ----------------------------------------------------------------------------------------


def test_the_host_gives_up_what_the_device_has_first(world: World) -> None:
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


def test_host_leaves_go_in_order_and_locked_ones_stay(world: World) -> None:
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


def test_pages_under_a_copy_are_not_evicted_from_the_host(world: World) -> None:
    world.put("ab")
    copy = world.evict(2)
    assert copy is not None
    assert (world.tree.evict_host(2), world.tree.host_evictable, world.tree.host_pages) == (0, 0, 2)
    world.tree.finish_copy(copy.id)
    assert world.tree.evict_host(2) == 2
    world.check()


# -- write-through --------------------------------------------------------------------------------------------------


def test_backups_wait_for_enough_hits() -> None:
    world = World(write_through_hits=2)
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
    world = World(host_pages=5, write_through_hits=1)
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
    world = World(write_through_hits=1)
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


def test_no_backups_without_a_host() -> None:
    tree = PagedRadixTree(PagePool(4), write_through_hits=1)
    tree.lock(tree.insert(chain("ab"), tree.device.allocate(2)).match)
    assert tree.backups(4) is None


# -- flush, views ---------------------------------------------------------------------------------------------------


def test_flush_takes_what_nothing_holds(world: World) -> None:
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


def test_dump_shows_the_nodes(world: World) -> None:
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
