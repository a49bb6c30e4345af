"""What waits for pages is what SGLang's own radix cache evicts last."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from kvferry.connectors.sglang import engine, next_prompts
from kvferry.connectors.sglang.next_prompts import NextPrompts
from kvferry.connectors.sglang.versions import RUN
from tests.connectors.sglang.engine_on_cpu import cache_params

PAGE, PROMPT_PAGES, CHAT = 16, 8, 10_000  # tokens, pages, and between chats' ids


@pytest.fixture(autouse=True)
def run_version(sglang: str) -> None:
    if sglang not in RUN:
        pytest.skip(f"SGLang {sglang} is known by its interfaces alone")


def waiting(prompt: list[int]) -> Any:
    request = SimpleNamespace(origin_input_ids=array("q", prompt), extra_key=None)
    return SimpleNamespace(req=request, waiting_for_input=True, metadata_buffer_index=-1)


class Decode:
    """A decode engine's radix cache, and the queue before it. `knows`: it is kvferry's, whose hook is called."""

    def __init__(self, pages: int, patches: ExitStack, *, knows: bool = True, policy: str = "lru") -> None:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.tree = RadixCache(cache_params(pages, PAGE, eviction_policy=policy))
        self.queue: list[Any] = []
        manager = SimpleNamespace(tree=self.tree, next_prompts=NextPrompts(self))
        patches.enter_context(mock.patch.object(engine, "_managers", [manager] if knows else []))

    def serve(self, prompt: list[int]) -> int:
        """The prompt's pages are in the cache when it returns, as of one that has finished; those that it had."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        found = self.match(prompt)
        self.tree.inc_lock_ref(found.last_device_node)
        lacking = len(prompt) - len(found.device_indices)
        allocator = self.tree.token_to_kv_pool_allocator
        if (room := allocator.available_size()) < lacking:
            self.evict((lacking - room) // PAGE)
        slots = torch.cat((found.device_indices, allocator.alloc(lacking)))
        self.tree.insert(InsertParams(key=key(prompt), value=slots))
        self.tree.dec_lock_ref(found.last_device_node)
        return len(found.device_indices) // PAGE

    def match(self, prompt: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.tree.match_prefix(MatchPrefixParams(key=key(prompt)))

    def evict(self, pages: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=pages * PAGE))

    def there(self) -> dict[int, int]:
        """Pages that the cache has of each chat."""
        nodes, held = list(self.tree.root_node.children.values()), Counter[int]()
        for node in nodes:
            held[chat_of(node)] += len(node.key) // PAGE
            nodes += node.children.values()
        return dict(held)


def key(prompt: list[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", prompt), extra_key=None)


def chat_of(node: Any) -> int:
    return int(node.key.token_ids[0]) // CHAT


def prompt(chat: int, pages: int = PROMPT_PAGES, turn: int = 0) -> list[int]:
    """`turn`: the second half is another in each."""
    half = pages * PAGE // 2
    start = chat * CHAT
    return [*range(start, start + half), *range(start + (1 + turn) * half, start + (2 + turn) * half)]


@pytest.fixture
def patches() -> Iterator[ExitStack]:
    with ExitStack() as patches:
        yield patches


def test_the_first_that_waits_is_evicted_last(patches: ExitStack) -> None:
    decode = Decode(4 * PROMPT_PAGES, patches)
    for chat in range(4):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in (0, 3, 1)]
    there = dict.fromkeys(range(4), PROMPT_PAGES)
    for gone in (2, 1, 3, 0):  # nobody waits for 2
        decode.evict(PROMPT_PAGES)
        del there[gone]
        assert decode.there() == there


def test_what_nobody_waits_for_goes_before_all_that_waits(patches: ExitStack) -> None:
    """As an answer's thinking, which the next turn leaves out: it hangs behind what the next turn begins with."""
    decode = Decode(4 * PROMPT_PAGES, patches)
    decode.serve([*prompt(0), *prompt(9)])
    for chat in (1, 2):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in range(3)]
    decode.evict(2 * PROMPT_PAGES)
    assert decode.there() == {0: PROMPT_PAGES, 1: PROMPT_PAGES}


def test_nodes_above_are_kept_with_what_hangs_below(patches: ExitStack) -> None:
    decode = Decode(4 * PROMPT_PAGES, patches)
    for turn in range(2):
        decode.serve(prompt(0, turn=turn))  # one node with two below it
    decode.serve(prompt(1))
    decode.queue = [waiting(prompt(0, turn=0))]
    decode.evict(PROMPT_PAGES + PROMPT_PAGES // 2)  # the other turn's half, and all of chat 1
    assert decode.there() == {0: PROMPT_PAGES}
    decode.queue = []
    root = decode.tree.root_node
    (above,) = root.children.values()
    (below,) = above.children.values()
    assert above.last_access_time >= below.last_access_time


def rounds(decode: Decode, chats: int = 12, turns: int = 4) -> int:
    """Pages that chats found which all come back together, in the same order, turn for turn."""
    found = 0
    for _ in range(turns):
        decode.queue = [waiting(prompt(chat)) for chat in range(chats)]
        for chat in range(chats):
            found += decode.serve(prompt(chat))
            decode.queue.pop(0)
    return found


def test_chats_that_come_back_together_find_half_where_there_is_room_for_half(patches: ExitStack) -> None:
    room, most = 6 * PROMPT_PAGES, 3 * 12 * PROMPT_PAGES
    assert rounds(Decode(room, patches, knows=False)) == 0, "what was used longest ago comes next"
    assert rounds(Decode(room, patches)) > 0.4 * most


@pytest.mark.parametrize("policy", ["mru", "fifo"])
def test_another_policys_order_stays(policy: str, patches: ExitStack) -> None:
    decode = Decode(2 * PROMPT_PAGES, patches, policy=policy)
    for chat in range(2):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in range(2)]
    nodes = list(decode.tree.root_node.children.values())
    before = [node.last_access_time for node in nodes]
    decode.evict(0)
    assert [node.last_access_time for node in nodes] == before


def test_only_what_waits_for_pages_is_marked(patches: ExitStack) -> None:
    decode = Decode(3 * PROMPT_PAGES, patches)
    for chat in range(3):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in range(3)]
    decode.queue[0].metadata_buffer_index = 5  # it has its pages
    decode.queue[1].waiting_for_input = False  # its prefill server is not known yet
    decode.evict(2 * PROMPT_PAGES)
    assert decode.there() == {2: PROMPT_PAGES}


