"""Recovery: host pages that outlived the tree, in whatever order, and the orphans among them."""

from __future__ import annotations

import random
import time

import pytest

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import Lock, PagedRadixTree, Recovered
from tests.radix.letters import chain, digest

LEASED, ARRIVING, CACHED = PageState.LEASED, PageState.ARRIVING, PageState.CACHED
NO_PARENT = bytes(32)


class World:
    def __init__(self, pages: int = 32) -> None:
        self.pool, self.host = PagePool(pages), PagePool(pages, tier="host")
        self.tree = PagedRadixTree(self.pool, self.host)
        self.rows: dict[str, int] = {}

    def recover(self, *paths: str, outputs: str = "") -> Recovered:
        """A page for each path, whose parent is the path before it. `outputs`: the last letters of output pages."""
        rows = self.host.allocate(len(paths))
        self.rows.update(zip(paths, rows, strict=True))
        result = self.tree.recover(
            b"".join(digest(path) for path in paths),
            b"".join(digest(path[:-1]) if len(path) > 1 else NO_PARENT for path in paths),
            rows,
            bytes(path[-1] in outputs for path in paths),
        )
        assert result.attached + result.orphans + result.dropped == len(paths)
        self.check()
        return result

    def hold(self, path: str) -> Lock:
        return self.tree.lock(self.tree.match(chain(path)))

    def restored_rows(self, path: str) -> list[int]:
        """Host pages of the path, as a restore would read them."""
        lock = self.hold(path)
        copy = self.tree.restore(lock, self.pool.allocate(lock.pages - lock.device_pages))
        assert copy is not None
        self.tree.finish_copy(copy.id)
        self.tree.unlock(lock)
        self.check()
        return copy.host

    def put(self, path: str, *, start: int = 0) -> list[int]:
        pages = self.pool.allocate(len(path) - start)
        self.pool.free_pages(self.tree.insert(chain(path), pages, start).duplicates)
        self.check()
        return pages

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


def test_runs_are_made_of_pages_in_any_order(world: World) -> None:
    paths = ["a", "ab", "abc", "abcd", "abx", "abxy", "q"]
    for seed in range(8):
        world = World()
        random.Random(seed).shuffle(paths)
        result = world.recover(*paths)
        assert (result.attached, result.orphans, result.dropped) == (7, 0, 0)
        assert (world.tree.nodes, world.tree.host_pages, world.tree.host_evictable) == (4, 7, 7)
        assert world.matched("abcde") == (4, 0)
        assert world.restored_rows("abxy") == [world.rows[p] for p in ("a", "ab", "abx", "abxy")]
        assert set(world.host.states(list(world.rows.values()))) == {CACHED}


def test_a_run_ends_where_output_begins(world: World) -> None:
    world.recover("abcd", "abc", "ab", "a", outputs="cd")
    assert [(view.depth, view.pages, view.output) for view in world.tree.dump(9)] == [(0, 2, False), (2, 2, True)]


def test_orphans_are_kept_and_go_first(world: World) -> None:
    world.recover("a", "xyz", "xyzu", "pq")
    assert (world.tree.orphans, world.tree.host_pages, world.tree.nodes) == (3, 4, 3)
    assert world.matched("xyzu") == (0, 0)
    assert [view.orphan for view in world.tree.dump(9)].count(True) == 2
    assert world.tree.oldest_host() is not None and world.tree.oldest_host()[0] == 0  # type: ignore[index]
    assert world.tree.evict_host(3) == 3
    assert (world.tree.orphans, world.tree.host_pages) == (0, 1)
    assert world.matched("a") == (1, 0)
    world.check()
    assert world.tree.oldest_host()[0] == 2  # type: ignore[index]


def test_an_insert_adopts_orphans(world: World) -> None:
    assert world.recover("abc", "abcd", "abxy").orphans == 3
    world.put("ab")
    assert world.tree.orphans == 1  # xy still misses x
    assert world.matched("abcd") == (4, 2)
    world.put("abx")
    assert world.tree.orphans == 0
    assert world.matched("abxy") == (4, 3)
    assert world.restored_rows("abcd") == [world.rows["abc"], world.rows["abcd"]]


