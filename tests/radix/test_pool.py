"""Page pool: states and counts, free runs, generations."""

from __future__ import annotations

import mmap
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry._core import HeldIndexReader
from kvferry.radix.pool import HeldIndex, PagePool, PageState, PoolExhausted, leading_readable


def test_starts_free() -> None:
    pool = PagePool(8)
    assert (pool.pages, pool.free, pool.counts().total) == (8, 8, 8)
    assert pool.state(7) is PageState.FREE
    pool.check()


@pytest.mark.parametrize("pages", [-1, 1 << 31])
def test_size_is_bounded(pages: int) -> None:
    with pytest.raises(ValueError, match=f"pages is {pages}; it must be 0 to"):
        PagePool(pages)


def test_one_without_pages_has_none_to_give() -> None:
    pool = PagePool(0)
    assert (pool.pages, pool.free, pool.allocate(0)) == (0, 0, [])
    with pytest.raises(PoolExhausted, match="1 device pages are wanted, 0 of 0 are free"):
        pool.allocate(1)
    with pytest.raises(IndexError, match="page is 0"):
        pool.claim([0], PageState.LEASED)
    pool.check()


def test_allocates_neighbours_from_the_smallest_run_that_fits() -> None:
    pool = PagePool(20)
    pool.allocate(20)
    pool.free_pages([1, 2, 3, 4, 5, 6, 10, 11, 12, 15, 16])
    assert pool.allocate(3) == [10, 11, 12]
    assert pool.allocate(2) == [15, 16]
    assert pool.allocate(2) == [1, 2]
    pool.check()


def test_allocates_few_runs_ascending_when_none_fits() -> None:
    pool = PagePool(20)
    pool.allocate(20)
    pool.free_pages([1, 2, 5, 8, 9, 10, 15, 18])
    assert pool.allocate(4) == [5, 8, 9, 10]  # the longest run, then the best fit for the one page left
    assert pool.allocate(3) == [1, 2, 15]
    pool.check()


def test_exhausted_takes_nothing() -> None:
    pool = PagePool(4, tier="host")
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="3 host pages are wanted, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.free == 2
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="n is -1"):
        pool.allocate(-1)
    pool.check()


def test_runs_merge_whatever_the_order() -> None:
    pool = PagePool(12)
    pool.allocate(12)
    for page in (3, 5, 4, 0, 11, 1, 2):
        pool.free_pages([page])
        pool.check()
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_generation_grows_with_each_free() -> None:
    pool = PagePool(3)
    assert pool.generation(0) == 0
    for expected in (1, 2):
        pool.free_pages(pool.allocate(1))
        assert pool.generation(0) == expected
    assert pool.generation(1) == 0


def test_moves_along_the_life_of_a_page() -> None:
    pool = PagePool(6)
    pages = pool.allocate(4)
    pool.move([pages[3], pages[0]], PageState.LEASED, PageState.ARRIVING)
    pool.move([pages[0]], PageState.ARRIVING, PageState.CACHED)
    pool.move([pages[1]], PageState.LEASED, PageState.ORPHANED)
    pool.move([], PageState.LEASED, PageState.CACHED)
    counts = pool.counts()
    assert (counts.free, counts.leased, counts.arriving, counts.cached, counts.orphaned) == (2, 1, 1, 1, 1)
    assert list(pool.states(pages)) == [PageState.CACHED, PageState.ORPHANED, PageState.LEASED, PageState.ARRIVING]
    pool.check()
    pool.free_pages(pages)
    assert pool.free == 6
    pool.check()


def test_restored_page_starts_in_its_state() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1, PageState.RESTORING)
    pool.move([page], PageState.RESTORING, PageState.CACHED)
    pool.move([page], PageState.CACHED, PageState.SPILLING)
    with pytest.raises(AssertionError, match="FREE to CACHED"):
        pool.allocate(1, PageState.CACHED)
    pool.check()


def test_pages_of_a_copy_between_tiers() -> None:
    pool = PagePool(4, tier="host")
    pages = pool.allocate(2, PageState.SPILLING)
    pool.move(pages, PageState.SPILLING, PageState.CACHED)
    pool.move(pages, PageState.CACHED, PageState.RESTORING)
    pool.move(pages[:1], PageState.RESTORING, PageState.ARRIVING)
    assert list(pool.states(pages)) == [PageState.ARRIVING, PageState.RESTORING]
    assert pool.tier == "host"
    pool.check()


