"""The host tier under pages that are blocks of their engine's. Core: no I/O.

The engine gives each request blocks of its own, so that device pages never enter the tree: what it holds is in the host
tier. A load copies held rows into a request's pages, under its lock; a store copies a request's pages to rows, which
enter the tree once they are written. The engine has its blocks back when the request has ended: not before the last
copy of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import precondition
from kvferry.daemon.core.lease import Lease
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.digests import DIGEST_BYTES, split_digests
from kvferry.radix.pool import PageState
from kvferry.radix.tree import BACKUP, PROMPT, RESTORE, Lock, PagedRadixTree

NO_PARENT = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A load (`kind` RESTORE) or store (BACKUP) of a lease's pages, from page `first` of its prompt on."""

    lease: Lease
    kind: int
    first: int
    device: list[int]
    host: list[int]
    digests: bytes
    parents: bytes
    outputs: bytes


class BlockTier:
    """Loads and stores, from their start to their end."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._running: dict[int, BlockCopy] = {}
        self._written: set[int] = set()  # blocks, by living requests
        self._read: Counter[int] = Counter()  # how many living requests are to have a block stored, or may send it back
        self._storing: dict[bytes, set[bytes]] = {}  # by namespace, digests on their way: no second store has them

    def claim(self, lease: Lease) -> None:
        """Guard: blocks that a request has written, or is to have read, are written for nobody else until it has
        ended. FAILED_PRECONDITION where one is another's."""
        written = _written(lease)
        if twice := written & (self._written | self._read.keys()):
            raise precondition(f"blocks has {min(twice)}, which is another request's that has not ended")
        self._written |= written
        self._read.update(_read(lease))

    def give_back(self, lease: Lease) -> None:
        """The lease has ended: no copy touches its blocks."""
        self._written -= _written(lease)
        for block in _read(lease):
            self._read[block] -= 1
            if not self._read[block]:
                del self._read[block]

    def load(self, lease: Lease) -> list[int]:
        """Starts the copy of what the lease has matched and its engine does not hold. Returns the pages."""
        pages = lease.pages[lease.held_pages : lease.matched]
        if pages:
            lock = lease.hold.lock
            assert lock is not None
            rows = lease.hold.namespace.tree.path_rows(lock)[lease.held_pages :]
            self._begin(lease, RESTORE, lease.held_pages, pages, rows)
        return pages

    def store(self, lease: Lease) -> None:
        """Starts the copy of those of the lease's full pages that the tier has not, nor is being given, as far as it
        has room."""
        cache, namespace = self._cache, lease.hold.namespace
        if cache.host is None or cache.copies.full:
            return
        storing = self._storing.setdefault(namespace.id, set())
        digests = split_digests(lease.digests)
        first = namespace.tree.match(lease.digests).pages
        while first < len(digests) and digests[first] in storing:
            first += 1
        room = cache.eviction.host_room(namespace, len(digests) - first)
        if room:
            storing.update(digests[first : first + room])
            rows = cache.host.allocate(room, PageState.LEASED)
            self._begin(lease, BACKUP, first, lease.pages[first : first + room], rows)

    def _begin(self, lease: Lease, kind: int, first: int, pages: list[int], rows: list[int]) -> None:
        behind = first + len(pages)
        digests = lease.digests[first * DIGEST_BYTES : behind * DIGEST_BYTES]
        parents = (NO_PARENT + lease.digests)[first * DIGEST_BYTES : behind * DIGEST_BYTES]
        copy = BlockCopy(lease, kind, first, pages, rows, digests, parents, bytes(len(pages)))
        number = self._cache.copies.begin(lease.hold.namespace, copy)
        self._running[number] = copy
        lease.copies.add(number)

    def ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> BlockCopy | None:
        """A copy is over; `failed`: those of its pages whose bytes are not right. None: it is none of these."""
        copy = self._running.pop(number, None)
        if copy is not None:
            self._cache.copies.end(number, len(failed), mismatched, seconds)
            copy.lease.copies.discard(number)
            if copy.kind == BACKUP:
                self._stored(copy, failed)
        return copy

    def _stored(self, copy: BlockCopy, failed: Sequence[int]) -> None:
        """Takes the rows into the tree, up to the first that is not right, or frees them."""
        host, namespace = self._cache.host, copy.lease.hold.namespace
        assert host is not None
        self._storing[namespace.id].difference_update(split_digests(copy.digests))
        good = min((copy.device.index(page) for page in failed), default=len(copy.device))
        digests = copy.lease.digests[: (copy.first + good) * DIGEST_BYTES]
        if good and self._path_is_held(namespace, digests, copy.first):
            result = namespace.tree.insert_host(digests, copy.host[:good], copy.first, PROMPT, copy.lease.priority)
            host.free_pages(result.duplicates + copy.host[good:])
            self._cache.eviction.keep_host_quota(namespace)
        else:
            host.free_pages(copy.host)

    def _path_is_held(self, namespace: Namespace, digests: bytes, pages: int) -> bool:
        """Whether what is before them is there: it may have been another's store, or be evicted."""
        return namespace.tree.match(digests).pages >= pages

    def forget_wrong(self, lease: Lease, page: int) -> None:
        """What the lease's path holds from prompt page `page` on is not right: it leaves the tree, but for what others
        hold. The lease holds what is before it."""
        hold, tree = lease.hold, lease.hold.namespace.tree
        assert hold.lock is not None
        # Else two that wait once more would match it again and again, each because the other one holds it.
        hold.digests = hold.digests[: page * DIGEST_BYTES]
        hold.lock = forget_path(tree, hold.lock, lease.digests, page, hold.priority)


def forget_path(tree: PagedRadixTree, lock: Lock, digests: bytes, page: int, priority: int = 0) -> Lock:
    """Takes what this lock's path holds from page `page` on out of a tree of rows alone, but for what others hold; what
    is before it is locked in its place."""
    shorter = tree.lock(tree.match(digests[: page * DIGEST_BYTES]), priority)
    removed = tree.prune(lock, page)
    assert not removed, "pages of the device were in the tree"
    return shorter


def _written(lease: Lease) -> set[int]:
    """The blocks that are written for the lease."""
    return set() if lease.stores else set(lease.blocks) - {-1}


def _read(lease: Lease) -> Sequence[int]:
    """The blocks that are read for it."""
    return lease.blocks if lease.stores else lease.held_blocks
