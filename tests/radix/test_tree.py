"""Radix tree: match and insert, locks and splits under them, eviction order."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import Clock, PagedRadixTree
from tests.radix.letters import chain
from tests.radix.one_tier import OneTier

LEASED, CACHED = PageState.LEASED, PageState.CACHED


@pytest.fixture
def world() -> OneTier:
    return OneTier()


# -- match and insert -----------------------------------------------------------------------------------------------


def test_empty_tree(world: OneTier) -> None:
    tree = world.tree
    assert tree.match(b"").pages == world.matched("abc") == 0
    assert (tree.pages, tree.cached, tree.nodes, tree.locks, tree.evictable) == (0, 0, 0, 0, 0)
    assert tree.oldest() is None
    assert world.evict(5) == []
    world.check()


@pytest.mark.parametrize(
    ("path", "pages"), [("a", 1), ("abc", 3), ("abcdef", 6), ("abcdefgh", 6), ("abx", 2), ("xbc", 0), ("abcdex", 5)]
)
def test_match_is_the_longest_prefix_and_changes_nothing(world: OneTier, path: str, pages: int) -> None:
    world.put("abcdef")
    assert world.matched(path) == pages
    assert (world.tree.nodes, world.tree.pages) == (1, 6)


def test_the_pages_of_a_match_are_those_that_a_lock_would_hold(world: OneTier) -> None:
    pages = world.put("abcdef")
    branch = world.put("abcxy", start=3)
    for path in ("", "z", "a", "abcd", "abcdefg", "abcx", "abcxyz"):
        match = world.tree.match(chain(path))
        theirs = pages[:3] + branch if path.startswith("abcx") else pages
        assert world.tree.match_pages(match) == theirs[: match.pages]
    nodes, match = world.tree.nodes, world.tree.match(chain("abcde"))
    lock = world.tree.lock(match)
    assert world.tree.nodes == nodes + 1 and world.tree.path_pages(lock) == pages[:5]
    with pytest.raises(AssertionError, match="the tree has changed since this match"):
        world.tree.match_pages(match)
    world.tree.unlock(lock)


def test_match_in_a_long_node(world: OneTier) -> None:
    world = OneTier(300)
    path = "".join(chr(1000 + i) for i in range(257))
    world.put(path)
    for n in range(257):
        assert world.matched(path[:n]) == world.matched(path[:n] + "x") == world.matched(path[:n] + "xyz" * 90) == n


def test_digests_in_any_form(world: OneTier) -> None:
    world.put("abc")
    data = chain("abx")
    array = np.frombuffer(data, np.uint8).reshape(-1, 32)
    for form in (data, bytearray(data), memoryview(data), array, np.asfortranarray(array)):
        assert world.tree.match(form).pages == 2
    assert world.tree.match(np.empty((0, 32), np.uint8)).pages == 0


@pytest.mark.parametrize(
    "digests", [b"x" * 33, np.zeros((2, 31), np.uint8), np.zeros(32, np.uint8), np.zeros((1, 32), np.int64)]
)
def test_malformed_digests(world: OneTier, digests: bytes) -> None:
    with pytest.raises(ValueError, match="digests"):
        world.tree.match(digests)


def test_digests_are_compared_to_their_last_byte(world: OneTier) -> None:
    world.put("ab")
    for path in ("a", "ab"):
        digests = bytearray(chain(path))
        digests[-1] ^= 1
        assert world.tree.match(bytes(digests)).pages == len(path) - 1


def test_insert_keeps_the_page_that_is_there(world: OneTier) -> None:
    first = world.put("abcd")
    pages = world.pool.allocate(5)
    result = world.tree.insert(chain("abcxy"), pages)
    assert (result.existing, result.duplicates, result.match.pages) == (3, pages[:3], 5)
    assert list(world.pool.states(pages)) == [LEASED] * 3 + [CACHED] * 2
    world.pool.free_pages(result.duplicates)
    assert world.tree.nodes == 3
    assert world.tree.path_pages(world.hold("abcxy")) == first[:3] + pages[3:]
    assert world.tree.path_pages(world.hold("abcd")) == first
    world.check()


def test_insert_of_what_is_held_changes_nothing(world: OneTier) -> None:
    world.put("abcd")
    pages = world.pool.allocate(2)
    result = world.tree.insert(chain("ab"), pages)
    assert (result.existing, result.duplicates) == (2, pages)
    assert world.tree.nodes == 1
    lock = world.tree.lock(result.match)
    assert lock.pages == 2
    world.check()


def test_insert_behind_start(world: OneTier) -> None:
    first = world.put("ab")
    rest = world.put("abcd", start=2)
    assert world.tree.path_pages(world.hold("abcd")) == first + rest
    assert world.put("abc", start=2) == []
    world.check()


def test_insert_names_what_is_wrong(world: OneTier) -> None:
    world.put("ab")
    pages = world.pool.allocate(3)
    with pytest.raises(ValueError, match="start is 3; only 2 pages"):
        world.tree.insert(chain("abcdef"), pages, start=3)
    with pytest.raises(ValueError, match="pages has 3 entries from start 0; digests has 2"):
        world.tree.insert(chain("ab"), pages)
    with pytest.raises(ValueError, match="start -1"):
        world.tree.insert(chain("ab"), pages, start=-1)
    for twice in ([*pages[:1], *pages[:2]], [*pages, pages[0]]):  # one of them is a duplicate, or both are
        with pytest.raises(AssertionError, match="twice"):
            world.tree.insert(chain("abcd"[: len(twice)]), twice)
    world.pool.move(pages[:1], LEASED, PageState.ORPHANED)
    with pytest.raises(AssertionError, match="ORPHANED"):
        world.tree.insert(chain("xyz"), pages)
    world.check()


# -- locks ----------------------------------------------------------------------------------------------------------


def test_lock_splits_at_the_end_of_the_match(world: OneTier) -> None:
    pages = world.put("abcdef")
    lock = world.hold("abcx")
    assert (lock.pages, world.tree.nodes, world.tree.evictable) == (3, 2, 3)
    assert world.tree.path_pages(lock) == pages[:3]
    world.check()
    world.tree.unlock(lock)
    assert world.tree.evictable == 6
    world.check()


def test_lock_survives_splits_of_its_path(world: OneTier) -> None:
    pages = world.put("abcdef")
    whole, middle, short = world.hold("abcdef"), world.hold("abcd"), world.hold("ab")
    world.put("abcxy")
    assert [world.tree.path_pages(lock) for lock in (whole, middle, short)] == [pages, pages[:4], pages[:2]]
    world.check()
    for lock, evictable in ((whole, 4), (short, 4), (middle, 8)):
        world.tree.unlock(lock)
        assert world.tree.evictable == evictable
        world.check()


def test_locked_pages_are_never_evicted(world: OneTier) -> None:
    pages = world.put("abcdef")
    lock = world.hold("abc")
    world.put("xyz")
    assert len(world.evict(100)) == 6
    assert world.tree.path_pages(lock) == pages[:3]
    assert (world.tree.pages, world.tree.evictable) == (3, 0)
    world.tree.unlock(lock)
    assert sorted(world.evict(100)) == pages[:3]
    assert (world.tree.pages, world.tree.nodes, world.pool.free) == (0, 0, world.pool.pages)
    world.check()


def test_relock_goes_on_behind_its_end(world: OneTier) -> None:
    pages = world.put("ab")
    lock = world.hold("ab")
    pages += world.put("abcdef", start=2)
    hits = [view.hits for view in world.tree.dump(9)]
    world.tree.relock(lock, world.tree.match(chain("abcd")))  # splits
    assert (lock.pages, world.tree.path_pages(lock), world.tree.evictable) == (4, pages[:4], 2)
    assert sum(view.hits for view in world.tree.dump(9)) == sum(hits)
    world.check()
    world.tree.relock(lock, world.tree.match(chain("abcd")))  # changes nothing
    assert (lock.pages, world.tree.locks) == (4, 1)
    with pytest.raises(AssertionError, match="shorter"):
        world.tree.relock(lock, world.tree.match(chain("ab")))
    world.put("axyzuv")
    with pytest.raises(AssertionError, match="does not go on"):
        world.tree.relock(lock, world.tree.match(chain("axyzuv")))
    stale = world.tree.match(chain("abcdef"))
    world.put("q")
    with pytest.raises(AssertionError, match="changed"):
        world.tree.relock(lock, stale)
    world.tree.unlock(lock)
    assert world.tree.evictable == 12
    world.check()


def test_root_can_be_locked(world: OneTier) -> None:
    world.put("abc")
    lock = world.hold("xyz")
    assert (lock.pages, world.tree.path_pages(lock), world.tree.evictable, world.tree.locks) == (0, [], 3, 1)
    world.check()
    assert world.evict(3)
    world.tree.unlock(lock)
    assert world.tree.locks == 0
    world.check()


def test_released_lock_is_refused(world: OneTier) -> None:
    world.put("abc")
    lock = world.hold("abc")
    world.tree.unlock(lock)
    assert lock.released
    for use in (world.tree.unlock, world.tree.path_pages, lambda lock: world.tree.prune(lock, 0)):
        with pytest.raises(AssertionError, match="released"):
            use(lock)
    world.check()


def test_stale_match_is_refused(world: OneTier) -> None:
    world.put("abcd")
    before = world.tree.match(chain("abcd"))
    world.hold("ab")  # splits
    with pytest.raises(AssertionError, match="changed"):
        world.tree.lock(before)
    before = world.tree.match(chain("abcd"))
    world.evict(1)
    with pytest.raises(AssertionError, match="changed"):
        world.tree.lock(before)


def test_trees_of_one_pool_are_apart(world: OneTier) -> None:
    other = PagedRadixTree(world.pool)
    mine = world.put("abc")
    theirs = world.pool.allocate(3)
    other.insert(chain("abc"), theirs)
    with pytest.raises(AssertionError, match="changed"):
        other.lock(world.tree.match(chain("abc")))
    lock = other.lock(other.match(chain("abc")))
    assert other.path_pages(lock) == theirs
    with pytest.raises(AssertionError, match="another tree"):
        world.tree.unlock(lock)
    assert sorted(world.evict(100)) == mine
    assert other.evict(100).freed == []
    other.check()
    world.check()


# -- eviction -------------------------------------------------------------------------------------------------------


def test_least_recently_used_goes_first(world: OneTier) -> None:
    pages = {path: world.put(path) for path in ("aa", "bb", "cc")}
    world.tree.unlock(world.hold("aa"))
    assert world.evict(2) == pages["bb"]
    world.put("cc")  # an insert is a use
    assert sorted(world.evict(2)) == pages["aa"]
    assert sorted(world.evict(2)) == pages["cc"]
    world.check()


def test_a_page_was_used_until_its_unlock(world: OneTier) -> None:
    world.put("aa")
    lock = world.hold("aa")
    pages = world.put("bb")
    world.tree.unlock(lock)
    assert sorted(world.evict(2)) == pages
    world.check()


def test_leaves_go_before_their_parents(world: OneTier) -> None:
    world.put("abcd")
    world.put("abxy")
    gone = [world.evict(1)[0] for _ in range(6)]
    assert len(set(gone)) == 6
    assert world.tree.nodes == 0
    world.check()


def test_long_leaf_is_cut_at_its_tail(world: OneTier) -> None:
    pages = world.put("abcdefgh")
    assert world.evict(3) == pages[5:]
    assert world.matched("abcdefgh") == 5
    assert all(world.pool.state(page) is PageState.FREE for page in pages[5:])
    world.check()
    assert world.put("abcdefgh")
    assert world.matched("abcdefgh") == 8
    world.check()


@pytest.mark.parametrize("want", range(12))
def test_evicts_exactly_what_is_asked(world: OneTier, want: int) -> None:
    for path in ("abcd", "abx", "abcy", "z", "zzz"):
        world.put(path)
    evictable = world.tree.evictable
    gone = world.evict(want)
    assert len(gone) == len(set(gone)) == min(want, evictable)
    assert world.tree.evictable == evictable - len(gone)
    world.check()


def test_oldest_compares_trees_with_one_clock() -> None:
    clock = Clock()
    pool = PagePool(8)
    trees = [PagedRadixTree(pool, clock=clock) for _ in range(2)]
    for tree, path in zip((trees[1], trees[0], trees[1]), ("a", "b", "c"), strict=True):
        tree.insert(chain(path), pool.allocate(1))
    keys = [tree.oldest() for tree in trees]
    assert keys[0] is not None and keys[1] is not None and keys[1] < keys[0]
    trees[1].evict(1)
    later = trees[1].oldest()
    assert later is not None and later > keys[0]
