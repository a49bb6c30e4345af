"""The choice of the strategy that moves pages between a GPU and the host tier, and a front that asks before each copy.

On the bus a copy engine needs long runs of bytes, and a call of the driver costs microseconds: pages in small fragments
are gathered into rows, or scattered from them, by a kernel on the GPU (`staged`). An engine's process and this one have
the GPU by turns, so that such a kernel waits for a turn, which staging covers (CopyTuning.deep_buffers), and the engine
for the kernel's: spills, for which nobody waits, go without one where fragments are long enough (`batch`), except while
pages are restored, which takes the turns anyway: the bus has more of both where both are staged. Under MPS it runs
beside the engine's kernels: where these hold every multiprocessor, as matrix products do, it waits for the end of one;
then a copy engine walks over the fragments itself (`pitched`), which costs it some 2.5 us a page, and nobody else
anything. (That time is the engine's, one for each direction: more streams, or a batch of such copies in one call, do
not hide it, and a copy within the GPU is a kernel as well. Only fragments fill it: see apart_percent in
csrc/cuda/engine.h.) It walks slowly over fragments as small as a few KiB: where many copies are under way, those are
staged all the same, since the bus has others to do while their kernels wait. Rows that are short themselves go by a
kernel which reads or writes host memory (`kernel`). Long fragments go as they are (`batch`). What a driver cannot do,
the engine does otherwise, and counts it.

A list of fragments that lie anywhere, in host memory as well, has no rows: a kernel moves many small ones (`kernel`),
or the driver does (`batch`, `loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

from kvferry._core import GpuCopy, GpuCopyEngine, GpuPages
from kvferry.transfer.host_tier.copy_strategies import (
    AUTO,
    ENVIRONMENT,
    STRATEGIES,
    CopyStatistics,
    Strategy,
    StrategyCounts,
    from_environment,
)

__all__ = ["ENVIRONMENT", "STRATEGIES", "GpuCopies", "Strategy", "choose", "choose_for_list", "from_environment"]

ListStrategy = Literal["batch", "loop", "kernel"]

LONG_FRAGMENT = 512 << 10  # bytes: from here on a copy engine is as fast on fragments as on what was gathered
LONG_SPILLED = 32 << 10  # bytes: from here on a copy engine is as fast on fragments as 0.7 of the bus
SHORT_ROW = 64 << 10  # bytes: under this a copy engine is slow on rows as well
FEW_COPIES = 2  # their calls take less time than a gather
SHORT_ITEM = 256 << 10  # bytes, the mean of a list: under this a copy engine is slower on items than that kernel
SHORT_RUN = 64 << 10  # bytes that `pitched` moves at a time: under this its own cost is more than a batch's
SHORT_FRAGMENT = 16 << 10  # bytes: under this `pitched` is slower than the bus
# Bytes of copies before one, in the same direction: the bus moves them in 0.8 ms, and on average a kernel waits as long
# for the end of a product of matrices of 8192 x 8192.
DEEP = 44 << 20


def stays(fragment_bytes: int, fragments: int, pages: int) -> bool:
    """Whether fragments are best moved as they are, by `batch`."""
    return fragments == 1 or fragment_bytes >= LONG_FRAGMENT or fragments * pages <= FEW_COPIES


def choose(
    fragment_bytes: int, fragments: int, pages: int, runs: int = 0, busy: bool = False, under_way: int = 0
) -> Strategy:
    """The strategy for `pages` pages of `fragments` fragments in `runs` evenly spaced runs (0: none); busy: a kernel
    would wait; under_way: bytes of copies in the same direction that have not ended."""
    if stays(fragment_bytes, fragments, pages):
        return "batch"
    row_bytes = fragment_bytes * fragments
    deep = fragment_bytes < SHORT_FRAGMENT and under_way >= DEEP
    if busy and runs > 0 and row_bytes >= runs * SHORT_RUN and not deep:
        return "pitched"
    if row_bytes >= SHORT_ROW:
        return "staged"
    return "batch" if busy else "kernel"  # beside others that kernel would hold its multiprocessors, and them, for long


def list_stays(nbytes: int, items: int) -> bool:
    """Whether a list is best moved by `batch`."""
    return items <= FEW_COPIES or nbytes >= items * SHORT_ITEM


def choose_for_list(nbytes: int, items: int, busy: bool = False) -> ListStrategy:
    """The strategy for a list of `items` items of `nbytes` bytes in all."""
    return "batch" if busy or list_stays(nbytes, items) else "kernel"


# What a strategy of pages is for a list: it takes multiprocessors, or none.
OF_LISTS: Mapping[Strategy, ListStrategy] = {
    "batch": "batch",
    "loop": "loop",
    "kernel": "kernel",
    "staged": "kernel",
    "pitched": "batch",
}


class GpuCopies:
    """Spill and restore over one engine: a copy is issued, and runs while the caller does other things."""

    def __init__(
        self, engine: GpuCopyEngine, strategy: Strategy | None = None, *, restores: GpuCopyEngine | None = None
    ) -> None:
        """strategy: of every copy; else the environment's, else what is chosen for each. restores: the engine that
        restores beside spills of this one; None: itself."""
        self.engine = engine
        self._restoring = restores or engine
        self.forced = strategy or from_environment()
        self.beside = engine.mps
        """Whether other kernels run beside those of copies, in the same turn of the GPU."""

    def plan_spill(self, pages: GpuPages, count: int) -> Strategy:
        """The strategy for a copy of `count` of these pages to the host."""
        long = pages.fragment_bytes >= LONG_SPILLED
        if self.forced is None and not self.beside and long and not self._restoring.under_way_from_host:
            return "batch"
        return self.plan(pages, count, lambda: self.engine.under_way_to_host)

    def plan(self, pages: GpuPages, count: int, under_way: Callable[[], int]) -> Strategy:
        """The strategy for a copy of `count` of these pages; under_way: see `choose`."""
        if self.forced is not None:
            return self.forced
        shape = (pages.fragment_bytes, pages.fragments, count)
        matters = not stays(*shape) and (self.beside or pages.row_bytes < SHORT_ROW)
        if not matters or not self.engine.busy():
            return choose(*shape, pages.runs)
        return choose(*shape, pages.runs if self.beside else 0, busy=True, under_way=under_way())

    def to_host(
        self,
        pages: GpuPages,
        page_ids: ArrayLike,
        rows: Buffer,
        row_ids: ArrayLike,
        stream: int | None = None,
        *,
        row_stride: int | None = None,
        row_offset: int = 0,
    ) -> GpuCopy:
        """Page page_ids[i], in blocks that of the i-th pages.ids_a_page ids, to the pages.row_bytes at row_offset +
        row_ids[i] * row_stride, which is pages.row_bytes if None: a rank has its slice of wider rows. Ordered on
        `stream`; None: in no order with what is not done yet. Hold the result until it is done.
        """
        ids = _ids(page_ids)
        strategy = self.plan_spill(pages, len(ids) // pages.ids_a_page)
        to = _from(rows, row_offset), row_stride or pages.row_bytes, _ids(row_ids)
        return self.engine.copy_pages_to_host(pages, ids, *to, stream, strategy, _order(stream))

    def from_host(
        self,
        pages: GpuPages,
        page_ids: ArrayLike,
        rows: Buffer,
        row_ids: ArrayLike,
        stream: int | None = None,
        *,
        row_stride: int | None = None,
        row_offset: int = 0,
    ) -> GpuCopy:
        """The reverse of `to_host`. No copy may still be writing these rows, on any stream."""
        ids = _ids(page_ids)
        strategy = self.plan(pages, len(ids) // pages.ids_a_page, lambda: self.engine.under_way_from_host)
        source = _from(rows, row_offset), row_stride or pages.row_bytes, _ids(row_ids)
        return self.engine.copy_pages_from_host(pages, ids, *source, stream, strategy, _order(stream))

    def plan_list(self, nbytes: int, items: int) -> ListStrategy:
        """The strategy for a list of `items` items of `nbytes` bytes in all."""
        if self.forced is not None:
            return OF_LISTS[self.forced]
        return choose_for_list(nbytes, items, busy=not list_stays(nbytes, items) and self.engine.busy())

    def list_to_host(
        self, dst_addresses: ArrayLike, src_addresses: ArrayLike, sizes: ArrayLike, stream: int | None = None
    ) -> GpuCopy:
        """Copies sizes[i] bytes of the device at src_addresses[i] to dst_addresses[i] of host memory, all of them the
        caller's word. Hold what they lie in, and the result, until it is done.
        """
        lengths = _ids(sizes)
        strategy = self.plan_list(int(lengths.sum()), len(lengths))
        return self.engine.copy_list_to_host(_ids(dst_addresses), _ids(src_addresses), lengths, stream, strategy)

    def list_from_host(
        self, dst_addresses: ArrayLike, src_addresses: ArrayLike, sizes: ArrayLike, stream: int | None = None
    ) -> GpuCopy:
        """The reverse of `list_to_host`. No copy may still be writing to the sources, on any stream."""
        lengths = _ids(sizes)
        strategy = self.plan_list(int(lengths.sum()), len(lengths))
        return self.engine.copy_list_from_host(_ids(dst_addresses), _ids(src_addresses), lengths, stream, strategy)

    def statistics(self) -> CopyStatistics:
        """Counts of all copies of pages by the engine; the fallbacks are also those of parts. Waits for no copy."""
        told = self.engine.statistics()
        strategies: dict[str, StrategyCounts] = {name: StrategyCounts(**told[name]) for name in STRATEGIES}
        return CopyStatistics(strategies, told["fallbacks"], self.forced or AUTO)


def _order(stream: int | None) -> Literal["stream", "none"]:
    return "none" if stream is None else "stream"


def _ids(ids: ArrayLike) -> NDArray[np.int64]:
    return np.ascontiguousarray(ids, np.int64)


def _from(rows: Buffer, offset: int) -> Buffer:
    if offset == 0:
        return rows
    memory = memoryview(rows).cast("B")
    if not 0 < offset < len(memory):
        raise ValueError(f"row_offset is {offset}; it must be 0 to {len(memory) - 1}")
    return memory[offset:]