def test_particular_pages_are_claimed() -> None:
    pool = PagePool(10)
    pool.claim([7, 2, 3], PageState.LEASED)
    pool.claim([0, 9], PageState.CACHED)
    assert list(pool.states(range(10))) == [3, 0, 1, 1, 0, 0, 0, 1, 0, 3]
    pool.check()
    for pages, error in (([1, 2], "page 2 is LEASED, must be FREE"), ([1, 1], "page 1 is named twice")):
        with pytest.raises(AssertionError, match=error):
            pool.claim(pages, PageState.LEASED)
    with pytest.raises(AssertionError, match="not claimed as ARRIVING"):
        pool.claim([1], PageState.ARRIVING)
    with pytest.raises(IndexError, match="page is 10"):
        pool.claim([10], PageState.LEASED)
    assert pool.allocate(5) == [1, 4, 5, 6, 8]
    pool.check()


def test_frees_are_logged_while_asked_for() -> None:
    pool = PagePool(8)
    pages = pool.allocate(6)
    pool.free_pages(pages[:1])
    assert (pool.log_frees, pool.take_freed()) == (False, [])
    pool.log_frees = True
    pool.free_pages(pages[3:5])
    pool.free_pages(pages[1:2])
    with pytest.raises(AssertionError):
        pool.free_pages(pages[1:3])
    assert pool.take_freed() == [*pages[3:5], pages[1]]
    assert pool.take_freed() == []
    pool.free_pages(pages[2:3])
    pool.log_frees = False
    assert pool.take_freed() == []


@pytest.mark.parametrize("form", [list, tuple, iter, set, "q", "Q", "i", "I"])
def test_ids_in_any_form(form: Any) -> None:
    pool = PagePool(8)
    pages = pool.allocate(3)
    ids = array(form, pages) if isinstance(form, str) else form(pages)
    pool.free_pages(ids)
    assert pool.free == 8
    with pytest.raises(ValueError, match="pages: an array of 1 dimensions and format 'd'"):
        pool.free_pages(array("d", [1.0]))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.free_pages(["0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"state: 7, must be in \[0, 6\]"):
        pool.allocate(1, 7)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (PageState.CACHED, PageState.LEASED),
        (PageState.ORPHANED, PageState.CACHED),
        (PageState.LEASED, PageState.FREE),
        (PageState.FREE, PageState.LEASED),
    ],
)
def test_other_changes_are_refused(source: PageState, target: PageState) -> None:
    with pytest.raises(AssertionError, match="no page goes"):
        PagePool(2).move([0], source, target)


def test_what_is_refused_changes_nothing() -> None:
    pool = PagePool(6)
    a, b, c = pool.allocate(3)
    pool.move([b], PageState.LEASED, PageState.CACHED)
    before = pool.counts()
    for pages in ([a, b], [a, a], [a, c, c]):
        with pytest.raises(AssertionError):
            pool.move(pages, PageState.LEASED, PageState.CACHED)
    for pages in ([a, 5], [c, c], [a, c, c]):
        with pytest.raises(AssertionError):
            pool.free_pages(pages)
    assert pool.counts() == before
    pool.check()


@pytest.mark.parametrize("page", [-1, 6])
def test_page_outside_the_pool_is_named(page: int) -> None:
    pool = PagePool(6)
    pool.allocate(6)
    for refuse in (
        lambda: pool.state(page),
        lambda: pool.generation(page),
        lambda: pool.states([0, page]),
        lambda: pool.move([0, page], PageState.LEASED, PageState.CACHED),
        lambda: pool.free_pages([0, page]),
    ):
        with pytest.raises(IndexError, match=f"page is {page}; it must be 0 to 5"):
            refuse()
    pool.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.randoms(use_true_random=False)), max_size=30))
