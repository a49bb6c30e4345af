"""What a decode engine's radix cache has is locked while it is copied, whichever class this version of SGLang makes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client.requests import RequestName
from kvferry.connectors.sglang.stores import FinishedPages
from kvferry.connectors.sglang.transfers import PageTransfer, StoredPrompt

PAGE, PAGES = 16, 64


def made_tree() -> Any:
    """The class that SGLang makes where there are neither windows nor states."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    pool = SimpleNamespace(get_kvcache=lambda: None)
    allocator = PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE, torch.bfloat16, "cpu", pool, False)
    rows = SimpleNamespace(req_to_token=torch.zeros((4, PAGES * PAGE), dtype=torch.int32), device="cpu")
    params = CacheInitParams(False, rows, allocator, PAGE)
    try:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    except ImportError:
        UnifiedRadixCache = None
    if UnifiedRadixCache is None or not hasattr(UnifiedRadixCache, "path_device_indices"):
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)
    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


class Finished:
    def __init__(self, most: float = PAGES) -> None:
        self.tree = made_tree()
        self.orders: list[StoredPrompt] = []
        self.told: list[str] = []
        self.pages = FinishedPages(most, lambda of, blocks: StoredPrompt(of, blocks, ()), self.orders.append, list)

    def insert(self, tokens: list[int], beside: dict[str, str | None]) -> list[int]:
        """Has the tree keep tokens, and returns their pages."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = self.tree.token_to_kv_pool_allocator.alloc(len(tokens))
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens), **beside), value=slots))
        return [int(slot) // PAGE for slot in slots[::PAGE]]

    def add(self, tokens: list[int], extra_key: str | None = None) -> PageTransfer | None:
        before = len(self.orders)
        self.pages.add(RequestName(bytes(16), 1), SimpleNamespace(extra_key=extra_key), tokens, self.tree)
        return self.orders[-1].transfer if len(self.orders) > before else None

    def evict(self) -> int:
        """What SGLang evicts that may evict all; the pages that stay."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=PAGES * PAGE))
        return PAGES - int(self.tree.token_to_kv_pool_allocator.available_size()) // PAGE


@pytest.mark.parametrize("extra_key", [None, "tenant"])
def test_what_has_finished_is_locked_until_it_is_copied(sglang: str, extra_key: str | None) -> None:
    finished = Finished()
    tokens = list(range(1000, 1000 + 5 * PAGE))
    others = finished.insert(list(range(9000, 9000 + 3 * PAGE)), {"extra_key": extra_key})
    pages = finished.insert(tokens, {"extra_key": extra_key})
    transfer = finished.add([*tokens, 7, 8], extra_key)  # of the last page SGLang keeps nothing
    assert transfer is not None and transfer.tokens == 5 * PAGE
    assert finished.orders[0].blocks == pages and not set(pages) & set(others)
    assert finished.evict() == 5, "locked"
    finished.pages.tidy()
    assert finished.evict() == 5, "it runs still"
    transfer.fail("no room")
    finished.pages.tidy()
    assert finished.evict() == 0


def test_what_the_tree_has_in_part_is_copied_so_far(sglang: str) -> None:
    finished = Finished()
    tokens = list(range(4 * PAGE))
    first = finished.insert(tokens[: 2 * PAGE], {"extra_key": None})
    transfer = finished.add(tokens)
    assert transfer is not None and transfer.tokens == 2 * PAGE and finished.orders[0].blocks == first
    assert finished.add(list(range(500, 500 + PAGE))) is None


def test_no_more_than_the_bound_is_locked(sglang: str) -> None:
    finished = Finished(most=6)
    for base in (0, 5000):
        finished.insert(list(range(base, base + 4 * PAGE)), {"extra_key": None})
    assert finished.add(list(range(4 * PAGE))) is not None
    assert finished.add(list(range(5000, 5000 + 4 * PAGE))) is None
    assert finished.evict() == 4


def test_a_tree_that_nobody_knows_is_left_alone(sglang: str) -> None:
    finished = Finished()
    finished.tree = type("OtherCache", (), {})()
    assert finished.add(list(range(PAGE))) is None
