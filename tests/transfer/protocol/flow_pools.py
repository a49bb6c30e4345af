"""Pools over ranks whose every byte the oracle of the flow's model knows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage, RowMap
from kvferry.transfer.geometry.pool_shape import PoolShape
from tests.support.reshard import heads_of_rank

POOL_PAGES = 24
POISON = 0xAA


class Violation(Exception):
    """What the oracle saw."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


@dataclass(frozen=True)
class Sizes:
    geometry: KVGeometry
    senders: int
    receivers: int
    source: StorageOrder
    target: StorageOrder
    capacity: int  # payload of a slot
    slots: int  # of each receiving rank
    send_slots: int  # of each sending rank


def in_one_run(cache: KVGeometry) -> bool:
    """Whether each head's K and V are one run, in which only an engine knows what is where."""
    return 0 < cache.head_runs < cache.tensors


def by_runs(cache: KVGeometry) -> KVGeometry:
    """A cache of the same bytes, whose heads' runs are not looked into where K and V are one."""
    return replace(cache, tensors=1, head_dim=cache.tensors * cache.head_dim) if in_one_run(cache) else cache


def view_of(storage: RankStorage, memory: np.ndarray) -> np.ndarray:
    whole = by_runs(storage.geometry)
    step = storage.geometry.tensors // whole.tensors
    return RankStorage(whole, storage.bases[::step], storage.page_strides[::step], storage.pages).view(memory)


class Pool:
    """A pool over its ranks."""

    def __init__(self, geometry: KVGeometry, ranks: int, order: StorageOrder) -> None:
        self.geometry = geometry
        self.shape = PoolShape(geometry, ranks, order, POOL_PAGES)
        self.memories = [np.full(self.shape.rank_bytes, POISON, np.uint8) for _ in range(ranks)]
        # Of each cache, of each rank.
        self.views = [[view_of(storage, memory) for memory in self.memories] for storage in self.shape.storages]
        self.heads = [[heads_of_rank(cache, ranks, rank) for rank in range(ranks)] for cache in geometry.caches]

    def store(self, page_id: int, row: bytes) -> None:
        for views, heads, content in zip(self.views, self.heads, self.by_head(row), strict=True):
            for view, own in zip(views, heads, strict=True):
                view[page_id] = content[:, :, :, own]

    def holds(self, page_id: int, row: bytes) -> bool:
        return all(
            np.array_equal(view[page_id], content[:, :, :, own])
            for views, heads, content in zip(self.views, self.heads, self.by_head(row), strict=True)
            for view, own in zip(views, heads, strict=True)
        )

    def fill(self, page_id: int, value: int) -> None:
        for view in itertools.chain(*self.views):
            view[page_id] = value

    def is_filled(self, page_id: int, value: int) -> bool:
        return all((view[page_id] == value).all() for view in itertools.chain(*self.views))

    def by_head(self, row: bytes) -> list[np.ndarray]:
        """Each cache of it."""
        found: list[np.ndarray] = []
        start = 0
        for cache in map(by_runs, self.geometry.caches):
            own = np.frombuffer(row, np.uint8, cache.page_bytes, start)
            shaped = own.reshape(*cache.page_shape[:4], -1)
            found.append(shaped.transpose(0, 1, 3, 2, 4) if cache.heads_first else shaped)
            start += cache.page_bytes
        return found


def read_part(memory: np.ndarray, rows: RowMap, ids: Sequence[int], byte_offset: int, nbytes: int) -> bytes:
    runs = zip(*(each.tolist() for each in rows.part(ids, byte_offset, nbytes)), strict=True)
    return b"".join(memory[at : at + size].tobytes() for at, _, size in runs)


def write_part(memory: np.ndarray, rows: RowMap, ids: Sequence[int], byte_offset: int, payload: bytes) -> None:
    for at, start, size in zip(*(each.tolist() for each in rows.part(ids, byte_offset, len(payload))), strict=True):
        memory[at : at + size] = np.frombuffer(payload[start : start + size], np.uint8)
