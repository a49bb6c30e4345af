"""A tree over the pages of a device and of a host, checked at each step."""

from __future__ import annotations

from kvferry.radix.pool import PagePool
from kvferry.radix.tree import Copy, Lock, PagedRadixTree
from tests.radix.letters import chain


class TwoTiers:
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
