"""An engine's own blocks, of which its daemon's pages are: what is in them, and whose they are.

A block that no request has holds canaries. The daemon may read a block that a living request has named, and write it
where that request is to get it; every other touch is harm, as is a canary that has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.memory.block_table import BlockTable
from kvferry.radix.pool import PageState
from kvferry.transfer.geometry.layouts import BlockStorage
from tests.simulation.clock import Clock, Violation, expect
from tests.simulation.prompts import ENGINE_GEOMETRY, PAGE, PAGE_BYTES
from tests.simulation.storage.memory import Memory

PLACES = 8  # of an engine's, each with all tokens of a block
TOKEN_BYTES = PAGE_BYTES // PLACES // PAGE  # in each
BLOCK_TOKENS = (1, 2, 4)
# Pages' worth of blocks. Of a prefill engine as many as all requests may have: it keeps what is computed until it is
# asked for, and who would ask may wait for one that has no blocks there.
BLOCK_PAGES = {"decode": (60, 80, 120), "prefill": (440, 480)}
_LOOKED_AT = 48  # blocks, at any moment
_CANARY, _STALE = b"\xca", b"\xee"  # of what nobody has, and of what its request has not written yet
_PLACE = PAGE_BYTES // PLACES


_LENT = (PageState.LEASED, PageState.ORPHANED)


def block_bytes(tokens: int) -> int:
    """Of a block, in each place."""
    return tokens * TOKEN_BYTES


class EngineBlocks:
    """`count` blocks of `tokens` tokens, in each place one behind the other."""

    def __init__(self, clock: Clock, who: str, count: int, tokens: int) -> None:
        self.count, self.tokens, self.size = count, tokens, block_bytes(tokens)
        self.per_page = PAGE // tokens
        self.memory = bytearray(_CANARY * (PLACES * count * self.size))
        bases = np.arange(PLACES, dtype=np.int64) * (count * self.size)
        strides = np.full(PLACES, self.size, np.int64)
        self.storage = BlockStorage(ENGINE_GEOMETRY, bases, strides, self.size, count, self.per_page)
        self._clock, self._who = clock, who
        self._free = dict.fromkeys(range(count))
        self._had = set[int]()
        self._named: tuple[Counter[int], Counter[int]] = (Counter(), Counter())  # to be read, to be written too

    # -- the engine's --------------------------------------------------------------------------------------------

    def take(self, tokens: int) -> list[int] | None:
        """Blocks for so many tokens, wherever they are; None: there are too few."""
        need = -(-tokens // self.tokens)
        if need > len(self._free):
            return None
        taken = self._clock.random.sample(list(self._free), need)
        for block in taken:
            self._expect_canary(block)
            del self._free[block]
            self._put(block, _STALE * (PLACES * self.size))
        again = self._had.intersection(taken)
        self._clock.counts["blocks that another request has had"] += len(again)
        self._had.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            expect(block not in self._free, f"{self._who}: block {block} is given back twice")
            named = [counts[block] for counts in self._named]
            expect(not any(named), f"{self._who}: block {block} is given back, and named for {named}")
            self._put(block, _CANARY * (PLACES * self.size))
            self._free[block] = None

    def compute(self, blocks: Sequence[int], start: int, end: int, contents: Sequence[bytes]) -> None:
        """Writes tokens [start, end) of a prompt with these pages, whose blocks are these from its beginning on."""
        for token in range(start, end):
            block, index = divmod(token, self.tokens)
            row, at = contents[token // PAGE], token % PAGE * TOKEN_BYTES
            for place in range(PLACES):
                to = (place * self.count + blocks[block]) * self.size + index * TOKEN_BYTES
                self.memory[to : to + TOKEN_BYTES] = row[place * _PLACE + at : place * _PLACE + at + TOKEN_BYTES]

    def check_tokens(self, blocks: Sequence[int], start: int, end: int, contents: Sequence[bytes], what: str) -> None:
        """As `compute`; blocks[0] begins at token 0."""
        for token in range(start, end):
            block, index = divmod(token, self.tokens)
            row, at = contents[token // PAGE], token % PAGE * TOKEN_BYTES
            for place in range(PLACES):
                begin = (place * self.count + blocks[block]) * self.size + index * TOKEN_BYTES
                got = self.memory[begin : begin + TOKEN_BYTES]
                want = row[place * _PLACE + at : place * _PLACE + at + TOKEN_BYTES]
                if got != want:
                    raise Violation(
                        f"{self._who}: {what}: token {token} (block {blocks[block]}, place {place}) holds {got.hex()}, "
                        f"not {want.hex()}"
                    )

    # -- what the daemon may touch -------------------------------------------------------------------------------

    def name(self, blocks: Iterable[int], *, writes: bool) -> None:
        self._named[writes].update(blocks)

    def unname(self, blocks: Iterable[int], *, writes: bool) -> None:
        self._named[writes].subtract(blocks)

    def check_touch(self, block: int, writes: bool) -> None:
        named = self._named[True][block] > 0 or (not writes and self._named[False][block] > 0)
        if not named:
            touched = "written" if writes else "read"
            raise Violation(f"{self._who}: block {block} is {touched}, which no living request has named for that")

    def read(self, block: int) -> bytes:
        """Place by place."""
        starts = ((place * self.count + block) * self.size for place in range(PLACES))
        return b"".join(self.memory[start : start + self.size] for start in starts)

    def write(self, block: int, data: bytes) -> None:
        self.check_touch(block, True)
        self._put(block, data)

    def part(self, row: bytes, index: int) -> bytes:
        """What a page's block of this index has of its row."""
        starts = (place * _PLACE + index * self.size for place in range(PLACES))
        return b"".join(row[start : start + self.size] for start in starts)

    def until(self, data: bytes, tokens: int) -> bytes:
        """Of a block's bytes those of its first tokens."""
        size = max(0, tokens) * TOKEN_BYTES
        return b"".join(data[start : start + min(size, self.size)] for start in range(0, len(data), self.size))

    def _put(self, block: int, data: bytes) -> None:
        for place in range(PLACES):
            start = (place * self.count + block) * self.size
            self.memory[start : start + self.size] = data[place * self.size : (place + 1) * self.size]

    # -- what is judged --------------------------------------------------------------------------------------------

    def _expect_canary(self, block: int) -> None:
        got = self.read(block)
        expect(got == _CANARY * len(got), f"{self._who}: block {block}, which no request has, was written: {got.hex()}")

    def check(self) -> None:
        """At any moment: some of them."""
        free = list(self._free)
        for block in self._clock.random.sample(free, min(_LOOKED_AT, len(free))):
            self._expect_canary(block)

    def check_back(self) -> None:
        """No request runs."""
        for block in self._free:
            self._expect_canary(block)
        left = sorted(set(range(self.count)) - set(self._free))
        expect(not left, f"{self._who}: blocks {left} do not come back")


