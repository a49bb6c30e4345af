"""Between an engine's blocks and the daemon's pages on the same GPU: kvferry's gather and scatter kernels, on a stream
of their own that is ordered behind the engine's by events.

Copies from place to place by the driver take some 4 us each within a GPU, whatever their size; two kernels and a buffer
between them move all layers of many blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuPages, GpuUnavailable
from kvferry.connectors.blocks import BlockMap, BlockPlaces, Memory, PoolPages, Tail
from kvferry.connectors.movers import Moment

STAGING_BYTES = 64 << 20
Ids: TypeAlias = NDArray[np.int64]


class Hop(NamedTuple):
    """Rows, a block in all its layers each, from one place to another."""

    source: GpuPages
    from_ids: Ids
    to_ids: Ids
    target: GpuPages


class GpuMover:
    """The `movers.Mover` of blocks that are on `device`."""

    records = True

    def __init__(self, blocks: BlockMap, device: torch.device) -> None:
        """OSError where the driver has no such device."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._map = blocks
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # All at the start: later the engine may have taken what there is.
        self._staging = torch.empty(max(STAGING_BYTES, blocks.row_bytes), dtype=torch.uint8, device=self._device)
        self._order = torch.from_numpy(blocks.order).to(self._device)
        self._behind = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._pool: PoolPages | None = None
        self._pages: list[GpuPages] = []  # of that pool, by the number of a block in its page
        try:
            self._engine = GpuCopyEngine(index)
            self._blocks = self._engine.pages(blocks.bases, blocks.strides, blocks.block_bytes, blocks.blocks)
        except (GpuUnavailable, GpuError, ValueError) as error:
            raise OSError(f"{self._device}: {error}") from error

    def moment(self) -> Moment:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def misfit(self, memories: Sequence[Memory]) -> str:
        where = [memory.device if isinstance(memory, torch.Tensor) else "shared memory" for memory in memories]
        if where == [self._device]:
            return ""
        return (
            f"the daemon's pool is {' and '.join(map(str, where))} as this process counts devices, and the engine's "
            f"blocks are on {self._device}: start the daemon with --device and that GPU"
        )

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        hops = [Hop(self._blocks, blocks, pages, in_pool) for in_pool, blocks, pages in self._hops(pool, places)]
        self._run(hops, after, None if tail is None else partial(self._clear_behind, pool, tail))

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        hops = self._hops(pool, places)
        self._run([Hop(in_pool, pages, blocks, self._blocks) for in_pool, blocks, pages in hops], after)

    def _clear_behind(self, pool: PoolPages, tail: Tail) -> None:
        assert isinstance(pool.memory, torch.Tensor)
        page = pool.memory[pool.span(tail.page)].view(self._map.page_shape)
        with torch.cuda.stream(self._stream):
            page[:, tail.block + 1 :].zero_()
            page[:, tail.block].masked_fill_(self._order > tail.token, 0)

    def _hops(self, pool: PoolPages, places: BlockPlaces) -> Iterator[tuple[GpuPages, Ids, Ids]]:
        """(where blocks lie in the pool, block ids, page ids), each no more than the buffer holds."""
        most = len(self._staging) // self._map.row_bytes
        in_pool = self._pages_of(pool)
        for number in range(self._map.blocks_per_page):
            here = places.numbers == number
            blocks, pages = places.blocks[here], places.pages[here]
            for first in range(0, len(blocks), most):
                yield in_pool[number], blocks[first : first + most], pages[first : first + most]

    def _run(self, hops: Sequence[Hop], after: Moment, then: Callable[[], None] | None = None) -> None:
        """The hops one behind the other, and what `then` issues on the same stream."""
        assert after is not None
        if not hops:
            return
        buffer, stream = self._staging.data_ptr(), self._stream.cuda_stream
        issued: list[GpuCopy] = []
        self._stream.wait_event(after)
        try:
            for hop in hops:
                nbytes = len(hop.from_ids) * self._map.row_bytes
                issued.append(self._engine.gather_part(hop.source, hop.from_ids, 0, nbytes, buffer, stream))
                issued.append(self._engine.scatter_part(hop.target, hop.to_ids, 0, nbytes, buffer, stream))
            if then is not None:
                then()
                self._behind.record(self._stream)
        except BaseException:
            self._stream.synchronize()  # those before the one that failed
            raise
        # However long it takes: until then the copies may touch both ends. These waits sleep, the stream's would spin.
        if then is not None:
            self._behind.synchronize()
        issued[-1].wait()

    def _pages_of(self, pool: PoolPages) -> list[GpuPages]:
        if self._pool is None or pool.memory is not self._pool.memory:
            where = self._map
            layers = np.arange(len(where.bases), dtype=np.int64) * where.blocks_per_page
            strides = np.full(len(where.bases), pool.page_bytes, dtype=np.int64)
            self._pages = [
                self._engine.pages(
                    pool.address + (layers + number) * where.block_bytes, strides, where.block_bytes, pool.pages
                )
                for number in range(where.blocks_per_page)
            ]
            self._pool = pool
        return self._pages