def test_random_use_keeps_runs_and_counts(steps: list[tuple[bool, int, object]]) -> None:
    pool = PagePool(24)
    held: list[int] = []
    for take, n, random in steps:
        if take and n <= pool.free:
            free = {page for page in range(24) if pool.state(page) is PageState.FREE}
            runs = [sum(1 for _ in run) for run in _runs_of(free)]
            pages = pool.allocate(n)
            assert pages == sorted(set(pages)) and set(pages) <= free
            assert len(_runs_of(set(pages))) == _fewest(runs, n)
            held += pages
        elif not take:
            random.shuffle(held)  # type: ignore[attr-defined]
            pool.free_pages(held[:n])
            del held[:n]
        pool.check()
        assert pool.counts().leased == len(held)


def _runs_of(pages: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][-1] == page - 1:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


def _fewest(lengths: list[int], n: int) -> int:
    count = 0
    for length in sorted(lengths, reverse=True):
        if n <= 0:
            break
        n -= length
        count += 1
    return count


def test_a_pool_is_resized_when_nothing_of_it_is_in_use() -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 device pages are in use: the pool cannot be resized"):
        pool.resize(8)
    pool.free_pages(held)
    newest = max(pool.generation(page) for page in range(4))
    with pytest.raises(ValueError, match="pages is 0; it must be 1 to"):
        pool.resize(0)
    for pages in (8, 3):
        pool.resize(pages)
        pool.check()
        assert pool.pages == pool.free == pages
        assert all(pool.generation(page) > newest for page in range(pages)), "no page is taken for an old one"
        newest = max(pool.generation(page) for page in range(pages))
        pool.free_pages(pool.allocate(pages))


def test_a_pool_grows_while_it_is_used() -> None:
    pool = PagePool(0, tier="host")
    pool.grow(4)
    (held,) = pool.allocate(1)
    pool.free_pages(pool.allocate(1))
    pool.grow(9)
    pool.check()
    assert (pool.pages, pool.free, pool.state(held)) == (9, 8, PageState.LEASED)
    assert [pool.generation(page) for page in range(9)] == [0, 1, *[0] * 7], "those of before are what they were"
    assert pool.allocate(8) == [1, 2, 3, 4, 5, 6, 7, 8], "one run with what was free before"
    pool.grow(11)
    pool.check()
    assert pool.allocate(2) == [9, 10]
    pool.free_pages([9])
    assert pool.generation(9) == 1


def test_a_pool_does_not_shrink() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    for pages in (3, 0, -1, 1 << 31):
        with pytest.raises(ValueError, match=rf"pages is {pages}; it must be 4 to 2\^31 - 1"):
            pool.grow(pages)
    pool.grow(4)
    assert (pool.pages, pool.free) == (4, 2)
    pool.check()


def test_pages_that_came_later_are_published_and_logged_as_any() -> None:
    pool, memory = PagePool(2, tier="host"), mmap.mmap(-1, HeldIndex.bytes_for(6))
    index = HeldIndex(memory)
    pool.publish(index)
    reader, space = HeldIndexReader(memory), bytes(32)
    pool.log_frees = pool.log_readable = True
    pool.grow(6)
    pool.claim([5, 1], PageState.LEASED)
    digests = b"a" * 32 + b"b" * 32
    pool.name_pages([5, 1], digests, space)
    pool.move([5, 1], PageState.LEASED, PageState.CACHED)
    assert list(pool.take_readable()) == [1, 5]
    assert reader.held_pages(digests, space) == 2
    pool.free_pages([5])
    assert reader.held_pages(digests, space) == 0 and reader.held_pages(digests[32:], space) == 1
    assert pool.take_freed() == [5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_growth_between_takes_and_frees_keeps_runs_and_counts(steps: list[tuple[int, int, int]]) -> None:
    pool = PagePool(0)
    held: list[int] = []
    for more, taken, freed in steps:
        free = pool.free
        pool.grow(pool.pages + more)
        assert pool.free == free + more
        held += pool.allocate(min(taken, pool.free))
        pool.free_pages(held[:freed])
        del held[:freed]
        pool.check()
        assert pool.counts().leased == len(held)


def test_what_can_be_read_ends_with_the_first_page_that_cannot() -> None:
    readable = [PageState.CACHED, PageState.SPILLING, PageState.CACHED]
    assert leading_readable(b"") == 0 and leading_readable(bytes(readable)) == 3
    for state in set(PageState) - set(readable):
        assert leading_readable(bytes([*readable, state, PageState.CACHED])) == 3
