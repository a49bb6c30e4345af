"""Copies between an engine's blocks and the daemon's pages: the interface, and the mover where both are in the
machine's memory; `gpu_mover` is for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from kvferry import _core
from kvferry.connectors.blocks import BlockMap, BlockPlaces, Memory, PoolPages, Tail

if TYPE_CHECKING:
    import torch

Moment: TypeAlias = "torch.cuda.Event | None"
"""What an engine had begun to compute at some time; None: it is computed."""


class Mover(Protocol):
    """Copies to and from one engine's blocks. They begin when what the engine had begun before `after` is computed, and
    are over when the call returns."""

    records: bool
    """Whether the engine may record what its GPU is told (CUDA graphs) until its first step: nobody else may map memory
    or wait for the device meanwhile."""

    def moment(self) -> Moment:
        """The present moment. Called on the thread that tells the engine what to compute; waits for nothing."""

    def computed(self, after: Moment) -> None:
        """Returns when what the engine had begun before `after` is computed. On a thread: it may sleep."""

    def is_computed(self, after: Moment) -> bool:
        """Whether `computed` would return at once. Waits for nothing."""

    def misfit(self, memories: Sequence[Memory]) -> str:
        """Why a daemon with such memories, one a rank, cannot be used; empty where it can."""

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        """Behind a `tail`'s token its page is cleared."""

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None: ...


class HostMover:
    """The mover of blocks in the machine's memory: there a step is computed when the engine says so."""

    records = False

    def __init__(self, blocks: BlockMap) -> None:
        self._blocks = blocks

    def moment(self) -> Moment:
        return None

    def computed(self, after: Moment) -> None:
        """It is, when the engine says so."""

    def is_computed(self, after: Moment) -> bool:
        return True

    def misfit(self, memories: Sequence[Memory]) -> str:
        if len(memories) == 1 and isinstance(memories[0], np.ndarray):
            return ""
        return "the daemon's pool is no shared memory of one rank: start it without --device"

    def to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        in_blocks, in_pages, sizes = self._blocks.addresses(pool, places)
        _core.copy_list(in_pages, in_blocks, sizes)
        if tail is not None:
            assert isinstance(pool.memory, np.ndarray)
            pieces = self._blocks.pieces(pool.memory[pool.span(tail.page)])
            for cache, page in zip(self._blocks.caches, pieces, strict=True):
                page[:, tail.block + 1 :] = 0
                page[:, tail.block, cache.order > tail.token] = 0

    def to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        in_blocks, in_pages, sizes = self._blocks.addresses(pool, places)
        _core.copy_list(in_blocks, in_pages, sizes)
