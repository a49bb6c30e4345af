"""A compressed radix tree of pages, keyed by chained digests.

A node is a run of pages and splits only between pages; its children are keyed by their first digest. Since digests are
chained, equality at page i of a node implies equality of all before it: a node is compared by its last digest, and by
bisection where the paths part. `match` changes nothing; `lock` splits at the match's end and counts on the node and all
its ancestors, so a locked node is never evicted or freed, and a split leaves locks right (the lower part stays the node
that was locked). `insert` never lengthens a node, so what a lock covers never changes.

ARRIVING pages are in the tree before their bytes; only locked nodes hold any. A lock that may be the last one over
such pages is given up by `prune`, which removes them. Pages that go by `evict` are FREE when it returns; those that go
by `prune` are the caller's to free, since copies may still name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sortedcontainers import SortedList

from kvferry.radix.policy import LRU, EvictionPolicy, LeafUse
from kvferry.radix.pool import PagePool, PageState

DIGEST = 32

Buffer = bytes | bytearray | memoryview


class _Node:
    __slots__ = (
        "arriving",
        "children",
        "created",
        "digests",
        "entry",
        "hits",
        "last_access",
        "locks",
        "pages",
        "parent",
        "serial",
    )

    def __init__(self, parent: _Node | None, digests: bytes, pages: list[int], serial: int, now: float) -> None:
        self.parent = parent
        self.digests = digests
        self.pages = pages
        self.serial = serial
        self.children: dict[bytes, _Node] = {}
        self.locks = 0  # on it or a descendant
        self.arriving = 0  # of its pages
        self.created = self.last_access = now
        self.hits = 0
        self.entry: tuple[float, int, _Node] | None = None  # in the sorted leaves


class Match(NamedTuple):
    """The longest held prefix of a list of digests. Good until the tree's next change of structure."""

    pages: int
    node: _Node
    offset: int  # pages of `node` that match; all of it unless the paths part within
    version: int


