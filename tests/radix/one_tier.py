"""A tree over the pages of a device, checked at each step."""

from __future__ import annotations

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import Lock, PagedRadixTree
from tests.radix.letters import chain


class OneTier:
    def __init__(self, pages: int = 32) -> None:
        self.pool = PagePool(pages)
        self.tree = PagedRadixTree(self.pool)

    def put(self, path: str, *, start: int = 0) -> list[int]:
        """Inserts LEASED pages; frees the duplicates. Returns the pages that stayed."""
        pages = self.pool.allocate(len(path) - start)
        result = self.tree.insert(chain(path), pages, start=start)
        self.pool.free_pages(result.duplicates)
        return pages[len(result.duplicates) :]

    def hold(self, path: str) -> Lock:
        return self.tree.lock(self.tree.match(chain(path)))

    def arriving(self, path: str) -> tuple[Lock, list[int]]:
        """What a request does: locks what is held, inserts the rest as ARRIVING, locks all."""
        short = self.hold(path)
        pages = self.pool.allocate(len(path) - short.pages, PageState.ARRIVING)
        result = self.tree.insert(chain(path), pages, start=short.pages)
        lock = self.tree.lock(result.match)
        self.tree.unlock(short)
        self.check()
        return lock, pages

    def evict(self, pages: int) -> list[int]:
        evicted = self.tree.evict(pages)
        assert evicted.spill is None
        return evicted.freed

    def matched(self, path: str) -> int:
        return self.tree.match(chain(path)).pages

    def check(self) -> None:
        self.tree.check()
        self.pool.check()
