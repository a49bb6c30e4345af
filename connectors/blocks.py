"""An engine's KV blocks and the daemon's pages: which belongs where.

A block has one run of bytes in each of the engine's places: layers, or the heads of each where heads are outermost in a
layer's block. A page of Layout.ENGINE is, place by place, the runs of its blocks as the engine has them; of several
caches, those of one behind those of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Memory: TypeAlias = "NDArray[np.uint8] | torch.Tensor"
"""uint8, one-dimensional, in the machine's memory or a GPU's."""


class PoolPages(NamedTuple):
    """The daemon's pool, writable: page p is the bytes [p * page_bytes, (p + 1) * page_bytes) of `memory`."""

    memory: Memory
    address: int
    pages: int
    page_bytes: int

    @staticmethod
    def of(memory: Memory, pages: int) -> PoolPages:
        address = memory.__array_interface__["data"][0] if isinstance(memory, np.ndarray) else memory.data_ptr()
        return PoolPages(memory, address, pages, len(memory) // pages)

    def span(self, page: int) -> slice:
        """The page's bytes in `memory`."""
        return slice(page * self.page_bytes, (page + 1) * self.page_bytes)


class BlockPlaces(NamedTuple):
    """For each block the page that it belongs to and its number there; int64, of equal length."""

    blocks: NDArray[np.int64]
    pages: NDArray[np.int64]
    numbers: NDArray[np.int64]


class Tail(NamedTuple):
    """The last token of a page that is not full: what is behind it, in the engine's block or in the page, is what
    another request left, and is not sent."""

    page: int  # of the pool
    block: int  # number in the page
    token: int  # number in the block


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The places of an engine's blocks: in place i block b is `block_bytes` bytes at bases[i] + b * strides[i]. Bases,
    strides, bytes and order are the first cache's; `caches` has each by itself."""

    bases: NDArray[np.int64]
    strides: NDArray[np.int64]
    block_bytes: int
    blocks: int  # in each place
    block_tokens: int
    blocks_per_page: int
    order: NDArray[np.int32]  # (block_bytes,): the token of its block that each byte belongs to
    further: tuple[BlockMap, ...] = ()  # of the same blocks in caches behind the first

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        if self.bases.shape != self.strides.shape or self.bases.ndim != 1 or not len(self.bases):
            raise ValueError(f"bases has shape {self.bases.shape}, strides {self.strides.shape}; one of each a place")
        for name in ("block_bytes", "blocks", "block_tokens", "blocks_per_page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if int(self.strides.min()) < self.block_bytes:
            raise ValueError(f"strides: {int(self.strides.min())} is below a block's {self.block_bytes} bytes")
        if self.order.shape != (self.block_bytes,):
            raise ValueError(f"order has shape {self.order.shape}; it must have a block's {self.block_bytes} bytes")
        if not 0 <= int(self.order.min()) <= int(self.order.max()) < self.block_tokens:
            raise ValueError(
                f"order: {int(self.order.min())} to {int(self.order.max())}; tokens are 0 to {self.block_tokens - 1}"
            )
        for number, cache in enumerate(self.further):
            for name in ("blocks", "block_tokens", "blocks_per_page"):
                if (value := getattr(cache, name)) != (wanted := getattr(self, name)):
                    raise ValueError(f"further[{number}].{name} is {value}; it must be {wanted}, as of the first cache")
            if cache.further:
                raise ValueError(f"further[{number}].further has {len(cache.further)} entries; it must have none")

    @property
    def caches(self) -> tuple[BlockMap, ...]:
        """Each cache by itself, in the order of a page's bytes."""
        return (replace(self, further=()), *self.further) if self.further else (self,)

    @property
    def in_token_order(self) -> bool:
        """Whether each run of bytes has its tokens one behind the other."""
        each = np.arange(self.block_tokens, dtype=np.int32)
        return all(
            np.array_equal(cache.order, np.repeat(each, cache.block_bytes // cache.block_tokens))
            for cache in self.caches
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a block in all places of all caches."""
        return sum(len(cache.bases) * cache.block_bytes for cache in self.caches)

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.blocks_per_page

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """(places, blocks, bytes of one), of one cache."""
        assert not self.further, "each cache has a shape of its own"
        return len(self.bases), self.blocks_per_page, self.block_bytes

    def pieces(self, page: Memory) -> list[Memory]:
        """Each cache of a page, of `page_shape`: views of its bytes."""
        found: list[Memory] = []
        start = 0
        for cache in self.caches:
            found.append(page[start : start + cache.page_bytes].reshape(cache.page_shape))
            start += cache.page_bytes
        return found

    @property
    def page_size(self) -> int:
        return self.blocks_per_page * self.block_tokens

    def places(
        self, pool: PoolPages, pages: Sequence[int], block_ids: Sequence[int], start: int, end: int
    ) -> BlockPlaces:
        """The blocks of tokens [start, end) and their pages: pages[i] is the prompt's page i, block_ids[0] the block
        that begins at token `start`. ValueError or IndexError before anything is copied.
        """
        if start % self.block_tokens or not 0 <= start <= end:
            raise ValueError(f"start is {start}; it must be a multiple of {self.block_tokens}, at most {end}")
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        if len(block_ids) < last - first:
            raise ValueError(f"block_ids has {len(block_ids)} entries; tokens {start} to {end} need {last - first}")
        if pool.page_bytes != self.page_bytes:
            raise ValueError(f"pool has pages of {pool.page_bytes} bytes; a page must have {self.page_bytes}")
        index = np.arange(first, last, dtype=np.int64)
        page_ids = np.asarray(pages, dtype=np.int64)[index // self.blocks_per_page]
        blocks = np.asarray(block_ids[: last - first], dtype=np.int64)
        for name, ids, bound in (("pages", page_ids, pool.pages), ("block_ids", blocks, self.blocks)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < bound:
                raise IndexError(f"{name}: {int(ids.min())} to {int(ids.max())}; they must be 0 to {bound - 1}")
        return BlockPlaces(blocks, page_ids, index % self.blocks_per_page)

    def addresses(
        self, pool: PoolPages, places: BlockPlaces
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(in blocks, in pages, sizes) of the runs of bytes that are one block's in one place."""
        found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        start = pool.address
        for cache in self.caches:
            numbers = np.arange(len(cache.bases), dtype=np.int64)[:, None]
            in_page = (numbers * cache.blocks_per_page + places.numbers) * cache.block_bytes
            in_pages = start + places.pages * self.page_bytes + in_page
            in_blocks = cache.bases[:, None] + places.blocks * cache.strides[:, None]
            sizes = np.full(in_pages.size, cache.block_bytes, dtype=np.int64)
            found.append((in_blocks.ravel(), in_pages.ravel(), sizes))
            start += cache.page_bytes
        in_all_blocks, in_all_pages, all_sizes = map(np.concatenate, zip(*found, strict=True))
        return in_all_blocks, in_all_pages, all_sizes

    def tail(self, pages: Sequence[int], end: int) -> Tail | None:
        """Where the last of `end` tokens lies, pages[-1] being their last page; None where they fill it."""
        behind = end % self.page_size
        return None if not behind else Tail(pages[-1], *divmod(behind - 1, self.block_tokens))
