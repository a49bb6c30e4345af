"""A tree on two small tiers and a naive model of it: for each tier a dict of paths, and what is written in each page.

A path is a tuple of symbols, one a page. What goes by eviction is the tree's choice: the model learns it from the pools
and judges whether it was allowed to go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import RESTORE, SPILL, Copy, Lock, PagedRadixTree, Policy, policy_names
from tests.radix.cache_machine.model import NO_PARENT, Path, chain, digest, prefixes

PAGES, HOST_PAGES = 20, 12
WRONG: Path = (-1,)


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


class TiersWorld(RuleBasedStateMachine):
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

    # -- looking --------------------------------------------------------------------------------------------------

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

    def leaving(self) -> int:
        """Pages that would be free if all spills ended now: the deepest first."""
        spilled = {path for f in self.flights if f.copy.kind == SPILL for path in f.in_tree if path not in f.touched}
        left = set(self.device)
        for path in sorted(spilled, key=len, reverse=True):
            if not self.locked(path) and not any(p[:-1] == path for p in left):
                left.remove(path)
        return len(self.device) - len(left)

    # -- what the steps are made of -------------------------------------------------------------------------------

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

    def restore_to(self, lock: Lock, pages: list[int]) -> None:
        path = self.locks[lock]
        copy = self.tree.restore(lock, pages)
        assert (copy is None) == (not pages)
        for prefix, page in zip(prefixes(path)[len(path) - len(pages) :], pages, strict=True):
            self.device[prefix] = page
            self.written[page] = WRONG
        self.start(copy, path)

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
