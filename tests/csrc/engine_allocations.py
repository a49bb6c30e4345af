"""An engine's allocations as it registers them: K and V of a layer in each."""

from __future__ import annotations

from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.registration import (
    GpuAllocation,
    RegisteredMemory,
    RegisteredRank,
    RegisteredTensor,
    Registration,
)

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=16)
PAGES = 6
SIZE = GEOMETRY.page_bytes // 4  # of a page, of K or V
STRIDE = SIZE + 64
START = 4096  # of the first tensor in its allocation
EXTENT = (PAGES - 1) * STRIDE + SIZE
NBYTES = START + PAGES * STRIDE + EXTENT


def handle_of(address: int) -> bytes:
    """As the fake makes them."""
    return address.to_bytes(8, "little") + bytes([0x5A] * 56)


def registered(addresses: list[int], nbytes: int, uuid: bytes = bytes(16)) -> Registration:
    """K and V of a layer in an allocation, a layer in each."""
    memories = tuple(RegisteredMemory(GpuAllocation(handle_of(address), uuid), nbytes) for address in addresses)
    tensors = tuple(
        RegisteredTensor(layer, START + tensor * PAGES * STRIDE, STRIDE, SIZE)
        for layer in range(2)
        for tensor in range(2)
    )
    return Registration(PAGES, StorageOrder.LAYER_MAJOR, (RegisteredRank(memories, tensors),))
