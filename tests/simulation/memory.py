"""Pools, host rows and prompts as bytes, and who may touch them when.

The bytes of a page follow from its digest, so any page can be judged on sight. A page's generation grows when it is
freed: whoever was given a page remembers its generation, and finding another one means that the page was taken from
under him.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from kvferry._core import part_checksum
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.interface import CopyEnd, ScatterEnd
from kvferry.radix.digests import DIGEST_BYTES, DigestChain
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE
from kvferry.transfer.courier.host_slots import HostSlots
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.host_tier.copy_strategies import CopyStatistics, StrategyCounts
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import HEADER_BYTES, Buffer
from tests.simulation.clock import Clock, expect

PAGE = 4  # tokens
GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=1, dtype="float16", page_size=PAGE)
PAGE_BYTES = GEOMETRY.page_bytes
GARBAGE = b"\xee" * PAGE_BYTES

_SCATTERED = (PageState.LEASED, PageState.ARRIVING, PageState.ORPHANED)
_READABLE = (PageState.CACHED, PageState.SPILLING)
_OWNED = (PageState.LEASED, PageState.ORPHANED)


def content(digest: bytes) -> bytes:
    """Of a full page."""
    return digest[:PAGE_BYTES]


def partial_content(tail_digest: bytes, tokens: int, behind: bytes = b"\0") -> bytes:
    """Of a last page: what is behind its tokens is zeroed before it travels."""
    size, each = GEOMETRY.fragment_bytes, GEOMETRY.fragment_token_bytes
    kept = tokens * each
    parts = (tail_digest[i : i + kept].ljust(size, behind) for i in range(0, PAGE_BYTES, size))
    return b"".join(parts)


class Prompt:
    """Tokens, their digests, and the bytes of their pages."""

    __slots__ = ("contents", "digests", "full", "tail", "tokens")

    def __init__(self, tokens: Sequence[int], root: bytes) -> None:
        chain = DigestChain(page_size=PAGE, parent=root)
        chain.extend(tokens)
        self.tokens = list(tokens)
        self.digests, self.tail = chain.digests, chain.tail_digest
        self.full = len(tokens) // PAGE
        self.contents = [content(self.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]) for i in range(self.full)]
        if self.tail:
            self.contents.append(partial_content(self.tail, len(tokens) % PAGE))

    @property
    def blob(self) -> bytes:
        """What its prefill worker says with it."""
        return b"first token of " + (self.tail or self.digests[-DIGEST_BYTES:])


class Memory:
    """Of one pool, as its owner, its workers and copies see it."""

    def __init__(self, cache: Cache, who: str) -> None:
        self.pool = cache.pool
        self.who = who
        self.clean = cache.limits.zero_freed  # who is given a page finds nothing in it
        self.zeroed_at: dict[int, float] = {}  # by page whose tail is being cleared: when that is done
        self.bytes = bytearray((bytes(PAGE_BYTES) if self.clean else GARBAGE) * cache.pool.pages)

    def generations(self, pages: Iterable[int]) -> list[int]:
        generation = self.pool.generation
        return [generation(page) for page in pages]

    def read(self, page: int) -> bytes:
        return bytes(self.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def write(self, page: int, data: bytes) -> None:
        self.bytes[page * PAGE_BYTES : page * PAGE_BYTES + len(data)] = data

    def write_owned(self, page: int, generation: int, data: bytes) -> None:
        """A worker writes what it believes to be its own."""
        state = self.pool.state(page)
        expect(
            self.pool.generation(page) == generation and state in _OWNED,
            f"{self.who}: a worker writes page {page}, which was given to it in generation {generation}; the page is "
            f"{state.name} in generation {self.pool.generation(page)}",
        )
        self.write(page, data)

    def check(self, pages: Sequence[int], contents: Sequence[bytes], what: str) -> None:
        for i, (page, want) in enumerate(zip(pages, contents, strict=False)):
            got = self.read(page)
            expect(got == want, f"{self.who}: {what}: page {i} (id {page}) holds {got.hex()}, not {want.hex()}")

    def check_clean(self, pages: Sequence[int], what: str) -> None:
        if self.clean:
            self.check(pages, [bytes(PAGE_BYTES)] * len(pages), f"{what} with what others left")

    def check_kept(self, pages: Sequence[int], generations: Sequence[int], what: str) -> None:
        """Nobody has freed them since."""
        expect(self.generations(pages) == list(generations), f"{self.who}: pages {pages} were freed while {what}")


class SimParts:
    """The copies of one session: they take their time, and some fail."""

    gathers_at_once = 64

    def __init__(self, clock: Clock, memory: Memory, failing: float, slots: HostSlots) -> None:
        self._clock, self._memory, self._failing, self._slots = clock, memory, failing, slots
        self._pool = memory.pool
        self._sums = False

    def begin_sums(self) -> None:
        self._sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        """Behind the clearing of a tail that was begun before."""
        memory = self._memory
        states = self._pool.states(gather.page_ids)
        expect(PageState.FREE not in states, f"{memory.who}: a gather names the free page in {gather.page_ids}")
        begins = max(memory.zeroed_at.get(page, 0.0) for page in gather.page_ids)
        delay = max(0.0, begins - self._clock.now) + self._clock.between(0.00002, 0.001)
        self._clock.after(delay, self._gathered, gather, memory.generations(gather.page_ids), done)

    def _gathered(self, gather: Gather, generations: Sequence[int], done: CopyEnd) -> None:
        memory = self._memory
        memory.check_kept(gather.page_ids, generations, "a gather ran")
        if self._clock.chance(self._failing):
            self._clock.counts["gathers that failed"] += 1
            done("injected")
            return
        data = b"".join(memory.read(page) for page in gather.page_ids)[gather.byte_offset :][: gather.nbytes]
        slot = self._slots.send_slot(gather.send_slot)
        slot[HEADER_BYTES : HEADER_BYTES + gather.nbytes] = data
        header = gather.header.with_sum(part_checksum(data)) if self._sums else gather.header
        slot[:HEADER_BYTES] = header.pack()
        done("")

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        states = set(self._pool.states(scatter.page_ids))
        expect(
            states <= set(_SCATTERED),
            f"{self._memory.who}: a scatter names pages {scatter.page_ids} in states {states}",
        )
        generations = self._memory.generations(scatter.page_ids)
        self._clock.after(self._clock.between(0.00002, 0.001), self._scattered, scatter, generations, done)

    def _scattered(self, scatter: Scatter, generations: Sequence[int], done: ScatterEnd) -> None:
        memory, nbytes = self._memory, scatter.nbytes
        memory.check_kept(scatter.page_ids, generations, "a scatter ran")
        failed = self._clock.chance(self._failing)
        if failed:
            nbytes //= 2
        slot = self._slots.receive_slot(scatter.slot)
        at, left = scatter.byte_offset, bytes(slot[HEADER_BYTES : HEADER_BYTES + nbytes])
        payload_sum = part_checksum(left) if self._sums else None
        for page in scatter.page_ids:
            room = PAGE_BYTES - at
            start = page * PAGE_BYTES + at
            memory.bytes[start : start + len(left[:room])] = left[:room]
            left, at = left[room:], 0
        if failed:
            self._clock.counts["scatters that failed"] += 1
        done("injected" if failed else "", payload_sum)

    def read_header(self, receive_slot: int) -> Buffer:
        return self._slots.receive_slot(receive_slot)[:HEADER_BYTES]

    def close(self) -> None:
        pass


class SimPoolMemory:
    """As `kvferry.daemon.memory.interface.PoolMemory`, as far as sessions ask of it."""

    def __init__(self, clock: Clock, memory: Memory, failing: float) -> None:
        self._clock, self._memory, self._failing = clock, memory, failing
        self.shape = PoolShape(GEOMETRY, 1, StorageOrder.PAGE_MAJOR, memory.pool.pages)
        self.workers: dict[str, Executor] = {}
        self.can_sum = True

    def sending(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        return SimParts(self._clock, self._memory, self._failing, link.host_slots)

    def receiving(self, link: CourierLink, lanes: Sequence[Lane]) -> SimParts:
        return SimParts(self._clock, self._memory, self._failing, link.host_slots)

    def zero_pages(self, pages: Int64s, done: CopyEnd) -> None:
        self._clock.after(self._clock.between(0.00002, 0.002), self._zeroed, pages.tolist(), done)

    def _zeroed(self, pages: list[int], done: CopyEnd) -> None:
        """Their request may have ended meanwhile, and another one has them: it is told behind its own clearing."""
        states = set(self._memory.pool.states(pages))
        expect(not states & set(_READABLE), f"{self._memory.who}: pages {pages} are cleared in states {states}")
        for page in pages:
            self._memory.write(page, bytes(PAGE_BYTES))
        self._clock.counts["pages cleared"] += len(pages)
        done("")

    def copy_statistics(self) -> CopyStatistics:
        return CopyStatistics({"memcpy": StrategyCounts()})

    def zero_tail(self, page: int, tokens: int, done: CopyEnd) -> None:
        delay = self._clock.between(0.00002, 0.003)
        self._memory.zeroed_at[page] = self._clock.now + delay
        self._clock.after(delay, self._tail_zeroed, page, tokens, self._memory.generations([page]), done)

    def _tail_zeroed(self, page: int, tokens: int, generations: list[int], done: CopyEnd) -> None:
        memory = self._memory
        del memory.zeroed_at[page]
        memory.check_kept([page], generations, "its tail was cleared")
        size, kept = GEOMETRY.fragment_bytes, tokens * GEOMETRY.fragment_token_bytes
        for start in range(page * PAGE_BYTES, (page + 1) * PAGE_BYTES, size):
            memory.bytes[start + kept : start + size] = bytes(size - kept)
        self._clock.counts["tails cleared"] += 1
        done("")


class SimTier:
    """The host rows, and copies to and from them that take their time; some fail, wholly or in part."""

    def __init__(self, clock: Clock, memory: Memory, rows: int, failing: float) -> None:
        self._clock, self._memory, self._failing = clock, memory, failing
        self._rows = [GARBAGE] * rows
        self.unverified = 0

    def forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row] = GARBAGE

    def start(self, started: CopyStarted, done: Callable[[int, Sequence[int], int, float], None]) -> None:
        copy = started.copy
        generations = self._memory.generations(copy.device)
        if copy.kind != RESTORE:
            self.forget(copy.host)
        self._clock.after(self._clock.between(0.0002, 0.01), self._copied, started, generations, done)

    def _copied(
        self, started: CopyStarted, generations: list[int], done: Callable[[int, Sequence[int], int, float], None]
    ) -> None:
        copy, memory, counts = started.copy, self._memory, self._clock.counts
        memory.check_kept(copy.device, generations, "a copy between the tiers ran")
        restore = copy.kind == RESTORE
        failed: list[int] = []
        if self._clock.chance(self._failing):
            failed = self._clock.random.sample(copy.device, self._clock.random.randint(1, len(copy.device)))
            counts["restores that failed" if restore else "spills that failed"] += 1
        counts["restores" if restore else "spills"] += 1
        for i, (page, row) in enumerate(zip(copy.device, copy.host, strict=True)):
            want = content(copy.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES])
            source = self._rows[row] if restore else memory.read(page)
            expect(source == want, f"{memory.who}: {'row' if restore else 'page'} {row if restore else page} is wrong")
            data = GARBAGE if page in failed else source
            if restore:
                memory.write(page, data)
            else:
                self._rows[row] = data
        done(started.number, failed, 0, 0.001)
