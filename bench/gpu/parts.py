"""Parts between scattered pages and a slot of one GPU, small accesses, ends of copies; sums on the host.

us: one part, from the call to its end, on an idle GPU. back to back: one of 16 that follow each other, by events, each
over other pages and another slot, as plain copies of as many bytes do in the same run; x: over the plain copy's time.
limit: 1.25 times the plain copy + 10 us; 2.5 times for pieces under 128 B, of which memory moves more than asked for.
Under products: 8192^3 bf16 products run on another stream.

    python bench/gpu/parts.py [--repeat 21] [--only host,parts,load,small] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopy, GpuCopyEngine, GpuWaiter, HostPages

KIB, MIB = 1 << 10, 1 << 20
PART = 64 * MIB
ROUND = 16  # parts that follow each other
SMALL_LIMIT, END_LIMIT = 15e-6, 30e-6  # seconds


@dataclass(frozen=True)
class Shape:
    name: str
    tensors: int
    pieces: int
    fragment: int  # bytes
    gap: int  # bytes between pieces

    @property
    def row(self) -> int:
        return self.tensors * self.pieces * self.fragment


SHAPES = (
    Shape("64 B heads of NHD", 32, 16, 64, 192),
    Shape("128 B heads of NHD", 32, 16, 128, 384),
    Shape("256 B heads of NHD", 32, 16, 256, 256),
    Shape("1 KiB", 64, 1, 1 * KIB, 0),
    Shape("4 KiB", 48, 1, 4 * KIB, 0),
    Shape("8 KiB", 160, 1, 8 * KIB, 0),
    Shape("32 KiB", 64, 1, 32 * KIB, 0),
    Shape("256 KiB", 32, 1, 256 * KIB, 0),
    Shape("2 MiB", 2, 1, 2 * MIB, 0),
)


def median(values: list[float]) -> float:
    return statistics.median(values)


def clocked(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def host(repeat: int) -> None:
    page, count = 128 * KIB, PART // (128 * KIB)
    pool = np.random.default_rng(1).integers(0, 256, 2 * PART, np.uint8)
    slot: NDArray[np.uint8] = np.zeros(PART, np.uint8)
    ids = np.random.default_rng(2).permutation(2 * count)[:count].astype(np.int64)
    layers = HostPages(pool, np.arange(8) * (2 * PART // 8), np.full(8, page // 8), 1, 0, page // 8, 2 * count)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": partial(np.copyto, slot, pool[:PART]),
        "gather": partial(_core.gather_pages, slot, 0, pool, ids, page, 0, PART),
        "gather, summed": partial(_core.gather_pages_summed, slot, 0, pool, ids, page, 0, PART),
        "scatter": partial(_core.scatter_pages, pool, ids, page, 0, slot, 0, PART),
        "scatter, summed": partial(_core.scatter_pages_summed, pool, ids, page, 0, slot, 0, PART),
        "gather of 16 KiB layers": partial(layers.gather_part, ids, 0, PART, slot),
        "the same, summed": partial(layers.gather_part_summed, ids, 0, PART, slot),
        "sum alone": partial(_core.part_checksum, slot),
    }
    print("host, 64 MiB, one thread, GB/s: ", end="")
    print(", ".join(f"{name} {PART / clocked(way, repeat) / 1e9:.1f}" for name, way in ways.items()))


class Field:
    """Four parts' worth of pages in random order, and slots for them: what is copied is not in the cache."""

    PARTS = 4

    def __init__(self, shape: Shape, engine: GpuCopyEngine) -> None:
        import torch

        self.engine = engine
        self.count = PART // shape.row
        self.nbytes = self.count * shape.row
        pool = self.PARTS * self.count
        stride = shape.pieces * (shape.fragment + shape.gap)
        self.memory = torch.randint(0, 256, (shape.tensors * pool * stride,), dtype=torch.uint8, device="cuda")
        self.slots = [torch.empty(self.nbytes, dtype=torch.uint8, device="cuda") for _ in range(self.PARTS)]
        bases = self.memory.data_ptr() + np.arange(shape.tensors, dtype=np.int64) * pool * stride
        strides = np.full(shape.tensors, stride, np.int64)
        self.pages = engine.pages(bases, strides, shape.fragment, pool, shape.pieces, shape.fragment + shape.gap)
        ids = np.random.default_rng(shape.row).permutation(pool).astype(np.int64)
        self.ids = [ids[i * self.count : (i + 1) * self.count].copy() for i in range(self.PARTS)]
        self.turn = itertools.cycle(range(self.PARTS))
        torch.cuda.synchronize()

    def issue(self, way: str) -> GpuCopy:
        i = next(self.turn)
        part = (self.pages, self.ids[i], 0, self.nbytes, self.slots[i].data_ptr())
        moves = {
            "gather": self.engine.gather_part,
            "gather, summed": self.engine.gather_part_summed,
            "scatter": self.engine.scatter_part,
            "scatter, summed": self.engine.scatter_part_summed,
        }
        return moves[way](*part)

    def plain(self) -> None:
        i = next(self.turn)
        self.slots[i].copy_(self.slots[(i + 1) % self.PARTS], non_blocking=True)


WAYS = ("gather", "gather, summed", "scatter", "scatter, summed")


