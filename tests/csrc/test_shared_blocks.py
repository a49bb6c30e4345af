"""An engine's blocks that a daemon is to map: memory that has no name for another process is refused, and what makes it
so is said by its own name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry._core import GpuCopyEngine
from kvferry.connectors import gpu_blocks
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.gpu_blocks import TorchSegment, registered
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.transfer.geometry.registration import GpuAllocation
from kvferry.transfer.mapping import ipc_memory

BLOCKS, TOKENS = 64, 16
GEOMETRY = KVGeometry(2, 1, 64, "float32", TOKENS, Layout.ENGINE)
PLACES = GEOMETRY.layers * GEOMETRY.tensors
BLOCK_BYTES = GEOMETRY.page_bytes // PLACES
NBYTES = PLACES * BLOCKS * BLOCK_BYTES
EXPANDABLE = "torch's expandable segments are on"
IN_A_POOL = r"in a memory pool \(torch\.cuda\.MemPool\) whose allocator maps it piece by piece"
MIB = 1 << 20


def blocks_at(address: int) -> BlockMap:
    bases = address + np.arange(PLACES, dtype=np.int64) * BLOCKS * BLOCK_BYTES
    order = np.repeat(np.arange(TOKENS, dtype=np.int32), BLOCK_BYTES // TOKENS)
    return BlockMap(bases, np.full(PLACES, BLOCK_BYTES, np.int64), BLOCK_BYTES, BLOCKS, TOKENS, 1, order)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, NBYTES, True, (0, 0))], f"{EXPANDABLE}.*take expandable_segments:True out of"),
        ([(0, NBYTES, False, (0, 3))], IN_A_POOL),
        ([(0, NBYTES, False, (0, 0))], "torch allocated it whole, and something between torch and the driver"),
        ([(-NBYTES, NBYTES, True, (0, 0)), (NBYTES, NBYTES, True, (0, 0))], "torch did not allocate it"),
        ([], "torch did not allocate it"),
    ],
)
def test_memory_without_a_name_is_refused_by_what_makes_it_so(
    fake: ctypes.CDLL,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    segments: list[tuple[int, int, bool, tuple[int, int]]],
    message: str,
) -> None:
    monkeypatch.setattr(ipc_memory, "GpuCopyEngine", lambda device: GpuCopyEngine(device, library))
    memory = GpuCopyEngine(0, library).allocate(NBYTES)
    told = [
        TorchSegment(address=memory.address + at, total_size=size, is_expandable=expandable, segment_pool_id=pool)
        for at, size, expandable, pool in segments
    ]
    monkeypatch.setattr(gpu_blocks, "torch_segments", lambda: told)
    assert registered(blocks_at(memory.address), GEOMETRY, 0).pools.pages == BLOCKS, "what has a name is served"
    fake.fake_answer(b"ipc_export", 801)
    with pytest.raises(OSError, match=rf"memory on a GPU cannot be shared: handle of memory for .*; .*{message}"):
        registered(blocks_at(memory.address), GEOMETRY, 0)


# -- a real device


@pytest.fixture
def torch_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> Iterator[Any]:
    gpu_engine()
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a torch for GPUs")
    yield torch
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_expandable_segments_on_a_gpu(torch_on_a_gpu: Any) -> None:
    torch = torch_on_a_gpu
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    kv = torch.zeros(NBYTES + 64 * MIB, dtype=torch.uint8, device="cuda")  # more than what is cached
    with pytest.raises(OSError, match=EXPANDABLE):
        registered(blocks_at(kv.data_ptr()), GEOMETRY, 0)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    whole = torch.zeros(NBYTES + 256 * MIB, dtype=torch.uint8, device="cuda")
    assert registered(blocks_at(whole.data_ptr()), GEOMETRY, 0).pools.pages == BLOCKS


@pytest.mark.gpu
def test_a_memory_pool_that_allocates_whole_is_served_on_a_gpu(torch_on_a_gpu: Any) -> None:
    torch = torch_on_a_gpu
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kv = torch.zeros(NBYTES + 4 * MIB, dtype=torch.uint8, device="cuda")
    own = registered(blocks_at(kv.data_ptr()), GEOMETRY, 0)
    (memory,) = own._registration.ranks[0].memories
    assert isinstance(memory.source, GpuAllocation) and memory.nbytes >= NBYTES
    assert any(each["address"] <= kv.data_ptr() for each in pool.snapshot())


class PieceByPiece:
    """An allocator as vLLM's for its sleep mode is: a range of addresses, to which memory is mapped."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.handles: dict[int, int] = {}
        pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
        self._functions = (
            ctypes.CFUNCTYPE(pointer, size, number, pointer)(self.allocate),
            ctypes.CFUNCTYPE(None, pointer, size, number, pointer)(self.free),
        )

    def addresses(self) -> list[int]:
        """Of the functions, for torch."""
        found = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        return [address for address in found if address is not None]

    def _call(self, name: str, *words: object) -> None:
        status = getattr(self.driver, name)(*words)
        assert status == 0, f"{name}: {status}"

    def allocate(self, size: int, device: int, stream: object) -> int:
        whole = ctypes.c_size_t(-(-size // (2 * MIB)) * 2 * MIB)
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        place = [1, device]  # a device's memory: CU_MEM_LOCATION_TYPE_DEVICE
        properties = (ctypes.c_uint32 * 8)(1, 0, *place)  # CU_MEM_ALLOCATION_TYPE_PINNED, no handles for others
        access = (ctypes.c_uint32 * 3)(*place, 3)  # to be read and written
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), zero, zero)
        self._call("cuMemCreate", ctypes.byref(handle), whole, properties, zero)
        self._call("cuMemMap", address, whole, ctypes.c_size_t(0), handle, zero)
        self._call("cuMemSetAccess", address, whole, access, ctypes.c_size_t(1))
        self.handles[address.value] = handle.value
        return address.value

    def free(self, address: int, size: int, device: int, stream: object) -> None:
        whole = ctypes.c_size_t(-(-size // (2 * MIB)) * 2 * MIB)
        self._call("cuMemUnmap", ctypes.c_uint64(address), whole)
        self._call("cuMemRelease", ctypes.c_uint64(self.handles.pop(address)))
        self._call("cuMemAddressFree", ctypes.c_uint64(address), whole)


@pytest.mark.gpu
def test_a_memory_pool_that_maps_piece_by_piece_on_a_gpu(torch_on_a_gpu: Any) -> None:
    torch = torch_on_a_gpu
    torch.zeros(1, device="cuda")
    pieces = PieceByPiece()
    allocator = torch._C._cuda_customAllocator(*pieces.addresses())
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        kv = torch.zeros(NBYTES + 4 * MIB, dtype=torch.uint8, device="cuda")
    assert pieces.handles, "torch has asked the allocator"
    with pytest.raises(OSError, match=IN_A_POOL):
        registered(blocks_at(kv.data_ptr()), GEOMETRY, 0)
    del kv
    del pool
    torch.cuda.empty_cache()
