"""How a ready lease ends well: by its worker's Finish, or by itself where its Admit was its worker's last word. Core:
no I/O."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.daemon.core.blocks.block_tier import BlockTier
from kvferry.daemon.core.counters import RequestCounters
from kvferry.daemon.core.lease import Lease, LeaseState


class Endings:
    """Ready leases that end by themselves, until they have. `end` ends one that its worker touches no more."""

    def __init__(self, blocks: BlockTier, counters: RequestCounters, end: Callable[[Lease], None]) -> None:
        self._blocks = blocks
        self._counters = counters
        self._end = end
        self._waiting: list[Lease] = []

    def add(self, lease: Lease) -> None:
        """Takes a lease that is ready; it ends in this step, or where a transfer of it goes on, behind that."""
        if lease.ends_itself:
            self._waiting.append(lease)

    def end_ready(self) -> bool:
        """Ends those whose transfers are over, which most are with their last pages. Whether there were any."""
        ending = [lease for lease in self._waiting if not lease.transfers]
        self._end_these(ending)
        return bool(ending)

    def end_late(self) -> None:
        """Ends the others, too: their transfers are stopped, as by a Finish."""
        self._end_these(self._waiting)

    def _end_these(self, ending: list[Lease]) -> None:
        self._waiting = [lease for lease in self._waiting if lease not in ending]
        for lease in ending:
            if lease.state is LeaseState.READY:  # else its worker has aborted it, or is lost
                self._counters.finished += 1
                self.finish(lease)

    def finish(self, lease: Lease) -> None:
        """Ends one whose worker has said its last word; what that hands in is stored."""
        if lease.stores and lease.hold.digests:  # none: nothing is to be kept
            self._blocks.store(lease)
        # Of a load that ends itself Ready stood for Ended: another would be taken for its answer to an Abort.
        lease.acknowledge = lease.stores or not lease.ends_itself
        self._end(lease)
