"""Pages that come to the host without ever having been on the device."""

from __future__ import annotations

import random

import pytest

from kvferry.radix.pool import PageState
from tests.radix.letters import chain, digest
from tests.radix.two_tiers import TwoTiers

LEASED, CACHED = PageState.LEASED, PageState.CACHED


def put(world: TwoTiers, path: str, *, start: int = 0, kind: int = 0) -> list[int]:
    """Inserts LEASED rows; frees the duplicates. Returns all."""
    rows = world.host.allocate(len(path) - start)
    result = world.tree.insert_host(chain(path), rows, start, kind)
    assert all(world.host.state(row) is LEASED for row in result.duplicates)
    assert result.match.pages == len(path)
    world.host.free_pages(result.duplicates)
    world.check()
    return rows


def test_they_are_matched_on_the_host_alone() -> None:
    world = TwoTiers()
    rows = put(world, "abcd")
    assert world.matched("abcde") == (4, 0) and world.tree.host_pages == 4
    assert all(world.host.state(row) is CACHED for row in rows)
    lock = world.hold("abc")
    assert world.tree.path_rows(lock) == rows[:3] and world.tree.path_pages(lock) == []
    assert world.tree.evict_host(9) == 1, "what a lock covers stays"
    world.tree.unlock(lock)
    assert world.tree.evict_host(9) == 3 and world.host.free == world.host.pages
    world.check()


def test_what_is_held_wins() -> None:
    world = TwoTiers()
    first = put(world, "abc")
    more = put(world, "abcde", start=1)
    lock = world.hold("abcde")
    assert world.tree.path_rows(lock) == first + more[2:]
    world.tree.unlock(lock)
    put(world, "abc")
    assert world.tree.host_pages == 5
    put(world, "abxy", start=2)
    assert world.matched("abxy") == (4, 0) and world.tree.host_pages == 7


def test_behind_pages_of_the_device() -> None:
    world = TwoTiers()
    world.put("ab")
    put(world, "abcd", start=2)
    assert world.matched("abcd") == (4, 2)
    lock = world.hold("abcd")
    with pytest.raises(AssertionError, match="no row"):
        world.tree.path_rows(lock)
    world.tree.unlock(lock)


def test_orphans_are_linked_and_keep_their_rows() -> None:
    world = TwoTiers()
    kept = world.host.allocate(2)
    world.tree.recover(digest("abc") + digest("abcd"), digest("ab") + digest("abc"), kept)
    assert world.tree.orphans == 2
    rows = put(world, "abcde")
    assert world.tree.orphans == 0
    lock = world.hold("abcde")
    assert world.tree.path_rows(lock) == [*rows[:2], *kept, rows[4]]
    world.tree.unlock(lock)
    world.check()


def test_refusals_change_nothing() -> None:
    world = TwoTiers()
    put(world, "ab")
    rows = world.host.allocate(2)
    with pytest.raises(ValueError, match="start is 3; only 2 pages"):
        world.tree.insert_host(chain("abcde"), rows, 3)
    with pytest.raises(ValueError, match="rows has 2 entries from start 0; digests has 3"):
        world.tree.insert_host(chain("abc"), rows)
    with pytest.raises(AssertionError, match="named twice"):
        world.tree.insert_host(chain("abxy"), [rows[0], rows[0]], 2)
    world.host.free_pages(rows)
    with pytest.raises(AssertionError, match="not LEASED"):
        world.tree.insert_host(chain("abxy"), rows, 2)
    world.check()
    assert world.matched("abxy") == (2, 0)


def test_wrong_rows_are_pruned() -> None:
    world = TwoTiers()
    put(world, "abcdef")
    lock, other = world.hold("abcd"), world.hold("abc")
    assert world.tree.prune(lock, 1) == []
    assert world.matched("abcdef") == (3, 0), "what another holds stays"
    assert world.tree.prune(other, 1) == []
    assert world.matched("abcdef") == (1, 0) and world.host.free == world.host.pages - 1
    world.check()


@pytest.mark.parametrize("seed", range(20))
def test_like_a_set_of_paths(seed: int) -> None:
    chosen = random.Random(seed)
    world, held = TwoTiers(host_pages=400), set[str]()
    for _ in range(60):
        path = "".join(chosen.choices("ab", k=chosen.randint(1, 6)))
        known = next(n for n in range(len(path), -1, -1) if n == 0 or path[:n] in held)
        put(world, path, start=chosen.randint(0, known))
        held |= {path[: n + 1] for n in range(len(path))}
        assert world.tree.host_pages == len(held)
        probe = "".join(chosen.choices("ab", k=6))
        assert world.matched(probe)[0] == next(n for n in range(6, -1, -1) if n == 0 or probe[:n] in held)
