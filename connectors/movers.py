"""What moves bytes between an engine's blocks and the daemon's pages, where both are in memory of the host; `gpu_mover`
is for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry.workers.rank_pools import Memory, RankPools

if TYPE_CHECKING:
    import torch

Moment: TypeAlias = "torch.cuda.Event | None"
"""What an engine had begun to compute at some time; None: it is computed."""


class PoolPages(NamedTuple):
    """The daemon's pool, writable: page p is the bytes [p * page_bytes, (p + 1) * page_bytes) of `memory`."""

    memory: Memory
    address: int
    pages: int
    page_bytes: int


class Mover(Protocol):
    def moment(self) -> Moment:
        """Now. Called on the thread that tells the engine what to compute; waits for nothing."""

    def misfit(self, memories: Sequence[Memory]) -> str:
        """Why a daemon with such memories, one a rank, cannot be used; empty where it can."""

    def copy(self, to: NDArray[np.int64], of: NDArray[np.int64], sizes: NDArray[np.int64], after: Moment) -> None:
        """sizes[i] bytes from address of[i] to to[i], when what was begun before `after` is computed. They are there
        when this returns."""

    def mask(self, pool: PoolPages, page: int, kept: NDArray[np.uint8]) -> None:
        """Of the page's bytes only the bits of `kept`, (page_bytes,), stay, when this returns."""


def pool_pages(pools: RankPools) -> PoolPages:
    """Of a daemon with one rank."""
    memory = pools.memories[0]
    address = memory.__array_interface__["data"][0] if isinstance(memory, np.ndarray) else memory.data_ptr()
    return PoolPages(memory, address, pools.pages, len(memory) // pools.pages)


class HostMover:
    """Its engine has computed a step when it says so."""

    def moment(self) -> Moment:
        return None

    def misfit(self, memories: Sequence[Memory]) -> str:
        if len(memories) == 1 and isinstance(memories[0], np.ndarray):
            return ""
        return "the daemon's pool is no shared memory of one rank: start it without --device"

    def copy(self, to: NDArray[np.int64], of: NDArray[np.int64], sizes: NDArray[np.int64], after: Moment) -> None:
        _core.copy_list(to, of, sizes)

    def mask(self, pool: PoolPages, page: int, kept: NDArray[np.uint8]) -> None:
        assert isinstance(pool.memory, np.ndarray)
        row = pool.memory[page * pool.page_bytes : (page + 1) * pool.page_bytes]
        np.bitwise_and(row, kept, out=row)
