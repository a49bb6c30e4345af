"""One decode step of several requests over their pages: keys and values are gathered to the length of the longest, and
what is behind a shorter one is masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.workers.models.paged_cache import PagedCache, RankView, layer_views, readers, stored_parts


class TokenPlaces(NamedTuple):
    """Tokens in the pool: of each its page, and its place there."""

    pages: torch.Tensor
    offsets: torch.Tensor

    def to(self, device: torch.device) -> TokenPlaces:
        return TokenPlaces(self.pages.to(device), self.offsets.to(device))


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values of all requests."""

    def __init__(self, ranks: Sequence[RankView], layer: int, batch: PagedBatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = layer_views(ranks, layer)
        self._read = readers(self._ranks)
        self._batch = batch
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to make: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores each request's new key and value, each (requests, heads, 1, head dimension), and returns all keys and
        all values, each (requests, heads, tokens of the longest, head dimension)."""
        batch = self._batch
        assert key_states.shape[0] == batch.requests and key_states.shape[2] == 1
        parts = stored_parts(self._ranks, key_states, value_states)
        for stored, heads in self._ranks:
            at = batch.written[stored.device]
            for tensor, states in enumerate(parts):
                stored[:, tensor][at.pages, at.offsets] = states[:, heads, 0].to(stored.device)
        found = [self._gather(tensor, key_states.device) for tensor in range(len(parts))]
        if len(found) == 2:
            return found[0], found[1]
        width = key_states.shape[-1]
        return found[0][..., :width], found[0][..., width:]

    def _gather(self, tensor: int, device: torch.device) -> torch.Tensor:
        # Of each rank (requests, tokens, heads, head dimension).
        ranks = []
        for stored in self._read:
            at = self._batch.read[stored.device]
            ranks.append(stored[:, tensor][at.pages, at.offsets].to(device))
        found = ranks[0] if len(ranks) == 1 else torch.cat(ranks, dim=2)
        return found.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._batch.longest, 0

    def get_seq_length(self) -> int:
        return self._batch.longest - 1

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise NotImplementedError("a batch is of one step and is not reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("a paged cache has no beams")


class PagedBatch(Cache):
    """The caches of several requests for one token of each; `end` counts the tokens there."""

    def __init__(self, ranks: Sequence[RankView], caches: Sequence[PagedCache]) -> None:
        tables = [cache.table for cache in caches]
        lengths = [cache.get_seq_length() + 1 for cache in caches]  # with the new token
        for table, length in zip(tables, lengths, strict=True):
            assert length <= table.capacity, f"{length} tokens; the pages hold {table.capacity}"
            assert length > table.shared_tokens, f"token {length - 1} is in a shared page"
        self._caches = caches
        self.requests = len(caches)
        self.longest = max(lengths)
        device, page_size = tables[0].pages.device, tables[0].page_size
        pages = torch.nn.utils.rnn.pad_sequence([table.pages for table in tables], batch_first=True)
        ends = torch.tensor(lengths, device=device)
        positions = torch.arange(self.longest, device=device).expand(self.requests, -1)
        self._valid = positions < ends[:, None]
        # Behind a request's end its first token is read in place of what nobody has written.
        positions = torch.where(self._valid, positions, 0)
        read = TokenPlaces(pages.gather(1, positions // page_size), positions % page_size)
        last = (ends - 1)[:, None]
        written = TokenPlaces(pages.gather(1, last // page_size)[:, 0], (last % page_size)[:, 0])
        devices = {rank.device for rank in ranks}
        self.read = {each: read.to(each) for each in devices}
        self.written = {each: written.to(each) for each in devices}
        self.positions = last
        """Of the new tokens, (requests, 1)."""
        super().__init__(layers=[BatchLayer(ranks, layer, self) for layer in range(len(ranks[0].layers))])

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """The mask to be added to attention's scores, (requests, 1, 1, tokens of the longest)."""
        nothing = torch.zeros((), dtype=dtype, device=self._valid.device)
        return torch.where(self._valid, nothing, torch.finfo(dtype).min)[:, None, None]

    def end(self) -> None:
        for cache in self._caches:
            cache.advance(1)
