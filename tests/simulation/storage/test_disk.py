"""A host tier's file outlives daemons that are killed, or lose their power, at any instant: what is found names its
bytes, or its checksum tells. Without any one guard of the product, harm is found."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.effects import ForgetRows, StartCopy, tier_effects
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.radix.digests import DIGEST_BYTES, root_digest
from kvferry.radix.pool import PageState
from kvferry.radix.tree import Lock, PagedRadixTree
from kvferry.transfer.host_tier.index import IN_USE, RowIndex, Rows
from tests.simulation.clock import Clock, Violation, expect
from tests.simulation.loops import ProcessLoop
from tests.simulation.prompts import PAGE, PAGE_BYTES, Prompt, content
from tests.simulation.storage.disk import End, SimDisk
from tests.simulation.storage.memory import Memory
from tests.simulation.storage.parts import SimPoolMemory
from tests.simulation.storage.tier import SimTier

PAGES, ROWS = 12, 20
SPACES = (b"a" * 32, b"b" * 32)
ROOT = root_digest(b"disk")
LAYOUT = b"l" * 32
ENDED_SECONDS = 1.0  # in which all copies end
SEEDS = 20
ENDS: tuple[End, ...] = ("killed", "power", "closed")
LIVES = 4  # of daemons on one file


class Owner:
    """A daemon, as far as its tiers go: it caches prompts, and takes them out of the host tier again."""

    def __init__(self, process: ProcessLoop, disk: SimDisk, *, checksums: bool, failing: float) -> None:
        self.clock = process.clock
        self.cache = Cache(PAGES, PAGE, host_pages=ROWS, host_there=0)
        assert self.cache.host is not None
        self.cache.host.log_frees = True
        self.memory = Memory(self.cache, "owner")
        pool = SimPoolMemory(self.clock, self.memory, 0.0)
        rows = disk.open(ROWS, LAYOUT)
        self.tier = SimTier(process, pool, rows, failing=failing, checksums=checksums)
        self._locks: dict[int, list[tuple[PagedRadixTree, Lock]]] = {}  # by the copy that restores what they hold
        growing = process.create_task(self.tier.grow(self.cache, SPACES[0], self.flush))
        self.clock.run_until(self.clock.now + ENDED_SECONDS)
        growing.result()
        self.flush()

    def flush(self) -> None:
        while effects := tier_effects(self.cache):
            for effect in effects:
                if isinstance(effect, ForgetRows):
                    self.tier.forget(effect.rows)
                elif isinstance(effect, StartCopy):
                    self.tier.start(effect.started, partial(self._copied, effect.started))

    def _copied(
        self, started: CopyStarted, number: int, failed: Sequence[int], mismatched: int, seconds: float
    ) -> None:
        """What could not be restored, and somebody waits for, is computed again."""
        cache, copy = self.cache, started.copy
        ended = cache.copies.ended(number, failed, mismatched, seconds)
        cache.pruned(ended.namespace, ended.removed)
        for page in ended.lost:
            at = copy.device.index(page) * DIGEST_BYTES
            self.memory.write(page, content(copy.digests[at : at + DIGEST_BYTES]))
        ended.namespace.tree.arrived(ended.lost)
        for tree, lock in self._locks.pop(number, ()):
            tree.unlock(lock)
        self.flush()

    def serve(self, prompt: Prompt, space: bytes) -> None:
        """A request, at once: it reads what is cached, asks for what is in the host tier, or computes the rest."""
        cache, namespace = self.cache, self.cache.namespace(space)
        tree = namespace.tree
        lock = tree.lock(tree.match(prompt.digests))
        held, matched = lock.device_pages, lock.pages
        readable = [page for page in tree.path_pages(lock) if cache.pool.state(page) is not PageState.RESTORING]
        self.memory.check(readable, prompt.contents, "a request reads what is cached")
        want = matched - held or prompt.full - matched
        taken = self._take(namespace, want) if len(readable) == held and want else None
        if taken is None:
            tree.unlock(lock)
        elif matched > held:
            cache.restore(namespace, lock, taken)
            number = max(cache.copies._running)
            self._locks[number] = [(tree, lock)]
        else:
            for page, data in zip(taken, prompt.contents[matched:], strict=True):
                self.memory.write(page, data)
            duplicates = tree.insert(prompt.digests, taken, matched).duplicates
            assert not duplicates
            cache.publish(namespace, len(taken))
            tree.unlock(lock)
        self.flush()

    def _take(self, namespace: Namespace, pages: int) -> list[int] | None:
        if not self.cache.fits(namespace, pages):
            return None
        namespace.promised += pages
        taken = self.cache.take(namespace, pages)
        namespace.promised -= pages
        return taken


def in_the_tier(owner: Owner) -> dict[int, bytes]:
    """What rows hold whose bytes are there."""
    cache = owner.cache
    assert cache.host is not None
    rows = range(cache.host.pages)
    return {
        row: owner.tier.row(row) for row in rows if cache.host.state(row) in (PageState.CACHED, PageState.RESTORING)
    }


def drawn_prompts(random: Random) -> list[Prompt]:
    def tokens(pages: int) -> list[int]:
        return [random.randrange(1000) for _ in range(PAGE * pages)]

    stems = [tokens(pages) for pages in range(3)]
    return [Prompt(random.choice(stems) + tokens(random.randint(1, 4)), ROOT) for _ in range(12)]


def live(seed: int, ends: Sequence[End], *, checksums: bool, failing: float) -> Counter[str]:
    """One file and its daemons, one after the other: each serves until it ends in one of these ways."""
    clock = Clock(seed)
    random = clock.random
    disk = SimDisk(random, PAGE_BYTES)
    prompts = drawn_prompts(random)
    before: dict[int, bytes] = {}  # what rows held at the end
    lost = came_to = 0
    for _ in range(LIVES):
        loop = ProcessLoop(clock, "owner")
        owner = Owner(loop, disk, checksums=checksums, failing=failing)
        if lost == 0:  # a copy that ran at the end in order has left its entries, too
            # What a tier that stayed small did not come to may be there twice by now.
            found, there = owner.tier.found, range(owner.tier.rows_there)
            lost_rows = [row for row, held in before.items() if row in there and held not in found.values()]
            more = [row for row in found if row < came_to and row not in before and disk.ended == "killed"]
            expect(not lost_rows and not more, f"{lost_rows} are lost, {more} found; the end was {disk.ended}")
        for _ in range(random.randint(1, 60)):
            loop.here(owner.serve, random.choice(prompts), random.choice(SPACES))
            clock.run_until(clock.now + clock.between(0.0, 0.02))
        behind = {row: held for row, held in before.items() if row >= owner.tier.rows_there and lost == 0}
        before, came_to = in_the_tier(owner) | behind, owner.tier.rows_there
        lost = end_of(owner, loop, random.choice(ends))
    return clock.counts


def end_of(owner: Owner, loop: ProcessLoop, how: End) -> int:
    """Stores that were lost with it."""
    owner.clock.counts[how] += 1
    if how == "closed":
        closing = loop.create_task(owner.tier.close())
        owner.clock.run_until(owner.clock.now + ENDED_SECONDS)
        closing.result()
    loop.die()
    return owner.tier.die(how) if how != "closed" else 0


def lives(seeds: range, ends: Sequence[End], *, checksums: bool, failing: float = 0.1) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += live(seed, ends, checksums=checksums, failing=failing)
    return total


@pytest.mark.parametrize("checksums", [True, False])
def test_nothing_that_is_found_is_wrong(checksums: bool) -> None:
    counts = lives(range(SEEDS), ENDS, checksums=checksums)
    print(counts)
    for what in (
        *ENDS,
        "entries found again",
        "restored pages with a wrong checksum",
        "restores that failed",
        "rows that were damaged",
        "rows torn by a power loss",
        "spills that failed",
    ):
        assert counts[what], f"nothing of {what} happened"


def test_a_daemon_whose_invariant_is_broken_writes_no_entry() -> None:
    """Not even of a copy that runs then."""
    clock = Clock(1)
    disk = SimDisk(clock.random, PAGE_BYTES)
    loop, prompts = ProcessLoop(clock, "owner"), drawn_prompts(clock.random)
    owner = Owner(loop, disk, checksums=True, failing=0.0)
    for prompt in itertools.cycle(prompts):
        loop.here(owner.serve, prompt, SPACES[0])
        clock.run_until(clock.now + 0.001)
        if clock.counts["spills"] and owner.cache.copies.yielding:
            break
    owner.tier.halt()
    left, spills = bytes(disk.index), clock.counts["spills"]
    clock.run_until(clock.now + ENDED_SECONDS)
    assert disk.index == left and owner.cache.copies.yielding and clock.counts["spills"] == spills


_clear, _write, _take = RowIndex.clear, RowIndex.write, HostTier._take


def clear_nothing(index: RowIndex, rows: Rows) -> None:
    pass


def clear_when_copied(index: RowIndex, rows: Rows, *entry: Any) -> None:
    _clear(index, rows)
    _write(index, rows, *entry)


def state_with_the_rest(index: RowIndex, rows: Rows, *entry: Any) -> None:
    """One store in place of two."""
    real, index._entries = index._entries, np.array(index._entries)
    _write(index, rows, *entry)
    made, index._entries = index._entries, real
    index._entries[np.asarray(rows)] = made[np.asarray(rows)]


def state_first(index: RowIndex, rows: Rows, *entry: Any) -> None:
    index._entries["state"][np.asarray(rows)] = IN_USE
    state_with_the_rest(index, rows, *entry)


def believe_the_file(tier: HostTier, *found: Any) -> None:
    _take(tier, *found)
    tier._verify[:] = False


@dataclass(frozen=True)
class FileGuard:
    methods: dict[tuple[type, str], Callable[..., object]]
    ends: Sequence[End]


FILE_GUARDS = {
    "an entry is cleared": FileGuard({(RowIndex, "clear"): clear_nothing}, ["killed"]),
    "before its row is overwritten": FileGuard(
        {(RowIndex, "clear"): clear_nothing, (RowIndex, "write"): clear_when_copied}, ["killed"]
    ),
    "its state comes last": FileGuard({(RowIndex, "write"): state_with_the_rest}, ["killed"]),
    "and not first": FileGuard({(RowIndex, "write"): state_first}, ["killed"]),
    "rows of a file are verified": FileGuard({(HostTier, "_take"): believe_the_file}, ["power"]),
}


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("guard", FILE_GUARDS)
def test_without_a_guard_of_the_file_harm_is_found(
    guard: str, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = FILE_GUARDS[guard]
    for (owner, method), mutant in taken.methods.items():
        monkeypatch.setattr(owner, method, mutant)
    for seed in range(SEEDS):
        try:
            live(seed, taken.ends, checksums=checksums, failing=0.0)
        except Violation as error:
            print(f"seed {seed}: {error}")
            return
    pytest.fail(f"{SEEDS} seeds found no harm")
