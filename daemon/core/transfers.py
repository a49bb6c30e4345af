"""The transfers that leases have asked for: numbers, who asked, and which of them still drain. Core: no I/O."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.effects import Effect, StartTransfer, StopTransfer
from kvferry.daemon.core.lease import Lease, Transfer
from kvferry.daemon.core.limits import MAX_ASKS_PER_REQUEST
from kvferry.proto import peer_pb2 as peer
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import Clock

MAX_OPEN_ASKS = MAX_ASKS_PER_REQUEST // 2  # of one request at a time; the prefill daemon's bound is the whole


class Asks:
    """The asks of all leases and their transfers. `emit` takes the effects, in order; `held`: leading pages of a lease
    that may be asked back."""

    def __init__(
        self, page_size: int, clock: Clock, emit: Callable[[Effect], None], held: Callable[[Lease], int]
    ) -> None:
        self.counters = TransferCounters()
        self.asked_again = 0
        self._page_size = page_size
        self._clock = clock
        self._emit = emit
        self._held = held
        self._transfers: dict[int, Transfer] = {}
        self._given_up: dict[int, Lease] = {}  # transfers that are over since another took over their pages
        self._next = 1

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def draining(self) -> int:
        return sum(transfer.draining for transfer in self._transfers.values())

    def get(self, number: int) -> Transfer | None:
        return self._transfers.get(number)

    def first(self, lease: Lease, first_page: int, pages: int) -> None:
        lease.asks += 1
        self._ask(lease, first_page, pages)

    def _ask(self, lease: Lease, first_page: int, pages: int) -> None:
        """A new transfer of prompt pages from `first_page` on; with no pages, only the aux blob is awaited."""
        number = self._next
        self._next += 1
        page_ids = tuple(lease.pages[first_page : first_page + pages])
        self._transfers[number] = Transfer(number, lease, first_page, page_ids)
        lease.transfers.add(number)
        lease.quiet_since = self._clock.now
        self.counters.opened += 1
        ask = peer.Ask(
            transfer=number,
            name=lease.name.to_proto(),
            namespace_id=lease.namespace_id,
            first_page=first_page,
            pages=pages,
            promised_tokens=lease.promised * self._page_size,
            tokens=lease.tokens,
            last_full_digest=lease.digests[-DIGEST_BYTES:],
            tail_digest=lease.tail_digest,
            held_tokens=self._held(lease) * self._page_size,
        )
        self._emit(StartTransfer(lease.prefill, ask, page_ids))

    def ask_again(self, lease: Lease, pages: list[int]) -> None:
        """Asks for pages of the lease's prompt (pool ids), one transfer a run of neighbours, so many at a time."""
        lease.asks += 1
        self.ask_on(lease, pages)

    def ask_on(self, lease: Lease, pages: list[int]) -> None:
        """Asks as `ask_again` does, for what another was asking for, or the rest of what it was itself: no round of its
        own."""
        self._queue_runs(lease, set(pages))
        self._issue(lease)

    def _queue_runs(self, lease: Lease, pages: set[int]) -> None:
        if not pages:
            return
        indexes = [i for i, page in enumerate(lease.pages) if page in pages]
        assert len(indexes) == len(pages), "asked again for a page that is not of this prompt"
        start = 0
        for i in range(1, len(indexes) + 1):
            if i == len(indexes) or indexes[i] != indexes[i - 1] + 1:
                lease.runs.append((indexes[start], i - start))
                start = i

    def _issue(self, lease: Lease) -> None:
        while lease.runs and len(lease.transfers) < MAX_OPEN_ASKS:
            self.asked_again += 1
            self._ask(lease, *lease.runs.popleft())

    def stop(self, transfer: Transfer, reason: str) -> None:
        """Stops the transfer: it drains from now on. Idempotent."""
        if not transfer.draining:
            transfer.draining = True
            self._emit(StopTransfer(transfer.lease.prefill, transfer.number, reason))

    def await_aux(self, lease: Lease) -> None:
        """Keeps a transfer open, of no pages: by it the prefill daemon says that the aux blob will not come."""
        self._ask(lease, lease.promised, 0)

    def waits(self, lease: Lease) -> bool:
        """Whether more is to come of what it asks for, or is to ask for. Nothing is of what drains."""
        return bool(lease.runs) or any(not self._transfers[number].draining for number in lease.transfers)

    def first_page(self, lease: Lease) -> int:
        """Index of the first prompt page of what it asks for, or is to."""
        first = [self._transfers[number].first_page for number in lease.transfers] + [run[0] for run in lease.runs]
        return min(first, default=len(lease.pages))

    def give_to(self, taker: Lease, lease: Lease, pages: set[int]) -> list[int]:
        """Gives what the lease's transfers bring of these pages (pool ids) to `taker`, which is to ask for it once they
        have drained. Returns those that the lease has not asked for yet, and now will not."""
        for number in sorted(lease.transfers):
            transfer = self._transfers[number]
            if not transfer.draining and not pages.isdisjoint(transfer.page_ids):
                self.give_transfer(transfer, taker)
        waiting = [page for first, count in lease.runs for page in lease.pages[first : first + count]]
        lease.runs.clear()
        self._queue_runs(lease, set(waiting) - pages)
        return [page for page in waiting if page in pages]

    def give_transfer(self, transfer: Transfer, taker: Lease) -> None:
        transfer.taker = taker
        self._given_up[transfer.number] = transfer.lease
        self.stop(transfer, "another prefill daemon has computed it")

    def given_up_by(self, number: int) -> Lease | None:
        """The lease that had asked for a transfer that is over since another one took over its pages."""
        return self._given_up.get(number)

    def stop_all(self, lease: Lease, reason: str) -> None:
        lease.runs.clear()
        for number in sorted(lease.transfers):
            self.stop(self._transfers[number], reason)
        self._given_up = {number: other for number, other in self._given_up.items() if other is not lease}

    def pop(self, number: int) -> Transfer | None:
        """The transfer is over: no copy of it runs."""
        transfer = self._transfers.pop(number, None)
        if transfer is not None:
            transfer.lease.transfers.discard(number)
            self._issue(transfer.lease)
        return transfer

    def complete_empty(self, lease: Lease) -> None:
        """Transfers of no pages were there for the aux blob, which is here now."""
        for number in sorted(lease.transfers):
            if not self._transfers[number].page_ids:
                self.pop(number)
                self.counters.completed += 1
