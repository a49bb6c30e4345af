"""A pool as bytes, and who may touch its pages when.

A page's generation grows when it is freed: whoever was given a page remembers its generation, and finding another one
means that the page was taken from under him.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.daemon.core.cache import Cache
from kvferry.radix.pool import PageState
from tests.simulation.clock import expect
from tests.simulation.prompts import GARBAGE, PAGE_BYTES

_OWNED = (PageState.LEASED, PageState.ORPHANED)


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
