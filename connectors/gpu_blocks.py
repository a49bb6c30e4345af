"""An engine's blocks on a GPU, as they are registered with a daemon of `--pool engine`."""

from __future__ import annotations

from kvferry.client.engine_blocks import OwnBlocks
from kvferry.client.engine_pools import EnginePools
from kvferry.connectors.blocks import BlockMap
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
)
from kvferry.transfer.mapping.ipc_memory import Exporter


def registered(blocks: BlockMap, geometry: KVGeometry, device: int) -> EnginePools:
    """Names the blocks' allocations for another process. OSError where they have no name: they were not allocated whole
    (torch's expandable segments, vLLM's sleep mode). ValueError where a block's bytes are not in its tokens' order."""
    if not blocks.in_token_order:  # the daemon could not tell what is behind a prompt's last token
        raise ValueError("the tokens of a block do not lie one behind the other")
    exporter = Exporter(device)
    ends: dict[bytes, int] = {}  # of each allocation, what is named of it
    tensors: list[RegisteredTensor] = []
    for number, cache in enumerate(blocks.caches):
        for base, stride in zip(cache.bases.tolist(), cache.strides.tolist(), strict=True):
            nbytes = (cache.blocks - 1) * stride + cache.block_bytes
            handle, offset = exporter.export(base, nbytes)
            ends[handle] = max(ends.get(handle, 0), offset + nbytes)
            tensors.append(RegisteredTensor(list(ends).index(handle), offset, stride, cache.block_bytes, number))
    uuid = exporter.device_uuid
    memories = tuple(RegisteredMemory(GpuAllocation(handle, uuid), end) for handle, end in ends.items())
    rank = RegisteredRank(memories, tuple(tensors))
    registration = Registration(blocks.blocks, StorageOrder.PAGE_MAJOR, (rank,), blocks.block_tokens)
    return EnginePools(OwnBlocks(geometry, blocks.blocks), registration, [])
