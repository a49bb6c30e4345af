"""The naive model of the cache: for each namespace and tier a dict of paths, and for each page the bytes in it.

A path is a tuple of symbols, one a page. The same path has the same digest in every namespace, but other bytes: a page
of another namespace, or of another digest, is seen when it is read. Which pages are evicted is the policy's business:
the model learns it from the pools' generations, and judges whether they were allowed to go.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry.daemon.core.namespaces import Namespace
from kvferry.radix.pool import PagePool
from kvferry.radix.tree import RESTORE, SPILL, Copy

Path = tuple[int, ...]

PAGE_BYTES = 32
NO_PARENT = bytes(PAGE_BYTES)
GARBAGE = b"\xee" * PAGE_BYTES

_paths: dict[bytes, Path] = {}


@functools.cache
def digest(path: Path) -> bytes:
    parent = digest(path[:-1]) if len(path) > 1 else b"root"
    value = hashlib.sha256(parent + bytes([path[-1]])).digest()
    _paths[value] = path
    return value


@functools.cache
def chain(path: Path) -> bytes:
    return b"".join(digest(prefix) for prefix in prefixes(path))


@functools.cache
def content(namespace: int, path: Path) -> bytes:
    """What the page must hold: the KV of these tokens under this namespace's model."""
    return hashlib.sha256(bytes([namespace]) + digest(path)).digest()


@functools.cache
def prefixes(path: Path) -> tuple[Path, ...]:
    return tuple(path[:n] for n in range(1, len(path) + 1))


def path_of(value: bytes) -> Path:
    return _paths[value]


def split_digests(data: bytes) -> list[bytes]:
    return [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]


class Memory:
    """The bytes of one tier's pages."""

    def __init__(self, pages: int) -> None:
        self.rows = np.zeros((max(1, pages), PAGE_BYTES), np.uint8)

    def write(self, page: int, value: bytes) -> None:
        self.rows[page] = np.frombuffer(value, np.uint8)

    def read(self, page: int) -> bytes:
        return self.rows[page].tobytes()

    def read_all(self, pages: Sequence[int]) -> bytes:
        return self.rows[list(pages)].tobytes()


class Place(NamedTuple):
    """A page; it was freed if its generation is another one now."""

    page: int
    generation: int


def place(pool: PagePool, page: int) -> Place:
    return Place(page, pool.generation(page))


def gone(pool: PagePool, at: Place) -> bool:
    return pool.generation(at.page) != at.generation


@dataclass(eq=False)
class Flight:
    """A copy under way."""

    number: int
    side: Side
    copy: Copy
    paths: list[Path]
    device: list[Place]
    host: list[Place]
    touched: set[Path] = field(default_factory=set)  # locked while it was spilled: stays on the device
    detached: set[Path] = field(default_factory=set)  # not the tree's any more: freed when it ends
    holds: Path = ()  # a restore locks its path

    @property
    def attached(self) -> set[Path]:
        return set(self.paths) - self.detached

    @property
    def writes_host(self) -> bool:
        return self.copy.kind != RESTORE


@dataclass(eq=False)
class Side:
    """One namespace."""

    number: int
    namespace: Namespace
    device: dict[Path, Place] = field(default_factory=dict)
    host: dict[Path, Place] = field(default_factory=dict)
    arriving: set[Path] = field(default_factory=set)
    outputs: dict[Path, bool | None] = field(default_factory=dict)  # None: an orphan was met, either may have won
    locks: Counter[Path] = field(default_factory=Counter)  # how many locks cover a path

    # -- locks ---------------------------------------------------------------------------------------------------

    def hold(self, path: Path) -> None:
        self.locks.update(prefixes(path))

    def let_go(self, path: Path) -> None:
        for prefix in prefixes(path):
            self.locks[prefix] -= 1
            assert self.locks[prefix] >= 0
            if self.locks[prefix] == 0:
                del self.locks[prefix]

    # -- looking -------------------------------------------------------------------------------------------------

    def has(self, path: Path) -> bool:
        return path in self.device or path in self.host

    def matched(self, path: Path) -> int:
        return next((i for i, prefix in enumerate(prefixes(path)) if not self.has(prefix)), len(path))

    def matched_device(self, path: Path) -> int:
        return next((i for i, prefix in enumerate(prefixes(path)) if prefix not in self.device), len(path))

    def pages(self, path: Path) -> list[int]:
        """Device pages of the leading part that has some."""
        return [self.device[prefix].page for prefix in prefixes(path)[: self.matched_device(path)]]

    def is_orphan(self, path: Path) -> bool:
        return path not in self.device and self.matched(path) < len(path)

    def below(self, top: Path) -> list[Path]:
        """`top` and everything under it, in whichever tier."""
        every = dict.fromkeys((*self.device, *self.host))
        return [path for path in every if path[: len(top)] == top and not self.is_orphan(path)]

    def ends(self) -> Iterator[Path]:
        """Paths that no held path continues."""
        parents = {path[:-1] for tier in (self.device, self.host) for path in tier}
        return (path for path in dict.fromkeys((*self.device, *self.host)) if path not in parents)

    def leaving(self, flights: Iterable[Flight]) -> set[Path]:
        """Pages whose spill frees them if it ends well now: nobody has touched them, and nothing stays below."""
        spilled = {
            path
            for flight in flights
            if flight.side is self and flight.copy.kind == SPILL
            for path in flight.attached - flight.touched
        }
        staying = {path[:-1] for path in self.device if path not in spilled}
        result: set[Path] = set()
        for path in sorted(spilled, key=len, reverse=True):
            if path in staying or path in self.locks:
                staying.add(path[:-1])
            else:
                result.add(path)
        return result

    # -- learning ------------------------------------------------------------------------------------------------

    def sync(self, device: PagePool, host: PagePool | None) -> None:
        """Forgets what has been freed: it must have been allowed to go."""
        for path in [path for path, at in self.device.items() if gone(device, at)]:
            assert path not in self.locks or path in self.host, f"{path} was locked and is gone from the device"
            assert path not in self.locks, f"{path} was locked and is on the host only"
            assert path not in self.arriving, f"{path} was arriving and is gone"
            del self.device[path]
        if host is not None:
            for path in [path for path, at in self.host.items() if gone(host, at)]:
                assert path not in self.locks or path in self.device, f"{path} was locked and is gone from the host"
                del self.host[path]

    def drop(self, paths: Iterable[Path]) -> None:
        """They were taken out of the tree."""
        for path in paths:
            self.device.pop(path, None)
            self.host.pop(path, None)
            self.arriving.discard(path)
