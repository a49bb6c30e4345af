"""The copies of pages between a role's device pool and its host pool, from start to end. Core: no I/O. A copy that was
started waits in `take_started` for the shell, which carries it out and tells its end by `ended`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvferry.daemon.core.counters import TierCounters
from kvferry.daemon.core.kv_events import KvEventLog
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.pool import PagePool
from kvferry.radix.tree import RESTORE, SPILL, Copy

MAX_COPIES = 64  # to the host tier, under way at once; more pages wait


class TierCopy(Protocol):
    """Pages to be copied, of one kind: device[i] <-> host[i]."""

    @property
    def kind(self) -> int:
        """SPILL, BACKUP or RESTORE."""

    @property
    def device(self) -> list[int]: ...
    @property
    def host(self) -> list[int]: ...
    @property
    def digests(self) -> bytes:
        """The digest of each page, one behind the other."""

    @property
    def parents(self) -> bytes:
        """The digests before them; zeros where there is none."""

    @property
    def outputs(self) -> bytes:
        """A byte a page: whether it is of an answer."""


@dataclass(frozen=True, slots=True)
class CopyStarted:
    """A copy that the shell is to carry out, and to tell the core of its end by `number`."""

    number: int
    namespace_id: bytes
    copy: TierCopy


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The changes that the end of a copy made. Device page ids."""

    namespace: Namespace
    kind: int
    readable: list[int]  # restored
    lost: list[int]  # their restore failed: ARRIVING now, to be asked for again
    removed: list[int]  # held by nobody: out of the tree, and the caller's to free (`Holds.removed`)


class TierCopies:
    """The copies of all namespaces of one role."""

    def __init__(self, device: PagePool, host: PagePool | None, counters: TierCounters) -> None:
        self._device = device
        self._host = host
        self.events: KvEventLog | None = None  # if there, it is told which pages come into which tier
        self._counters = counters
        self._started: list[CopyStarted] = []
        self._running: dict[int, tuple[Namespace, TierCopy]] = {}
        self._of_trees: dict[int, int] = {}  # those that came from a tree, to its own number for it
        self._next = 1

    @property
    def running(self) -> int:
        """Copies under way."""
        return len(self._running)

    @property
    def yielding(self) -> int:
        """Copies under way that make pages free or evictable: all but restores."""
        return sum(copy.kind != RESTORE for _, copy in self._running.values())

    @property
    def full(self) -> bool:
        """Whether no further copy to the host tier may start."""
        return self.yielding >= MAX_COPIES

    def start(self, namespace: Namespace, copy: Copy) -> None:
        """Starts a copy that has just come from the namespace's tree."""
        number = self.begin(namespace, copy)
        self._of_trees[number] = copy.id
        if copy.kind == RESTORE:
            self._device.name_pages(copy.device, copy.digests, namespace.id)
            if self.events is not None:
                self.events.name_device(namespace.id, copy.device, copy.digests)

    def begin(self, namespace: Namespace, copy: TierCopy) -> int:
        """Starts a copy, whose end is told to `end` by the number."""
        number = self._next
        self._next += 1
        self._running[number] = (namespace, copy)
        assert self._host is not None, "a copy, and no host tier"
        if copy.kind != RESTORE:
            self._host.name_pages(copy.host, copy.digests, namespace.id)
            if self.events is not None:
                self.events.name_host(namespace.id, copy.host, copy.digests)
        self._started.append(CopyStarted(number, namespace.id, copy))
        return number

    def take_started(self) -> list[CopyStarted]:
        """Copies started since the last time, in order."""
        started, self._started = self._started, []
        return started

    def ended(self, number: int, failed: Iterable[int], mismatched: int, seconds: float) -> CopyEnded:
        """A tree's copy is over. `failed`: device ids of pages whose bytes are not right; `mismatched`: how many of
        them by checksum."""
        bad = list(failed)
        namespace, copy = self.end(number, len(bad), mismatched, seconds)
        result = namespace.tree.finish_copy(self._of_trees.pop(number), bad)
        namespace.evicted += len(result.freed)
        namespace.arrivals += bool(result.readable)
        return CopyEnded(namespace, copy.kind, result.readable, result.lost, result.removed)

    def end(self, number: int, bad: int, mismatched: int, seconds: float) -> tuple[Namespace, TierCopy]:
        """A copy is over, and is counted: `bad` of its pages are not right. What it changes is the caller's to do."""
        namespace, copy = self._running.pop(number)
        self._count(copy, bad, mismatched, seconds)
        return namespace, copy

    def _count(self, copy: TierCopy, bad: int, mismatched: int, seconds: float) -> None:
        counters, good = self._counters, len(copy.device) - bad
        counters.mismatched += mismatched
        if copy.kind == RESTORE:
            counters.restored += good
            counters.restore_failed += bad
            counters.restore_seconds += seconds
            return
        counters.spill_failed += bad
        counters.spill_seconds += seconds
        if copy.kind == SPILL:
            counters.spilled += good
        else:
            counters.backed_up += good
