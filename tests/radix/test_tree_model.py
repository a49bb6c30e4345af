"""A naive model (a dict of digests, a list of locked prefixes) against pool and tree, step by step."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import Lock, PagedRadixTree

PAGES = 24


def chain(symbols: list[int]) -> bytes:
    digests, parent = b"", b"root"
    for symbol in symbols:
        parent = hashlib.sha256(parent + bytes([symbol])).digest()
        digests += parent
    return digests


class TreeMachine(RuleBasedStateMachine):
    """Every held digest's page keeps the content that was put there: page reuse without eviction would show."""

    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.tree = PagedRadixTree(self.pool)
        self.held: dict[bytes, int] = {}  # digest -> page
        self.content: dict[int, bytes] = {}  # page -> digest written to it
        self.locked: dict[Lock, bytes] = {}
        self.arriving: dict[Lock, list[int]] = {}

    def prefixes(self, data: bytes) -> list[bytes]:
        return [data[i : i + 32] for i in range(0, len(data), 32)]

    def model_match(self, data: bytes) -> int:
        count = 0
        for digest in self.prefixes(data):
            if digest not in self.held:
                break
            count += 1
        return count

    @rule(target=locks, symbols=st.lists(st.integers(0, 2), max_size=7), arriving=st.booleans())
    def admit(self, symbols: list[int], arriving: bool) -> Lock:
        data = chain(symbols)
        match = self.tree.match(data)
        assert match.pages == self.model_match(data)
        lock = self.tree.lock(match)
        assert [self.content[p] for p in self.tree.path_pages(lock)] == self.prefixes(data)[: match.pages]
        missing = len(symbols) - match.pages
        if missing and self.pool.free + self.tree.evictable >= missing:
            short = max(0, missing - self.pool.free)
            gone = self.tree.evict(short)
            assert len(gone) == short
            self.forget(gone)
            pages = self.pool.allocate(missing)
            for page, digest in zip(pages, self.prefixes(data)[match.pages :], strict=True):
                self.content[page] = digest
                self.held[digest] = page
            if arriving:
                self.pool.move(pages, PageState.LEASED, PageState.ARRIVING)
            result = self.tree.insert(data, pages, start=match.pages)
            assert result.existing == match.pages
            assert not result.duplicates
            longer = self.tree.lock(result.match)
            self.tree.unlock(lock)
            lock = longer
            if arriving:
                self.arriving[lock] = pages
        self.locked[lock] = data[: lock.pages * 32]
        return lock

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            digest = self.content.pop(page)
            assert not any(digest in self.prefixes(data) for data in self.locked.values()), "a locked page went"
            del self.held[digest]

    @rule(symbols=st.lists(st.integers(0, 2), min_size=1, max_size=7))
    def finish_elsewhere(self, symbols: list[int]) -> None:
        """Inserts pages of its own for a whole path: what is held wins."""
        data = chain(symbols)
        if self.pool.free < len(symbols):
            return
        pages = self.pool.allocate(len(symbols))
        before = self.model_match(data)
        result = self.tree.insert(data, pages)
        assert result.existing == before
        assert result.duplicates == pages[:before]
        self.pool.free_pages(result.duplicates)
        for page, digest in zip(pages[before:], self.prefixes(data)[before:], strict=True):
            self.held[digest] = page
            self.content[page] = digest

    @rule(lock=locks)
    def arrive(self, lock: Lock) -> None:
        pages = self.arriving.pop(lock, [])
        self.tree.arrived(pages)

    @rule(lock=consumes(locks))
    def release(self, lock: Lock) -> None:
        """Finished if its pages came, pruned otherwise (unless others hold them, who then find them arriving)."""
        data = self.locked.pop(lock)
        path = self.tree.path_pages(lock)
        first = next((i for i, page in enumerate(path) if self.pool.state(page) is PageState.ARRIVING), None)
        mine = self.arriving.pop(lock, [])
        if first is None:
            self.tree.unlock(lock)
            return
        removed = self.tree.prune(lock, first)
        for page in removed:
            digest = self.content.pop(page)
            assert not any(digest in self.prefixes(d) for d in self.locked.values())
            del self.held[digest]
        self.pool.free_pages(removed)
        left = [page for page in mine if self.pool.state(page) is PageState.ARRIVING and page not in removed]
        heirs = [other for other, d in self.locked.items() if any(self.content[p] in self.prefixes(d) for p in left)]
        if left:
            assert heirs, "arriving pages stayed that nobody holds"
            # The one that holds most of them takes over; what is behind its end had another holder or was removed.
            best = max(heirs, key=lambda other: other.pages)
            self.arriving.setdefault(best, []).extend(left)
        assert path[:first] == [self.held[d] for d in self.prefixes(data)[:first]]

    @rule(pages=st.integers(0, PAGES))
    def evict(self, pages: int) -> None:
        want = min(pages, self.tree.evictable)
        gone = self.tree.evict(pages)
        assert len(gone) == want
        self.forget(gone)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        self.tree.check()
        assert self.pool.counts().total == PAGES
        assert self.tree.pages == len(self.held)
        assert self.tree.locks == len(self.locked)
        for data in self.locked.values():
            assert self.model_match(data) * 32 == len(data)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
