"""What the copy engine alone does with rows that lie apart: the limit of spills beside products.

    python3 bench/gpu/rows.py

Each page is one 2D copy of its rows; all are issued together (cuMemcpy3DBatchAsync), with the flag that asks for what
overlaps with compute: to pinned memory, to pinned memory on two streams, and within the GPU. Idle, and beside products.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PRODUCT = 8192
PRODUCTS = 4  # in a row: longer than the copies
POOL_PAGES = 4096
ROUNDS = 15
DEVICE, HOST = 1, 2  # CUmemLocationType
SHAPES = (("Qwen2.5-0.5B", 48, 128, 4096), ("Qwen2.5-1.5B", 56, 64, 8192), ("Qwen2.5-3B", 72, 64, 8192))


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Pointer(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("location", Location),
    )


class Operand(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("pointer", Pointer))


class Operation(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = (
        ("source", Operand),
        ("target", Operand),
        ("extent", ctypes.c_size_t * 3),
        ("order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def batch_copy() -> Callable[..., int]:
    """cuMemcpy3DBatchAsync(count, operations, flags, stream) of CUDA 13."""
    address, status = ctypes.c_void_p(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuGetProcAddress_v2(
        b"cuMemcpy3DBatchAsync", ctypes.byref(address), 13000, ctypes.c_uint64(0), ctypes.byref(status)
    )
    if error or not address.value:
        raise SystemExit("this driver has no cuMemcpy3DBatchAsync")
    made = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    return made(address.value)


@dataclass
class Pool:
    """Layer-major: row `page` of each of `tensors`."""

    tensors: int
    pages: int
    row: int

    def __post_init__(self) -> None:
        size = self.tensors * self.pages * self.row
        self.memory = torch.randint(255, (self.tensors * POOL_PAGES * self.row,), dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(size, dtype=torch.uint8).pin_memory()
        self.device = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.ids = torch.randperm(POOL_PAGES)[: self.pages]

    def operations(self, target: torch.Tensor, kind: int, which: range) -> ctypes.Array[Operation]:
        made = (Operation * len(which))()
        for each, i in zip(made, which, strict=True):
            source = self.memory.data_ptr() + int(self.ids[i]) * self.row
            to = target.data_ptr() + i * self.tensors * self.row
            each.source = Operand(1, Pointer(source, POOL_PAGES * self.row, self.tensors, Location(DEVICE, 0)))
            each.target = Operand(1, Pointer(to, self.row, self.tensors, Location(kind, 0)))
            each.extent[:] = (self.row, self.tensors, 1)
            each.order, each.flags = 1, 1  # in the stream's order; prefer what overlaps with compute
        return made

    def check(self, copied: torch.Tensor) -> None:
        rows = self.memory.view(self.tensors, POOL_PAGES, self.row)[:, self.ids.cuda()]
        assert torch.equal(copied.cuda(), rows.permute(1, 0, 2).reshape(-1)), "other bytes were copied"


def products(factors: torch.Tensor, stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        began, ended = torch.cuda.Event(True), torch.cuda.Event(True)
        began.record()
        for _ in range(PRODUCTS):
            torch.mm(factors, factors)
        ended.record()
    time.sleep(0.001)  # until they run
    return began, ended


def measure(
    copies: Sequence[tuple[torch.cuda.Stream, ctypes.Array[Operation]]], copy: Callable[..., int], beside: bool
) -> float:
    """Seconds, the median."""
    factors = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda")
    computing, times = torch.cuda.Stream(), []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        if beside:
            products(factors, computing)
        first = copies[0][0]
        began, ended = torch.cuda.Event(True), torch.cuda.Event(True)
        began.record(first)
        for stream, operations in copies:
            stream.wait_event(began)
            error = copy(len(operations), ctypes.addressof(operations), 0, stream.cuda_stream)
            assert error == 0, f"cuMemcpy3DBatchAsync: {error}"
            done = torch.cuda.Event()
            done.record(stream)
            first.wait_event(done)
        ended.record(first)
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)


def main() -> None:
    copy = batch_copy()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}; medians of {ROUNDS}, GB/s")
    print(f"{'shape':<14}{'rows':>16}   {'copied':<28}{'idle':>8}{'beside products':>18}")
    streams = [torch.cuda.Stream(priority=-1) for _ in range(2)]
    for name, tensors, pages, row in SHAPES:
        pool = Pool(tensors, pages, row)
        every, half = range(pages), pages // 2
        ways = {
            "to host": [(streams[0], pool.operations(pool.host, HOST, every))],
            "to host, two streams": [
                (stream, pool.operations(pool.host, HOST, part))
                for stream, part in zip(streams, (every[:half], every[half:]), strict=True)
            ],
            "within the GPU": [(streams[0], pool.operations(pool.device, DEVICE, every))],
        }
        for way, copies in ways.items():
            rates = [tensors * pages * row / measure(copies, copy, beside) / 1e9 for beside in (False, True)]
            pool.check(pool.device if way == "within the GPU" else pool.host)
            rows = f"{tensors * pages} x {row >> 10} KiB"
            print(f"{name:<14}{rows:>16}   {way:<28}{rates[0]:>8.1f}{rates[1]:>18.1f}", flush=True)


if __name__ == "__main__":
    main()
