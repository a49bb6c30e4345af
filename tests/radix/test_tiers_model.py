"""A tree on two small tiers against a naive model, step by step. Copies move what is written when they end, late, in
any order, and in part wrongly.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from kvferry.radix.pool import PageState
from kvferry.radix.tree import OUTPUT, PROMPT, RESTORE, SPILL
from tests.radix.cache_machine.model import NO_PARENT, Path, chain, digest, prefixes
from tests.radix.tiers_world import HOST_PAGES, PAGES, WRONG, TiersWorld

paths = st.lists(st.integers(0, 2), max_size=7).map(tuple)
picks = st.integers(0, 30)
masks = st.integers(0, 127)


class TiersMachine(TiersWorld):
    def take(self, pages: int) -> list[int] | None:
        """What is free, or can be at once."""
        if self.pool.free < pages:
            self.evict(pages - self.pool.free)
        if self.pool.free < pages:
            return None
        return self.pool.allocate(pages)

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

    @rule(pages=st.integers(0, 6), ahead=st.integers(0, 9))
    def backup_ahead(self, pages: int, ahead: int) -> None:
        copy = self.tree.backups_ahead(pages, ahead)
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

    @rule()
    def end_recovery(self) -> None:
        self.tree.end_recovery()

    # -- what always holds ----------------------------------------------------------------------------------------

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
