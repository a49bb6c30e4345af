"""The copies of pages between a role's device pool and its host pool, from start to end. Core: no I/O. A copy that was
started waits in `take_started` for the shell, which carries it out and tells its end by `ended`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.daemon.core.counters import TierCounters
from kvferry.daemon.core.kv_events import KvEventLog
from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.pool import PagePool
from kvferry.radix.tree import RESTORE, SPILL, Copy

MAX_COPIES = 64  # to the host tier, under way at once; more pages wait


@dataclass(frozen=True, slots=True)
class CopyStarted:
    """A copy that the shell is to carry out. `number` names it in `TierCopies.ended`."""

    number: int
    namespace_id: bytes
    copy: Copy


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
        self._running: dict[int, tuple[Namespace, Copy]] = {}
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
        """`copy` has just come from the namespace's tree."""
        number = self._next
        self._next += 1
        self._running[number] = (namespace, copy)
        assert self._host is not None, "a copy, and no host tier"
        if copy.kind == RESTORE:
            self._device.name_pages(copy.device, copy.digests, namespace.id)
            if self.events is not None:
                self.events.name_device(namespace.id, copy.device, copy.digests)
        else:
            self._host.name_pages(copy.host, copy.digests, namespace.id)
            if self.events is not None:
                self.events.name_host(namespace.id, copy.host, copy.digests)
        self._started.append(CopyStarted(number, namespace.id, copy))

    def take_started(self) -> list[CopyStarted]:
        """Copies started since the last time, in order."""
        started, self._started = self._started, []
        return started

    def ended(self, number: int, failed: Iterable[int], mismatched: int, seconds: float) -> CopyEnded:
        """`failed`: device ids of pages whose bytes are not right; `mismatched`: how many of them by checksum."""
        namespace, copy = self._running.pop(number)
        bad = list(failed)
        result = namespace.tree.finish_copy(copy.id, bad)
        self._count(copy, len(bad), mismatched, seconds)
        namespace.evicted += len(result.freed)
        namespace.arrivals += bool(result.readable)
        return CopyEnded(namespace, copy.kind, result.readable, result.lost, result.removed)

    def _count(self, copy: Copy, bad: int, mismatched: int, seconds: float) -> None:
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
