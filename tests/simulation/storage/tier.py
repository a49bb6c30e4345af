"""The product's host tier on virtual time: its rows in a simulated file or in memory, its copy threads, and the copies
themselves, which land in pieces; some fail, some find that the medium has lost a bit.

The oracle: a copy takes only pages that nobody frees meanwhile, and rows that no other copy has; what it says is right
holds its digest's bytes; and of what the file of a killed daemon has, every entry is whole and names its row's bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import numpy as np

from kvferry.daemon.core.blocks.stows import StowCopy
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted, TierCopy
from kvferry.daemon.memory.block_table import BlockTable
from kvferry.daemon.memory.copy_threads import CopyThreads
from kvferry.daemon.memory.growing_rows import Held
from kvferry.daemon.memory.host_tier import CopyDone, HostTier
from kvferry.daemon.memory.interface import WHOLE, PoolMemory
from kvferry.daemon.memory.tier_lanes import TierBytes, clear_tails
from kvferry.radix.digests import split_digests
from kvferry.radix.pool import PagePool, PageState
from kvferry.radix.tree import RESTORE
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.host_tier.index import DropReason, Recovered
from tests.simulation.clock import Clock, expect
from tests.simulation.loops import ProcessLoop
from tests.simulation.prompts import GARBAGE, PAGE, PAGE_BYTES, content, partial_content
from tests.simulation.storage.disk import SimDisk, SimRows
from tests.simulation.storage.memory import Access
from tests.simulation.storage.parts import SimPoolMemory
from tests.simulation.storage.threads import SimThreads, Step, Work

_READABLE = (PageState.CACHED, PageState.RESTORING)  # rows


class Rows(Protocol):
    """`TierRows`, as the simulation writes them."""

    buffer: memoryview

    def lacks(self, start: int, end: int) -> str: ...

    def make(self, start: int, end: int, cpus: Collection[int]) -> None: ...

    def unmake(self, start: int, end: int) -> None: ...

    def recover(self, first: int, last: int) -> Recovered | None: ...

    def put(self, at: int, data: bytes) -> None: ...

    def damage(self, row: int, byte: int) -> None: ...

    def of_first(self, nbytes: int) -> TierBytes: ...

    def close(self) -> None: ...


class LooseRows:
    """Rows that end with their daemon."""

    def __init__(self, pages: int) -> None:
        self._bytes = bytearray(GARBAGE * pages)
        self.buffer = memoryview(self._bytes).toreadonly()

    def lacks(self, start: int, end: int) -> str:
        return ""

    def make(self, start: int, end: int, cpus: Collection[int]) -> None:
        """They are there."""

    def unmake(self, start: int, end: int) -> None:
        """They stay."""

    def recover(self, first: int, last: int) -> Recovered | None:
        return None

    def put(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def damage(self, row: int, byte: int) -> None:
        self._bytes[row * PAGE_BYTES + byte] ^= 0x10

    def of_first(self, nbytes: int) -> TierBytes:
        """From which sessions send."""
        return np.frombuffer(self._bytes, np.uint8)[:nbytes]

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Moving:
    """A copy under way: of its bytes so many have been moved."""

    pages: list[int]
    rows: list[int]
    access: Access
    bytes: int = 0


class TierMemory:
    """The pool as a `HostTier` knows it: `PoolMemory`, as far as it asks. A copy moves its first bytes some time before
    it moves the others."""

    def __init__(self, clock: Clock, pool: SimPoolMemory, rows: Rows, failing: float) -> None:
        self._clock, self._pool, self._rows, self._failing = clock, pool, rows, failing
        self._memory = pool.memory
        self.shape = pool.shape
        self._moving: dict[int, Moving] = {}  # by the first of the pages

    def attach_rows(self, rows: memoryview) -> None:
        expect(rows.obj is self._rows.buffer.obj, "other rows")
        self._pool.tier_rows = self._rows.of_first(len(rows))

    def detach_rows(self) -> None:
        expect(not self._moving, "copies run while their rows go")
        self._pool.tier_rows = None

    # -- from when a copy is asked for until it has ended ------------------------------------------------------------

    def enter(self, pages: Int64s, rows: Int64s, restore: bool) -> Moving:
        what, states = "a restore" if restore else "a spill", self._memory.tier_states[restore]
        access = Access(self._memory, what, pages.tolist(), states, writes=restore)
        moving = Moving(access.pages, rows.tolist(), access)
        self.check_left(moving.rows, "copied once more", reads=restore and self._memory.blocks is not None)
        self._moving[moving.pages[0]] = moving
        return moving

    def leave(self, pages: Int64s) -> None:
        self._moving.pop(int(pages[0])).access.end()

    def check_left(self, rows: Iterable[int], what: str, *, reads: bool = False) -> None:
        """reads: as others may do at the same time."""
        busy = {row for each in self._moving.values() if not (reads and each.access.writes) for row in each.rows}
        taken = [row for row in rows if row in busy]
        expect(not taken, f"{self._memory.who}: rows {taken} are {what} while a copy of theirs runs")

    # -- the copying -------------------------------------------------------------------------------------------------

    def move_some(self, moving: Moving) -> None:
        """Up to any byte."""
        self._move(moving, self._clock.random.randint(moving.bytes, len(moving.rows) * PAGE_BYTES))

    def spill(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        """A part of those that were entered together."""
        self._end(next(each for each in self._moving.values() if int(pages[0]) in each.pages))

    def restore(self, pages: Int64s, rows: Int64s, parts: Sequence[slice] = WHOLE) -> None:
        self.spill(pages, rows)

    def _end(self, moving: Moving) -> None:
        if self._clock.chance(self._failing):
            self.move_some(moving)
            raise OSError("injected")
        self._move(moving, len(moving.rows) * PAGE_BYTES)
        if (table := self._memory.table) is not None and not moving.access.writes:
            assert (table.of(moving.pages) >= 0).all(), "a block that is not there was to be spilled"
            self._clear_tails(table, moving)

    def _clear_tails(self, table: BlockTable, moving: Moving) -> None:
        """As the product's pools, behind the copy."""
        ends = [pair for pair in zip(moving.pages, moving.rows, strict=True) if table.tokens_in(pair[0]) is not None]
        for page, row in ends:
            start = row * PAGE_BYTES
            held = np.frombuffer(bytearray(self._rows.buffer[start : start + PAGE_BYTES]), np.uint8)
            clear_tails(self.shape, table, np.array([page]), held, np.array([0]))
            self._rows.put(start, held.tobytes())

    def _move(self, moving: Moving, end: int) -> None:
        memory = self._memory
        while moving.bytes < end:
            index, at = divmod(moving.bytes, PAGE_BYTES)
            page, start = moving.pages[index], moving.rows[index] * PAGE_BYTES
            moving.access.touch([page])
            part = slice(at, min(PAGE_BYTES, at + end - moving.bytes))
            held = memory.read(page)
            if moving.access.writes:
                found = self._rows.buffer[start : start + PAGE_BYTES][part]
                memory.write(page, held[:at] + bytes(found) + held[part.stop :])
            else:
                self._rows.put(start + at, held[part])
            moving.bytes += part.stop - at


