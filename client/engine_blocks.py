"""Blocks of an engine's own, which it registers with a daemon of `--pool engine`: the daemon copies straight from them
and into them, and keeps no pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.client.engine_pools import EnginePools, make_rank_files, ranks_of
from kvferry.client.rank_pools import Bytes, Memory, RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from kvferry.transfer.geometry.registration import RegisteredTensor, Registration

NOT_HERE: Bytes = np.zeros(0, np.uint8)


class OwnBlocks(RankPools):
    """`blocks` blocks that stay the engine's, whatever becomes of the session: nothing of theirs is let go of."""

    in_blocks = True

    def __init__(self, geometry: KVGeometry, blocks: int, memories: Sequence[Memory] = (NOT_HERE,)) -> None:
        """memories: of each rank, in shared memory; NOT_HERE where one is not for this process to look into."""
        super().__init__(geometry, StorageOrder.PAGE_MAJOR, blocks, memories)


def make_block_files(
    geometry: KVGeometry, block_tokens: int, blocks: int, places: Sequence[int], shm_dir: str, ranks: int = 1
) -> EnginePools:
    """Allocates an engine's blocks in shared memory, a file for each rank: in each place of each cache, `places` of
    them, all blocks one behind the other. OSError where there is too little; ValueError where a page is not made of
    such blocks."""
    own = rank_geometry(geometry, ranks)
    tensors: list[RegisteredTensor] = []
    start = 0
    for number, (cache, count) in enumerate(zip(own.caches, places, strict=True)):
        size = _block_bytes(cache, block_tokens, count)
        tensors += [RegisteredTensor(0, start + i * blocks * size, size, size, number) for i in range(count)]
        start += count * blocks * size
    files = make_rank_files(shm_dir, ranks, start)
    pools = OwnBlocks(geometry, blocks, [np.frombuffer(file.buffer, np.uint8) for file in files])
    registration = Registration(blocks, StorageOrder.PAGE_MAJOR, ranks_of(files, tuple(tensors)), block_tokens)
    return EnginePools(pools, registration, files)


def _block_bytes(cache: KVGeometry, block_tokens: int, places: int) -> int:
    """Bytes of a block in each of so many places of a cache. ValueError."""
    per_page, rest = divmod(cache.page_size, block_tokens)
    size, odd = divmod(cache.page_bytes, places * max(per_page, 1))
    if rest or odd:
        page = f"a page of {cache.page_size} tokens and {cache.page_bytes} bytes"
        raise ValueError(f"{page} is not made of blocks of {block_tokens} tokens in {places} places")
    return size
