"""The host tier under pages that are blocks of their engine's. Core: no I/O.

The engine gives each request blocks of its own, so that device pages never enter the tree: what it holds is in the host
tier. A load copies held rows into a request's pages, under its lock; a store copies a request's pages to rows, which
enter the tree once they are written and what is before them is there. The engine has its blocks back when the request
has ended: not before the last copy of them. So a store for which there is no copy yet may wait with its request.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import precondition
from kvferry.daemon.core.lease import Lease
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.digests import DIGEST_BYTES, split_digests
from kvferry.radix.pool import PageState
from kvferry.radix.tree import BACKUP, PROMPT, RESTORE, Lock, PagedRadixTree

NO_PARENT = bytes(DIGEST_BYTES)
MAX_WAITING = 64  # stores that wait for a copy: their engine waits for the blocks
MAX_BEHIND = 64  # stores that are written, and wait for what is before them


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


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """The first `pages` of a store: they are right, and in no tree yet."""

    copy: BlockCopy
    pages: int

    @property
    def namespace(self) -> Namespace:
        return self.copy.lease.hold.namespace

    @property
    def rows(self) -> list[int]:
        return self.copy.host[: self.pages]


class BlockTier:
    """Loads and stores, from their start to their end."""

    def __init__(self, cache: Cache, leases: Mapping[Name, Lease]) -> None:
        """`leases`: those that have not ended."""
        self._cache = cache
        self._leases = leases
        self._running: dict[int, BlockCopy] = {}
        self._written: set[int] = set()  # blocks, by living requests
        self._read: Counter[int] = Counter()  # how many living requests are to have a block stored, or may send it back
        self._storing: dict[bytes, set[bytes]] = {}  # by namespace, digests on their way: no second store has them
        self._waiting: deque[Lease] = deque()  # to be stored, when a copy to the tier ends
        self._behind: list[Written] = []  # what is before them is on its way

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

    def rows_behind(self, namespace: Namespace) -> int:
        """Rows of it that are written, and wait for what is before them: in no tree yet."""
        return sum(written.pages for written in self._behind if written.namespace is namespace)

    def store(self, lease: Lease) -> None:
        """Starts the copy of those of the lease's full pages that the tier has not, nor is being given, as far as it
        has room; or has it wait until a copy to the tier ends, and the request with it."""
        cache, namespace = self._cache, lease.hold.namespace
        if cache.host is None:
            return
        digests, first = split_digests(lease.digests), self._held_of(lease)
        wanted = len(digests) - first
        if lease.store_flushed:
            self._not_stored("flushed", wanted)
            return
        if wanted and cache.copies.full:
            self._wait(lease, wanted)
            return
        room = cache.eviction.host_room(namespace, wanted)
        if hard := namespace.quota.host_hard:
            room = min(room, max(0, hard - namespace.tree.host_pages - self.rows_behind(namespace)))
        self._not_stored("room", wanted - room)
        if room:
            self._storing[namespace.id].update(digests[first : first + room])
            rows = cache.host.allocate(room, PageState.LEASED)
            self._begin(lease, BACKUP, first, lease.pages[first : first + room], rows)

    def _held_of(self, lease: Lease) -> int:
        """Leading pages of the lease's that the tier has, or is being given."""
        namespace = lease.hold.namespace
        storing = self._storing.setdefault(namespace.id, set())
        digests, first = split_digests(lease.digests), namespace.tree.match(lease.digests).pages
        while first < len(digests) and digests[first] in storing:
            first += 1
        return first

    def _wait(self, lease: Lease, wanted: int) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(lease)
            lease.store_waits = True
        else:
            self._not_stored("copies", wanted)

    def store_waiting(self) -> list[Lease]:
        """Starts the stores that have waited, as many as there are copies for. Returns their leases."""
        begun = []
        while self._waiting and not self._cache.copies.full:
            lease = self._waiting.popleft()
            lease.store_waits = False
            self.store(lease)
            begun.append(lease)
        return begun

    def wait_no_more(self, lease: Lease) -> None:
        """Guard: the blocks of a request that is over, or whose worker is lost, are not read any more."""
        if lease.store_waits:
            self._waiting.remove(lease)
            lease.store_waits = False
            self._not_stored("ended", len(lease.digests) // DIGEST_BYTES - self._held_of(lease))

    def flush(self, namespace: Namespace) -> tuple[int, int]:
        """Guard: what was handed in before a flush enters the tree no more. Returns how many of its rows were freed,
        and how many are freed when the copies into them have ended."""
        host, running = self._cache.host, self._stores_of(namespace)
        for lease in self._leases.values():
            if lease.hold.namespace is namespace:
                lease.store_flushed = True
        freed = [row for written in self._behind if written.namespace is namespace for row in written.rows]
        self._behind = [written for written in self._behind if written.namespace is not namespace]
        self._storing.pop(namespace.id, None)  # what is handed in from now on is stored
        if freed:
            assert host is not None
            host.free_pages(freed)
            self._not_stored("flushed", len(freed))
        return len(freed), sum(len(copy.host) for copy in running)

    def copies(self, namespace: Namespace) -> int:
        """Stores of it under way."""
        return len(self._stores_of(namespace))

    def _stores_of(self, namespace: Namespace) -> list[BlockCopy]:
        mine = (copy for copy in self._running.values() if copy.lease.hold.namespace is namespace)
        return [copy for copy in mine if copy.kind == BACKUP]

    def _not_stored(self, why: str, pages: int) -> None:
        if pages:
            self._cache.tiers.unstored[why] += pages

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
        """Has the rows enter the tree, up to the first that is not right; the others are freed."""
        host, namespace = self._cache.host, copy.lease.hold.namespace
        assert host is not None
        if copy.lease.store_flushed:  # its digests may be on their way once more
            host.free_pages(copy.host)
            self._not_stored("flushed", len(copy.host))
            return
        good = min((copy.device.index(page) for page in failed), default=len(copy.device))
        host.free_pages(copy.host[good:])
        self._storing[namespace.id].difference_update(split_digests(copy.digests)[good:])
        self._not_stored("prefix", len(copy.device) - good - len(failed))
        if good:
            self._behind.append(Written(copy, good))
        self._take_in(namespace)

    def _take_in(self, namespace: Namespace) -> None:
        """Takes into the tree all that is written and for which nothing on its way is to be waited for."""
        while True:
            mine = (written for written in self._behind if written.namespace is namespace)
            if (written := next((each for each in mine if not self._waits(each)), None)) is None:
                break
            self._behind.remove(written)
            self._enter(written, "prefix")
        if len(self._behind) > MAX_BEHIND:
            self._enter(self._behind.pop(), "behind")

    def _waits(self, written: Written) -> bool:
        """Whether what is before them is still on its way: it is another's store."""
        copy, namespace = written.copy, written.namespace
        before = copy.parents[:DIGEST_BYTES]
        return before in self._storing[namespace.id] and not self._path_is_held(namespace, copy)

    def _enter(self, written: Written, why_not: str) -> None:
        """Takes the rows into the tree, or frees them where their path is not held."""
        host, namespace, copy = self._cache.host, written.namespace, written.copy
        assert host is not None
        self._storing[namespace.id].difference_update(split_digests(copy.digests)[: written.pages])
        if self._path_is_held(namespace, copy):
            digests = copy.lease.digests[: (copy.first + written.pages) * DIGEST_BYTES]
            result = namespace.tree.insert_host(digests, written.rows, copy.first, PROMPT, copy.lease.priority)
            host.free_pages(result.duplicates)
            self._cache.eviction.keep_host_quota(namespace)
        else:
            host.free_pages(written.rows)
            self._not_stored(why_not, written.pages)

    def _path_is_held(self, namespace: Namespace, copy: BlockCopy) -> bool:
        """Whether what is before its pages is there: it may have been another's store, or be evicted."""
        return namespace.tree.match(copy.lease.digests[: copy.first * DIGEST_BYTES]).pages >= copy.first

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
