"""A transformers cache whose keys and values lie in the daemon's pool pages, each head on the ranks that hold it.

Every layer writes what the model computes into the request's pages and gives attention the keys and values gathered
from them, so what a request reads is what the pool holds. One request is one cache, a batch of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.client.rank_pools import RankPools


class RankView(NamedTuple):
    """One rank's memory of one cache: each layer's elements, shape (pages, tensors, page size, heads, head dimension)
    whatever order and layout, and which heads they are."""

    layers: tuple[torch.Tensor, ...]  # views
    heads: slice  # of the model

    @property
    def device(self) -> torch.device:
        return self.layers[0].device


class LayerView(NamedTuple):
    """One layer of one rank."""

    elements: torch.Tensor
    heads: slice


def rank_views(pools: RankPools, cache: int = 0) -> list[RankView]:
    """A view of a cache in each rank's memory."""
    geometry = pools.geometry.caches[cache]
    dtype = getattr(torch, geometry.dtype)
    assert isinstance(dtype, torch.dtype)

    def elements(rank: int, layer: int) -> torch.Tensor:
        found = pools.layer(rank, layer, cache)
        tensor = found if isinstance(found, torch.Tensor) else torch.from_numpy(found)
        return tensor.view(dtype)

    return [
        RankView(tuple(elements(rank, i) for i in range(geometry.layers)), slice(heads.first, heads.end))
        for rank, heads in enumerate(pools.heads[cache])
    ]


def layer_views(ranks: Sequence[RankView], layer: int) -> list[LayerView]:
    """One layer of each rank."""
    return [LayerView(rank.layers[layer], rank.heads) for rank in ranks]


def readers(ranks: Sequence[LayerView]) -> list[torch.Tensor]:
    """The elements to read: each head once, in the heads' order."""
    firsts = {rank.heads.start: rank for rank in reversed(ranks)}
    return [firsts[start].elements for start in sorted(firsts)]


class PageTable:
    """The pages of one request, shared by the layers of its cache."""

    def __init__(
        self, page_size: int, pages: Sequence[int], *, shared_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        """The pages of the first `shared_tokens` tokens are read only. device: the model's."""
        self.page_size = page_size
        self.shared_tokens = shared_tokens
        self.pages = torch.tensor(list(pages), dtype=torch.int64, device=device)
        self._last: tuple[int, int, torch.Tensor, torch.Tensor] | None = None

    def places(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of the tokens [start, end), and the tokens' places there. Every layer asks for the same ones."""
        if self._last is None or self._last[:2] != (start, end):
            positions = torch.arange(start, end, device=self.pages.device)
            self._last = (start, end, self.pages[positions // self.page_size], positions % self.page_size)
        return self._last[2:]

    def add(self, pages: Sequence[int]) -> None:
        more = torch.tensor(list(pages), dtype=torch.int64, device=self.pages.device)
        self.pages = torch.cat([self.pages, more])
        self._last = None

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold."""
        return len(self.pages) * self.page_size


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values."""

    def __init__(self, ranks: Sequence[RankView], layer: int, table: PageTable, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Of each rank: (pages, 2, page size, heads, head dimension), and its heads.
        self._ranks = layer_views(ranks, layer)
        self._read = readers(self._ranks)
        self._table = table
        self._tokens = tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to make: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values, each (1, heads, tokens, head dimension), behind those that are there.

        Returns all keys and all values, each (1, heads, all tokens, head dimension), contiguous as the dynamic cache's
        are: attention then does the same arithmetic.
        """
        new = key_states.shape[-2]
        start, end = self._tokens, self._tokens + new
        assert key_states.shape[0] == 1, f"a batch of {key_states.shape[0]}; a paged cache holds one request"
        assert start >= self._table.shared_tokens, f"token {start} is in a shared page"
        assert end <= self._table.capacity, f"{end} tokens; the pages hold {self._table.capacity}"
        pages, offsets = self._table.places(start, end)
        for stored, heads in self._ranks:
            at = (pages.to(stored.device), offsets.to(stored.device))
            for tensor, states in enumerate((key_states, value_states)):
                stored[at[0], tensor, at[1]] = states[0, heads].transpose(0, 1).to(stored.device)
        self._tokens = end
        return self._gather(0), self._gather(1)

    def _gather(self, tensor: int) -> torch.Tensor:
        used = -(-self._tokens // self._table.page_size)
        ids = self._table.pages[:used]
        # Of each rank (used, page size, heads, head dimension), a copy, where the model is.
        ranks = [stored[ids.to(stored.device), tensor].to(ids.device) for stored in self._read]
        pages = ranks[0] if len(ranks) == 1 else torch.cat(ranks, dim=2)
        rows = pages.flatten(0, 1)[: self._tokens]
        return rows.transpose(0, 1).contiguous().unsqueeze(0)

    def advance(self, tokens: int) -> None:
        """Counts so many more tokens, whose keys and values are in the pages."""
        self._tokens += tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise NotImplementedError("a paged cache belongs to one request and is not reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("a paged cache has no beams")


class PagedCache(Cache):
    """The cache of one request; pass it to a model as `past_key_values`."""

    def __init__(self, ranks: Sequence[RankView], table: PageTable, *, tokens: int) -> None:
        """`ranks`: of `rank_views`. The pages hold the KV of the first `tokens` tokens."""
        assert 0 <= tokens <= table.capacity
        self.table = table
        self._paged = [PagedLayer(ranks, layer, table, tokens) for layer in range(len(ranks[0].layers))]
        super().__init__(layers=list(self._paged))

    def advance(self, tokens: int) -> None:
        """Counts so many more tokens, whose keys and values a batch has stored in the pages."""
        for layer in self._paged:
            layer.advance(tokens)
