"""A pool over all its ranks: which bytes of which rank a lane, or the host tier's row, takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.layouts import BlockStorage, RankStorage, RowMap
from kvferry.transfer.geometry.rank_lanes import Lane, check_ranks, rank_geometry, shards_of


class RowShard(NamedTuple):
    """A shard of a page in the host tier: a rank's whole row, from byte `start` of the tier's row on. It is spilled
    from the first of `ranks` and restored to all of them."""

    ranks: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class PoolShape:
    """`pages` pages of a model's geometry, over `ranks` ranks that store them in this order: without gaps, or where
    `places` says (one for each rank)."""

    geometry: KVGeometry  # of the model: all heads
    ranks: int
    order: StorageOrder
    pages: int
    places: tuple[RankStorage | BlockStorage, ...] = ()

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        check_ranks(self.geometry, self.ranks)
        assert len(self.places) in (0, self.ranks), f"{len(self.places)} places for {self.ranks} ranks"

    @cached_property
    def rank_geometry(self) -> KVGeometry:
        """The shape of each rank's part."""
        return rank_geometry(self.geometry, self.ranks)

    def storage_of(self, rank: int) -> RankStorage | BlockStorage:
        return self.places[rank] if self.places else self.storage

    @cached_property
    def storage(self) -> RankStorage:
        """The memory of each rank, without gaps."""
        assert not self.places, "each rank has a place of its own"
        return RankStorage.make(self.rank_geometry, self.order, self.pages)

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
        """The shards that make up the host tier's rows, by `start`, without gaps."""
        size = self.rank_geometry.page_bytes
        return [RowShard(shard.ranks, i * size) for i, shard in enumerate(shards_of(self.geometry, self.ranks))]

    @cached_property
    def whole_rows(self) -> list[RowMap]:
        """The rows of each rank, of which the host tier's shards are made."""
        return [self.storage_of(rank).rows() for rank in range(self.ranks)]

    def sending_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its sending rank, which is one of these."""
        return [self.storage_of(lane.sender).rows(lane.sender_head, lane.heads.count) for lane in lanes]

    def receiving_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its receiving rank, which is one of these."""
        return [self.storage_of(lane.receiver).rows(lane.receiver_head, lane.heads.count) for lane in lanes]


def page_bytes_of(geometry: KVGeometry, ranks: int) -> int:
    """Bytes of a page on all ranks together. ValueError where so many ranks cannot share the heads."""
    return ranks * rank_geometry(geometry, ranks).page_bytes
