"""Pages of an engine's blocks in the host tier: they are sent from there as they would have been from the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.daemon.memory.block_table import BlockTable
from kvferry.transfer.geometry.layouts import Int64s, RowMap
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane

Pages = TypeVar("Pages")
TierBytes = NDArray[np.uint8]


class TierLanes(Generic[Pages]):
    """A session's lanes there: made when the first part is sent from the tier, and anew once it has more rows. `rows`:
    all of its bytes, the same array as long as there are no more. `make`: what copies a lane's rows of them."""

    def __init__(
        self,
        shape: PoolShape,
        lanes: Sequence[Lane],
        rows: Callable[[], TierBytes | None],
        make: Callable[[Lane, TierBytes, RowMap], Pages],
    ) -> None:
        self.made: list[Pages] = []  # all, since a copy may use those of fewer rows
        self._shape = shape
        self._lanes = list(lanes)
        self._rows = rows
        self._make = make
        self._now: TierBytes | None = None  # that the last ones were made of

    def of(self, lane: int) -> Pages:
        rows = self._rows()
        if rows is None:
            raise ValueError("a page is to be sent from a host tier that is not there")
        if rows is not self._now:
            count = len(rows) // self._shape.row_bytes
            self.made += [self._make(each, rows, self._shape.tier_rows(each, count)) for each in self._lanes]
            self._now = rows
        return self.made[len(self.made) - len(self._lanes) + lane]


def clear_tails(shape: PoolShape, table: BlockTable | None, pages: Int64s, tier: TierBytes, rows: Int64s) -> None:
    """Clears what lies in these rows behind the end of a prompt that ends in their page: its blocks had somebody
    else's bytes there, which are given to nobody."""
    if table is None:
        return
    for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
        if (tokens := table.tokens_in(page)) is None:
            continue
        whole = tier[row * shape.row_bytes : (row + 1) * shape.row_bytes]
        for shard in shape.row_shards:
            of_rank = shape.whole_rows[shard.ranks[0]][shard.cache]
            places = whole[shard.start : shard.start + of_rank.row_bytes].reshape(len(of_rank.offsets), -1)
            places[:, tokens * table.token_bytes(shard.cache) :] = 0
