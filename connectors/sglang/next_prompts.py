"""What waits to be taken in by a decode engine, as its radix cache is to know it: prompts that wait count as used just
now, the first one's last, and so SGLang's least recently used is none of them while there is anything else, and then
the last one's. By itself SGLang evicts what was used longest ago. Where more chats come back together than its pool has
room for, that is just what comes next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvferry.connectors.sglang.radix_locks import last_node

MOST = 64  # of those that wait, the first
LOOK_UP_TOKENS = 1 << 17  # that are looked up before one eviction: some milliseconds of the scheduler's
CLASS = "RadixCache"  # other trees order what they have otherwise
POLICIES = ("lru", "lfu", "slru", "priority")  # by which, of what they take for equal, what was used last is kept


class NextPrompts:
    """`queue`: SGLang's, of requests that wait for pages, the first of them first."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._root: Any = None
        self._known: list[tuple[Any, Any]] = []  # of those that wait, and the node that ends what the tree has of each

    def touch(self, tree: Any) -> None:
        """Called before the tree evicts. An error ends the engine: ranks that evict unlike are worse."""
        if type(tree).__name__ != CLASS or tree.eviction_policy not in POLICIES:
            return
        if tree.root_node is not self._root:  # it was emptied: let go of what it had
            self._root, self._known = tree.root_node, []
        waiting = [each for each in self._queue.queue if each.waiting_for_input and each.metadata_buffer_index < 0]
        self._look_up(tree, waiting[:MOST])
        for _, node in reversed(self._known):  # behind all look-ups, which mark what hangs behind what they find
            now = time.monotonic()
            while node is not None and node is not self._root:
                node.last_access_time, node = now, node.parent

    def _look_up(self, tree: Any, waiting: Sequence[Any]) -> None:
        """Once for each of these, and again where the tree had nothing of it."""
        nodes = {id(each): (each, node) for each, node in self._known}
        lacking = [each for each in waiting if id(each) not in nodes or nodes[id(each)][1] is self._root]
        tokens = 0
        for each in sorted(lacking, key=lambda each: id(each) in nodes):  # new ones first
            if tokens >= LOOK_UP_TOKENS:
                break
            nodes[id(each)] = each, last_node(tree, each.req)
            tokens += len(each.req.origin_input_ids)
        self._known = [nodes[id(each)] for each in waiting if id(each) in nodes]
