"""What a pool's page ids name: places in its memory, or the blocks of an engine's that a request has named for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.layouts import Int64s
from kvferry.transfer.geometry.registration import Registration

SHARING = 16


class PagePlaces(Protocol):
    def of(self, pages: Sequence[int] | Int64s) -> Int64s:
        """The ids by which copies find the pages."""

    def last_bytes(self, pages: Sequence[int], cache: int) -> int | None:
        """Bytes of the last page in each tensor of a cache that are given to others; None: all."""


class PlainPages:
    """Pages that are found by their own ids, and whose memory is cleared behind a prompt's end."""

    def of(self, pages: Sequence[int] | Int64s) -> Int64s:
        return np.asarray(pages, np.int64)

    def last_bytes(self, pages: Sequence[int], cache: int) -> None:
        return None


PLAIN_PAGES = PlainPages()


class BlockTable:
    """`per_page` blocks for each page, in order; -1: none, whose bytes are not the daemon's to read or write."""

    def __init__(self, pages: int, per_page: int, token_bytes: Sequence[int]) -> None:
        """token_bytes: of a token, in each of the engine's places of each cache."""
        self._blocks = np.full((pages, per_page), -1, np.int64)
        self._ends: dict[int, int] = {}  # pages that a prompt ends in: tokens there
        self._token_bytes = tuple(token_bytes)

    def bind(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """The pages are these blocks from now on, an equal number each."""
        ids = np.asarray(pages, np.int64)
        self._blocks[ids] = np.asarray(blocks, np.int64).reshape(len(ids), -1)
        for page in pages:
            self._ends.pop(page, None)

    def of(self, pages: Sequence[int] | Int64s) -> Int64s:
        """Block ids of the pages, one page's behind the other's."""
        found: Int64s = self._blocks[np.asarray(pages, np.int64)].ravel()
        return found

    def cut(self, page: int, tokens: int) -> None:
        """Nothing behind the page's first `tokens` tokens is given to others."""
        self._ends[page] = tokens

    def last_bytes(self, pages: Sequence[int], cache: int) -> int | None:
        tokens = self._ends.get(pages[-1])
        return None if tokens is None else tokens * self._token_bytes[cache]


def page_ids_of(registration: Registration, page_size: int) -> int:
    """How many pages a pool over this memory has. Of blocks, whose pages are ids alone: so many that SHARING requests
    may have each block in common, of a prefix that the engine holds itself."""
    if not registration.block_tokens:
        return registration.pages
    return SHARING * -(-registration.pages * registration.block_tokens // page_size)


def table_of(registration: Registration, geometry: KVGeometry) -> BlockTable | None:
    """The table of a pool over this memory, where it is of blocks."""
    if not (tokens := registration.block_tokens):
        return None
    rank = registration.ranks[0]
    token_bytes = [rank.of_cache(cache)[0].page_bytes // tokens for cache in range(len(geometry.caches))]
    return BlockTable(page_ids_of(registration, geometry.page_size), geometry.page_size // tokens, token_bytes)
