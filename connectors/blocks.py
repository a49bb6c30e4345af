"""An engine's KV blocks and the daemon's pages: which belongs where.

A block has one run of bytes in each of the engine's places: layers, or the heads of each where heads are outermost in a
layer's block. A page of Layout.ENGINE is, place by place, the runs of its blocks as the engine has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """The places of an engine's blocks: in place i block b is `block_bytes` bytes at bases[i] + b * strides[i]."""

    bases: NDArray[np.int64]
    strides: NDArray[np.int64]
    block_bytes: int
    blocks: int  # in each place
    block_tokens: int
    blocks_per_page: int
    order: NDArray[np.int32]  # (block_bytes,): the token of its block that each byte belongs to

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

    @property
    def in_token_order(self) -> bool:
        """Whether each run of bytes has its tokens one behind the other."""
        each = np.arange(self.block_tokens, dtype=np.int32)
        return np.array_equal(self.order, np.repeat(each, self.block_bytes // self.block_tokens))

    @property
    def row_bytes(self) -> int:
        """Bytes of a block in all places."""
        return len(self.bases) * self.block_bytes

    @property
    def page_bytes(self) -> int:
        return len(self.bases) * self.blocks_per_page * self.block_bytes

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """(places, blocks, bytes of one)."""
        return len(self.bases), self.blocks_per_page, self.block_bytes

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
        numbers = np.arange(len(self.bases), dtype=np.int64)[:, None]
        in_page = (numbers * self.blocks_per_page + places.numbers) * self.block_bytes
        in_pages = pool.address + places.pages * self.page_bytes + in_page
        in_blocks = self.bases[:, None] + places.blocks * self.strides[:, None]
        return in_blocks.ravel(), in_pages.ravel(), np.full(in_pages.size, self.block_bytes, dtype=np.int64)

    def tail(self, pages: Sequence[int], end: int) -> Tail | None:
        """Where the last of `end` tokens lies, pages[-1] being their last page; None where they fill it."""
        behind = end % self.page_size
        return None if not behind else Tail(pages[-1], *divmod(behind - 1, self.block_tokens))