class Lock:
    """Holds a path from the root, `pages` pages long."""

    __slots__ = ("node", "pages", "released")

    def __init__(self, node: _Node, pages: int) -> None:
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
        self.evictable = 0  # pages of nodes without a lock
        self.pages = 0
        self.nodes = 0  # without the root
        self.locks = 0  # handles that are not released
        self._policy: EvictionPolicy = policy if policy is not None else LRU()
        self._clock = clock if clock is not None else _counter()
        self._serials = itertools.count()
        self._root = _Node(None, b"", [], next(self._serials), 0.0)
        self._leaves: SortedList[tuple[float, int, _Node]] = SortedList()
        self._arriving: dict[int, _Node] = {}  # page -> its node
        self._version = 0

    # -- looking and locking -------------------------------------------------------------------------------------

    def match(self, digests: object) -> Match:
        """The longest held prefix; arriving pages count. `digests`: n * 32 bytes, or a (n, 32) uint8 array."""
        return self._walk(_as_bytes(digests))

    def lock(self, match: Match) -> Lock:
        """Holds the matched path. The match must be of the tree as it is now."""
        assert match.version == self._version, "the tree has changed since this match"
        node = match.node
        if match.offset < len(node.pages):
            node = self._split(node, match.offset)
        now = self._clock()
        step: _Node | None = node
        while step is not None:
            step.last_access = now
            step.hits += 1
            if step.locks == 0:
                self.evictable -= len(step.pages)
                self._remove_leaf(step)
            step.locks += 1
            step = step.parent
        self.locks += 1
        return Lock(node, match.pages)

    def unlock(self, lock: Lock) -> None:
        """Gives a lock up. No page under it alone may be ARRIVING: that is `prune`."""
        self._release(lock)
        for node in _upwards(lock.node):
            if node.locks > 0:
                break
            assert node.arriving == 0, "the last lock over arriving pages is given up; prune them"
            self._enter_leaf(node)

    def path_pages(self, lock: Lock) -> list[int]:
        """Page ids of the locked path, in order."""
        assert not lock.released, "this lock was released"
        runs = [node.pages for node in _upwards(lock.node)]
        return [page for run in reversed(runs) for page in run]

    # -- changing ------------------------------------------------------------------------------------------------

    def insert(self, digests: object, pages: Sequence[int], *, start: int = 0) -> InsertResult:
        """pages[i] is of digest start + i; digests before `start` must be held. What is held already wins.

        LEASED pages become CACHED; ARRIVING pages stay so, and the caller locks them before anything else happens.
        """
        data = _as_bytes(digests)
        total = len(data) // DIGEST
        if start < 0 or start + len(pages) != total:
            raise ValueError(f"pages has {len(pages)} entries from start {start}; digests has {total}")
        match = self._walk(data)
        if match.pages < start:
            raise ValueError(f"start is {start}; only {match.pages} pages of the path are held")
        duplicates = list(pages[: match.pages - start])
        fresh = list(pages[match.pages - start :])
        if not fresh:
            return InsertResult(match.pages, duplicates, match)
        state = self.pool.state(fresh[0])
        if state is PageState.ARRIVING:
            assert all(self.pool.state(page) is state for page in fresh), "some pages are ARRIVING and some are not"
        else:
            self.pool.move(fresh, PageState.LEASED, PageState.CACHED)
        parent = match.node
        if match.offset < len(parent.pages):
            parent = self._split(parent, match.offset)
        self._remove_leaf(parent)
        node = _Node(parent, data[match.pages * DIGEST :], fresh, next(self._serials), self._clock())
        parent.children[node.digests[:DIGEST]] = node
        self.nodes += 1
        self.pages += len(fresh)
        self.evictable += len(fresh)
        if state is PageState.ARRIVING:
            node.arriving = len(fresh)
            self._arriving.update(dict.fromkeys(fresh, node))
        else:
            self._enter_leaf(node)
        self._version += 1
        return InsertResult(match.pages, duplicates, Match(total, node, len(fresh), self._version))

    def arrived(self, pages: Iterable[int]) -> None:
        """ARRIVING -> CACHED: their bytes are there and verified."""
        arrived = list(pages)
        self.pool.move(arrived, PageState.ARRIVING, PageState.CACHED)
        for page in arrived:
            self._arriving.pop(page).arriving -= 1

    def prune(self, lock: Lock, start: int) -> list[int]:
        """Releases the lock and removes, of its path from page index `start` on, what no other lock holds, with all
        that hangs on it. Returns the pages that left the tree, in the state they had; the caller frees them. What
        other locks hold stays, arriving pages too."""
        assert 0 <= start <= lock.pages, f"start is {start}; the lock is over {lock.pages} pages"
        self._release(lock)
        end = lock.pages
        removed: list[int] = []
        # Unlocked nodes of the path are its lower end: from there up.
        for node in list(_upwards(lock.node)):
            if node.locks > 0 or node is self._root:
                break
            begin = end - len(node.pages)
            kept: _Node | None = node
            if begin >= start:
                kept = None
            elif end > start:
                kept = self._split(node, start - begin)  # `node` is the lower part now
            if kept is not node:
                removed = self._remove_subtree(node) + removed
            if kept is not None:
                assert kept.arriving == 0, "arriving pages before `start` lose their last lock"
                self._enter_leaf(kept)
            end = begin
        return removed

    def evict(self, pages: int) -> list[int]:
        """Frees up to `pages` pages of unlocked leaves, in the policy's order, cutting a long leaf at its tail;
        exactly that many if so many are evictable. Returns their ids."""
        freed: list[int] = []
        while len(freed) < pages and self._leaves:
            node = self._leaves[0][2]
            assert node.locks == 0 and node.arriving == 0 and not node.children
            want = pages - len(freed)
            if want >= len(node.pages):
                parent = node.parent
                freed += self._remove_subtree(node)
                assert parent is not None
                self._enter_leaf(parent)
            else:
                tail = node.pages[-want:]
                del node.pages[-want:]
                node.digests = node.digests[: len(node.pages) * DIGEST]
                self.pages -= want
                self.evictable -= want
                self._version += 1
                freed += tail
        self.pool.free_pages(freed)
        return freed

    def oldest_key(self) -> float | None:
        """The policy's key of the leaf that would go next."""
        return self._leaves[0][0] if self._leaves else None

    # -- inside --------------------------------------------------------------------------------------------------

    def _walk(self, data: bytes) -> Match:
        node, position, total = self._root, 0, len(data) // DIGEST
        while position < total:
            child = node.children.get(data[position * DIGEST : (position + 1) * DIGEST])
            if child is None:
                break
            length = len(child.pages)
            end = position + length
            if end <= total and data[(end - 1) * DIGEST : end * DIGEST] == child.digests[-DIGEST:]:
                node, position = child, end
                continue
            same = _common_pages(child.digests, data, position, min(length, total - position))
            return Match(position + same, child, same, self._version)
        return Match(position, node, len(node.pages), self._version)

    def _split(self, node: _Node, pages: int) -> _Node:
        """Cuts `node` after its first `pages` pages. The new node is the upper part; `node` stays as the lower one, so
        locks on it hold what they held."""
        parent = node.parent
        assert parent is not None and 0 < pages < len(node.pages)
        upper = _Node(parent, node.digests[: pages * DIGEST], node.pages[:pages], next(self._serials), node.created)
        upper.locks, upper.hits, upper.last_access = node.locks, node.hits, node.last_access
        parent.children[upper.digests[:DIGEST]] = upper
        node.parent = upper
        node.digests = node.digests[pages * DIGEST :]
        del node.pages[:pages]
        upper.children[node.digests[:DIGEST]] = node
        if node.arriving:
            for page in upper.pages:
                if page in self._arriving:
                    self._arriving[page] = upper
                    upper.arriving += 1
            node.arriving -= upper.arriving
        self.nodes += 1
        self._version += 1
        return upper

    def _release(self, lock: Lock) -> None:
        assert not lock.released, "this lock was released"
        lock.released = True
        self.locks -= 1
        for node in _upwards(lock.node):
            assert node.locks > 0
            node.locks -= 1
            if node.locks == 0:
                self.evictable += len(node.pages)

    def _remove_subtree(self, top: _Node) -> list[int]:
        """Takes `top` and all below it out of the tree; none may be locked. Returns their pages, path order first."""
        assert top.parent is not None
        del top.parent.children[top.digests[:DIGEST]]
        pages: list[int] = []
        stack = [top]
        while stack:
            node = stack.pop()
            assert node.locks == 0, "a locked node is taken out of the tree"
            self._remove_leaf(node)
            pages += node.pages
            self.nodes -= 1
            stack.extend(node.children.values())
        for page in pages:
            if self._arriving:
                self._arriving.pop(page, None)
        self.pages -= len(pages)
        self.evictable -= len(pages)
        self._version += 1
        return pages

    def _enter_leaf(self, node: _Node) -> None:
        """Puts a node among the leaves if it is one that can be evicted."""
        if node is self._root or node.locks or node.children or node.entry is not None:
            return
        use = LeafUse(node.created, node.last_access, node.hits, len(node.pages))
        node.entry = (self._policy.key(use), node.serial, node)
        self._leaves.add(node.entry)

    def _remove_leaf(self, node: _Node) -> None:
        if node.entry is not None:
            self._leaves.remove(node.entry)
            node.entry = None

    # -- for tests -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recounts everything."""
        pages = evictable = nodes = 0
        arriving: dict[int, _Node] = {}
        leaves: list[_Node] = []
        seen: set[int] = set()
        for node in self._all():
            assert len(node.digests) == len(node.pages) * DIGEST
            assert node.locks >= sum(child.locks for child in node.children.values())
            for first, child in node.children.items():
                assert child.parent is node and child.digests[:DIGEST] == first
            if node is self._root:
                continue
            nodes += 1
            pages += len(node.pages)
            assert node.pages, "an empty node"
            assert seen.isdisjoint(node.pages), "a page is in two nodes"
            seen.update(node.pages)
            coming = [page for page in node.pages if self.pool.state(page) is PageState.ARRIVING]
            assert all(self.pool.state(p) in (PageState.ARRIVING, PageState.CACHED) for p in node.pages)
            assert node.arriving == len(coming)
            arriving.update(dict.fromkeys(coming, node))
            if node.locks == 0:
                assert not coming, "an arriving page without a lock"
                evictable += len(node.pages)
                if not node.children:
                    leaves.append(node)
            assert (node.entry is not None) == (node.locks == 0 and not node.children)
        assert (pages, evictable, nodes) == (self.pages, self.evictable, self.nodes)
        assert arriving == self._arriving
        assert sorted(node.serial for node in leaves) == sorted(entry[1] for entry in self._leaves)

    def _all(self) -> Iterator[_Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _upwards(node: _Node) -> Iterator[_Node]:
    step: _Node | None = node
    while step is not None:
        yield step
        step = step.parent


def _common_pages(held: bytes, data: bytes, position: int, most: int) -> int:
    """How many of the first `most` digests of `held` equal those of `data` from page `position` on; 1 does."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        at = (position + middle) * DIGEST
        if held[(middle - 1) * DIGEST : middle * DIGEST] == data[at - DIGEST : at]:
            low = middle
        else:
            high = middle - 1
    return low


def _as_bytes(digests: object) -> bytes:
    data = digests if isinstance(digests, bytes) else bytes(memoryview(digests).cast("B"))  # type: ignore[arg-type]
    if len(data) % DIGEST:
        raise ValueError(f"digests has {len(data)} bytes; it must be a multiple of {DIGEST}")
    return data


def _counter() -> Callable[[], float]:
    ticks = itertools.count(1)
    return lambda: float(next(ticks))
