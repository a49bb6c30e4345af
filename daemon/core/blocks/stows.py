"""Computed prompts that wait in the host tier until a decode daemon asks for them. Core: no I/O.

A prefill engine that has blocks of its own keeps a prompt's blocks locked until it is sent. It may have them back
before: all pages of the prompt, the partial one too, are copied to rows that are the request's own, and are sent from
there. Such rows enter no tree: the engine has a prefix cache itself, and nothing is evicted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.daemon.core.blocks.block_tier import NO_PARENT
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.effects import Outbox
from kvferry.daemon.core.errors import precondition
from kvferry.daemon.core.prefill_entry import Entry, EntryState
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from kvferry.radix.tree import BACKUP


@dataclass(frozen=True, slots=True, eq=False)
class StowCopy:
    """The copy of a prompt's pages to rows."""

    entry: Entry
    device: list[int]
    host: list[int]
    digests: bytes
    parents: bytes
    outputs: bytes
    kind: int = BACKUP


class Stows:
    def __init__(
        self, cache: Cache, outbox: Outbox, give_back: Callable[[Entry], None], settle: Callable[[Entry], None]
    ) -> None:
        """give_back: gives the entry's pages back, of which no copy runs. settle: called when a copy has ended."""
        self._cache = cache
        self._outbox = outbox
        self._give_back = give_back
        self._settle = settle
        self._running: dict[int, StowCopy] = {}

    def begin(self, entry: Entry, can: bool) -> None:
        """The worker of a computed prompt wants its blocks back. It is told Stowed, now or when the copy has ended."""
        prompt, host = entry.prompt, self._cache.host
        assert prompt is not None
        if prompt.blocks is None:
            raise precondition(f"the pages of name {entry.name} are the daemon's: there are no blocks to be given back")
        if prompt.rows or entry.stowing or prompt.aux is None:
            raise precondition(f"stow of name {entry.name}: it comes once, behind aux")
        pages = prompt.pages
        room = can and host is not None and host.free >= len(pages) and not self._cache.copies.full
        if host is None or not room or entry.zeroing or entry.state is not EntryState.COMPUTED:
            self._tell(entry, stored=False)
            return
        digests = prompt.digests + prompt.tail_digest
        parents = (NO_PARENT + digests)[: len(digests)]
        rows = host.allocate(len(pages), PageState.LEASED)
        copy = StowCopy(entry, list(pages), rows, digests, parents, bytes(len(pages)))
        entry.stowing = True
        self._running[self._cache.copies.begin(prompt.hold.namespace, copy)] = copy

    def ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> bool:
        """A copy is over; `failed`: those of its pages whose bytes are not right. False: it is none of these."""
        copy = self._running.pop(number, None)
        if copy is None:
            return False
        self._cache.copies.end(number, len(failed), mismatched, seconds)
        entry, prompt, host = copy.entry, copy.entry.prompt, self._cache.host
        assert prompt is not None and host is not None
        entry.stowing = False
        if failed or entry.state is not EntryState.COMPUTED:  # asked for meanwhile, or over
            host.free_pages(copy.host)
            if not entry.done:
                self._tell(entry, stored=False)
        else:
            self._give_back(entry)
            prompt.rows = copy.host
            self._tell(entry, stored=True)
        self._settle(entry)
        return True

    def _tell(self, entry: Entry, *, stored: bool) -> None:
        assert entry.prompt is not None
        stowed = wire.Stowed(name=entry.name.to_proto(), stored=stored, asked=entry.asked)
        self._outbox.tell(entry.prompt.worker, wire.WorkerEvent(stowed=stowed))
