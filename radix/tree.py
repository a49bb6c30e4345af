"""A compressed radix tree of pages, keyed by chained digests.

A node is a run of pages and splits only between pages. Digests are chained, so equality at page i implies equality of
all before it: a node is compared by its last digest, and by bisection where the paths part. `match` changes nothing.
`lock` splits at the match's end and counts on the node and all its ancestors, so a locked node is never evicted or
freed. A split makes a new upper node with the same count and leaves the lower part its identity: the end of a lock
always is the end of a node. `insert` adds a child and never lengthens a node, so what a lock covers never changes.

Every page of an unlocked node is CACHED, hence evictable. ARRIVING pages stand in locked nodes only:

* `insert` of ARRIVING pages makes a node that is not evictable, to be locked before the caller's step ends;
* `unlock` of the last lock over an ARRIVING page is an assertion; that lock is given up by `prune(lock, start)`;
* `prune` releases the lock and removes of its path, from page index `start` on, what no other lock holds, with all
  that hangs below. Pages that other locks hold stay, also ARRIVING ones: they go when their last holder prunes.

Pages that go by `evict` are FREE when it returns. Pages that go by `prune` keep their state and are the caller's to
free, since copies may still name them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sortedcontainers import SortedList

from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.node import Digests, Node, common_pages, digest_bytes
from kvferry.radix.policy import LRU, EvictionPolicy
from kvferry.radix.pool import PagePool, PageState

# Of all trees of the process together: a match of one tree is never taken for a match of another.
_versions = itertools.count(1)


class Match(NamedTuple):
    """The longest held prefix of a list of digests. Good until the tree's next change of structure."""

    pages: int
    node: Node
    offset: int  # pages of `node` that match; all of it unless the paths part, or the list ends, within
    version: int


class Lock:
    """Holds a path from the root, `pages` pages long."""

    __slots__ = ("node", "pages", "released", "tree")

    def __init__(self, tree: PagedRadixTree, node: Node, pages: int) -> None:
        self.tree = tree
        self.node = node
        self.pages = pages
        self.released = False


class InsertResult(NamedTuple):
    existing: int  # leading pages of the whole list that were there before
    duplicates: list[int]  # of the caller's pages, those whose digests were there: the caller frees them
    match: Match  # of the whole list