def test_what_comes_while_a_prompt_waits_is_found(patches: ExitStack) -> None:
    decode = Decode(3 * PROMPT_PAGES, patches)
    decode.queue = [waiting(prompt(0))]
    decode.evict(0)  # there is nothing of it
    for chat in range(3):
        decode.serve(prompt(chat))
    decode.evict(2 * PROMPT_PAGES)
    assert decode.there() == {0: PROMPT_PAGES}


def test_an_emptied_tree_is_let_go(patches: ExitStack) -> None:
    decode = Decode(2 * PROMPT_PAGES, patches)
    decode.serve(prompt(0))
    decode.queue = [waiting(prompt(0))]
    decode.evict(0)
    gone = weakref.ref(decode.tree.root_node)
    decode.tree.reset()
    decode.tree.token_to_kv_pool_allocator.clear()
    for chat in (1, 0):
        decode.serve(prompt(chat))
    decode.evict(PROMPT_PAGES)
    assert decode.there() == {0: PROMPT_PAGES}, "it is looked up anew"
    gc.collect()
    assert gone() is None


def test_look_ups_are_bounded_and_made_once(patches: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Decode(8 * PROMPT_PAGES, patches)
    for chat in range(8):
        decode.serve(prompt(chat))
    decode.queue = [waiting(prompt(chat)) for chat in range(8)]
    monkeypatch.setattr(next_prompts, "LOOK_UP_TOKENS", 3 * PROMPT_PAGES * PAGE)
    monkeypatch.setattr(next_prompts, "MOST", 7)
    made: list[int] = []
    own = decode.tree.match_prefix
    monkeypatch.setattr(
        decode.tree, "match_prefix", lambda params: made.append(int(params.key.token_ids[0]) // CHAT) or own(params)
    )
    for so_far in (range(3), range(6), range(7), range(7)):
        decode.evict(0)
        assert made == list(so_far)
    made.clear()
    decode.queue = [waiting(prompt(20)), waiting(prompt(1))]
    decode.evict(0)
    decode.queue = [decode.queue[1], waiting(prompt(2))]
    decode.evict(0)
    assert made == [20, 1, 2], "what waits no more is not looked up again, though nothing of it was found"
