"""The host tier's memory, which grows while its daemon runs, the copies to and from it, and what is known of its rows.
Shell.

A spill clears the rows' index entries, copies, takes checksums where they are wanted, and writes the entries: so an
entry never names bytes that are not there. A restore verifies what it copied, where a checksum is known: always with
checksums on, else once for rows that were found in the file at the start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import MAX_NAMESPACES, Cache, CacheLimits
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.copy_threads import CopyThreads
from kvferry.daemon.memory.gpu_probe import near_cpus
from kvferry.daemon.memory.growing_rows import Found, GrowingRows, Held
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import RESTORE
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.host_tier.index import OUTPUT_PAGE, Recovered, layout_fingerprint
from kvferry.transfer.host_tier.rows import AnonymousRows, FileRows, NoRows, TierRows, checksum_rows, verify_rows
from kvferry.waiting import complete, is_done

log = logging.getLogger(__name__)

_T = TypeVar("_T")

CopyDone = Callable[[int, Sequence[int], int, float], None]
"""Copy number, device ids of pages whose bytes are not right, how many of them by checksum, and seconds: the times
of copies of one kind that run together add up to the time in which any did."""


VERIFIED_AT_A_TIME = 64  # rows of what is lent
STILL_SECONDS = 60.0  # that a chunk may take, and be waited for behind another tier's: a slow disk reads one in 20 s
LOCKED_SECONDS = 5.0  # in which a daemon that is ending lets go of the file, at the first worker's expense
TAKEN_AT_A_TIME = 64  # entries, of 200,000 in chains of 512 whose rows are at random: 0.4 ms, p99 2.6; 512: 2.7, p99 22
WRITTEN_AT_A_TIME = 256  # entries: 0.3 ms
BETWEEN_SECONDS = 5e-5  # in which the event loop has Python's lock, if it waits for that


@dataclass(slots=True)
class Busy:
    copies: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    failed: list[int]
    mismatched: int
    sums: NDArray[np.uint64] | None = None  # of the rows that were written


class HostTier:
    """The host tier of a pool. Completions run on the event loop's thread."""

    def __init__(
        self, memory: PoolMemory, rows: TierRows, pages: int, *, checksums: bool, near: Sequence[frozenset[int]] = ()
    ) -> None:
        """`near`: CPUs beside each of the devices. Nothing of it is there before `grow`."""
        self._rows = rows
        self.file_unopened = isinstance(rows, NoRows) and rows.of_file
        self._there = GrowingRows(rows, pages, memory.shape.row_bytes, memory.pinner(), near)
        self._grown = False
        self.stays = ""
        """Why it has fewer rows than were asked for, and comes to no more, or stands still."""
        self._memory: PoolMemory | None = None
        self.attach(memory)
        self._file = rows if isinstance(rows, FileRows) else None
        self._checksums = checksums
        self._sums = np.zeros(pages, np.uint64)
        self._verify = np.zeros(pages, np.bool_)  # rows whose checksum is known and is to be verified
        self._unverified = np.zeros(pages, np.bool_)  # found in the file, never restored yet
        # Threads of their own: a restore, which a request waits for, is not behind the spills.
        self._spills = CopyThreads(memory.tier_copies, "kvferry-spill")
        self._restores = CopyThreads(memory.tier_copies, "kvferry-restore")
        self._verifying = CopyThreads(1, "kvferry-verify")  # what is lent: no restore waits behind it
        self._growth = CopyThreads(1, "kvferry-host-growth")
        self._running: set[asyncio.Future[_Outcome] | asyncio.Future[list[int]]] = set()
        self._busy = (Busy(), Busy())  # with spills, and with restores
        self._writing = threading.Lock()  # entries, of one copy at a time; none once the tier is halted
        self._closing = False
        self._halted = False

    @property
    def workers(self) -> dict[str, Executor]:
        """The threads whose progress is watched."""
        return {f"{name} worker": threads.executor for name, threads in self._threads.items()}

    @property
    def _threads(self) -> dict[str, CopyThreads]:
        """All but that of growth, by what they do."""
        return {"spill": self._spills, "restore": self._restores, "verify": self._verifying}

    def oldest(self, now: float) -> float:
        """Seconds for which the oldest copy has run, as those who ask saw it; 0: none does."""
        return max(threads.oldest(now) for threads in self._threads.values())

    @property
    def survives(self) -> bool:
        """Whether what it holds is found again by the next daemon."""
        return self._file is not None

    @property
    def can_be_sent(self) -> bool:
        """Whether sessions can send from its rows."""
        return self._there.can_be_sent

    @property
    def unverified(self) -> int:
        return int(np.count_nonzero(self._unverified))

    @property
    def reads_file(self) -> bool:
        """Whether rows may come yet that an earlier daemon's file holds."""
        return self.survives and not self._grown

    @property
    def is_nothing(self) -> bool:
        """Whether there is no row, and none will come."""
        return self._grown and not self._there.pages

    async def grow(self, cache: Cache, first: bytes, grown: Callable[[], None]) -> None:
        """Has its rows be made, chunk by chunk, and what a file holds in them put into the trees: of the namespace
        `first`, for which a place is kept, and of those that are met while there is one. `grown` hears of each chunk,
        which the cache may use from then on, and of what is put into the trees. A chunk that cannot be had is the last:
        those before it stay. Cancelled, it ends when its chunk has."""
        began, found, there = time.perf_counter(), Found(), self._there
        try:
            await self._growing(there.warn)  # it looks through a file that there is
            for chunk in there.chunks():
                held = await self._growing(partial(there.make, *chunk))
                if self._closing or self._halted:
                    return
                self._name_rows()
                cache.grow_host(there.pages, held.rows() if held is not None else [])
                if held is not None:
                    found.count(held.found.report)
                    await self._take_in(cache, first, held, grown)
                grown()
        except AssertionError:
            raise  # a broken invariant, by which the daemon ends
        except Exception as error:
            self.stays = str(error)
            log.error("the host tier stays at %d of %d pages: %s", there.pages, there.asked, error)
        self._grown = True
        cache.end_recovery()
        seconds = time.perf_counter() - began
        log.info("host tier: %d of %d pages are there, after %.1f s", there.pages, there.asked, seconds)
        if self.survives:
            cache.tiers.discarded_entries += found.tell()

    async def _growing(self, work: Callable[[], _T]) -> _T:
        """The result of the work, on the thread for that; it is said where it stands still."""
        result = self._growth.submit(work)
        watch = asyncio.create_task(self._say_if_still(result))
        try:
            return await complete(result)
        finally:
            watch.cancel()
            self.stays = ""

    async def _say_if_still(self, result: asyncio.Future[_T]) -> None:
        if not await is_done(result, STILL_SECONDS):
            there = self._there
            self.stays = f"no chunk has come for {STILL_SECONDS:g} s, at {there.pages} of {there.asked} pages"
            log.warning("the growth of the host tier stands still: %s", self.stays)

    async def _take_in(self, cache: Cache, first: bytes, held: Held, taken: Callable[[], None]) -> None:
        """Puts what rows hold into the trees of their namespaces, few at a time: others have the event loop between."""
        for name, mine in held.by_namespace:
            for at in (mine[i : i + TAKEN_AT_A_TIME] for i in range(0, len(mine), TAKEN_AT_A_TIME)):
                self._take(cache, first, name, held.found, at)
                taken()
                await asyncio.sleep(0)
                if self._closing or self._halted:
                    return

    def _take(self, cache: Cache, first: bytes, name: bytes, found: Recovered, at: NDArray[np.int64]) -> None:
        rows = found.rows[at]
        known = cache.namespaces.keys() | {first}
        if name not in known and len(known) >= MAX_NAMESPACES:
            cache.discard(rows.tolist())
            return
        self._sums[rows] = found.checksums[at]
        self._verify[rows] = True
        self._unverified[rows] = True
        outputs = (found.flags[at] & OUTPUT_PAGE).astype(np.uint8).tobytes()
        digests, parents = found.digests[at].tobytes(), found.parents[at].tobytes()
        cache.recover(cache.namespace(name), digests, parents, rows.tolist(), outputs)

    def forget_unread(self, namespace_id: bytes) -> None:
        """Forgets what a file holds of a namespace, or of all where none is named, in rows that this tier did not come
        to: a flush is of those, too."""
        assert not self.reads_file, "rows are being read"
        if self._file is not None:
            self._file.clear(self._file.named(namespace_id, self._there.pages))

    def forget(self, rows: Sequence[int]) -> None:
        """Forgets rows that were freed."""
        self._unverified[list(rows)] = False
        if self._file is not None:
            self._file.clear(rows)

    def start(self, started: CopyStarted, done: CopyDone) -> None:
        copy = started.copy
        device, rows = np.asarray(copy.device, np.int64), np.asarray(copy.host, np.int64)
        restore = copy.kind == RESTORE
        if not restore:
            # Before a byte of them changes, and before another effect of the core: here it is 0.1 us a row, of which a
            # long prompt has some thousand. To write them takes ten times as long, and is the copy's thread's.
            self.forget(copy.host)
        known = self._verify[rows].copy() if restore else None
        if self._closing or self._halted:
            return
        threads = self._restores if restore else self._spills
        self._begins(restore)
        future = threads.submit(partial(self._copy, device, rows, known, started))
        self._running.add(future)

        def finished(result: asyncio.Future[_Outcome]) -> None:
            self._running.discard(result)
            seconds = self._busy_seconds(restore)
            if result.cancelled():
                return
            if self._halted:
                result.exception()  # marked as seen
                return
            outcome = self._outcome(started, rows, result)
            if not self._closing:
                done(started.number, outcome.failed, outcome.mismatched, seconds)

        future.add_done_callback(finished)

    def verify(self, rows: Sequence[int], done: Callable[[Collection[int] | None], None]) -> None:
        """Looks whether rows are as they were written; `done` hears the wrong ones, None where that could not be found
        out, or nothing where the tier ends. Who has them freed meanwhile does not ask any more."""
        if self._closing or self._halted:
            return
        at = np.asarray(rows, np.int64)
        known = at[self._verify[at]]
        future = self._verifying.submit(partial(self._wrong_of, known, self._sums[known]))
        self._running.add(future)

        def finished(result: asyncio.Future[list[int]]) -> None:
            self._running.discard(result)
            if result.cancelled():
                return
            error = result.exception()
            if self._halted or self._closing:
                return
            if error is not None:
                log.error("%d rows could not be verified: %s", len(rows), error)
                done(None)
                return
            wrong = result.result()
            if wrong:
                log.warning("%d of %d rows that were to be sent have wrong checksums", len(wrong), len(rows))
            self._restored(rows, _Outcome(wrong, len(wrong)))
            done(wrong)

        future.add_done_callback(finished)

    def _wrong_of(self, rows: NDArray[np.int64], sums: NDArray[np.uint64]) -> list[int]:
        """On the thread for that."""
        wrong: list[int] = []
        for start in range(0, len(rows), VERIFIED_AT_A_TIME):
            part = slice(start, start + VERIFIED_AT_A_TIME)
            wrong += verify_rows(self._rows.buffer, rows[part], self._there.row_bytes, sums[part])
            self._verifying.step()
        return wrong

    def attach(self, memory: PoolMemory) -> None:
        """The device pool's memory, before the first copy."""
        assert self._memory is None, "the tier is attached to another memory"
        self._memory = memory
        self._name_rows()

    def detach(self) -> None:
        """Detaches the tier from that memory, which goes; no copy runs. Rows stay, and stay pinned. Idempotent."""
        if self._memory is not None:
            self._memory.detach_rows()
            self._memory = None

    def _name_rows(self) -> None:
        """Tells the memory of the rows that there are."""
        if self._memory is not None and self._there.pages:
            self._memory.attach_rows(self._there.buffer)

    def halt(self) -> None:
        """An invariant is broken: no copy starts, and no index entry is written of one that runs."""
        with self._writing:
            self._halted = True

    async def close(self) -> None:
        """Starts no copy more, waits for those that run so that what they wrote is found again, and lets the memory
        go.
        """
        self._closing = True
        for threads in (*self._threads.values(), self._growth):
            threads.executor.shutdown(wait=False, cancel_futures=True)
        while self._running:
            await asyncio.wait(self._running)
        for threads in self._threads.values():
            threads.close()
        await complete(asyncio.to_thread(self._growth.close))  # of a chunk that is being made: seconds
        await complete(asyncio.to_thread(self.discard))

    def discard(self) -> None:
        """Lets the memory go; no copy runs, and it does not grow. On a thread: what is pinned takes seconds."""
        self.detach()
        self._there.close()

    def _outcome(self, started: CopyStarted, rows: NDArray[np.int64], result: asyncio.Future[_Outcome]) -> _Outcome:
        """Whatever went wrong with a copy, it has ended, and none of its pages is right."""
        try:
            outcome = result.result()
            if outcome.mismatched:
                log.warning("%d of %d restored pages have wrong checksums", outcome.mismatched, len(rows))
            if started.copy.kind == RESTORE:
                self._restored(started.copy.host, outcome)
            else:
                self._spilled(rows, outcome)
            return outcome
        except AssertionError:
            raise  # a broken invariant, by which the daemon ends
        except Exception as error:
            log.error("copy of %d pages between the tiers: %s: %s", len(rows), type(error).__name__, error)
            return _Outcome(list(started.copy.device), 0)

    def _begins(self, restore: bool) -> None:
        busy = self._busy[restore]
        if busy.copies == 0:
            busy.since = time.perf_counter()
        busy.copies += 1

    def _busy_seconds(self, restore: bool) -> float:
        """Counts the end of a copy of this kind: seconds since it began, or since the last end that was counted."""
        busy, now = self._busy[restore], time.perf_counter()
        seconds, busy.since = now - busy.since, now
        busy.copies -= 1
        return seconds

    def _copy(
        self, device: NDArray[np.int64], rows: NDArray[np.int64], known: NDArray[np.bool_] | None, started: CopyStarted
    ) -> _Outcome:
        """On a copy thread. `known`: a restore, and which of its rows have a checksum."""
        memory = self._memory
        assert memory is not None, "a copy without a device pool"
        size = memory.shape.row_bytes
        failed: list[int] = []
        sums: NDArray[np.uint64] | None = None
        # All parts in one go: a second one would be behind the copies that others have begun meanwhile.
        (memory.spill if known is None else memory.restore)(device, rows, self._there.parts(rows))
        if known is None and (self._checksums or self._file is not None):
            sums = checksum_rows(self._rows.buffer, rows, size)
            if self._file is not None:
                self._write_entries(self._file, started, rows, sums)
        if known is not None and known.any():
            wrong = verify_rows(self._rows.buffer, rows[known], size, self._sums[rows[known]])
            failed = device[np.isin(rows, np.asarray(wrong, np.int64))].tolist()
        return _Outcome(failed, len(failed), sums)

    def _restored(self, rows: Sequence[int], outcome: _Outcome) -> None:
        self._unverified[list(rows)] = False
        if not self._checksums and not outcome.failed:
            self._verify[list(rows)] = False  # once is enough

    def _write_entries(
        self, file: FileRows, started: CopyStarted, rows: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> None:
        """On the thread of the copy, behind its bytes. Until the loop has heard of the copy's end the rows are nobody
        else's: nothing clears them, and whoever has them next does that first."""
        copy = started.copy
        flags = np.frombuffer(copy.outputs, np.uint8).astype(np.uint32) * OUTPUT_PAGE
        for start in range(0, len(rows), WRITTEN_AT_A_TIME):
            part = slice(start, start + WRITTEN_AT_A_TIME)
            names = slice(start * DIGEST_BYTES, part.stop * DIGEST_BYTES)
            with self._writing:
                if self._halted:
                    return
                file.write(
                    rows[part], started.namespace_id, copy.digests[names], copy.parents[names], sums[part], flags[part]
                )
            time.sleep(BETWEEN_SECONDS)

    def _spilled(self, rows: NDArray[np.int64], outcome: _Outcome) -> None:
        self._verify[rows] = outcome.sums is not None and self._checksums
        if outcome.sums is not None:
            self._sums[rows] = outcome.sums


def open_tier(config: DaemonConfig, role: str, facts: NamespaceFacts, memory: PoolMemory, cache: Cache) -> HostTier:
    """The host tier of the cache; it has yet to grow. One that cannot be had says so as it comes to nothing: its daemon
    serves without it."""
    pages = cache.host_asked
    rows = _rows_of(config, role, memory, pages)
    try:
        tier = HostTier(memory, rows, pages, checksums=config.checksums == "on", near=near_cpus(config.devices))
    except BaseException:
        rows.close()
        raise
    assert cache.host is not None
    cache.host.log_frees = True
    if tier.survives:
        cache.begin_recovery()
    return tier


def _rows_of(config: DaemonConfig, role: str, memory: PoolMemory, pages: int) -> TierRows:
    shape, in_file = memory.shape, bool(config.host_dir) and not (role == "prefill" and memory.block_table is not None)
    try:
        if not in_file:
            return AnonymousRows(pages, shape.row_bytes)
        layout, size = layout_fingerprint(shape.geometry, len(shape.row_shards)), shape.row_bytes
        return FileRows.open(
            config.host_dir, pages=pages, page_bytes=size, layout=layout, role=role, patience_s=LOCKED_SECONDS
        )
    except (OSError, ValueError) as error:
        flags = f"--host-dir {config.host_dir!r}" if in_file else "--host-bytes"
        return NoRows(f"{pages * shape.row_bytes} bytes ({flags}) cannot be had: {error}", of_file=in_file)


def cache_limits(config: DaemonConfig, in_blocks: bool) -> CacheLimits:
    return CacheLimits(
        policy=config.policy,
        evict_output_first=config.evict_output_first,
        write_through_hits=config.write_through_hits,
        write_ahead=config.write_ahead,
        zero_freed=config.zero_freed == "on" and not in_blocks,  # an engine's blocks are its own to clear
        used_before=config.pool == "engine" or bool(config.devices),  # no driver promises to clear a GPU's memory
        quotas={bytes.fromhex(name): quota for name, quota in config.quotas.items() if name != "default"},
        default_quota=config.quotas.get("default", Quota()),
        in_blocks=in_blocks,
    )
