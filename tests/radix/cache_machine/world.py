"""A cache with its memory, and what shells and cores do with it: copies that end when they like, requests, pins.

Everything done here is done to the model too, and what the cache answers is compared with it on the spot.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry._core import HeldIndexReader
from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.tier_copies import CopyEnded, CopyStarted
from kvferry.radix.pool import HeldIndex, PageState
from kvferry.radix.tree import BACKUP, RESTORE, Lock
from tests.radix.cache_machine.model import (
    GARBAGE,
    NO_PARENT,
    Flight,
    Memory,
    Path,
    Side,
    chain,
    content,
    digest,
    path_of,
    place,
    prefixes,
    split_digests,
)

PROMPT, OUTPUT = 0, 1
_READABLE = (PageState.CACHED, PageState.SPILLING)


@dataclass(frozen=True)
class Setup:
    pages: int
    host_pages: int
    limits: CacheLimits
    namespaces: tuple[bytes, ...]
    overcommit: float = 1.0


class Unlocking:
    """How pins give their locks up."""

    def __init__(self, world: World) -> None:
        self.world = world

    def abandoned(self, namespace: Namespace, lock: Lock) -> int | None:
        return self.world.abandoned(self.world.side_of(namespace), lock)

    def unlock(self, namespace: Namespace, lock: Lock) -> None:
        self.world.give_up(self.world.side_of(namespace), lock)


@dataclass
class World:
    setup: Setup
    now: float = 0.0
    flights: list[Flight] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # given back, not settled yet
    lingering: list[tuple[Side, Path]] = field(default_factory=list)  # of them, those that were readable in a tree
    lock_paths: dict[Lock, tuple[Side, Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host_memory = Memory(self.setup.host_pages)
        self.start()

    def start(self) -> None:
        """A fresh process: only the host tier's bytes may have outlived the one before."""
        setup = self.setup
        self.device_memory = Memory(setup.pages)
        self.cache = Cache(setup.pages, 4, host_pages=setup.host_pages, limits=setup.limits)
        self.pool, self.host = self.cache.pool, self.cache.host
        index = mmap.mmap(-1, HeldIndex.bytes_for(setup.pages + setup.host_pages))
        self.cache.index_held(HeldIndex(index))
        self.index = HeldIndexReader(index)
        self.sides = [Side(i, self.cache.namespace(name)) for i, name in enumerate(setup.namespaces)]
        self.pins = Pins(self.cache, Unlocking(self))
        self.flights, self.released, self.lingering, self.lock_paths = [], [], [], {}

    def side_of(self, namespace: Namespace) -> Side:
        return next(side for side in self.sides if side.namespace is namespace)

    def sync(self) -> None:
        for side in self.sides:
            side.sync(self.pool, self.host)

    # -- locks ---------------------------------------------------------------------------------------------------

    def lock(self, side: Side, path: Path, priority: int = 0) -> Lock:
        """Locks what is held of the path."""
        tree = side.namespace.tree
        match = tree.match(chain(path))
        assert (match.pages, match.device_pages) == (side.matched(path), side.matched_device(path))
        return self.register(side, path[: match.pages], tree.lock(match, priority))

    def register(self, side: Side, path: Path, lock: Lock) -> Lock:
        assert lock.pages == len(path)
        self.touch(side, path)
        side.hold(path)
        self.lock_paths[lock] = (side, path)
        assert side.namespace.tree.path_pages(lock) == side.pages(path)
        return lock

    def touch(self, side: Side, path: Path) -> None:
        covered = set(prefixes(path))
        for flight in self.flights:
            if flight.side is side:
                flight.touched.update(covered.intersection(flight.paths))

    def path_of(self, lock: Lock) -> Path:
        return self.lock_paths[lock][1]

    def give_up(self, side: Side, lock: Lock) -> None:
        """Unlocks, or prunes from the first arriving page that nobody else holds."""
        tree = side.namespace.tree
        owner, path = self.lock_paths.pop(lock)
        assert owner is side and tree.path_pages(lock) == side.pages(path)
        side.let_go(path)
        start = next((i for i, p in enumerate(prefixes(path)) if p in side.arriving and p not in side.locks), None)
        if start is None:
            tree.unlock(lock)
            return
        removed = tree.prune(lock, start)
        expected = self.take_out(side, path[: start + 1])
        assert sorted(removed) == sorted(expected)
        assert removed[0] == expected[0], "path order first"
        self.cache.pruned(side.namespace, removed)
        self.sync()

    def take_out(self, side: Side, top: Path) -> list[int]:
        """`top` and all below leave the model's tree. Returns the device pages that no copy keeps."""
        gone = sorted(side.below(top), key=len)
        assert all(path not in side.locks for path in gone)
        kept: set[Path] = set()
        for flight in self.flights:
            if flight.side is side:
                detached = flight.attached.intersection(gone)
                assert not detached or flight.writes_host, "a path that is being restored was taken out"
                flight.detached |= detached
                kept |= detached
        freed = [path for path in gone if path in side.device and path not in kept]
        pages = [side.device[path].page for path in freed]
        self.released += pages
        self.lingering += [(side, path) for path in freed if path not in side.arriving]
        side.drop(gone)
        return pages

    # -- pages ---------------------------------------------------------------------------------------------------

    @property
    def sound(self) -> bool:
        """No promise was given lightly."""
        return self.setup.overcommit == 1.0

    def take(self, side: Side, pages: int) -> list[int] | None:
        """Of a promise. None: copies must end first, and some are under way."""
        before = [(s, s.namespace.used - s.namespace.tree.spilling, s.namespace.tree.host_pages) for s in self.sides]
        dropped = self.cache.tiers.dropped
        taken = self.cache.take(side.namespace, pages)
        self._settled()
        self.sync()
        self.collect()
        for other, used, host_pages in before:
            namespace, quota = other.namespace, other.namespace.quota
            left, host_left = namespace.used - namespace.tree.spilling, namespace.tree.host_pages
            if other is not side and left < used:
                assert left >= quota.soft, "another one's soft quota was broken"
            # What hangs below a dropped page goes with it; and room may be made for what then waits for a copy's end.
            host_left += namespace.tree.evictable - namespace.tree.spilling
            if other is not side and host_left < host_pages and dropped == self.cache.tiers.dropped:
                assert host_left >= quota.host_soft, "another one's soft quota of the host was broken"
        if taken is None:
            coming = any(flight.writes_host for flight in self.flights)
            assert coming or not self.sound, "pages were promised, are not there, and nothing is under way"
            return None
        assert len(set(taken)) == pages == len(taken)
        assert set(self.pool.states(taken)) <= {PageState.LEASED}
        return taken

    def release(self, side: Side, pages: Sequence[int]) -> None:
        self.released += pages
        self.cache.release(side.namespace, pages)

    def settle(self) -> None:
        self.cache.settle()
        self._settled()

    def _settled(self) -> None:
        self.released.clear()
        self.lingering.clear()

    def insert(
        self, side: Side, path: Path, pages: list[int], start: int, kind: int, priority: int, lock: Lock | None
    ) -> None:
        """A request's own pages, for path[start:]; its duplicates are released. The lock then covers it all."""
        tree = side.namespace.tree
        states = self.pool.states(pages)
        news = list(zip(prefixes(path)[start:], pages, states, strict=True))
        twice = [page for prefix, page, _ in news if prefix in side.device]
        self.cache.name(side.namespace, pages, b"".join(digest(prefix) for prefix in prefixes(path)[start:]))
        result = tree.insert(chain(path), pages, start, kind, priority)
        assert (result.existing, result.duplicates) == (side.matched_device(path), twice)
        assert (result.match.pages, result.match.device_pages) == (len(path), len(path))
        for prefix, page, state in news:
            if prefix in side.device:
                continue
            if prefix not in side.host:
                side.outputs[prefix] = kind == OUTPUT
            elif side.is_orphan(prefix):
                side.outputs[prefix] = None
            side.device[prefix] = place(self.pool, page)
            if state == PageState.ARRIVING:
                side.arriving.add(prefix)
        self.sync()
        if lock is not None:
            tree.relock(lock, result.match)
            side.let_go(self.lock_paths.pop(lock)[1])
            self.register(side, path, lock)
        self.cache.publish(side.namespace, len(pages) - len(twice))
        self.release(side, twice)

    # -- copies --------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Copies that were begun since the last time: their targets are half written from now on."""
        for started in self.cache.copies.take_started():
            self.flights.append(self._flight(started))

    def _flight(self, started: CopyStarted) -> Flight:
        copy = started.copy
        side = next(side for side in self.sides if side.namespace.id == started.namespace_id)
        assert self.host is not None
        paths = [path_of(value) for value in split_digests(copy.digests)]
        device = [place(self.pool, page) for page in copy.device]
        host = [place(self.host, page) for page in copy.host]
        flight = Flight(started.number, side, copy, paths, device, host)
        assert len(paths) == len(device) == len(host) == len(copy.outputs) > 0
        for path, parent, output in zip(paths, split_digests(copy.parents), copy.outputs, strict=True):
            assert parent == (digest(path[:-1]) if len(path) > 1 else NO_PARENT)
            assert side.outputs[path] in (None, bool(output))
        copied = {path for other in self.flights if other.side is side for path in other.attached}
        assert copied.isdisjoint(paths), "it is copied twice at a time"
        for path, at, row in zip(paths, device, host, strict=True):
            assert side.device[path] == at
            if copy.kind == RESTORE:
                assert side.host[path] == row
                self.device_memory.write(at.page, GARBAGE)
            else:
                assert path not in side.host
                assert copy.kind == BACKUP or path not in side.locks
                self.host_memory.write(row.page, GARBAGE)
        return flight

    def restore(self, side: Side, lock: Lock, pages: list[int]) -> None:
        path = self.path_of(lock)
        missing = [prefix for prefix in prefixes(path) if prefix not in side.device]
        self.cache.restore(side.namespace, lock, pages)
        for prefix, page in zip(missing, pages, strict=True):
            side.device[prefix] = place(self.pool, page)
        self.collect()
        flight = self.flights[-1]
        assert flight.paths == missing and flight.copy.kind == RESTORE
        flight.holds = path
        side.hold(path)

    def end_copy(self, flight: Flight, failing: int) -> None:
        """Its bytes are moved now, but those of the pages in the mask `failing`."""
        self.flights.remove(flight)
        side, kind = flight.side, flight.copy.kind
        bad: list[int] = []
        for i, (path, at, row) in enumerate(zip(flight.paths, flight.device, flight.host, strict=True)):
            source, page = (self.host_memory, row.page) if kind == RESTORE else (self.device_memory, at.page)
            target, copied = (self.device_memory, at.page) if kind == RESTORE else (self.host_memory, row.page)
            assert self.host is not None
            assert place(self.pool, at.page) == at and place(self.host, row.page) == row, "freed under a copy"
            value = source.read(page)
            assert value == content(side.number, path), f"{path} was overwritten while it was copied"
            if failing >> i & 1:
                bad.append(at.page)
                value = GARBAGE
            target.write(copied, value)
        leaving = side.leaving([flight]) if not bad else set()
        if kind == RESTORE:
            side.let_go(flight.holds)
        ended = self.cache.copies.ended(flight.number, bad, len(bad), 0.001)
        self.cache.pruned(ended.namespace, ended.removed)
        assert (ended.namespace, ended.kind) == (side.namespace, kind)
        if kind == RESTORE:
            self._restored(flight, set(bad), ended)
            if ended.lost:
                self.shorten_pins(side)
        else:
            assert not ended.readable and not ended.lost and not ended.removed
            self._spilled(flight, set(bad), leaving)
        self.sync()

    def _spilled(self, flight: Flight, bad: set[int], leaving: set[Path]) -> None:
        side, host = flight.side, self.host
        assert host is not None
        for path, at, row in zip(flight.paths, flight.device, flight.host, strict=True):
            in_host, in_device = place(host, row.page) == row, place(self.pool, at.page) == at
            if path in flight.detached:
                assert not in_host and not in_device
                continue
            if in_host:
                side.host[path] = row
            assert in_host or bad, "a good copy was thrown away"
            assert not in_host or at.page not in bad, "a bad copy was kept"
            if not bad:
                assert in_device == (path not in leaving)
            assert in_device or (in_host and flight.copy.kind != BACKUP and path not in flight.touched)

    def _restored(self, flight: Flight, bad: set[int], ended: CopyEnded) -> None:
        side, readable, lost, removed = flight.side, ended.readable, ended.lost, ended.removed
        by_page = {at.page: path for path, at in zip(flight.paths, flight.device, strict=True)}
        held = {at.page: path for path, at in side.device.items()}
        assert set(lost).isdisjoint(removed) and set(readable).isdisjoint(removed) and set(lost) <= bad
        assert set(by_page) == set(readable) | set(lost) | (set(removed) & set(by_page))
        assert not bad.intersection(readable)
        for page in lost:
            assert by_page[page] in side.locks, "lost, and nobody waits for it"
        side.arriving.update(by_page[page] for page in bad)
        # Of pages that were to come from elsewhere it may have been the last that held them, too.
        failed = list(side.arriving)
        for path in [held[page] for page in removed]:
            assert path not in side.locks, "removed, and somebody holds it"
            near = (f for f in failed if f[: len(path)] == path or path[: len(f)] == f)
            assert next(near, None) is not None, f"{path} was removed, and no page on its path is missing"
        expected: list[int] = []
        for path in sorted((held[page] for page in removed), key=len):
            if path in side.device:
                expected += self.take_out(side, path)
        assert sorted(expected) == sorted(removed)

    def end_copies(self) -> None:
        while self.flights:
            self.end_copy(self.flights[0], 0)

    def spill(self, pages: int) -> None:
        """For the host tier's sake."""
        self.settle()
        going = self.cache.eviction.spill(pages)
        self.sync()
        self.collect()
        assert going <= pages

    def write_through(self) -> None:
        self.cache.eviction.write_through()
        self.collect()

    def write_ahead(self) -> None:
        copies, free = self.cache.copies.yielding, self.cache.pool.free
        self.cache.eviction.write_ahead()
        assert self.cache.copies.yielding <= copies + (copies == 0 and free < self.cache.eviction.ahead)
        self.collect()

    # -- pins ----------------------------------------------------------------------------------------------------

    def pin(self, side: Side, path: Path, until: float) -> None:
        matched = path[: side.matched(path)]
        states = self.pool.states(side.pages(matched))
        readable = next((i for i, state in enumerate(states) if state not in _READABLE), len(matched))
        self.touch(side, path[:readable])
        try:
            pin = self.pins.pin(side.namespace, chain(path), until)
        except RequestError:
            assert readable == 0 or not self.cache.fits(side.namespace, 0) or self.would_not_fit(side, path[:readable])
            return
        assert readable > 0
        self.register(side, path[:readable], pin.lock)

    def shorten_pins(self, side: Side) -> None:
        """Lost pages that only pins hold are brought by nobody."""
        before = {pin.number: self.path_of(pin.lock) for pin in self.pins.all()}
        for pin in self.pins.all():
            if pin.namespace is side.namespace and (left := self.abandoned(side, pin.lock)) is not None:
                self.touch(side, before[pin.number][:left])
        self.pins.shorten(side.namespace)
        for pin in self.pins.all():
            if pin.lock not in self.lock_paths:
                self.register(side, before[pin.number][: pin.pages], pin.lock)
            assert pin.namespace is not side.namespace or self.abandoned(side, pin.lock) is None

    def abandoned(self, side: Side, lock: Lock) -> int | None:
        """The first page on the path that is on its way, and that only pins hold."""
        pinned = [self.lock_paths.get(pin.lock) for pin in self.pins.all()]
        covers = Counter(p for owner in pinned if owner and owner[0] is side for p in prefixes(owner[1]))
        path = self.path_of(lock)
        return next(
            (i for i, p in enumerate(prefixes(path)) if p in side.arriving and side.locks[p] == covers[p]), None
        )

    def would_not_fit(self, side: Side, path: Path) -> bool:
        lock = self.lock(side, path)
        fits = self.cache.fits(side.namespace, 0)
        self.give_up(side, lock)
        return not fits
