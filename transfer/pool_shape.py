"""A pool over all its ranks: which bytes of which rank a lane, or the host tier's row, takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvferry.transfer.geometry import KVGeometry
from kvferry.transfer.lanes import Lane, check_ranks, rank_geometry, shards_of
from kvferry.transfer.layouts import RankStorage, RowMap, StorageOrder


class RowShard(NamedTuple):
    """A shard of a page in the host tier: `rows.row_bytes` bytes from byte `start` of the host row on. It is spilled
    from the first of `ranks` and restored to all of them; `rows` are those of each."""

    ranks: tuple[int, ...]
    rows: RowMap
    start: int


@dataclass(frozen=True)
class PoolShape:
    """`pages` pages of a model's geometry, over `ranks` ranks that store them in this order."""

    geometry: KVGeometry  # of the model: all heads
    ranks: int
    order: StorageOrder
    pages: int

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        check_ranks(self.geometry, self.ranks)

    @cached_property
    def storage(self) -> RankStorage:
        """Of each rank."""
        return RankStorage.make(rank_geometry(self.geometry, self.ranks), self.order, self.pages)

    @property
    def page_bytes(self) -> int:
        """Of a page on all ranks together: more than a row's, where ranks hold the same heads."""
        return self.ranks * self.storage.geometry.page_bytes

    @property
    def row_bytes(self) -> int:
        """Of a page in the host tier: each head once."""
        return self.geometry.page_bytes

    @cached_property
    def row_shards(self) -> list[RowShard]:
        """By `start`, without gaps: what the host tier's rows are made of."""
        rows = self.storage.rows()
        shards = shards_of(self.geometry, self.ranks)
        return [RowShard(shard.ranks, rows, i * rows.row_bytes) for i, shard in enumerate(shards)]

    def sending_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its sending rank, which is one of these."""
        return [self.storage.rows(lane.sender_head, lane.heads.count) for lane in lanes]

    def receiving_rows(self, lanes: Sequence[Lane]) -> list[RowMap]:
        """Each lane's rows in the memory of its receiving rank, which is one of these."""
        return [self.storage.rows(lane.receiver_head, lane.heads.count) for lane in lanes]


def page_bytes_of(geometry: KVGeometry, ranks: int) -> int:
    """Of a page on all ranks together. ValueError where so many ranks cannot share the heads."""
    return ranks * rank_geometry(geometry, ranks).page_bytes
