"""A pool over all its ranks: which bytes of which rank a lane, or the host tier's row, takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import RankStorage, RowMap, Storages, rank_storages
from kvferry.transfer.geometry.rank_lanes import Lane, check_ranks, rank_geometry, shards_of


class RowShard(NamedTuple):
    """A shard of a page in the host tier: a rank's whole row of one cache, from byte `start` of the tier's row on. It
    is spilled from the first of `ranks` and restored to all of them."""

    cache: int
    ranks: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class PoolShape:
    """`pages` pages of a model's geometry, over `ranks` ranks that store them in this order: without gaps, or where
    `places` says (for each rank of each cache)."""

    geometry: KVGeometry  # of the model: all heads
    ranks: int
    order: StorageOrder
    pages: int
    places: tuple[Storages, ...] = ()

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        check_ranks(self.geometry, self.ranks)
        assert len(self.places) in (0, self.ranks), f"{len(self.places)} places for {self.ranks} ranks"
        assert all(len(place) == len(self.geometry.caches) for place in self.places), "each cache has a place"

    @cached_property
    def rank_geometry(self) -> KVGeometry:
        """The shape of each rank's part."""
        return rank_geometry(self.geometry, self.ranks)

    def storages_of(self, rank: int) -> Storages:
        """The places of the caches in one rank's memory."""
        return self.places[rank] if self.places else self.storages

    @cached_property
    def storages(self) -> tuple[RankStorage, ...]:
        """The places of the caches in each rank's memory, without gaps."""
        assert not self.places, "each rank has a place of its own"
        return rank_storages(self.rank_geometry, self.order, self.pages)

    @property
    def rank_bytes(self) -> int:
        """Bytes of a rank's memory, without gaps."""
        return self.rank_geometry.page_bytes * self.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on all ranks together: more than a row's, where ranks hold the same heads."""
        return self.ranks * self.rank_geometry.page_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a page in the host tier: each head once."""
        return self.geometry.page_bytes

    @cached_property
    def row_shards(self) -> list[RowShard]:
        """The shards that make up the host tier's rows, by `start`, without gaps: cache by cache."""
        found: list[RowShard] = []
        start = 0
        for number, cache in enumerate(self.geometry.caches):
            for shard in shards_of(cache, self.ranks):
                found.append(RowShard(number, shard.ranks, start))
                start += self.rank_geometry.caches[number].page_bytes
        return found

    @cached_property
    def whole_rows(self) -> list[list[RowMap]]:
        """The rows of each rank's caches, of which the host tier's shards are made."""
        return [[storage.rows() for storage in self.storages_of(rank)] for rank in range(self.ranks)]

    def sending_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its sending rank, which is one of these."""
        return [self.storages_of(lane.sender)[lane.cache].rows(lane.sender_head, lane.heads.count) for lane in lanes]

    def receiving_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its receiving rank, which is one of these."""
        return [
            self.storages_of(lane.receiver)[lane.cache].rows(lane.receiver_head, lane.heads.count) for lane in lanes
        ]


def page_bytes_of(geometry: KVGeometry, ranks: int) -> int:
    """Bytes of a page on all ranks together. ValueError where so many ranks cannot share the heads."""
    return ranks * rank_geometry(geometry, ranks).page_bytes
