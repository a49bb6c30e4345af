"""What an SGLang radix cache has of some tokens; locked there, SGLang evicts it not, and gives it to nobody."""

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


def locked_prefix(tree: Any, tokens: Sequence[int], request: Any, most: float) -> LockedPrefix | None:
    """The longest prefix of the request's `tokens` that the tree has; None: it has none. UnknownTree; ValueError where
    it is longer than `most` pages."""
    if type(tree).__name__ not in TREES:
        raise UnknownTree(f"a radix cache of the kind {type(tree).__name__} is not served")
    found = _found(tree, tokens, request)
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


def last_node(tree: Any, request: Any) -> Any:
    """The node that the longest prefix of the request's prompt ends with, as far as the tree has it; it may be the
    root."""
    return _found(tree, request.origin_input_ids, request).last_device_node


def _found(tree: Any, tokens: Sequence[int], request: Any) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    own = tokens if isinstance(tokens, array) else array("q", tokens)  # later versions take no other
    beside = {"extra_key": request.extra_key}
    if (salt := getattr(request, "cache_salt", None)) is not None:
        beside["cache_salt"] = salt
    return tree.match_prefix(MatchPrefixParams(key=RadixKey(own, **beside)))