def test_an_insert_runs_through_orphans(world: World) -> None:
    world.recover("abc", "abcd", "abcq", "abcdef")
    pages = world.put("abcdefgh")
    assert world.tree.orphans == 0
    assert world.matched("abcdefgh") == (8, 8)
    assert world.tree.path_pages(world.hold("abcdefgh")) == pages
    assert world.matched("abcq") == (4, 3)
    assert world.tree.host_pages == 4


def test_an_insert_parts_from_an_orphan_within(world: World) -> None:
    world.recover("ab", "abc", "abcd")
    world.put("abx")
    assert world.tree.orphans == 0
    assert world.matched("abcd") == (4, 2)
    assert world.matched("abx") == (3, 3)


def test_arriving_pages_replace_the_orphans_they_meet(world: World) -> None:
    world.recover("ab", "abc", "abcd")
    pages = world.pool.allocate(3, ARRIVING)
    result = world.tree.insert(chain("abc"), pages)
    lock = world.tree.lock(result.match)
    assert (result.existing, result.duplicates) == (0, [])
    assert (world.tree.orphans, world.tree.arriving, world.tree.host_pages) == (0, 3, 1)
    assert world.matched("abcd") == (4, 3)
    world.check()
    removed = world.tree.prune(lock, 0)
    assert removed == pages
    world.pool.free_pages(removed)
    assert world.host.free == world.host.pages
    world.check()


def test_recovery_adopts_earlier_orphans(world: World) -> None:
    world.recover("abcd", "abcde")
    world.recover("xy", "abc")
    assert world.tree.orphans == 4
    result = world.recover("b", "a", "ab")
    assert (result.attached, result.orphans) == (3, 0)
    assert world.tree.orphans == 1
    assert world.matched("abcde") == (5, 0)
    assert world.restored_rows("abcde") == [world.rows["abcde"[:n]] for n in range(1, 6)]


def test_recovery_goes_on_from_the_middle_of_nodes(world: World) -> None:
    world.put("abcdef")
    lock = world.hold("abcdef")
    result = world.recover("abx", "abxy", "ab2", "abcdz", "abcdefg", "q")
    assert (result.attached, world.tree.orphans) == (6, 0)
    for path in ("abxy", "ab2", "abcdz", "abcdefg"):
        assert world.matched(path)[0] == len(path)
    world.tree.unlock(lock)
    world.check()


def test_what_is_there_is_freed_unless_it_completes_a_node(world: World) -> None:
    world.put("ab")
    world.put("abcd")
    result = world.recover("abc", "ab")
    assert (result.attached, result.dropped, world.tree.host_pages) == (0, 2, 0)
    result = world.recover("abcd", "abc", "ab")
    assert (result.attached, result.dropped, world.tree.host_pages) == (2, 1, 2)
    result = world.recover("abcd", "abc", "abcde")
    assert (result.attached, result.dropped) == (1, 2)
    assert world.matched("abcde") == (5, 4)
    assert world.host.free == world.host.pages - 3


def test_what_is_on_its_way_gets_no_second_copy(world: World) -> None:
    pages = world.pool.allocate(2, ARRIVING)
    lock = world.tree.lock(world.tree.insert(chain("ab"), pages).match)
    assert world.recover("a", "ab").dropped == 2
    assert (world.tree.host_pages, world.host.free) == (0, world.host.pages)
    world.pool.free_pages(world.tree.prune(lock, 0))
    world.check()


def test_rings_and_repeated_pages_are_freed(world: World) -> None:
    one, two, three = digest("1"), digest("2"), digest("3")
    rows = world.host.allocate(6)
    digests = one + two + three + digest("a") + digest("a") + digest("4")
    parents = two + one + three + NO_PARENT + NO_PARENT + two
    result = world.tree.recover(digests, parents, rows)
    assert (result.attached, result.orphans, result.dropped) == (1, 0, 5)
    assert world.host.free == world.host.pages - 1
    world.check()


