"""A pool's memory on all its ranks, and every copy from it and to it: what the daemon asks of it, wherever it lies.

A page id names the same place on every rank. Sessions copy parts of pages between the pool and their slots, the host
tier copies whole pages between the pool and its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeAlias

from kvferry.daemon.memory.block_table import BlockTable
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import Buffer

CopyEnd: TypeAlias = Callable[[str], None]
"""Called with "" or what went wrong, on the event loop's thread, and never before the call that it ends returns."""

ScatterEnd: TypeAlias = Callable[[str, int | None], None]
"""Likewise, with the `part_checksum` of the bytes that were copied; None where the session's parts have no sums, or
something went wrong."""


class PartCopies(Protocol):
    """The copies of one session, all with sums or all without. All methods but `begin_sums` are called on the event
    loop's thread, and none after `close`."""

    @property
    def gathers_at_once(self) -> int:
        """The most gathers at a time: more of them would wait for each other."""

    def begin_sums(self) -> None:
        """Every part has a sum. Before the first one, on the thread that made the copies: it may wait for devices.
        OSError."""

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        """The gather's header, with the sum if there are sums, and pages behind it -> sending slot."""

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        """Copies from behind the receiving slot's header -> pages."""

    def read_header(self, receive_slot: int) -> Buffer:
        """The first HEADER_BYTES of a slot in host memory that was written; the courier tells those of slots on GPUs,
        and OSError says that it did not."""

    def close(self) -> None:
        """Ends the copies, of which none runs; the courier and its slots go next."""


class Pinner(Protocol):
    """Pins host memory for the devices of a pool, whatever becomes of the pool."""

    def pin(self, memory: memoryview) -> object:
        """What keeps it pinned, and exported, while it is held. For threads. OSError."""


WHOLE = (slice(None),)


class PoolMemory(Protocol):
    """Owns the memory of a pool of `shape`, or its mapping. `sending`, `receiving`, `spill`,
    `restore` and `close` may wait for devices: they are for threads. All other methods are called on the event
    loop's thread."""

    @property
    def shape(self) -> PoolShape: ...

    @property
    def block_table(self) -> BlockTable | None:
        """The blocks that pages are, where an engine names them; None: pages lie where the shape says."""

    @property
    def can_sum(self) -> bool:
        """Whether its copies of parts can add up."""

    @property
    def workers(self) -> dict[str, Executor]:
        """The copy threads by name, if it has any: their progress may be watched."""

    @property
    def tier_copies(self) -> int:
        """The most spills, and the most restores, that run at a time, each on a thread of its own."""

    def late_copies(self, now: float) -> dict[str, float]:
        """Seconds for which those who ask, until `now` of their clock, have seen the oldest copy of each kind neither
        end nor come further; 0: none runs."""

    def rank_pools(self) -> list[wire.RankPool]:
        """The pools by which workers find the memory, rank by rank; none: it is the worker's own."""

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> PartCopies:
        """The copies of a session that comes up; the sending slots are the ranks', `slots_of_rank` after each other.
        OSError."""

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> PartCopies:
        """The copies likewise, with receiving slots."""

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        """Clears what lies behind the first `tokens` tokens of a page on every rank, before any gather that is issued
        later; until `done` the page is nobody else's. Blocks stay as they are: gathers give zeros for it. OSError: it
        could not be issued, and `done` may not come."""

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        """Clears whole pages on every rank."""

    def pinner(self) -> Pinner | None:
        """What pins the host tier's memory for its copies; None: nothing needs that."""

    def attach_rows(self, rows: memoryview) -> None:
        """Names the rows of the host tier that there are, of `shape.row_bytes` one behind the other: before the first
        `spill`, and again when there are more."""

    def detach_rows(self) -> None:
        """Forgets it: nothing of it is held any more, and no copy runs. Idempotent."""

    def spill(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        """Copies page pages[i] -> row rows[i]; blocks until it is done, on a copy thread, beside other spills and
        restores of other pages and rows. `parts`: of both, that a device's driver may not copy as one. OSError or
        ValueError: failed."""

    def restore(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        """Copies row rows[i] -> page pages[i], on all ranks; otherwise as `spill`."""

    def copy_statistics(self) -> CopyStatistics:
        """Counts of spills and restores, so far; with zeros for each strategy that there is. Before `close`."""

    def stop(self) -> None:
        """No copy begins any more, and the ends of those that run need not be told. Before `close`. Idempotent."""

    def close(self) -> None:
        """Waits for the copies that run, whose number is bounded by the slots, and lets the memory go."""
