"""A node of the radix tree, and how its digests are compared."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.radix.digests import DIGEST_BYTES

Digests: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8]"

# Shared by all nodes without children, never changed: most nodes are leaves, and an empty dict each would cost memory.
_NO_CHILDREN: dict[bytes, Node] = {}


class Node:
    """A run of pages. `digests` holds 32 bytes for each of `pages`; children are keyed by their first digest."""

    __slots__ = (
        "children",
        "created",
        "digests",
        "entry",
        "hits",
        "last_access",
        "locks",
        "may_arrive",
        "pages",
        "parent",
        "serial",
    )

    def __init__(self, parent: Node | None, digests: bytes, pages: array[int], serial: int, now: float) -> None:
        self.parent = parent
        self.digests = digests
        self.pages = pages
        self.serial = serial  # breaks ties of eviction keys
        self.children = _NO_CHILDREN
        self.locks = 0  # on it or a descendant
        self.may_arrive = False  # pages may be ARRIVING: true from insert or split to the last unlock
        self.created = self.last_access = now
        self.hits = 0
        self.entry: tuple[float, int, Node] | None = None  # its place among the evictable leaves

    @property
    def size(self) -> int:
        return len(self.pages)

    @property
    def first_digest(self) -> bytes:
        return self.digests[:DIGEST_BYTES]

    def add_child(self, child: Node) -> None:
        """Takes the place of a child with the same first digest."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.first_digest] = child

    def remove_child(self, child: Node) -> None:
        del self.children[child.first_digest]
        if not self.children:
            self.children = _NO_CHILDREN

    def cut(self, pages: int) -> tuple[bytes, array[int]]:
        """Keeps the first `pages` pages; returns the digests and pages behind them."""
        rest = self.digests[pages * DIGEST_BYTES :], self.pages[pages:]
        self.digests = self.digests[: pages * DIGEST_BYTES]
        self.pages = self.pages[:pages]
        return rest


def digest_bytes(digests: Digests) -> bytes:
    """n * 32 bytes, or a (n, 32) uint8 array, as bytes. ValueError for another shape, size or dtype."""
    if isinstance(digests, bytes):
        data = digests
    elif isinstance(digests, np.ndarray):
        if digests.dtype != np.uint8 or digests.ndim != 2 or digests.shape[1] != DIGEST_BYTES:
            raise ValueError(f"digests is {digests.dtype} {digests.shape}; it must be uint8 (n, {DIGEST_BYTES})")
        data = digests.tobytes()
    else:
        data = bytes(memoryview(digests))
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"digests has {len(data)} bytes; it must be a multiple of {DIGEST_BYTES}")
    return data


def common_pages(held: bytes, data: bytes, at: int) -> int:
    """How many leading digests of `held` equal those of `data` from byte `at` on; the first one does.

    Chained digests are equal at page i only if they are equal at all pages before it, so this bisects.
    """
    low, high = 1, min(len(held), len(data) - at) // DIGEST_BYTES
    middle = high  # first the whole: a prompt often ends inside a node
    while low < high:
        end = middle * DIGEST_BYTES
        if held[end - DIGEST_BYTES : end] == data[at + end - DIGEST_BYTES : at + end]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