class BlockMemory(Memory):
    """Pages that are blocks which an engine names: none of it is the daemon's."""

    blocks: EngineBlocks
    table: BlockTable
    tier_states = (_LENT, _LENT)

    def __init__(self, cache: Cache, who: str, clock: Clock, block_tokens: int) -> None:
        self._clock, self._block_tokens = clock, block_tokens
        super().__init__(cache, who)

    def map(self, pages: int, content: bytes) -> None:
        self.who_has = content
        self.map_blocks(pages // 2, self._block_tokens)

    def map_blocks(self, blocks: int, tokens: int) -> None:
        self.pages, self.mapped = 2 * blocks, True
        self.blocks = EngineBlocks(self._clock, self.who, blocks, tokens)
        self.table = BlockTable(self.pages, self.blocks.per_page, [TOKEN_BYTES])

    def _of(self, page: int) -> list[int]:
        found: list[int] = self.table.of([page]).tolist()
        return found

    def touched(self, pages: Sequence[int], writes: bool) -> None:
        for block in self.table.of(pages).tolist():
            if block >= 0:
                self.blocks.check_touch(block, writes)

    def read(self, page: int) -> bytes:
        """Its row, with zeros for blocks that are not there."""
        if not self.mapped:
            raise Violation(f"{self.who}: page {page} is read in memory that was let go")
        size = self.blocks.size
        parts = [self.blocks.read(block) if block >= 0 else bytes(PLACES * size) for block in self._of(page)]
        return b"".join(part[i * size : (i + 1) * size] for i in range(PLACES) for part in parts)

    def write(self, page: int, data: bytes) -> None:
        expect(self.mapped, f"{self.who}: page {page} is written in memory that was let go")
        for index, block in enumerate(self._of(page)):
            if block >= 0:
                self.blocks.write(block, self.blocks.part(data, index))

    def of_rank(self, rank: int) -> memoryview:
        return memoryview(self.blocks.memory)

    def check(self, pages: Sequence[int], contents: Sequence[bytes], what: str) -> None:
        """Of each page what is there."""
        for i, (page, want) in enumerate(zip(pages, contents, strict=False)):
            end = self.table.tokens_in(page)  # what is behind it is given to nobody
            for index, block in enumerate(self._of(page)):
                got = self.blocks.read(block) if block >= 0 else b""
                wanted = self.blocks.part(want, index)
                if end is not None:
                    got, wanted = (self.blocks.until(each, end - index * self.blocks.tokens) for each in (got, wanted))
                if block >= 0 and got != wanted:
                    raise Violation(f"{self.who}: {what}: page {i} (id {page}): block {block} holds {got.hex()}")
            for access in self.accesses.get(page, ()):
                expect(not access.writes, f"{self.who}: {what}: page {i} (id {page}) is written by {access.what}")
