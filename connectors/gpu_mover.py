"""Between an engine's blocks and the daemon's pages on the same GPU: a kernel of kvferry's, on a stream of its own that
is ordered behind the engine's by events.

Copies from place to place by the driver take some 4 us each within a GPU, whatever their size; the kernel moves all
layers of hundreds of blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuPages, GpuUnavailable
from kvferry.connectors.blocks import BlockMap, BlockPlaces, Memory, PoolPages, Tail
from kvferry.connectors.movers import Moment

Where: TypeAlias = tuple[GpuPages, NDArray[np.int64]]
"""A table of pages, and ids there."""


class Move(NamedTuple):
    """A copy of blocks of one cache, from either side to the other."""

    blocks: Where
    in_pool: Where


class GpuMover:
    """The `movers.Mover` of blocks that are on `device`."""

    records = True

    def __init__(self, blocks: BlockMap, device: torch.device) -> None:
        """OSError where the driver has no such device."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._map = blocks
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Now, since later there may be no memory left; on a thread of its own, since this one's may be the engine's to
        # discard when it sleeps, as its KV cache is.
        with ThreadPoolExecutor(1) as outside:
            self._orders = [
                outside.submit(torch.from_numpy(cache.order).to, self._device).result() for cache in blocks.caches
            ]
            self._behind_token = [
                outside.submit(torch.empty_like, order, dtype=torch.bool).result() for order in self._orders
            ]
        self._behind = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._pool: tuple[PoolPages, list[list[GpuPages]]] | None = None  # the last one, and `_tables` of it
        try:
            self._engine = GpuCopyEngine(index)
            self._blocks = [
                self._engine.pages(cache.bases, cache.strides, cache.block_bytes, cache.blocks)
                for cache in blocks.caches
            ]
        except (GpuUnavailable, GpuError, ValueError) as error:
            raise OSError(f"{self._device}: {error}") from error

    def moment(self) -> Moment:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def computed(self, after: Moment) -> None:
        assert after is not None
        after.synchronize()

    def is_computed(self, after: Moment) -> bool:
        assert after is not None
        over: bool = after.query()  # type: ignore[no-untyped-call]
        return over

    def misfit(self, memories: Sequence[Memory]) -> str:
        where = [memory.device if isinstance(memory, torch.Tensor) else "shared memory" for memory in memories]
        if where == [self._device]:
            return ""
        return (
            f"the daemon's pool is {' and '.join(map(str, where))} as this process counts devices, and the engine's "
            f"blocks are on {self._device}: start the daemon with --device and that GPU"
        )

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        moves = self._moves(pool, places)
        issues = [partial(self._engine.move_pages, *there.blocks, *there.in_pool) for there in moves]
        self._run(issues, after, None if tail is None else partial(self._clear_behind, pool, tail))

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        moves = self._moves(pool, places)
        self._run([partial(self._engine.move_pages, *there.in_pool, *there.blocks) for there in moves], after)

    def _clear_behind(self, pool: PoolPages, tail: Tail) -> None:
        pieces = self._map.pieces(pool.memory[pool.span(tail.page)])
        with torch.cuda.stream(self._stream):
            for page, order, behind in zip(pieces, self._orders, self._behind_token, strict=True):
                assert isinstance(page, torch.Tensor)
                page[:, tail.block + 1 :].zero_()
                torch.gt(order, tail.token, out=behind)
                page[:, tail.block].masked_fill_(behind, 0)

    def _run(
        self,
        issues: Sequence[Callable[[int], GpuCopy]],
        after: Moment,
        then: Callable[[], None] | None = None,
    ) -> None:
        """The copies that `issues` begin on a stream, and what `then` issues on the same one."""
        assert after is not None
        if not issues:
            return
        self._stream.wait_event(after)
        copies: list[GpuCopy] = []
        try:
            for issue in issues:
                copies.append(issue(self._stream.cuda_stream))
            if then is not None:
                then()
                self._behind.record(self._stream)
        except BaseException:
            self._stream.synchronize()
            raise
        # However long it takes: until then the copies may touch both ends. These waits sleep, the stream's would spin.
        if then is not None:
            self._behind.synchronize()
        for copy in copies:
            copy.wait()

    def _moves(self, pool: PoolPages, places: BlockPlaces) -> list[Move]:
        """The copies of these blocks, of each cache."""
        if not len(places.blocks):
            return []
        if self._pool is None or self._pool[0].memory is not pool.memory:
            self._pool = pool, self._tables(pool)
        moves: list[Move] = []
        for cache, blocks, tables in zip(self._map.caches, self._blocks, self._pool[1], strict=True):
            in_page, rest = divmod(self._map.page_bytes, cache.block_bytes)
            if not rest:
                there = tables[0], places.pages * in_page + places.numbers
                moves.append(Move((blocks, places.blocks), there))
                continue
            for number, table in enumerate(tables):
                own = places.numbers == number
                if own.any():
                    moves.append(Move((blocks, places.blocks[own]), (table, places.pages[own])))
        return moves

    def _tables(self, pool: PoolPages) -> list[list[GpuPages]]:
        """Where blocks lie in the pool, of each cache. Where a page is so many blocks' bytes, as pages that overlap:
        that many bytes of a block behind one another, in each place. Else the blocks of each number in their pages."""
        found: list[list[GpuPages]] = []
        start, whole = pool.address, self._map.page_bytes
        for cache in self._map.caches:
            size = cache.block_bytes
            bases = start + np.arange(len(cache.bases), dtype=np.int64) * cache.blocks_per_page * size
            strides = np.full(len(bases), size, dtype=np.int64)
            if whole % size == 0:
                count = (pool.address + pool.pages * whole - int(bases[-1])) // size
                found.append([self._engine.pages(bases, strides, size, count)])
            else:
                strides[:] = whole
                numbers = range(cache.blocks_per_page)
                found.append([self._engine.pages(bases + n * size, strides, size, pool.pages) for n in numbers])
            start += cache.page_bytes
        return found
