"""Between an engine's blocks and the daemon's pages on the same GPU: a kernel of kvferry's, on a stream of its own that
is ordered behind the engine's by events.

Copies from place to place by the driver take some 4 us each within a GPU, whatever their size; the kernel moves all
layers of hundreds of blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry._core import GpuCopy, GpuCopyEngine, GpuError, GpuPages, GpuUnavailable
from kvferry.connectors.blocks import BlockMap, BlockPlaces, Memory, PoolPages, Tail
from kvferry.connectors.movers import Moment


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
            self._order = outside.submit(torch.from_numpy(blocks.order).to, self._device).result()
            self._behind_token = outside.submit(torch.empty_like, self._order, dtype=torch.bool).result()
        self._behind = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._pool: tuple[PoolPages, GpuPages] | None = None  # the last one, and its blocks
        try:
            self._engine = GpuCopyEngine(index)
            self._blocks = self._engine.pages(blocks.bases, blocks.strides, blocks.block_bytes, blocks.blocks)
        except (GpuUnavailable, GpuError, ValueError) as error:
            raise OSError(f"{self._device}: {error}") from error

    def moment(self) -> Moment:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def computed(self, after: Moment) -> None:
        assert after is not None
        after.synchronize()

    def misfit(self, memories: Sequence[Memory]) -> str:
        where = [memory.device if isinstance(memory, torch.Tensor) else "shared memory" for memory in memories]
        if where == [self._device]:
            return ""
        return (
            f"the daemon's pool is {' and '.join(map(str, where))} as this process counts devices, and the engine's "
            f"blocks are on {self._device}: start the daemon with --device and that GPU"
        )

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        issue = partial(self._engine.move_pages, self._blocks, places.blocks, *self._in_pool(pool, places))
        self._run(issue, len(places.blocks), after, None if tail is None else partial(self._clear_behind, pool, tail))

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        issue = partial(self._engine.move_pages, *self._in_pool(pool, places), self._blocks, places.blocks)
        self._run(issue, len(places.blocks), after)

    def _clear_behind(self, pool: PoolPages, tail: Tail) -> None:
        assert isinstance(pool.memory, torch.Tensor)
        page = pool.memory[pool.span(tail.page)].view(self._map.page_shape)
        with torch.cuda.stream(self._stream):
            page[:, tail.block + 1 :].zero_()
            torch.gt(self._order, tail.token, out=self._behind_token)
            page[:, tail.block].masked_fill_(self._behind_token, 0)

    def _run(
        self, issue: Callable[[int], GpuCopy], blocks: int, after: Moment, then: Callable[[], None] | None = None
    ) -> None:
        """The copy that `issue` begins on a stream, and what `then` issues on the same one."""
        assert after is not None
        if not blocks:
            return
        self._stream.wait_event(after)
        copy = issue(self._stream.cuda_stream)
        try:
            if then is not None:
                then()
                self._behind.record(self._stream)
        except BaseException:
            self._stream.synchronize()
            raise
        # However long it takes: until then the copy may touch both ends. These waits sleep, the stream's would spin.
        if then is not None:
            self._behind.synchronize()
        copy.wait()

    def _in_pool(self, pool: PoolPages, places: BlockPlaces) -> tuple[GpuPages, NDArray[np.int64]]:
        """Where blocks lie in the pool, as pages that overlap: that many bytes of a block behind one another, in each
        layer; and the ids there."""
        where = self._map
        in_layer = where.blocks_per_page
        in_page = len(where.bases) * in_layer
        if self._pool is None or self._pool[0].memory is not pool.memory:
            layers = pool.address + np.arange(len(where.bases), dtype=np.int64) * in_layer * where.block_bytes
            strides = np.full(len(where.bases), where.block_bytes, dtype=np.int64)
            count = pool.pages * in_page - (len(where.bases) - 1) * in_layer
            self._pool = pool, self._engine.pages(layers, strides, where.block_bytes, count)
        return self._pool[1], places.pages * in_page + places.numbers
