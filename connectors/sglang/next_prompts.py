"""What waits to be taken in by a decode engine, as its radix cache is to know it: of prompts that wait the cache evicts
nothing while it has anything else, and then the last one's first. SGLang's own evicts what was used longest ago. Where
more chats come back than its pool has room for, that is just what comes next."""

from __future__ import annotations

import time
from typing import Any

from kvferry.connectors.sglang.radix_locks import last_node

MOST = 64  # of those that wait, the first
TREES = ("RadixCache",)  # others order what they have otherwise
POLICIES = ("lru", "lfu", "slru", "priority")  # by which what was used last is kept, of what they take for equal


class NextPrompts:
    """`queue`: SGLang's, of requests that wait for pages, the first of them first."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._nodes: dict[str, Any] = {}  # the last one of each that waits

    def touch(self, tree: Any) -> None:
        """Called before the tree evicts: what waits has been used just now, the first one's last. Ranks do alike."""
        waiting = self._queue.queue[:MOST] if type(tree).__name__ in TREES and tree.eviction_policy in POLICIES else ()
        known, self._nodes = self._nodes, {}
        for each in reversed(waiting):
            request = each.req
            if (node := known.get(request.rid)) is None:
                node = last_node(tree, request)
            self._nodes[request.rid] = node
            now = time.monotonic()
            while node is not tree.root_node and node is not None:
                node.last_access_time, node = now, node.parent
