"""Blocks of an engine's own, which it registers with a daemon of `--pool engine`: the daemon copies straight from them
and into them, and keeps no pool."""

from __future__ import annotations

import os
import secrets

import numpy as np

from kvferry.client.engine_pools import EnginePools
from kvferry.client.rank_pools import Memory, RankPools
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.registration import (
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
    SharedFile,
)
from kvferry.transfer.mapping.segment import Segment


class OwnBlocks(RankPools):
    """`blocks` blocks that stay the engine's, whatever becomes of the session: nothing of theirs is let go of."""

    in_blocks = True

    def __init__(self, geometry: KVGeometry, blocks: int, memory: Memory | None = None) -> None:
        """memory: of shared memory, all of it; None where it is not for this process to look into."""
        super().__init__(
            geometry, StorageOrder.PAGE_MAJOR, blocks, [np.zeros(0, np.uint8) if memory is None else memory]
        )


def make_block_file(geometry: KVGeometry, block_tokens: int, blocks: int, places: int, shm_dir: str) -> EnginePools:
    """Allocates an engine's blocks in shared memory, of one rank: in each of `places` all blocks one behind the other.
    OSError where there is too little; ValueError where a page is not made of such blocks."""
    per_page, rest = divmod(geometry.page_size, block_tokens)
    block_bytes, odd = divmod(geometry.page_bytes, places * max(per_page, 1))
    if rest or odd:
        page = f"a page of {geometry.page_size} tokens and {geometry.page_bytes} bytes"
        raise ValueError(f"{page} is not made of blocks of {block_tokens} tokens in {places} places")
    file = Segment.create(
        shm_dir, f"kvferry-engine-{os.getpid()}-{secrets.token_hex(8)}", places * blocks * block_bytes
    )
    tensors = [RegisteredTensor(0, place * blocks * block_bytes, block_bytes, block_bytes) for place in range(places)]
    memory = RegisteredMemory(SharedFile(os.path.basename(file.path)), file.nbytes)
    rank = RegisteredRank((memory,), tuple(tensors))
    pools = OwnBlocks(geometry, blocks, np.frombuffer(file.buffer, np.uint8))
    return EnginePools(pools, Registration(blocks, StorageOrder.PAGE_MAJOR, (rank,), block_tokens), [file])