def back_to_back(stream: int, issue: Callable[[], object], repeat: int) -> float:
    """Seconds of one."""
    import torch

    times = []
    external = torch.cuda.ExternalStream(stream)
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(external):
            begin.record(external)
            held = [issue() for _ in range(ROUND)]
            end.record(external)
            end.synchronize()
        del held
        times.append(begin.elapsed_time(end) / 1e3 / ROUND)
    return median(times)


def one(issue: Callable[[], GpuCopy]) -> None:
    copy = issue()
    while not copy.done():
        pass


def parts(engine: GpuCopyEngine, repeat: int) -> None:
    import torch

    print(f"\nparts of 64 MiB, idle GPU, medians of {repeat}; GB/s count a byte once")
    print(
        f"{'fragments':20} {'':16} {'us':>5} {'back to back us':>15} {'GB/s':>6} {'plain us':>8} {'x':>5} {'limit':>6}"
    )
    for shape in SHAPES:
        field = Field(shape, engine)
        stream = torch.cuda.Stream()
        back_to_back(stream.cuda_stream, field.plain, 3)
        plain = back_to_back(stream.cuda_stream, field.plain, repeat)
        limit = (1.25 if shape.fragment >= 128 else 2.5) * plain + 10e-6
        for way in WAYS:
            on = engine.gather_stream if way.startswith("gather") else engine.scatter_stream
            issue = partial(field.issue, way)
            back_to_back(on, issue, 3)
            took, single = back_to_back(on, issue, repeat), clocked(partial(one, issue), repeat)
            print(
                f"{shape.name:20} {way:16} {single * 1e6:5.0f} {took * 1e6:15.1f} {field.nbytes / took / 1e9:6.0f} "
                f"{plain * 1e6:8.1f} {took / plain:5.2f} {limit * 1e6:6.0f} {'ok' if took <= limit else 'MISS'}",
                flush=True,
            )
        del field
        torch.cuda.empty_cache()


def sweep(repeat: int) -> None:
    print("\nback to back us of a gather and a scatter, by threads a block and blocks")
    for threads, blocks in itertools.product((64, 128, 256), (528, 1056, 2112, 8448)):
        engine = GpuCopyEngine(0, part_threads=threads, part_blocks=blocks)
        found = []
        for shape in (SHAPES[0], SHAPES[4], SHAPES[7]):
            field = Field(shape, engine)
            for way, on in (("gather", engine.gather_stream), ("scatter", engine.scatter_stream)):
                issue = partial(field.issue, way)
                back_to_back(on, issue, 2)
                found.append(f"{shape.name} {way} {back_to_back(on, issue, repeat) * 1e6:.1f}")
        print(f"{threads:4} {blocks:5}: {', '.join(found)}", flush=True)


def load(engine: GpuCopyEngine, repeat: int) -> None:
    import torch

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    stream = torch.cuda.Stream()
    field = Field(SHAPES[4], engine)
    print("\nbeside 8192^3 bf16 products, 64 MiB of 8 KiB fragments: from the call to its end, us: ", end="")
    for way in ("gather", "scatter"):
        times = []
        for _ in range(repeat):
            with torch.cuda.stream(stream):
                for _ in range(8):
                    torch.matmul(a, b, out=c)
            time.sleep(0.002)
            times.append(clocked(partial(one, partial(field.issue, way)), 1))
            stream.synchronize()
        print(f"{way} median {median(times) * 1e6:.0f}, most {max(times) * 1e6:.0f}; ", end="")
    print()


def verdict(seconds: float, limit: float) -> str:
    return f"{seconds * 1e6:.1f} us ({'ok' if seconds <= limit else 'MISS'}, limit {limit * 1e6:.0f})"


def small(engine: GpuCopyEngine) -> None:
    memory = engine.allocate(1 * MIB)
    header = bytes(range(64))
    tiny = engine.pages(np.array([memory.address]), np.array([4096]), 4096, 100)
    page = np.array([3], np.int64)
    issue = partial(engine.gather_part, tiny, page, 0, 4096, memory.address + 512 * KIB)
    waiter = GpuWaiter()

    def learn() -> None:
        waiter.add(issue())
        waiter.wait(10)

    def sleep_first() -> None:
        copy = issue()
        copy.wait_for(10)

    for work in (learn, sleep_first):
        clocked(work, 100)
    print(f"\nread of 64 B {verdict(clocked(lambda: engine.read(memory.address, 64), 1000), SMALL_LIMIT)}, ", end="")
    spun, headed = (clocked(partial(one, each), 1000) for each in (issue, partial(issue, header=header)))
    print(f"a header with its part {verdict(headed - spun, SMALL_LIMIT)}")
    print(f"a part of 4 KiB {spun * 1e6:.1f} us by asking without pause, ", end="")
    print(f"by wait_for {verdict(clocked(sleep_first, 1000), spun + END_LIMIT)}, ", end="")
    print(f"by a waiter {verdict(clocked(learn, 1000), spun + END_LIMIT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--only", default="host,parts,load,small")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if "host" in wanted:
        host(arguments.repeat)
    if wanted == ["host"]:
        return
    import torch

    torch.zeros(1, device="cuda")
    engine = GpuCopyEngine(0)
    print(torch.cuda.get_device_name(0))
    if "parts" in wanted:
        parts(engine, arguments.repeat)
    if "load" in wanted:
        load(engine, arguments.repeat)
    if "small" in wanted:
        small(engine)
    if arguments.sweep:
        sweep(5)


if __name__ == "__main__":
    main()
