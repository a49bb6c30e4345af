"""A tree on two small tiers against a naive model, step by step: for each tier a dict of paths, and what is written in
each page. Copies move what is written when they end, late, in any order, and in part wrongly.

A path is a tuple of symbols, one a page. What goes by eviction is the tree's choice: the model learns it from the pools
and judges whether it was allowed to go.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.radix.policy import Policy, policy_names
from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import OUTPUT, PROMPT, RESTORE, SPILL, Copy, Lock, PagedRadixTree

Path = tuple[int, ...]

PAGES, HOST_PAGES = 20, 12
WRONG: Path = (-1,)
NO_PARENT = bytes(32)

paths = st.lists(st.integers(0, 2), max_size=7).map(tuple)
picks = st.integers(0, 30)
masks = st.integers(0, 127)


def digest(path: Path) -> bytes:
    value = b"root"
    for symbol in path:
        value = hashlib.sha256(value + bytes([symbol])).digest()
    return value


def chain(path: Path) -> bytes:
    return b"".join(digest(prefix) for prefix in prefixes(path))


def prefixes(path: Path) -> list[Path]:
    return [path[:n] for n in range(1, len(path) + 1)]


@dataclass(eq=False)
class Flight:
    copy: Copy
    paths: list[Path]
    holds: Path = ()  # of a restore
    detached: set[Path] = field(default_factory=set)
    touched: set[Path] = field(default_factory=set)

    @property
    def in_tree(self) -> list[Path]:
        return [path for path in self.paths if path not in self.detached]


class TiersMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(policy_names()), output_first=st.booleans(), hits=st.integers(0, 3))
    def begin(self, policy: str, output_first: bool, hits: int) -> None:
        self.pool, self.rows = PagePool(PAGES), PagePool(HOST_PAGES, tier="host")
        self.tree = PagedRadixTree(self.pool, self.rows, Policy(policy, output_first), write_through_hits=hits)
        self.device: dict[Path, int] = {}
        self.host: dict[Path, int] = {}
        self.arriving: set[Path] = set()
        self.locks: dict[Lock, Path] = {}
        self.flights: list[Flight] = []
        self.written: dict[int, Path] = {}  # by device page
        self.written_rows: dict[int, Path] = {}
        self.generations: dict[Path, int] = {}  # of the rows: one may be freed and taken again within a call

    # -- looking -------------------------------------------------------------------------------------------------

    def matched(self, path: Path) -> int:
        held = (i for i, p in enumerate(prefixes(path)) if p not in self.device and p not in self.host)
        return next(held, len(path))

    def on_device(self, path: Path) -> int:
        return next((i for i, p in enumerate(prefixes(path)) if p not in self.device), len(path))

    def is_orphan(self, path: Path) -> bool:
        return self.matched(path) < len(path)

    def locked(self, path: Path, but: Lock | None = None) -> bool:
        held = [p for lock, p in self.locks.items() if lock is not but] + [flight.holds for flight in self.flights]
        return any(p[: len(path)] == path for p in held)

    def below(self, top: Path) -> list[Path]:
        every = dict.fromkeys((*self.device, *self.host, *(p for f in self.flights for p in f.in_tree)))
        return [p for p in every if p[: len(top)] == top and not (p in self.host and self.is_orphan(p))]

    def copied(self, kind: int | None = None) -> set[Path]:
        return {p for f in self.flights if kind is None or f.copy.kind == kind for p in f.in_tree}

    # -- what the steps are made of ------------------------------------------------------------------------------

    def lock(self, path: Path, priority: int = 0) -> Lock:
        match = self.tree.match(chain(path))
        assert (match.pages, match.device_pages) == (self.matched(path), self.on_device(path))
        return self.keep(self.tree.lock(match, priority), path[: match.pages])

    def keep(self, lock: Lock, path: Path) -> Lock:
        self.locks[lock] = path
        for flight in self.flights:
            flight.touched.update(prefixes(path))
        return lock

    def learn(self, *, evicting: bool = False) -> None:
        """Forgets what was freed: nobody held it, and no copy."""
        copied = self.copied()
        for path, row in list(self.host.items()):
            if self.rows.generation(row) != self.generations[path]:
                assert path not in copied and (path in self.device or not self.locked(path))
                del self.host[path]
        for path, page in list(self.device.items()):
            if self.pool.state(page) == PageState.FREE:
                assert evicting and path not in copied and path not in self.arriving and not self.locked(path)
                del self.device[path]

    def hold_row(self, path: Path, row: int) -> None:
        self.host[path] = row
        self.generations[path] = self.rows.generation(row)

    def take(self, pages: int) -> list[int] | None:
        """What is free, or can be at once."""
        if self.pool.free < pages:
            self.evict(pages - self.pool.free)
        if self.pool.free < pages:
            return None
        return self.pool.allocate(pages)

    def start(self, copy: Copy | None, holds: Path = ()) -> None:
        if copy is None:
            return
        names = {digest(path): path for path in self.device}
        flight = Flight(copy, [names[copy.digests[i : i + 32]] for i in range(0, len(copy.digests), 32)], holds)
        above = b"".join(digest(path[:-1]) if len(path) > 1 else NO_PARENT for path in flight.paths)
        assert copy.parents == above and len(copy.outputs) == len(copy.host) == len(flight.paths)
        assert [self.device[path] for path in flight.paths] == copy.device
        assert not self.copied().intersection(flight.paths)
        for path, row in zip(flight.paths, copy.host, strict=True):
            if copy.kind == RESTORE:
                assert self.host[path] == row
            else:
                assert path not in self.host
        self.flights.append(flight)

    def take_out(self, top: Path) -> list[int]:
        """`top` and what is below it leave the tree. Returns the device pages that no copy keeps."""
        gone = self.below(top)
        kept = self.copied().intersection(gone)
        for flight in self.flights:
            flight.detached |= kept.intersection(flight.paths)
        for path in gone:
            assert not self.locked(path)
            self.arriving.discard(path)
            self.host.pop(path, None)
        return [page for path in gone if (page := self.device.pop(path, None)) is not None and path not in kept]

    def insert(
        self, path: Path, pages: list[int], start: int, kind: int, priority: int, lock: Lock | None = None
    ) -> Lock:
        """And locks it, by a new lock or by one that goes on."""
        states = self.pool.states(pages)
        result = self.tree.insert(chain(path), pages, start, kind, priority)
        existing = self.on_device(path)
        assert (result.existing, result.duplicates) == (existing, pages[: existing - start])
        for prefix, page, state in list(zip(prefixes(path)[start:], pages, states, strict=True))[existing - start :]:
            self.device[prefix] = page
            self.written[page] = prefix
            if state == PageState.ARRIVING:
                self.arriving.add(prefix)
                self.written[page] = WRONG
        self.learn()
        self.pool.free_pages(result.duplicates)
        assert (result.match.pages, result.match.device_pages) == (len(path), len(path))
        if lock is None:
            return self.keep(self.tree.lock(result.match), path)
        self.tree.relock(lock, result.match)
        return self.keep(lock, path)

    # -- steps ---------------------------------------------------------------------------------------------------

    @rule(path=paths, priority=st.integers(-2, 2))
    def hold(self, path: Path, priority: int) -> None:
        self.lock(path, priority)

    @rule(path=paths, coming=masks, priority=st.integers(-2, 2), moves=st.booleans())
    def admit(self, path: Path, coming: int, priority: int, moves: bool) -> None:
        """Locks what is held, restores what of it is on the host, inserts the rest, some of it arriving."""
        short = self.lock(path)
        held = short.pages
        pages = self.take(len(path) - short.device_pages)
        if pages is None:
            return
        back = held - short.device_pages
        self.restore_to(short, pages[:back])
        fresh = pages[back:]
        self.pool.move([p for i, p in enumerate(fresh) if coming >> i & 1], PageState.LEASED, PageState.ARRIVING)
        self.insert(path, fresh, held, PROMPT, priority, short if moves else None)
        if not moves:
            self.tree.unlock(short)
            del self.locks[short]

    def restore_to(self, lock: Lock, pages: list[int]) -> None:
        path = self.locks[lock]
        copy = self.tree.restore(lock, pages)
        assert (copy is None) == (not pages)
        for prefix, page in zip(prefixes(path)[len(path) - len(pages) :], pages, strict=True):
            self.device[prefix] = page
            self.written[page] = WRONG
        self.start(copy, path)

    @rule(pick=picks)
    def restore(self, pick: int) -> None:
        locks = [lock for lock in self.locks if lock.device_pages < lock.pages]
        if locks:
            lock = locks[pick % len(locks)]
            pages = self.take(lock.pages - lock.device_pages)
            if pages is not None:
                self.restore_to(lock, pages)

    @rule(path=paths, kind=st.sampled_from([PROMPT, OUTPUT]), back=st.integers(0, 7), stays=st.booleans())
    def publish(self, path: Path, kind: int, back: int, stays: bool) -> None:
        """Readable pages for a path of which any part may be held, in either tier."""
        start = min(back, self.on_device(path))
        pages = self.take(len(path) - start)
        if pages is None:
            return
        if self.on_device(path) < start:  # evicted meanwhile
            with pytest.raises(ValueError, match="start is"):
                self.tree.insert(chain(path), pages, start)
            self.pool.free_pages(pages)
            return
        lock = self.insert(path, pages, start, kind, 0)
        if not stays and not any(p in self.arriving for p in prefixes(path)):
            self.tree.unlock(lock)
            del self.locks[lock]

    @rule(pick=picks, chosen=masks)
    def arrive(self, pick: int, chosen: int) -> None:
        coming = sorted(self.arriving)
        come = [path for i, path in enumerate(coming) if chosen >> (i + pick) % 7 & 1]
        self.tree.arrived([self.device[path] for path in come])
        for path in come:
            self.arriving.remove(path)
            self.written[self.device[path]] = path

    @rule(pick=picks, back=st.integers(0, 7))
    def release(self, pick: int, back: int) -> None:
        """Unlocks, or prunes from somewhere at or before the first arriving page that only this lock holds."""
        if not self.locks:
            return
        lock = list(self.locks)[pick % len(self.locks)]
        path = self.locks.pop(lock)
        own = [p for p in prefixes(path) if not self.locked(p)]
        first = next((len(p) - 1 for p in own if p in self.arriving), len(path))
        if first == len(path) and back < 4:
            self.tree.unlock(lock)
            return
        if first < len(path):
            with pytest.raises(AssertionError, match="ARRIVING"):
                self.tree.unlock(lock)
        start = max(0, first - back % 4)
        top = next((p for p in own if len(p) > start), None)
        removed = self.tree.prune(lock, start)
        assert sorted(removed) == sorted(self.take_out(top) if top is not None else [])
        self.pool.free_pages(removed)

    @rule(pages=st.integers(0, 6))
    def evict(self, pages: int) -> None:
        room = self.rows.free
        result = self.tree.evict(pages)
        spilled = result.spill.device if result.spill is not None else []
        assert len(result.freed) + len(spilled) <= pages and len(spilled) <= max(room, self.rows.free + len(spilled))
        lost = sum(page in result.freed for path, page in self.device.items() if path not in self.host)
        assert result.dropped == lost
        self.learn(evicting=True)
        if len(result.freed) + len(spilled) < pages:  # all that is left is held by a copy, or above one
            kept = [p for p in self.device if p in self.copied() or p in self.arriving or self.locked(p)]
            kept += [] if result.spill is None else [p for p, page in self.device.items() if page in spilled]
            assert all(any(k[: len(p)] == p for k in kept) for p in self.device)
        self.start(result.spill)

    @rule(pages=st.integers(0, 6))
    def evict_host(self, pages: int) -> None:
        possible, before = self.tree.host_evictable, self.rows.free
        assert self.tree.evict_host(pages) == min(pages, possible) == self.rows.free - before
        self.learn()

    @rule(pages=st.integers(0, 6))
    def backup(self, pages: int) -> None:
        copy = self.tree.backups(pages)
        assert copy is None or len(copy.device) <= pages
        self.start(copy)

    @rule(pick=picks, failing=st.one_of(st.just(0), masks))
    def finish(self, pick: int, failing: int) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(pick % len(self.flights))
        copy, good = flight.copy, {}
        for i, (path, page, row) in enumerate(zip(flight.paths, copy.device, copy.host, strict=True)):
            good[path] = not failing >> i % 7 & 1
            if copy.kind == RESTORE:
                assert self.written_rows[row] == path
                self.written[page] = path if good[path] else WRONG
            else:
                assert self.written[page] == path
                self.written_rows[row] = path if good[path] else WRONG
        result = self.tree.finish_copy(
            copy.id, [page for path, page in zip(flight.paths, copy.device, strict=True) if not good[path]]
        )
        if copy.kind == RESTORE:
            self.restored(flight, good, result.readable, result.lost, result.removed)
            return
        assert not result.readable and not result.lost and not result.removed
        for path, page, row in zip(flight.paths, copy.device, copy.host, strict=True):
            row_stays, page_stays = self.rows.state(row) != PageState.FREE, page not in result.freed
            assert page_stays == (self.pool.state(page) != PageState.FREE)
            if path in flight.detached:
                assert not row_stays and not page_stays
                continue
            assert row_stays or page_stays
            assert row_stays <= good[path] and (row_stays or not all(good.values()))
            if row_stays:
                self.hold_row(path, row)
            if not page_stays:
                assert copy.kind == SPILL and path not in flight.touched and not self.locked(path)
                del self.device[path]

    def restored(
        self, flight: Flight, good: dict[Path, bool], readable: list[int], lost: list[int], removed: list[int]
    ) -> None:
        """Where a page failed, its whole node has lost its host pages; what nobody else holds from it on has gone."""
        names = dict(zip(flight.copy.device, flight.paths, strict=True))
        for path in [path for path in flight.paths if not good[path]]:
            self.arriving.add(path)
        gone = {path for path, page in self.device.items() if page in removed}
        if gone:
            self.pool.free_pages(removed)
            assert sorted(self.take_out(min(gone, key=len))) == sorted(removed)
        assert sorted([*readable, *lost]) == sorted(page for page, path in names.items() if path not in gone)
        assert all(good[names[page]] for page in readable) and not any(good[names[page]] for page in lost)
        for path in self.arriving:
            assert self.locked(path)
        self.learn()

    @rule()
    def flush(self) -> None:
        stays = {p for path in (*self.copied(), *self.locks.values()) for p in prefixes(path)}
        stays |= {p for flight in self.flights for p in prefixes(flight.holds)}
        pages = [path for path in self.device if path not in stays]
        rows = [path for path in self.host if path not in stays]
        result = self.tree.flush()
        assert (result.device, result.host) == (len(pages), len(rows))
        for path in pages:
            del self.device[path]
        for path in rows:
            del self.host[path]
        assert result.skipped == len(self.device.keys() | self.host.keys())

    @rule(resizes=st.booleans())
    def forget_device(self, resizes: bool) -> None:
        """The device's memory goes, once nothing is held or copied; what the host has stays, orphans among it."""
        if self.locks or self.flights:
            with pytest.raises(AssertionError, match="in use"):
                self.tree.forget_device()
            while self.flights:
                self.finish(0, 0)
            while self.locks:
                self.release(0, 0)
        assert self.tree.forget_device() == len(self.device)
        self.device.clear()
        self.written.clear()
        if resizes:
            self.pool.resize(PAGES)

    @rule(found=st.lists(paths.filter(bool), max_size=5, unique=True))
    def recover(self, found: list[Path]) -> None:
        found = found[: self.rows.free]
        rows = self.rows.allocate(len(found))
        parents = b"".join(digest(path[:-1]) if len(path) > 1 else NO_PARENT for path in found)
        before = set(self.host) | set(self.device) | self.copied()
        result = self.tree.recover(b"".join(map(digest, found)), parents, rows)
        assert result.attached + result.orphans + result.dropped == len(found)
        for path, row in zip(found, rows, strict=True):
            if self.rows.state(row) == PageState.FREE:
                assert path in before
            else:
                assert path not in self.host
                self.hold_row(path, row)
                self.written_rows[row] = path

    # -- what always holds ---------------------------------------------------------------------------------------

    def leaving(self) -> int:
        """Pages that would be free if all spills ended now: the deepest first."""
        spilled = {path for f in self.flights if f.copy.kind == SPILL for path in f.in_tree if path not in f.touched}
        left = set(self.device)
        for path in sorted(spilled, key=len, reverse=True):
            if not self.locked(path) and not any(p[:-1] == path for p in left):
                left.remove(path)
        return len(self.device) - len(left)

    @invariant()
    def agrees(self) -> None:
        tree, pool, rows = self.tree, self.pool, self.rows
        tree.check()
        pool.check()
        rows.check()
        restoring = self.copied(RESTORE)
        written = self.copied() - restoring
        assert (tree.pages, tree.arriving, tree.restoring) == (len(self.device), len(self.arriving), len(restoring))
        assert tree.cached == tree.pages - tree.arriving - tree.restoring
        assert tree.evictable == sum(not self.locked(path) for path in self.device)
        assert tree.host_pages == len(self.host) + len(written)
        assert tree.orphans == sum(self.is_orphan(path) for path in self.host)
        assert (tree.locks, tree.copies) == (len(self.locks), len(self.flights))
        assert tree.spilling == self.leaving()
        for path in self.device:
            assert len(path) == 1 or path[:-1] in self.device, "on the device below what is not"
        for path, page in self.device.items():
            if path in self.arriving:
                state = PageState.ARRIVING
            elif path in restoring:
                state = PageState.RESTORING
            else:
                assert self.written[page] == path, "a readable page has other bytes"
                state = PageState.SPILLING if path in written else PageState.CACHED
            assert pool.state(page) is state
        for path, row in self.host.items():
            assert self.written_rows[row] == path, "a readable row has other bytes"
            assert rows.state(row) is (PageState.RESTORING if path in restoring else PageState.CACHED)
        for lock, path in self.locks.items():
            device = self.on_device(path)
            assert (lock.pages, lock.device_pages) == (len(path), device)
            assert tree.path_pages(lock) == [self.device[p] for p in prefixes(path)[:device]]
        detached = sum(len(flight.detached) for flight in self.flights)
        assert pool.free == PAGES - len(self.device) - detached
        assert rows.free == HOST_PAGES - tree.host_pages - detached

    def teardown(self) -> None:
        """Nothing leaks."""
        if not hasattr(self, "tree"):
            return
        while self.flights:
            self.finish(0, 0)
        while self.locks:
            self.release(0, 0)
        self.tree.check()
        self.flush()
        assert (self.tree.pages, self.tree.nodes, self.tree.host_pages, self.tree.locks) == (0, 0, 0, 0)
        assert (self.pool.free, self.rows.free) == (PAGES, HOST_PAGES)


class LongTiersMachine(TiersMachine):
    pass


_CHECKS = list(HealthCheck)

TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=_CHECKS)

TestTiersLong = pytest.mark.nightly(pytest.mark.timeout(3600)(LongTiersMachine.TestCase))
TestTiersLong.settings = settings(
    max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=_CHECKS
)