def test_a_ring_over_two_recoveries_stays_an_orphan(world: World) -> None:
    one, two = digest("1"), digest("2")
    first, second = world.host.allocate(2)
    assert world.tree.recover(one, two, [first]).orphans == 1
    assert world.tree.recover(two, one, [second]).orphans == 1
    world.check()
    assert world.tree.evict_host(9) == 2
    world.check()


def test_flush_takes_orphans(world: World) -> None:
    world.recover("ab", "xyz", "xyzu")
    flushed = world.tree.flush()
    assert (flushed.host, flushed.skipped, world.tree.nodes, world.tree.orphans) == (3, 0, 0, 0)
    world.check()


def test_names_what_is_wrong(world: World) -> None:
    rows = world.host.allocate(2)
    with pytest.raises(ValueError, match="digests has 1 entries; parents has 2, host_pages 2, outputs 0"):
        world.tree.recover(digest("a"), NO_PARENT * 2, rows)
    with pytest.raises(IndexError, match="page is 32"):
        world.tree.recover(digest("a"), NO_PARENT, [32])
    with pytest.raises(ValueError, match="no host pool"):
        PagedRadixTree(world.pool).recover(digest("a"), NO_PARENT, [0])
    world.host.move(rows[:1], LEASED, CACHED)
    with pytest.raises(AssertionError, match="is CACHED, must be LEASED"):
        world.tree.recover(chain("ab"), NO_PARENT + digest("a"), rows)
    assert world.tree.recover(b"", b"", []).attached == 0
    world.check()


def test_what_was_evicted_comes_again(world: World) -> None:
    world.recover("a", "ab", "abc", "abcd", "q")
    assert world.tree.evict_host(2) == 2
    world.check()
    assert world.matched("abcd") == (2, 0)
    assert world.recover("abc", "abcd").attached == 2
    assert world.tree.evict_host(9) == 5
    assert world.recover("ab", "a").attached == 2
    assert world.matched("abcd") == (2, 0)


# -- times -----------------------------------------------------------------------------------------------------------


def many(world: World, n: int, parents: bytes) -> bytes:
    """So many pages are recovered, below these parents: their digests."""
    digests = b"".join(digest(f"{world.host.free}-{i}") for i in range(n))
    world.tree.recover(digests, parents or NO_PARENT + digests[:-32], world.host.allocate(n))
    return digests


def seconds(world: World, above: list[bytes], below: list[bytes]) -> float:
    """The shortest time in which one page between these two is recovered."""
    found = []
    for parent, page in zip(above, below, strict=True):
        row = world.host.allocate(1)
        began = time.perf_counter()
        world.tree.recover(page, parent, row)
        found.append(time.perf_counter() - began)
    return min(found)


def test_a_page_takes_as_long_however_many_there_are() -> None:
    def lasts(pages: int) -> float:
        world = World(pages + 8)
        ends = [many(world, pages // 8, b"")[-32:] for _ in range(8)]
        took = seconds(world, ends, [digest(f"behind {i}") for i in range(8)])
        world.check()
        return took

    assert lasts(1 << 18) < 20 * lasts(1 << 10)


def test_an_orphan_takes_as_long_however_much_hangs_on_it() -> None:
    """All of it is looked at once, when it has a path from the root, and not for each orphan above it."""

    def lasts(pages: int) -> float:
        world = World(pages + 16)
        nobody, tops, forks = ([digest(f"{name} {i}") for i in range(8)] for name in ("nobody", "top", "fork"))
        for fork in forks:
            many(world, pages // 8, fork * (pages // 8))
        seconds(world, tops, forks)
        took = seconds(world, nobody, tops)
        assert world.tree.orphans == pages + 16
        world.check()
        return took

    assert lasts(1 << 17) < 20 * lasts(1 << 7)


def test_what_pages_are_found_by_is_let_go(world: World) -> None:
    world.recover("a", "ab", "abc", "abcd")
    during = world.tree.index_bytes
    world.tree.end_recovery()
    assert world.tree.index_bytes < during - (8 << 10)
    world.put("abxy")
    world.tree.begin_recovery()
    assert world.recover("abxyz", "abx", "abcde").attached == 2
    assert world.matched("abcde") == (5, 2) and world.matched("abxyz") == (5, 4)
