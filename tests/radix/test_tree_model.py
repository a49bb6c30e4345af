"""Two trees over one pool against a naive model, step by step: a dict of held paths and a set of locked ones.

In the model a page is held under its whole path, `children` are found by looking at all paths, and what is evictable
is counted anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import Clock, Lock, Match, PagedRadixTree
from tests.radix.cache_machine.model import Path, chain, prefixes

PAGES = 24

paths = st.lists(st.integers(0, 2), max_size=7).map(tuple)
sides = st.integers(0, 1)


@dataclass
class Side:
    """A tree and what the model knows of it."""

    tree: PagedRadixTree
    held: dict[Path, int] = field(default_factory=dict)  # path -> its last page
    arriving: set[Path] = field(default_factory=set)
    locked: dict[Lock, Path] = field(default_factory=dict)

    def matched(self, path: Path) -> Path:
        return max((p for p in prefixes(path) if p in self.held), key=len, default=())

    def pages(self, path: Path) -> list[int]:
        return [self.held[p] for p in prefixes(path)]

    def is_locked(self, path: Path, but: Lock | None = None) -> bool:
        return any(p[: len(path)] == path for lock, p in self.locked.items() if lock is not but)

    @property
    def evictable(self) -> set[Path]:
        return {path for path in self.held if not self.is_locked(path)}


class TreeMachine(RuleBasedStateMachine):
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        clock = Clock()
        self.sides = [Side(PagedRadixTree(self.pool, clock=clock)) for _ in range(2)]

    # -- what the steps are made of ------------------------------------------------------------------------------

    def match(self, side: Side, path: Path) -> Match:
        match = side.tree.match(chain(path))
        assert match.pages == len(side.matched(path))
        return match

    def lock(self, side: Side, match: Match, path: Path) -> Lock:
        lock = side.tree.lock(match)
        side.locked[lock] = path
        assert side.tree.path_pages(lock) == side.pages(path)
        return lock

    def take(self, pages: int) -> list[int] | None:
        """Evicts on either side what is needed; None if it cannot be had."""
        if self.pool.free + sum(len(side.evictable) for side in self.sides) < pages:
            return None
        for side in self.sides:
            self.evict_from(side, max(0, pages - self.pool.free))
        return self.pool.allocate(pages)

    def evict_from(self, side: Side, pages: int) -> None:
        evictable = {side.held[path]: path for path in side.evictable}
        gone = side.tree.evict(pages).freed
        assert len(gone) == len(set(gone)) == min(pages, len(evictable))
        for page in gone:
            assert page in evictable, "a page went that was locked or not there"
            assert self.pool.state(page) is PageState.FREE
            del side.held[evictable[page]]

    def insert(self, side: Side, path: Path, start: int, coming: list[bool]) -> Match | None:
        """Inserts pages for path[start:]; those whose `coming` is true as ARRIVING."""
        pages = self.take(len(path) - start)
        if pages is None:
            return None
        arrives = [page for page, flag in zip(pages, coming, strict=False) if flag]
        self.pool.move(arrives, PageState.LEASED, PageState.ARRIVING)
        existing = len(side.matched(path))
        if existing < start:  # evicted meanwhile
            with pytest.raises(ValueError, match="start is"):
                side.tree.insert(chain(path), pages, start=start)
            self.pool.free_pages(pages)
            return None
        result = side.tree.insert(chain(path), pages, start=start)
        assert result.existing == existing
        assert result.duplicates == pages[: existing - start]
        assert result.match.pages == len(path)
        self.pool.free_pages(result.duplicates)
        for prefix, page in list(zip(prefixes(path)[start:], pages, strict=True))[existing - start :]:
            side.held[prefix] = page
            if page in arrives:
                side.arriving.add(prefix)
        return result.match

    # -- steps ---------------------------------------------------------------------------------------------------

    @rule(target=locks, side=sides, path=paths)
    def hold(self, side: int, path: Path) -> tuple[int, Lock]:
        s = self.sides[side]
        return side, self.lock(s, self.match(s, path), s.matched(path))

    @rule(target=locks, side=sides, path=paths, coming=st.lists(st.booleans(), min_size=7, max_size=7))
    def admit(self, side: int, path: Path, coming: list[bool]) -> tuple[int, Lock]:
        """Locks what is held, inserts the rest, some of it arriving, and locks all of it."""
        s = self.sides[side]
        held = s.matched(path)
        short = self.lock(s, self.match(s, path), held)
        longer = self.insert(s, path, len(held), coming)
        if longer is None:
            return side, short
        lock = self.lock(s, longer, path)
        if any(not s.is_locked(p, but=short) for p in prefixes(held) if p in s.arriving):
            raise AssertionError("the longer lock holds all that the shorter held")
        s.tree.unlock(short)
        del s.locked[short]
        return side, lock

    @rule(side=sides, path=paths, start=st.integers(0, 7))
    def insert_unlocked(self, side: int, path: Path, start: int) -> None:
        """Readable pages for a path of which any part may be held: what is held wins."""
        s = self.sides[side]
        self.insert(s, path, min(start, len(s.matched(path))), [])

    @rule(held=locks, chosen=st.integers(0, 127))
    def arrive(self, held: tuple[int, Lock], chosen: int) -> None:
        side, lock = self.sides[held[0]], held[1]
        if lock in side.locked:
            come = [p for p in prefixes(side.locked[lock]) if p in side.arriving and chosen >> len(p) - 1 & 1]
            side.tree.arrived([side.held[p] for p in come])
            side.arriving.difference_update(come)

    @rule(held=consumes(locks), back=st.integers(0, 7))
    def release(self, held: tuple[int, Lock], back: int) -> None:
        """Unlocks, or prunes from somewhere at or before the first arriving page that only this lock holds."""
        side, lock = self.sides[held[0]], held[1]
        if lock not in side.locked:
            return
        path = side.locked.pop(lock)
        own = [p for p in prefixes(path) if not side.is_locked(p)]
        first = next((len(p) - 1 for p in own if p in side.arriving), len(path))
        if first == len(path) and back == 0:
            side.tree.unlock(lock)
            return
        start = max(0, first - back)
        top = next((p for p in own if len(p) > start), None)
        gone = {p: page for p, page in side.held.items() if top is not None and p[: len(top)] == top}
        removed = side.tree.prune(lock, start)
        assert sorted(removed) == sorted(gone.values())
        for prefix, page in gone.items():
            state = PageState.ARRIVING if prefix in side.arriving else PageState.CACHED
            assert self.pool.state(page) is state
            side.arriving.discard(prefix)
            del side.held[prefix]
        self.pool.free_pages(removed)

    @rule(side=sides, pages=st.integers(0, 5))
    def evict(self, side: int, pages: int) -> None:
        self.evict_from(self.sides[side], pages)

    @rule(side=sides, path=paths)
    def look(self, side: int, path: Path) -> None:
        self.match(self.sides[side], path)

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        for side in self.sides:
            side.tree.check()
            tree = side.tree
            assert (tree.pages, tree.arriving) == (len(side.held), len(side.arriving))
            assert tree.evictable == len(side.evictable)
            assert tree.locks == len(side.locked)
            assert all(path[:-1] in side.held for path in side.held if len(path) > 1), "a page without its parent"
            for lock, path in side.locked.items():
                assert tree.path_pages(lock) == side.pages(path)
            for path, page in side.held.items():
                state = PageState.ARRIVING if path in side.arriving else PageState.CACHED
                assert self.pool.state(page) is state
        counts = self.pool.counts()
        assert (counts.total, counts.leased) == (PAGES, 0)
        assert counts.free == PAGES - sum(len(side.held) for side in self.sides)

    def teardown(self) -> None:
        """Nothing leaks: when every lock has gone, everything can be evicted."""
        for side in self.sides:
            for lock, path in list(side.locked.items()):
                del side.locked[lock]
                first = next((i for i, p in enumerate(prefixes(path)) if p in side.arriving), len(path))
                self.pool.free_pages(side.tree.prune(lock, first))
            side.tree.check()
            assert side.tree.locks == 0
            side.tree.evict(PAGES)
            assert (side.tree.pages, side.tree.nodes, side.tree.evictable) == (0, 0, 0)
        assert self.pool.free == PAGES


class LongTreeMachine(TreeMachine):
    pass


_CHECKS = list(HealthCheck)

TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=_CHECKS)

# At least 10^5 steps.
TestTreeLong = pytest.mark.nightly(pytest.mark.timeout(3600)(LongTreeMachine.TestCase))
TestTreeLong.settings = settings(
    max_examples=2200, stateful_step_count=60, deadline=None, suppress_health_check=_CHECKS
)