class SimTier(HostTier):
    def __init__(
        self, process: ProcessLoop, pool: SimPoolMemory, rows: Rows, *, failing: float, checksums: bool
    ) -> None:
        self._clock, self._sim_rows, self._failing = process.clock, rows, failing
        self._readers: Counter[int] = Counter()  # by row, restores that are not judged yet
        self._lent: set[int] = set()  # rows that may be sent
        self._claimed: dict[int, bytes] = {}  # row -> what it is said to hold
        self._host: PagePool | None = None
        super().__init__(cast(PoolMemory, pool), rows, len(rows.buffer) // PAGE_BYTES, checksums=checksums)
        for name in ("_spills", "_restores"):  # threads without a thread until now
            cast(CopyThreads, getattr(self, name)).close()
            setattr(self, name, SimThreads(process, pool.tier_copies, self._steps, self._ended))
        self._verifying.close()
        self._verifying = cast(CopyThreads, SimThreads(process, 1, self._lends, lambda work: None))
        self._growth.close()
        self._growth = cast(CopyThreads, SimThreads(process, 1, lambda work: [], lambda work: None))
        pages = self._there.asked
        self._there._step = self._clock.random.choice([pages, pages, -(-pages // 2), -(-pages // 5)])
        self._make_rows = self._there.make
        self._replaced = False
        self.found: dict[int, bytes] = {}  # what rows hold of an earlier run
        self._there.make = self._make_and_judge  # type: ignore[method-assign]

    def attach(self, memory: PoolMemory) -> None:
        pool = cast(SimPoolMemory, memory)
        self._pages = pool.memory
        self._copies = TierMemory(self._clock, pool, self._sim_rows, self._failing)
        super().attach(cast(PoolMemory, self._copies))

    def die(self, how: Literal["killed", "power"]) -> int:
        """Its daemon ends at once. Returns how many stores to its file were lost."""
        if not isinstance(self._sim_rows, SimRows):
            return 0
        disk = self._sim_rows.disk
        lost = disk.crash(how)
        disk.left = {} if lost else self._left(disk)
        return lost

    def discard(self) -> None:
        if isinstance(self._sim_rows, SimRows):
            self._sim_rows.disk.left = self._left(self._sim_rows.disk)
        super().discard()

    def _left(self, disk: SimDisk) -> dict[int, bytes]:
        """What its owner may restore, by row, and what it has not come to."""
        there, asked = self._there.pages, self._there.asked  # a smaller file has lost what was behind its end
        behind = {row: kept for row, kept in disk.left.items() if there <= row < asked}
        if self._host is None:
            return behind
        states = self._host.states(range(self._host.pages))
        return behind | {row: self._claimed[row] for row, state in enumerate(states) if state in _READABLE}

    @property
    def rows_there(self) -> int:
        return self._there.pages

    def row(self, row: int) -> bytes:
        """What a row that is readable is said to hold."""
        return self._claimed[row]

    def forget_unread(self, namespace_id: bytes) -> None:
        """What is flushed is not found again; the same rows of other tenants are."""
        if isinstance(self._sim_rows, SimRows):
            self._sim_rows.disk.flush(namespace_id, self._there.pages)
        super().forget_unread(namespace_id)

    # -- steps of copies ---------------------------------------------------------------------------------------------

    def _steps(self, work: Work) -> list[Step]:
        device, rows, known, _ = cast(Any, work).args
        moving = self._copies.enter(device, rows, known is not None)
        steps: list[Step] = [partial(self._copies.move_some, moving)]
        if known is not None and known.any() and self._clock.chance(self._failing):
            steps.insert(0, partial(self._damage, rows[known].tolist()))
        return steps

    def _lends(self, work: Work) -> list[Step]:
        """A loan reads its rows as long as it lasts."""
        self._lent.update(cast(Any, work).args[0].tolist())
        return []

    def _damage(self, rows: list[int]) -> None:
        random = self._clock.random
        # Not those whose bytes another one may have read as they were, or has verified for all that follow.
        rows = [row for row in rows if self._readers[row] == 1 and self._verify[row] and row not in self._lent]
        if not rows:
            return
        self._clock.counts["rows that were damaged"] += 1
        self._sim_rows.damage(random.choice(rows), random.randrange(PAGE_BYTES))

    def _ended(self, work: Work) -> None:
        self._copies.leave(cast(Any, work).args[0])

    # -- what is judged ----------------------------------------------------------------------------------------------

    def forget(self, rows: Sequence[int]) -> None:
        self._copies.check_left(rows, "freed")
        self._lent.difference_update(rows)
        super().forget(rows)

    def verify(self, rows: Sequence[int], done: Callable[[Collection[int] | None], None]) -> None:
        def judged(wrong: Collection[int] | None) -> None:
            self._clock.counts["rows that were verified to be lent"] += len(rows)
            done(wrong)

        super().verify(rows, judged)

    def start(self, started: CopyStarted, done: CopyDone) -> None:
        copy = started.copy
        if copy.kind != RESTORE:
            contents = _contents_of(copy)
            self._pages.check(copy.device, contents, "a page that is spilled")
            if isinstance(self._sim_rows, SimRows):
                self._sim_rows.disk.tenants |= dict.fromkeys(contents, started.namespace_id)
        else:
            self._readers.update(copy.host)
        super().start(started, partial(self._judge, started, self._clock.now, done))

    def _judge(
        self,
        started: CopyStarted,
        began: float,
        done: CopyDone,
        number: int,
        failed: Sequence[int],
        mismatched: int,
        seconds: float,
    ) -> None:
        copy, counts = started.copy, self._clock.counts
        what = "restores" if copy.kind == RESTORE else "spills"
        counts[what] += 1
        counts[f"{what} that failed"] += bool(failed)
        counts["restored pages with a wrong checksum"] += mismatched
        bad = set(failed)
        if copy.kind == RESTORE:
            self._readers.subtract(copy.host)
        for page, row, want in zip(copy.device, copy.host, _contents_of(copy), strict=True):
            if page not in bad:
                self._claimed[row] = want
                self._pages.check([page], [want], f"one of {what}")
                expect(self._row(row) == want, f"{self._pages.who}: row {row} holds {self._row(row).hex()}")
            elif mismatched:
                expect(self._row(row) != want, f"{self._pages.who}: row {row} is right, and was said to be wrong")
        done(number, failed, mismatched, self._clock.now - began)

    async def grow(self, cache: Cache, first: bytes, grown: Callable[[], None]) -> None:
        self._host = cache.host
        await super().grow(cache, first, grown)

    def _make_and_judge(self, first: int, last: int) -> Held | None:
        if self._clock.chance(self._failing / 4):  # most tiers come to be whole
            self._clock.counts["host tiers that stay small"] += 1
            raise OSError("injected")
        held = self._make_rows(first, last)
        if held is not None:
            found = held.found
            self.found |= dict(zip(found.rows.tolist(), _contents(found.digests.tobytes()), strict=True))
            self._judge_found(cast(SimRows, self._sim_rows).disk, found, range(first, last))
        self._clock.counts["chunks of host tiers"] += 1
        return held

    def _judge_found(self, disk: SimDisk, found: Recovered, among: range) -> None:
        """After a power loss anything may be there: what is wrong, its checksum has to tell."""
        who, report, counts = self._pages.who, found.report, self._clock.counts
        counts["entries found again"] += len(found.rows)
        if disk.ended == "power":
            counts["entries torn by a power loss"] += report.dropped.get(DropReason.BAD_ENTRY, 0)
        else:
            torn = report.dropped.get(DropReason.BAD_ENTRY)
            expect(not torn, f"{who}: {torn} entries are torn, and the daemon before was {disk.ended}")
            expect(report.replaced is not DropReason.BAD_HEADER, f"{who}: the header was torn by a kill")
        counts["host files replaced"] += report.replaced is not None
        counts["entries behind a smaller file's end"] += report.dropped.get(DropReason.PAGES_DIFFER, 0)
        self._replaced |= report.replaced is not None
        if not self._replaced:
            there = {content(digest.tobytes()) for digest in found.digests}
            lost = [row for row, kept in disk.left.items() if row in among and kept not in there]
            expect(not lost, f"{who}: rows {lost} are not found again, and the daemon before was {disk.ended}")
        for row, digest in zip(found.rows.tolist(), found.digests, strict=True):
            held, self._claimed[row] = self._row(row), content(digest.tobytes())
            if held == content(digest.tobytes()) or disk.is_damaged(row):
                continue
            expect(
                disk.ended == "power",
                f"{who}: an entry was found that names {digest.tobytes().hex()} in row {row}, which holds {held.hex()}",
            )
            counts["rows torn by a power loss"] += 1
            disk.note_damage(row)

    def _row(self, row: int) -> bytes:
        return bytes(self._rows.buffer[row * PAGE_BYTES : (row + 1) * PAGE_BYTES])


def _contents_of(copy: TierCopy) -> list[bytes]:
    prompt = copy.entry.prompt if isinstance(copy, StowCopy) else None
    if prompt is None or not prompt.tail_digest:
        return _contents(copy.digests)
    tail = partial_content(prompt.tail_digest, prompt.tokens % PAGE)
    return [*_contents(copy.digests[: -len(prompt.tail_digest)]), tail]


def _contents(digests: bytes) -> list[bytes]:
    return [content(digest) for digest in split_digests(digests)]
