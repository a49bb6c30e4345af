"""What waits for pages is what SGLang's own radix cache evicts last."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connectors.sglang.next_prompts import MOST, NextPrompts
from kvferry.connectors.sglang.versions import RUN

PAGE, PROMPT_PAGES = 16, 8


@pytest.fixture(autouse=True)
def run_version(sglang: str) -> None:
    if sglang not in RUN:
        pytest.skip(f"SGLang {sglang} is known by its interfaces alone")


def made_tree(pages: int, policy: str = "lru") -> Any:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache

    pool = SimpleNamespace(get_kvcache=lambda: None)
    allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.bfloat16, "cpu", pool, False)
    rows = SimpleNamespace(req_to_token=torch.zeros((4, pages * PAGE), dtype=torch.int32), device="cpu")
    return RadixCache(CacheInitParams(False, rows, allocator, PAGE, eviction_policy=policy))


def waiting(prompt: list[int]) -> Any:
    request = SimpleNamespace(rid=f"{prompt[0]} {len(prompt)}", origin_input_ids=array("q", prompt), extra_key=None)
    return SimpleNamespace(req=request)


class Decode:
    """A decode engine's radix cache, and the queue before it. `knows`: the cache is told what waits."""

    def __init__(self, prompts: int, knows: bool, policy: str = "lru") -> None:
        self.tree = made_tree(prompts * PROMPT_PAGES, policy)
        self.queue: list[Any] = []
        self.next = NextPrompts(self)
        self.knows = knows

    def held(self, prompt: list[int]) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt), extra_key=None)))
        return len(found.device_indices)

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if self.knows:
            self.next.touch(self.tree)
        self.tree.evict(EvictParams(num_tokens=tokens))

    def serve(self, prompt: list[int]) -> int:
        """The prompt's pages are in the cache when it returns, as of one that has finished; those that it had."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", prompt), extra_key=None)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        self.tree.inc_lock_ref(found.last_device_node)
        lacking = len(prompt) - len(found.device_indices)
        allocator = self.tree.token_to_kv_pool_allocator
        if (room := allocator.available_size()) < lacking:
            self.evict(lacking - room)
        slots = torch.cat((found.device_indices, allocator.alloc(lacking)))
        self.tree.insert(InsertParams(key=key, value=slots))
        self.tree.dec_lock_ref(found.last_device_node)
        return len(found.device_indices) // PAGE


def prompt(chat: int, pages: int = PROMPT_PAGES) -> list[int]:
    return list(range(chat * 10_000, chat * 10_000 + pages * PAGE))


def test_the_first_that_waits_is_evicted_last() -> None:
    decode = Decode(4, knows=True)
    for chat in range(4):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in (0, 3, 1)]
    there = [0, 1, 2, 3]
    for gone in (2, 1, 3, 0):  # nobody waits for 2
        decode.evict(PROMPT_PAGES * PAGE)
        there.remove(gone)
        decode.knows = False  # it has been told
        root = decode.tree.root_node
        assert sorted(node.key.token_ids[0] // 10_000 for node in root.children.values()) == there


def rounds(knows: bool, chats: int = 12, room: int = 6, turns: int = 4) -> int:
    """Pages that chats found which all come back together, in the same order, turn for turn."""
    decode, found = Decode(room, knows), 0
    for _ in range(turns):
        decode.queue = [waiting(prompt(chat)) for chat in range(chats)]
        for chat in range(chats):
            found += decode.serve(prompt(chat))
            decode.queue.pop(0)
    return found


def test_chats_that_come_back_together_find_what_there_is_room_for() -> None:
    assert rounds(knows=False) == 0, "what was used longest ago comes next"
    most = 3 * 12 * PROMPT_PAGES
    assert rounds(knows=True) > 0.4 * most


@pytest.mark.parametrize("policy", ["mru", "fifo"])
def test_another_policys_order_stays(policy: str) -> None:
    decode = Decode(2, knows=True, policy=policy)
    decode.serve(prompt(0))
    decode.queue = [waiting(prompt(0))]
    before = {node: node.last_access_time for node in decode.tree.root_node.children.values()}
    decode.next.touch(decode.tree)
    assert {node: node.last_access_time for node in before} == before
    decode.tree = SimpleNamespace(eviction_policy="lru")  # of a kind that nobody knows
    decode.next.touch(decode.tree)


def test_what_a_long_queue_costs_is_bounded() -> None:
    decode = Decode(64, knows=True)
    for chat in range(64):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in range(4 * MOST)]
    decode.next.touch(decode.tree)
    assert len(decode.next._nodes) == MOST
    began = time.thread_time()
    decode.next.touch(decode.tree)  # each is looked up once
    assert time.thread_time() - began < 0.02
