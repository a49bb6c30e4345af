"""What an SGLang radix cache has of some tokens, locked there: SGLang evicts it not, and gives it to nobody."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TREES = ("RadixCache", "UnifiedRadixCache")  # others have locks of their own kinds


class UnknownTree(TypeError):
    """The radix cache is of a kind that this backend does not know."""


@dataclass(frozen=True, slots=True)
class LockedPrefix:
    """`slots`: of the pool, one for each token."""

    tree: Any
    slots: Any
    lock: Any

    def let_go(self) -> None:
        if hasattr(self.tree, "unlock"):
            self.tree.unlock(self.lock)
        else:
            self.tree.dec_lock_ref(self.lock)


def locked_prefix(tree: Any, tokens: Sequence[int], beside: dict[str, Any], most: float) -> LockedPrefix | None:
    """The longest prefix of `tokens` that the tree has; None: it has none. `beside`: what SGLang's key has beside the
    tokens. UnknownTree; ValueError where it is longer than `most` pages."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    if type(tree).__name__ not in TREES:
        raise UnknownTree(f"a radix cache of the kind {type(tree).__name__} is not served")
    own = tokens if isinstance(tokens, array) else array("q", tokens)  # later versions take no other
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(own, **beside)))
    node, old = found.last_device_node, hasattr(found, "device_indices")
    length = len(found.device_indices) if old else found.device_prefix_len
    if not length:
        return None
    if length // tree.page_size > most:
        raise ValueError(f"it has {length // tree.page_size} pages; at most {most:.0f} may be locked now")
    if old:
        tree.inc_lock_ref(node)
        return LockedPrefix(tree, found.device_indices, node)
    lock = tree.lock(node)
    return LockedPrefix(tree, tree.path_device_indices(node)[:length], lock)
