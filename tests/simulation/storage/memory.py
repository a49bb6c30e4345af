"""A pool as bytes, and who may touch its pages when.

A page's generation grows when it is freed: whoever was given a page remembers its generation, and finding another one
means that the page was taken from under him. Of two that touch a page at the same time neither may write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.daemon.core.cache import Cache
from kvferry.radix.pool import PageState
from tests.simulation.clock import Violation, expect
from tests.simulation.prompts import GARBAGE, GEOMETRY, PAGE_BYTES

if TYPE_CHECKING:
    from kvferry.daemon.memory.block_table import BlockTable
    from tests.simulation.storage.blocks import EngineBlocks

_OWNED = (PageState.LEASED, PageState.ORPHANED)


class Memory:
    """Of one pool on all its ranks, as its owner, its workers and copies see it: whole pages, with all heads."""

    blocks: EngineBlocks | None = None  # of which its pages are, where an engine names them
    table: BlockTable | None = None
    # Of pages that are copied to the host tier, and from it.
    tier_states: tuple[tuple[PageState, ...], ...] = ((PageState.SPILLING,), (PageState.RESTORING,))

    def __init__(self, cache: Cache, who: str, ranks: int = 1) -> None:
        """Where there are more ranks than heads, several have each head: so there are several of every page."""
        self.pool, self.host = cache.pool, cache.host
        self.abandoned = False  # its daemon ends in order, and looks no more at what workers still write
        self.who = who
        self.clean = cache.limits.zero_freed  # who is given a page finds nothing in it
        self._copies = max(1, ranks // GEOMETRY.kv_heads)
        self.map(cache.pool.pages, bytes(PAGE_BYTES) if self.clean else GARBAGE)
        self.accesses: dict[int, list[Access]] = {}  # by page that copies touch

    def map(self, pages: int, content: bytes) -> None:
        """It is memory of so many pages, with this in each of them."""
        self.pages, self.mapped = pages, True
        self._bytes = [bytearray(content * pages) for _ in range(self._copies)]

    def generations(self, pages: Iterable[int]) -> list[int]:
        generation = self.pool.generation
        return [generation(page) for page in pages]

    def read(self, page: int) -> bytes:
        if not self.mapped:
            raise Violation(f"{self.who}: page {page} is read in memory that was let go")
        return bytes(self._bytes[0][page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def write(self, page: int, data: bytes) -> None:
        expect(self.mapped, f"{self.who}: page {page} is written in memory that was let go")
        self._put(page, data)

    def _put(self, page: int, data: bytes) -> None:
        for each in self._bytes:
            each[page * PAGE_BYTES : page * PAGE_BYTES + len(data)] = data

    def touched(self, pages: Sequence[int], writes: bool) -> None:
        """A copy of the daemon's reads these pages, or writes them."""

    def of_rank(self, rank: int) -> memoryview:
        """The pages in which the rank has its heads."""
        return memoryview(self._bytes[rank % len(self._bytes)])

    def write_owned(self, page: int, generation: int, data: bytes) -> None:
        """A worker writes what it believes to be its own."""
        if self.abandoned:
            self._put(page, data)
            return
        state = self.pool.state(page)
        expect(
            self.pool.generation(page) == generation and state in _OWNED,
            f"{self.who}: a worker writes page {page}, which was given to it in generation {generation}; the page is "
            f"{state.name} in generation {self.pool.generation(page)}",
        )
        for access in self.accesses.get(page, ()):
            raise Violation(f"{self.who}: a worker writes page {page} beside {access.what}")
        self.write(page, data)

    def check(self, pages: Sequence[int], contents: Sequence[bytes], what: str) -> None:
        for i, (page, want) in enumerate(zip(pages, contents, strict=False)):
            got = self.read(page)
            if got != want:
                raise Violation(f"{self.who}: {what}: page {i} (id {page}) holds {got.hex()}, not {want.hex()}")
            for other in self._bytes[1:]:
                same = other[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == got
                expect(same, f"{self.who}: {what}: page {i} (id {page}) is another one on other ranks")
            for access in self.accesses.get(page, ()):
                expect(not access.writes, f"{self.who}: {what}: page {i} (id {page}) is written by {access.what}")

    def check_clean(self, pages: Sequence[int], what: str) -> None:
        if self.clean:
            self.check(pages, [bytes(PAGE_BYTES)] * len(pages), f"{what} with what others left")

    def check_kept(self, pages: Sequence[int], generations: Sequence[int], what: str) -> None:
        """Nobody has freed them since."""
        expect(self.generations(pages) == list(generations), f"{self.who}: pages {pages} were freed while {what}")


class Access:
    """A copy's hold of the pages that it touches, from its issue until its owner has seen its end."""

    __slots__ = ("_generations", "_memory", "_states", "behind", "owner", "pages", "what", "writes")

    def __init__(
        self,
        memory: Memory,
        what: str,
        pages: Sequence[int],
        states: Sequence[PageState],
        *,
        writes: bool,
        owner: object = None,
        behind: str = "",
    ) -> None:
        """states: those in which the pages may be. owner: of parts of the same pages, whose bytes are never the same.
        behind: what it is ordered behind on every rank."""
        self._memory, self._states = memory, set(states)
        self.what, self.pages, self.writes, self.owner, self.behind = what, list(pages), writes, owner, behind
        self._generations = dict(zip(self.pages, memory.generations(self.pages), strict=True))
        for page in self.pages:
            others = memory.accesses.setdefault(page, [])
            for other in others:
                if not self._may_run_beside(other):
                    raise Violation(f"{memory.who}: {what} of page {page} begins beside {other.what}")
            others.append(self)
        self.touch(self.pages)

    def _may_run_beside(self, other: Access) -> bool:
        if not (self.writes or other.writes):
            return True
        return (self.owner is not None and self.owner == other.owner) or (
            self.behind != "" and self.behind == other.what
        )

    def touch(self, pages: Sequence[int]) -> None:
        """These of its pages, at this moment: nobody else has been given one."""
        memory, pool, generations = self._memory, self._memory.pool, self._generations
        if not memory.mapped:
            raise Violation(f"{memory.who}: {self.what} touches memory that was let go")
        states = pool.states(pages)
        if not self._states.issuperset(states):
            names = [PageState(state).name for state in states]
            raise Violation(f"{memory.who}: {self.what} touches pages {list(pages)}, which are {names}")
        for page in pages:
            if pool.generation(page) != generations[page]:
                raise Violation(f"{memory.who}: page {page} was freed while {self.what} ran")
        memory.touched(pages, self.writes)

    def end(self) -> None:
        self.touch(self.pages)
        accesses = self._memory.accesses
        for page in self.pages:
            accesses[page].remove(self)
            if not accesses[page]:
                del accesses[page]


class RowAccess:
    """Likewise of rows of the host tier, which are sent from there: they are their request's alone, or stay cached."""

    __slots__ = ("_generations", "_host", "_rows", "_states", "_who")

    def __init__(self, memory: Memory, rows: Sequence[int]) -> None:
        assert memory.host is not None
        self._host, self._who, self._rows = memory.host, memory.who, list(rows)
        self._generations = {row: self._host.generation(row) for row in rows}
        own = self._host.state(self._rows[0]) is PageState.LEASED
        self._states = (PageState.LEASED,) if own else (PageState.CACHED, PageState.RESTORING)
        self.touch(rows)

    def touch(self, rows: Sequence[int]) -> None:
        for row in rows:
            state = self._host.state(row)
            lives = state in self._states and self._host.generation(row) == self._generations[row]
            expect(lives, f"{self._who}: row {row} was given away while it is sent: it is {state.name}")

    def end(self) -> None:
        self.touch(self._rows)


class Clearing(Access):
    """The clearing of pages, whose request may end meanwhile: another one has them, which is told behind its own
    clearing."""

    __slots__ = ()

    def touch(self, pages: Sequence[int]) -> None:
        memory = self._memory
        states = set(memory.pool.states(pages))
        expect(self._states.issuperset(states), f"{memory.who}: pages {list(pages)} are cleared in states {states}")
