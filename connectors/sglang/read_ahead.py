"""The pages of prompts that a prefill engine is about to compute, read of its GPU before the step is launched.

SGLang reads them once the step's results are there. By then it has launched the next step, and its stream waits for all
of that (`Scheduler._apply_war_barrier`), so each prompt went out a step late. Nothing changes them meanwhile but the
radix cache: where another prompt of the same tokens was there first it puts that one's pages in their place, and frees
these. Then SGLang's own way is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.connectors.sglang.transfers import GpuMoment


@dataclass(frozen=True, slots=True)
class PagesRead:
    """The pages of a prompt's tokens `start` to `end`, on their way from the GPU."""

    start: int  # a multiple of the page size
    end: int
    pages: Any  # a tensor in the machine's memory
    there: GpuMoment | None  # None: they are

    def of(self, start: int, tokens: int, page_size: int) -> NDArray[np.int32] | None:
        """The numbers of the pages of so many tokens from `start` on; None: not all of them were read."""
        first = start - self.start
        if first < 0 or first % page_size or start + tokens > self.end:
            return None
        if self.there is not None:
            self.there.synchronize()
        found: NDArray[np.int32] = self.pages[first // page_size : -(-(first + tokens) // page_size)].numpy()
        return found


def can_read(tree: Any) -> bool:
    """Whether it is known what this radix cache of SGLang's does with pages."""
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    own = [cache.cache_unfinished_req for cache in (RadixCache, ChunkCache)]
    return getattr(type(tree), "cache_unfinished_req", None) in own


def read(requests: Sequence[Any], rows: Any, page_size: int) -> None:
    """Has the pages read of requests whose step is about to be launched, on the stream that has written them.
    `rows`: the tensor of SGLang's ReqToTokenPool."""
    import torch

    wanted = [(request, request.start_send_idx, request.extend_range.end) for request in requests]
    counts = [-(-(end - start) // page_size) for _, start, end in wanted]
    on_host = torch.empty(sum(counts), dtype=rows.dtype, pin_memory=rows.is_cuda)
    parts = torch.split(on_host, counts)
    for (request, start, end), part in zip(wanted, parts, strict=True):
        part.copy_(rows[request.req_pool_idx, start:end:page_size] // page_size, non_blocking=True)
    there = None
    if rows.is_cuda:
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
    for (request, start, end), part in zip(wanted, parts, strict=True):
        request.disagg_kv_sender.pages_read = PagesRead(start, end, part, there)


@contextmanager
def until_others_are_there(request: Any, allocator: Any) -> Iterator[None]:
    """Within, the radix cache may put other pages in the place of this request's: what was read of it is forgotten."""
    shadowed = vars(allocator).get("free")
    free = allocator.free

    def freed(slots: Any) -> None:
        if slots.numel():
            request.disagg_kv_sender.pages_read = None
        free(slots)

    allocator.free = freed
    try:
        yield
    finally:
        if shadowed is None:
            del allocator.free
        else:
            allocator.free = shadowed


_sent: list[Any] = []  # the request whose pages SGLang asks for; on the thread of its scheduler


@contextmanager
def being_sent(request: Any) -> Iterator[None]:
    _sent.append(request)
    try:
        yield
    finally:
        _sent.pop()


def pages_being_sent(tokens: int, page_size: int) -> NDArray[np.int32] | None:
    """What was read of the next so many tokens of the request that is being sent; None: SGLang has to read them."""
    if not _sent:
        return None
    known: PagesRead | None = getattr(_sent[-1].disagg_kv_sender, "pages_read", None)  # SGLang's own sender has none
    return None if known is None else known.of(_sent[-1].start_send_idx, tokens, page_size)
