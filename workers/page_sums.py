"""Sums over the bytes of pages, where the pages are, and a record of requests with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvferry.client.rank_pools import RankPools
from kvferry.client.requests import RequestName
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.paged_cache import RankView, rank_views
from kvferry.workers.record import Recorded

SEED = 20
PAGES_AT_ONCE = 16


class FileRecord:
    """A `Record` in a file."""

    def __init__(self, path: Path, pools: RankPools) -> None:
        """OSError where the file cannot be written; ValueError where a head has no whole 64-bit words."""
        self._sums = PageSums(pools)
        self._page_size = pools.geometry.page_size
        self._file = path.open("w", buffering=1)  # a line at a time: a worker may be killed

    def prefilled(self, name: RequestName, prompt: Prompt, pages: Sequence[int], matched: int, ends: list[int]) -> None:
        sums = self._sums.of(pages, len(prompt.tokens), 0)
        self._write(Recorded(_name(name), matched, [], [], ends, 0, sums))

    def decoded(self, name: RequestName, prompt: Prompt, pages: Sequence[int], matched: int, output: list[int]) -> None:
        first = matched // self._page_size
        sums = self._sums.of(pages, len(prompt.tokens), first)
        tokens = [int(token) for token in prompt.tokens]
        self._write(Recorded(_name(name), matched, tokens, output, [], first, sums))

    def _write(self, recorded: Recorded) -> None:
        self._file.write(json.dumps(asdict(recorded)) + "\n")


class PageSums:
    """Sums of 64-bit words, each times an odd number of its place in the page: two pages that differ in one word never
    have the same, others by a chance of about 2^-63. The same whatever ranks share the heads."""

    def __init__(self, pools: RankPools) -> None:
        self._page_size = pools.geometry.page_size
        generator = torch.Generator().manual_seed(SEED)
        # Of each cache and rank: each layer's words, (pages, tensors, page size, heads, words), and their factors.
        self._parts: list[tuple[RankView, torch.Tensor]] = []
        for number, cache in enumerate(pools.geometry.caches):
            if cache.head_dim * cache.itemsize % 8:
                field = f"geometry.further[{number - 1}]: " if number else ""
                raise ValueError(
                    f"{field}a head has {cache.head_dim * cache.itemsize} bytes; a record needs whole 64 bits"
                )
            words = cache.head_dim * cache.itemsize // 8
            shape = (cache.layers, cache.tensors, cache.page_size, cache.kv_heads, words)
            factors = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator) * 2 + 1
            for rank in {view.heads.start: view for view in rank_views(pools, number)}.values():  # each head once
                view = RankView(tuple(layer.view(torch.int64) for layer in rank.layers), rank.heads)
                self._parts.append((view, factors[:, :, :, rank.heads].to(rank.device)))

    def of(self, pages: Sequence[int], tokens: int, first: int) -> list[int]:
        """The sums of a request's pages with its first `tokens` tokens, from page `first` on; of the last one its
        tokens alone."""
        full, tail = divmod(tokens, self._page_size)
        sums: list[int] = []
        for start in range(first, full, PAGES_AT_ONCE):
            sums += self._sum(pages[start : min(start + PAGES_AT_ONCE, full)], self._page_size)
        if tail and first <= full:
            sums += self._sum(pages[full : full + 1], tail)
        return sums

    @torch.inference_mode()
    def _sum(self, pages: Sequence[int], tokens: int) -> list[int]:
        total = [0] * len(pages)
        for rank, factors in self._parts:
            ids = torch.tensor(list(pages), dtype=torch.int64, device=rank.device)
            found = torch.zeros(len(pages), dtype=torch.int64, device=rank.device)
            for layer, factor in zip(rank.layers, factors, strict=True):
                found += (layer[ids][:, :, :tokens] * factor[:, :tokens]).flatten(1).sum(1)
            total = [a + int(b) for a, b in zip(total, found.tolist(), strict=True)]
        return [each % (1 << 64) for each in total]


def _name(name: RequestName) -> str:
    return f"{name.request_id.hex()}-{name.attempt}"
