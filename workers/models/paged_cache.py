"""A transformers cache whose keys and values lie in the daemon's pool pages, each head on the ranks that hold it.

Where both are parts of one latent (MLA), they lie one behind the other, on every rank; so do the keys of an indexer, in
a cache of their own.

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
    """One layer of each rank; none of no ranks."""
    return [LayerView(rank.layers[layer], rank.heads) for rank in ranks]


def readers(ranks: Sequence[LayerView]) -> list[torch.Tensor]:
    """The elements to read: each head once, in the heads' order."""
    firsts = {rank.heads.start: rank for rank in reversed(ranks)}
    return [firsts[start].elements for start in sorted(firsts)]


def stored_parts(ranks: Sequence[LayerView], keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The states as the pages' tensors have them: keys and values, or one latent of both."""
    latent = ranks[0].elements.shape[1] == 1
    return (torch.cat((keys, values), dim=-1),) if latent else (keys, values)


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
    """One layer's keys and values, and its indexer's keys where it has one."""

    def __init__(
        self, ranks: Sequence[RankView], layer: int, table: PageTable, tokens: int, index: Sequence[RankView] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Of each rank: (pages, tensors, page size, heads, head dimension), and its heads.
        self._ranks = layer_views(ranks, layer)
        self._read = readers(self._ranks)
        self._index = layer_views(index, layer)
        self._table = table
        self._tokens = tokens
        self._indexed = tokens
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
        end = self._tokens + key_states.shape[-2]
        parts = stored_parts(self._ranks, key_states, value_states)
        self._store(self._ranks, parts, self._tokens, end)
        self._tokens = end
        found = [self._gather(self._read, tensor, end) for tensor in range(len(parts))]
        if len(found) == 2:
            return found[0], found[1]
        width = key_states.shape[-1]
        return found[0][..., :width].contiguous(), found[0][..., width:].contiguous()

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Stores an indexer's new keys, (1, tokens, values of one), behind those that are there, and returns all."""
        end = self._indexed + indexer_key_states.shape[1]
        assert self._index, "the pages have no indexer's cache"
        self._store(self._index, (indexer_key_states.unsqueeze(1),), self._indexed, end)
        self._indexed = end
        return self._gather([self._index[0].elements], 0, end)[:, 0]

    def _store(self, ranks: Sequence[LayerView], parts: Sequence[torch.Tensor], start: int, end: int) -> None:
        """Writes tokens [start, end), each part (1, heads, tokens, head dimension)."""
        assert parts[0].shape[0] == 1, f"a batch of {parts[0].shape[0]}; a paged cache holds one request"
        assert start >= self._table.shared_tokens, f"token {start} is in a shared page"
        assert end <= self._table.capacity, f"{end} tokens; the pages hold {self._table.capacity}"
        pages, offsets = self._table.places(start, end)
        for stored, heads in ranks:
            at = (pages.to(stored.device), offsets.to(stored.device))
            for tensor, states in enumerate(parts):
                stored[at[0], tensor, at[1]] = states[0, heads].transpose(0, 1).to(stored.device)

    def _gather(self, read: Sequence[torch.Tensor], tensor: int, tokens: int) -> torch.Tensor:
        """(1, heads, tokens, head dimension)."""
        used = -(-tokens // self._table.page_size)
        ids = self._table.pages[:used]
        # Of each rank (used, page size, heads, head dimension), a copy, where the model is.
        ranks = [stored[ids.to(stored.device), tensor].to(ids.device) for stored in read]
        pages = ranks[0] if len(ranks) == 1 else torch.cat(ranks, dim=2)
        rows = pages.flatten(0, 1)[:tokens]
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

    def __init__(
        self, ranks: Sequence[RankView], table: PageTable, *, tokens: int, index: Sequence[RankView] = ()
    ) -> None:
        """`ranks`: of `rank_views`; `index`: of an indexer's cache. The pages hold the KV of the first `tokens`
        tokens."""
        assert 0 <= tokens <= table.capacity
        self.table = table
        self._paged = [PagedLayer(ranks, layer, table, tokens, index) for layer in range(len(ranks[0].layers))]
        super().__init__(layers=list(self._paged))

    def advance(self, tokens: int) -> None:
        """Counts so many more tokens, whose keys and values a batch has stored in the pages."""
        for layer in self._paged:
            layer.advance(tokens)
