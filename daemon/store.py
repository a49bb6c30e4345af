"""One role's pages: a pool and a radix tree for every namespace over it. Core: no I/O."""

from __future__ import annotations

from kvferry.daemon.errors import exhausted
from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import PagedRadixTree

MAX_NAMESPACES = 64


class Store:
    """The pool of `pages` pages, shared by the trees of all namespaces; pages are evicted from whichever tree used
    them last ago.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(pages)
        self.trees: dict[bytes, PagedRadixTree] = {}
        self.evicted = 0
        self._time = 0

    def tree(self, namespace_id: bytes) -> PagedRadixTree:
        """The namespace's tree, made when it is first named. RESOURCE_EXHAUSTED beyond MAX_NAMESPACES."""
        tree = self.trees.get(namespace_id)
        if tree is None:
            if len(self.trees) >= MAX_NAMESPACES:
                raise exhausted(f"namespace {namespace_id.hex()[:16]} would be one more than {MAX_NAMESPACES}")
            tree = self.trees[namespace_id] = PagedRadixTree(self.pool, clock=self._tick)
        return tree

    @property
    def evictable(self) -> int:
        return sum(tree.evictable for tree in self.trees.values())

    @property
    def locks(self) -> int:
        return sum(tree.locks for tree in self.trees.values())

    @property
    def nodes(self) -> int:
        return sum(tree.nodes for tree in self.trees.values())

    def take(self, pages: int) -> list[int]:
        """Allocates `pages` LEASED pages, evicting what it must. The caller has checked `free + evictable`; it is
        asserted.
        """
        if self.pool.free < pages:
            self._evict(pages - self.pool.free)
        return self.pool.allocate(pages, PageState.LEASED)

    def _tick(self) -> float:
        # One clock for all trees, so that their eviction keys compare.
        self._time += 1
        return float(self._time)

    def _evict(self, pages: int) -> None:
        assert self.evictable >= pages, f"asked to evict {pages} pages, {self.evictable} are evictable"
        while pages > 0:
            candidates = [(tree.oldest_key(), tree) for tree in self.trees.values() if tree.evictable]
            if len(candidates) == 1:
                freed = candidates[0][1].evict(pages)
            else:
                # One leaf's worth at a time keeps the order across trees; the leaf's own tail is cut as needed.
                tree = min(candidates, key=lambda pair: pair[0])[1]  # type: ignore[arg-type,return-value]
                freed = tree.evict(min(pages, 64))
            assert freed, "the evictable count promised pages that no leaf had"
            pages -= len(freed)
            self.evicted += len(freed)
