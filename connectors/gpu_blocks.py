"""An engine's blocks on a GPU, as they are registered with a daemon of `--pool engine`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, cast

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


class TorchSegment(TypedDict):
    """What torch tells of an allocation of its own (`torch.cuda.memory_snapshot`), as far as is asked for here."""

    address: int
    total_size: int
    is_expandable: bool
    segment_pool_id: tuple[int, int]


OF_NO_POOL = (0, 0)


def torch_segments() -> list[TorchSegment]:
    import torch  # seconds, for what is seldom asked

    try:
        return cast("list[TorchSegment]", torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
    except RuntimeError:  # an allocator of somebody else's tells nothing
        return []


def why_unnamed(address: int, segments: Iterable[TorchSegment]) -> str:
    """What keeps the memory at this address from having a name for other processes."""
    for segment in segments:
        if not segment["address"] <= address < segment["address"] + segment["total_size"]:
            continue
        if segment["is_expandable"]:
            return (
                "torch's expandable segments are on, which are mapped piece by piece: take expandable_segments:True "
                "out of PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
            )
        if tuple(segment["segment_pool_id"]) != OF_NO_POOL:
            return (
                "it is in a memory pool (torch.cuda.MemPool) whose allocator maps it piece by piece: allocate the KV "
                "cache outside of that pool"
            )
        return "torch allocated it whole, and something between torch and the driver maps it piece by piece"
    return "torch did not allocate it, and who did maps it piece by piece"


def registered(blocks: BlockMap, geometry: KVGeometry, device: int) -> EnginePools:
    """Names the blocks' allocations for another process. OSError where they have no name, since they were not allocated
    whole, says who did so (`why_unnamed`); a memory pool whose allocator allocates whole is as good as none. ValueError
    where a block's bytes are not in its tokens' order."""
    if not blocks.in_token_order:  # the daemon could not tell what is behind a prompt's last token
        raise ValueError("the tokens of a block do not lie one behind the other")
    exporter = Exporter(device)
    ends: dict[bytes, int] = {}  # of each allocation, what is named of it
    tensors: list[RegisteredTensor] = []
    for number, cache in enumerate(blocks.caches):
        for base, stride in zip(cache.bases.tolist(), cache.strides.tolist(), strict=True):
            nbytes = (cache.blocks - 1) * stride + cache.block_bytes
            try:
                handle, offset = exporter.export(base, nbytes)
            except OSError as error:
                raise OSError(f"{error}; {why_unnamed(base, torch_segments())}") from error
            ends[handle] = max(ends.get(handle, 0), offset + nbytes)
            tensors.append(RegisteredTensor(list(ends).index(handle), offset, stride, cache.block_bytes, number))
    uuid = exporter.device_uuid
    memories = tuple(RegisteredMemory(GpuAllocation(handle, uuid), end) for handle, end in ends.items())
    rank = RegisteredRank(memories, tuple(tensors))
    registration = Registration(blocks.blocks, StorageOrder.PAGE_MAJOR, (rank,), blocks.block_tokens)
    return EnginePools(OwnBlocks(geometry, blocks.blocks), registration, [])
