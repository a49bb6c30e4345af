"""The places of pages' bytes in one rank's memory, and the rows that are made of them.

A row is what travels and what the host tier keeps of one cache of a page: some heads of it in canonical order, which
is (layer, K or V, token, head, head dimension), or with the head before the token where the geometry's layout is HND.
However a rank stores its pages, a row has the same bytes. A row's fragments are its runs that are contiguous in the
rank's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder

Int64s: TypeAlias = NDArray[np.int64]


class Runs(NamedTuple):
    """A part of a stream of rows: `sizes[i]` bytes at byte `memory[i]` of the memory are at byte `stream[i]` of the
    part. All (n,) int64."""

    memory: Int64s
    stream: Int64s
    sizes: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """Fragment tensor * pieces + piece of page p's row lies at offsets[tensor] + p * strides[tensor] + piece *
    piece_stride of the memory, and has fragment_bytes bytes. Bytes throughout.

    In blocks a page is made of `pieces` blocks of an engine, each anywhere in the memory, and named by their ids in
    order, `ids_a_page` a page: its fragment lies at offsets[tensor] + block * strides[tensor], piece_stride is 0, and
    pages is the number of blocks. Copies take the id -1 for a block that is not there; here it is no id."""

    offsets: Int64s  # (tensors,)
    strides: Int64s  # (tensors,): from a page to the next
    pieces: int  # of a tensor
    piece_stride: int
    fragment_bytes: int
    pages: int  # ids are 0..pages-1
    in_blocks: bool = False

    @property
    def ids_a_page(self) -> int:
        """The number of ids that name a page."""
        return self.pieces if self.in_blocks else 1

    @property
    def fragments(self) -> int:
        """The number of a row's fragments."""
        return len(self.offsets) * self.pieces

    @property
    def row_bytes(self) -> int:
        return self.fragments * self.fragment_bytes

    @property
    def end(self) -> int:
        """The byte behind the last that it names."""
        last = self.offsets + (self.pages - 1) * self.strides
        return int(last.max()) + (self.pieces - 1) * self.piece_stride + self.fragment_bytes

    def compact(self) -> RowMap:
        """The same rows in fewer fragments: a tensor's pieces are one where they touch, and all tensors are one where
        every one of them touches the next on every page. (K and V that touch within a layer alone stay two. So do
        the blocks of a page that has more than one.)"""
        merged = self
        if merged.pieces > 1 and not merged.in_blocks and merged.piece_stride == merged.fragment_bytes:
            whole = merged.fragment_bytes * merged.pieces
            merged = replace(merged, pieces=1, piece_stride=0, fragment_bytes=whole)
        touching = bool((np.diff(merged.offsets) == merged.fragment_bytes).all())
        if merged.pieces == 1 and touching and bool((merged.strides == merged.strides[0]).all()):
            size = merged.fragment_bytes * len(merged.offsets)
            # Of a pool of one page nobody takes the stride, which is that of one tensor: it must still hold the page.
            strides = np.maximum(merged.strides[:1], size) if merged.pages == 1 else merged.strides[:1]
            return replace(merged, offsets=merged.offsets[:1], strides=strides, piece_stride=0, fragment_bytes=size)
        return merged

    def check_ids(self, page_ids: Sequence[int] | Int64s) -> Int64s:
        """The ids as an array. ValueError for one that is not there, or for blocks that are no whole pages."""
        ids = np.asarray(page_ids, np.int64)
        if len(ids) % self.ids_a_page:
            raise ValueError(f"there are {len(ids)} page ids; they must be a multiple of {self.ids_a_page}, a page's")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.pages):
            raise ValueError(f"page ids are {int(ids.min())} to {int(ids.max())}; they must be 0 to {self.pages - 1}")
        return ids

    def fragments_of(self, page_ids: Sequence[int] | Int64s) -> Int64s:
        """The byte at which each fragment begins, (pages, fragments). ValueError as of `check_ids`."""
        ids = self.check_ids(page_ids).reshape(-1, 1, self.ids_a_page)
        pieces = np.arange(self.pieces, dtype=np.int64) * self.piece_stride
        found = self.offsets[:, None] + ids * self.strides[:, None] + pieces
        return found.reshape(len(ids), self.fragments)

    def part(self, page_ids: Sequence[int] | Int64s, byte_offset: int, nbytes: int) -> Runs:
        """Bytes [byte_offset, byte_offset + nbytes) of these pages' rows laid end to end. ValueError as of `check_ids`,
        or for a part that does not lie in the rows."""
        ids = self.check_ids(page_ids)
        end, size, rows = byte_offset + nbytes, self.fragment_bytes, len(ids) // self.ids_a_page
        if byte_offset < 0 or nbytes < 1 or end > rows * self.row_bytes:
            raise ValueError(
                f"part of {nbytes} bytes at byte {byte_offset}; it must have at least 1 and end within the "
                f"{rows * self.row_bytes} bytes of {rows} rows"
            )
        first, last = byte_offset // size, (end - 1) // size
        page, fragment = np.divmod(np.arange(first, last + 1, dtype=np.int64), self.fragments)
        tensor, piece = np.divmod(fragment, self.pieces)
        named = ids[page * self.ids_a_page + piece if self.in_blocks else page]
        memory = self.offsets[tensor] + named * self.strides[tensor] + piece * self.piece_stride
        sizes = np.full(len(memory), size, np.int64)
        skipped = byte_offset - first * size
        memory[0] += skipped
        sizes[0] -= skipped
        sizes[-1] -= (last + 1) * size - end
        return Runs(memory, np.cumsum(sizes) - sizes, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockStorage:
    """A rank's memory of one cache in blocks of an engine's: block b has `block_bytes` bytes at bases[i] + b *
    strides[i] in each of the engine's places i, and a page is `per_page` blocks. A page's row is, place by place, the
    bytes of its blocks. Where heads have runs of their own, places are in the order (layer, run, head)."""

    geometry: KVGeometry  # of one cache of this rank: its own heads only
    bases: Int64s  # (places,)
    strides: Int64s  # (places,)
    block_bytes: int
    blocks: int
    per_page: int

    def rows(self, first_head: int = 0, heads: int | None = None) -> RowMap:
        """Rows as `RankStorage.rows` has them. Of all heads, where only the engine knows which lie where in a block."""
        places = self._places(first_head, heads)
        bases, strides = self.bases[places], self.strides[places]
        return RowMap(bases, strides, self.per_page, 0, self.block_bytes, self.blocks, in_blocks=True)

    def tier_rows(self, start: int, stride: int, count: int, first_head: int = 0, heads: int | None = None) -> RowMap:
        """The same rows of pages that were copied to the host tier, where page p has all heads from byte start + p *
        stride on: a page's fragments are what it has in each of the places."""
        places = self._places(first_head, heads)
        size = self.block_bytes * self.per_page
        return RowMap(start + places * size, np.full(len(places), stride, np.int64), 1, 0, size, count)

    def _places(self, first_head: int, heads: int | None) -> Int64s:
        """Numbers of the places that these heads are in."""
        count = _count_heads(self.geometry, first_head, heads)
        places = np.arange(len(self.bases), dtype=np.int64)
        if self.geometry.runs_of_a_head:
            return places.reshape(-1, self.geometry.kv_heads)[:, first_head : first_head + count].ravel()
        assert count == self.geometry.kv_heads, "a block was to be taken apart"
        return places


@dataclass(frozen=True, slots=True, eq=False)
class RankStorage:
    """One rank's memory of one cache: a K or V tensor of a layer (one, where both are one) at bases[layer * tensors +
    tensor], its page p page_strides[...] * p bytes further on, and in it tokens and heads in the geometry's layout."""

    geometry: KVGeometry  # of one cache of this rank: its own heads only
    bases: Int64s  # (layers * tensors,)
    page_strides: Int64s  # (layers * tensors,)
    pages: int

    def __post_init__(self) -> None:
        """ValueError where K and V of each head are to be one run, and lie apart."""
        geometry = self.geometry
        assert not geometry.further, "each cache has a place of its own"
        if 0 < geometry.runs_of_a_head < geometry.tensors:
            size = geometry.page_bytes // (geometry.layers * geometry.tensors)
            touching = np.all(np.diff(self.bases.reshape(geometry.layers, -1)) == size)
            if not touching or np.any(np.diff(self.page_strides.reshape(geometry.layers, -1))):
                raise ValueError(
                    f"geometry.head_runs is {geometry.head_runs}: K and V of a head are one run of bytes, but the K "
                    "and the V of a layer lie apart here, as in storage LAYER_MAJOR; it takes PAGE_MAJOR"
                )

    @staticmethod
    def make(
        geometry: KVGeometry, order: StorageOrder, pages: int, start: int = 0, whole: int | None = None
    ) -> RankStorage:
        """A cache in a rank's memory, without gaps, from byte `start` on. whole: bytes of a page of all caches, of
        which page-major memory has one behind the other; None: there is this one alone. ValueError: no pages, or as
        of every one."""
        if pages < 1:
            raise ValueError(f"pages is {pages}; it must be at least 1")
        tensors = geometry.layers * geometry.tensors
        size = geometry.page_bytes // tensors  # of a tensor's page
        at = np.arange(tensors, dtype=np.int64)
        if order is StorageOrder.PAGE_MAJOR:
            stride = geometry.page_bytes if whole is None else whole
            return RankStorage(geometry, start + at * size, np.full(tensors, stride, np.int64), pages)
        if order is StorageOrder.LAYER_MAJOR:
            return RankStorage(geometry, start + at * (size * pages), np.full(tensors, size, np.int64), pages)
        layer, tensor = np.divmod(at, geometry.tensors)
        bases = start + layer * (size * geometry.tensors * pages) + tensor * size
        return RankStorage(geometry, bases, np.full(tensors, size * geometry.tensors, np.int64), pages)

    def rows(self, first_head: int = 0, heads: int | None = None) -> RowMap:
        """Rows of heads [first_head, first_head + heads) of this rank's own; by default of all. ValueError names the
        field."""
        geometry = self.geometry
        count = _count_heads(geometry, first_head, heads)
        head_bytes = geometry.head_dim * geometry.itemsize
        if runs := geometry.runs_of_a_head:
            through = geometry.tensors // runs  # K and V, or one of them; a run of both has them in one row
            run = through * head_bytes * geometry.page_size
            offsets = self.bases[::through] + first_head * run
            return RowMap(offsets, self.page_strides[::through], 1, 0, count * run, self.pages).compact()
        offsets = self.bases + first_head * head_bytes
        token = head_bytes * geometry.kv_heads
        pieces = geometry.page_size
        return RowMap(offsets, self.page_strides, pieces, token, count * head_bytes, self.pages).compact()

    def planes(self) -> RowMap:
        """Rows of all heads in fragments in which the tokens follow each other: token t of a page begins at byte
        t * geometry.fragment_token_bytes of each."""
        geometry = self.geometry
        heads = geometry.kv_heads if geometry.heads_first else 1
        size = geometry.fragment_bytes
        return RowMap(self.bases, self.page_strides, heads, size, size, self.pages)

    def view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rank's memory as (pages, layers, tensors, page size, heads, bytes of a head), whatever order and layout;
        a view. As `view_strides`; ValueError: too short."""
        geometry, end = self.geometry, self.rows().end
        if memory.ndim != 1 or not memory.flags.c_contiguous or len(memory) < end:
            raise ValueError(f"memory has shape {memory.shape}; it must be contiguous and of {end} bytes")
        shape = (self.pages, geometry.layers, geometry.tensors, geometry.page_size, geometry.kv_heads)
        head_bytes = geometry.head_dim * geometry.itemsize
        return np.lib.stride_tricks.as_strided(
            memory[int(self.bases[0]) :], (*shape, head_bytes), (*self.view_strides, 1)
        )

    @property
    def view_strides(self) -> tuple[int, int, int, int, int]:
        """Bytes from a page, layer, tensor, token and head to the next. Only for equal page strides and evenly spaced
        tensors, which `make` gives."""
        geometry = self.geometry
        head_bytes = geometry.head_dim * geometry.itemsize
        first = self.bases.reshape(geometry.layers, geometry.tensors)
        layer_stride = int(first[1, 0] - first[0, 0]) if geometry.layers > 1 else 0
        tensor_stride = int(first[0, 1] - first[0, 0]) if geometry.tensors > 1 else 0
        token, head = head_bytes * geometry.kv_heads, head_bytes
        if geometry.heads_first:
            token, head = head_bytes, head_bytes * geometry.page_size
        return (int(self.page_strides[0]), layer_stride, tensor_stride, token, head)


Storages: TypeAlias = tuple[RankStorage | BlockStorage, ...]
"""The places of the caches in one rank's memory, in the geometry's order."""


def rank_storages(geometry: KVGeometry, order: StorageOrder, pages: int) -> tuple[RankStorage, ...]:
    """A rank's memory without gaps, from byte 0 on: a page's caches one behind the other in page-major order, else all
    pages of one behind those of the other. ValueError as of `RankStorage.make`."""
    found: list[RankStorage] = []
    start = 0
    for cache in geometry.caches:
        found.append(RankStorage.make(cache, order, pages, start, geometry.page_bytes))
        start += cache.page_bytes * (1 if order is StorageOrder.PAGE_MAJOR else pages)
    return tuple(found)


def _count_heads(geometry: KVGeometry, first_head: int, heads: int | None) -> int:
    """How many heads [first_head, first_head + heads) of a rank's own are; None: all from there on. ValueError."""
    count = geometry.kv_heads - first_head if heads is None else heads
    if count < 1 or first_head < 0 or first_head + count > geometry.kv_heads:
        raise ValueError(
            f"heads {first_head} to {first_head + count - 1}; the rank has heads 0 to {geometry.kv_heads - 1}"
        )
    return count