class PagedRadixTree:
    """One namespace's pages over `pool`. Not thread-safe. `clock` gives the policy's times; default: a counter."""

    def __init__(
        self, pool: PagePool, *, policy: EvictionPolicy | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.pool = pool
        self.evictable = 0  # pages of unlocked nodes
        self.pages = 0  # ARRIVING or CACHED
        self.arriving = 0
        self.nodes = 0  # without the root
        self.locks = 0  # handles that are not released
        self._policy: EvictionPolicy = policy if policy is not None else LRU()
        self._clock = clock if clock is not None else _counter()
        self._serials = itertools.count()
        self._root = Node(None, b"", array("I"), next(self._serials), 0.0)
        self._leaves: SortedList[tuple[float, int, Node]] = SortedList()  # unlocked, by the policy's key
        self._version = next(_versions)

    @property
    def cached(self) -> int:
        """Pages that are readable."""
        return self.pages - self.arriving

    # -- looking and locking -------------------------------------------------------------------------------------

    def match(self, digests: Digests) -> Match:
        """The longest held prefix; arriving pages count. `digests`: n * 32 bytes, or a (n, 32) uint8 array."""
        return self._walk(digest_bytes(digests))

    def lock(self, match: Match) -> Lock:
        """Holds the matched path. The match must be of this tree as it is now."""
        assert match.version == self._version, "the tree has changed since this match"
        node = match.node
        if match.offset < len(node.pages):
            node = self._split(node, match.offset)
        lock = Lock(self, node, match.pages)
        now = self._clock()
        step: Node | None = node
        while step is not None:
            if step.locks == 0 and not step.may_arrive:
                self.evictable -= len(step.pages)
                self._leave(step)
            step.locks += 1
            step.hits += 1
            step.last_access = now
            step = step.parent
        self.locks += 1
        return lock

    def unlock(self, lock: Lock) -> None:
        """Gives a lock up. No page may be ARRIVING that it was the last to hold: that is `prune`."""
        self._close(lock)
        self._release(lock.node)

    def path_pages(self, lock: Lock) -> list[int]:
        """Page ids of the locked path, in order."""
        assert lock.tree is self and not lock.released, "the lock is released, or of another tree"
        pages = array("I")
        for node in reversed(list(_upwards(lock.node))):
            pages += node.pages
        return pages.tolist()

    # -- changing ------------------------------------------------------------------------------------------------

    def insert(self, digests: Digests, pages: Sequence[int], *, start: int = 0) -> InsertResult:
        """pages[i] is of digest start + i; digests before `start` must be held, else ValueError. What is held wins.

        New LEASED pages become CACHED. New ARRIVING pages stay so, and the caller locks them before anything else
        happens. Duplicates keep their state.
        """
        data = digest_bytes(digests)
        total = len(data) // DIGEST_BYTES
        if start < 0 or start + len(pages) != total:
            raise ValueError(f"pages has {len(pages)} entries from start {start}; digests has {total}")
        match = self._walk(data)
        if match.pages < start:
            raise ValueError(f"start is {start}; only {match.pages} pages of the path are held")
        duplicates, fresh = list(pages[: match.pages - start]), list(pages[match.pages - start :])
        node, now = match.node, self._clock()
        if not fresh:
            self._touch(node, now)
            return InsertResult(match.pages, duplicates, match)
        arriving = self._take_over(fresh)
        if match.offset < len(node.pages):
            node = self._split(node, match.offset)
        self._leave(node)
        self._touch(node, now)
        child = Node(node, data[match.pages * DIGEST_BYTES :], array("I", fresh), next(self._serials), now)
        node.add_child(child)
        self.nodes += 1
        self.pages += len(fresh)
        if arriving:
            self.arriving += arriving
            child.may_arrive = True
        else:
            self._rest(child)
        self._version = next(_versions)
        return InsertResult(match.pages, duplicates, Match(total, child, len(fresh), self._version))

    def arrived(self, pages: Iterable[int]) -> None:
        """ARRIVING -> CACHED: their bytes are there and verified."""
        readable = list(pages)
        assert len(readable) <= self.arriving, "pages of another tree arrived"
        self.pool.move(readable, PageState.ARRIVING, PageState.CACHED)
        self.arriving -= len(readable)

    def prune(self, lock: Lock, start: int) -> list[int]:
        """Releases the lock and takes what only it held, from page index `start` of its path on, out of the tree.

        Returns the pages, path order first, in the state they had; the caller frees them. No page before `start` may
        be ARRIVING that this lock was the last to hold.
        """
        assert 0 <= start <= lock.pages, f"start is {start}; the lock is over {lock.pages} pages"
        self._close(lock)
        node, end = lock.node, lock.pages
        top: Node | None = None  # the highest node to go
        while node.locks == 1 and end > start:
            begin = end - len(node.pages)
            if begin < start:
                self._split(node, start - begin)  # `node` is the lower part now
                begin = start
            top, end = node, begin
            assert node.parent is not None
            node = node.parent
        if top is None:
            self._release(lock.node)
            return []
        for held in _upwards(lock.node):
            held.locks = 0
            held.may_arrive = True  # it was not evictable, and must not be counted as if it had been
            if held is top:
                break
        removed = self._remove_subtree(top)
        self._release(node)
        return removed

    def evict(self, pages: int) -> list[int]:
        """Frees up to `pages` pages of unlocked leaves, in the policy's order, cutting a long leaf at its tail.

        Exactly that many if so many are evictable. Returns their ids, FREE.
        """
        freed: list[int] = []
        while len(freed) < pages and self._leaves:
            node = self._leaves[0][2]
            want = pages - len(freed)
            if want >= len(node.pages):
                parent = node.parent
                assert parent is not None
                freed += self._remove_subtree(node)
                if not (parent.locks or parent.may_arrive or parent.children or parent is self._root):
                    self._enter(parent)
            else:
                freed += node.cut(len(node.pages) - want)[1]
                self._rekey(node)
                self.pages -= want
                self.evictable -= want
                self._version = next(_versions)
        before = self.pool.states(freed)
        assert before.count(PageState.CACHED) == len(before), "an evictable page is not CACHED"
        self.pool.free_pages(freed)
        return freed

    def oldest_key(self) -> float | None:
        """The policy's key of the leaf that would go next."""
        return self._leaves[0][0] if self._leaves else None

    # -- inside --------------------------------------------------------------------------------------------------

    def _walk(self, data: bytes) -> Match:
        node, at, size = self._root, 0, len(data)
        while at < size:
            child = node.children.get(data[at : at + DIGEST_BYTES])
            if child is None:
                break
            held = child.digests
            end = at + len(held)
            if end > size or data[end - DIGEST_BYTES : end] != held[-DIGEST_BYTES:]:
                same = common_pages(held, data, at)
                return Match(at // DIGEST_BYTES + same, child, same, self._version)
            node, at = child, end
        return Match(at // DIGEST_BYTES, node, len(node.pages), self._version)

    def _split(self, node: Node, pages: int) -> Node:
        """Cuts `node` after its first `pages` pages; returns the upper part, a new node. `node` is the lower part."""
        parent = node.parent
        assert parent is not None and 0 < pages < len(node.pages)
        upper = Node(parent, node.digests, node.pages, next(self._serials), node.created)
        upper.locks, upper.hits, upper.last_access = node.locks, node.hits, node.last_access
        upper.may_arrive = node.may_arrive
        node.digests, node.pages = upper.cut(pages)
        node.parent = upper
        parent.add_child(upper)
        upper.add_child(node)
        self._rekey(node)
        self.nodes += 1
        self._version = next(_versions)
        return upper

    def _close(self, lock: Lock) -> None:
        assert lock.tree is self and not lock.released, "the lock is released, or of another tree"
        lock.released = True
        self.locks -= 1

    def _release(self, node: Node) -> None:
        """Takes one from the count of `node` and of all above it."""
        now = self._clock()
        step: Node | None = node
        while step is not None:
            assert step.locks > 0, "a lock is missing"
            step.last_access = now  # it was in use until now
            step.locks -= 1
            if step.locks == 0:
                self._rest(step)
            step = step.parent

    def _rest(self, node: Node) -> None:
        """An unlocked node's pages become evictable."""
        if node.may_arrive:
            assert PageState.ARRIVING not in self.pool.states(node.pages), "unlocked over ARRIVING pages: prune them"
            node.may_arrive = False
        self.evictable += len(node.pages)
        if not node.children and node is not self._root:
            self._enter(node)

    def _take_over(self, pages: list[int]) -> int:
        """LEASED pages become CACHED; returns how many others there are, all ARRIVING."""
        before = self.pool.states(pages)
        arriving = before.count(PageState.ARRIVING)
        if arriving:
            assert len(set(pages)) == len(pages), "a page is named twice"
            pages = [page for page, state in zip(pages, before, strict=True) if state != PageState.ARRIVING]
        self.pool.move(pages, PageState.LEASED, PageState.CACHED)
        return arriving

    def _touch(self, node: Node, now: float) -> None:
        step: Node | None = node
        while step is not None:
            step.last_access = now
            step = step.parent
        self._rekey(node)

    def _remove_subtree(self, top: Node) -> list[int]:
        """Takes `top` and all below it out of the tree; none may be locked. Returns their pages, path order first."""
        assert top.parent is not None
        top.parent.remove_child(top)
        removed = array("I")
        stack = [top]
        while stack:
            node = stack.pop()
            assert node.locks == 0, "a locked node is taken out of the tree"
            self._leave(node)
            removed += node.pages
            if node.may_arrive:
                self.arriving -= self.pool.states(node.pages).count(PageState.ARRIVING)
            else:
                self.evictable -= len(node.pages)
            self.nodes -= 1
            stack.extend(node.children.values())
        self.pages -= len(removed)
        self._version = next(_versions)
        return removed.tolist()

    def _enter(self, leaf: Node) -> None:
        leaf.entry = (self._policy.key(leaf), leaf.serial, leaf)
        self._leaves.add(leaf.entry)

    def _leave(self, node: Node) -> None:
        if node.entry is not None:
            self._leaves.remove(node.entry)
            node.entry = None

    def _rekey(self, node: Node) -> None:
        """After its use or size has changed."""
        if node.entry is not None and node.entry[0] != self._policy.key(node):
            self._leave(node)
            self._enter(node)

    # -- for tests -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recounts everything; for tests."""
        pages = arriving = evictable = nodes = 0
        leaves: list[Node] = []
        seen: set[int] = set()
        for node in self._all():
            assert len(node.digests) == len(node.pages) * DIGEST_BYTES
            assert node.locks >= sum(child.locks for child in node.children.values())
            for first, child in node.children.items():
                assert child.parent is node and child.first_digest == first
            if node is self._root:
                assert node.locks == self.locks and node.entry is None
                continue
            nodes += 1
            pages += len(node.pages)
            assert node.pages, "an empty node"
            assert seen.isdisjoint(node.pages), "a page is in two nodes"
            seen.update(node.pages)
            states = self.pool.states(node.pages)
            coming = states.count(PageState.ARRIVING)
            assert coming + states.count(PageState.CACHED) == len(states), "a page is neither ARRIVING nor CACHED"
            assert node.may_arrive or not coming
            arriving += coming
            if node.locks == 0:
                assert not node.may_arrive, "a node with ARRIVING pages was never locked"
                evictable += len(node.pages)
                if not node.children:
                    leaves.append(node)
                    assert node.entry is not None and node.entry[0] == self._policy.key(node)
            assert (node.entry is not None) == (node.locks == 0 and not node.children)
        assert (pages, arriving, evictable, nodes) == (self.pages, self.arriving, self.evictable, self.nodes)
        assert sorted(node.serial for node in leaves) == sorted(entry[1] for entry in self._leaves)

    def _all(self) -> Iterator[Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _upwards(node: Node) -> Iterator[Node]:
    step: Node | None = node
    while step is not None:
        yield step
        step = step.parent


def _counter() -> Callable[[], float]:
    ticks = itertools.count(1)
    return lambda: float(next(ticks))
