"""What checksums of parts cost on the CPU: gather and scatter with and without them, beside memcpy of as many bytes.

    python bench/part_checksums.py [--repeat N] [--threads N]

A part of 8 MiB, the default of a slot, between scattered pages of a pool of 512 MiB and one of 16 slots: neither lies
in a cache. The ways take turns, each with other pages and another slot every time; of their times the one that a tenth
is below, since other processes only make it longer. GB/s are bytes of the part a second; memory moves twice as many.
cost: of the sum, in time. The last lines: what a session does beside the copy, once a part.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry._core import HostPages, part_checksum
from kvferry.transfer.protocol.slots import PartHeader

MIB = 1 << 20
PART = 8 * MIB
POOL = 512 * MIB
SLOTS = 16
HEADER = 64


@dataclass(frozen=True)
class Shape:
    """Of a page, as one rank stores it."""

    name: str
    tensors: int
    pieces: int
    fragment: int  # bytes

    @property
    def row(self) -> int:
        return self.tensors * self.pieces * self.fragment


SHAPES = (
    Shape("one row of 2 MiB", 1, 1, 2 * MIB),
    Shape("64 x 32 KiB, layer-major", 64, 1, 32 << 10),
    Shape("64 x 4 KiB, layer-major", 64, 1, 4 << 10),
    Shape("64 x 64 x 256 B, heads of NHD", 64, 64, 256),
    Shape("8 x 1,001 B, not in words", 8, 1, 1001),
)


class World:
    def __init__(self, shape: Shape, threads: int) -> None:
        rng = np.random.default_rng(1)
        self.threads = threads
        stride = shape.fragment * 2 if shape.pieces > 1 else shape.fragment  # a rank's heads beside another's
        self.pages = POOL // (shape.tensors * shape.pieces * stride)
        plane = self.pages * shape.pieces * stride
        self.pool = rng.integers(0, 256, shape.tensors * plane, np.uint8)
        offsets = np.arange(shape.tensors, dtype=np.int64) * plane
        strides = np.full(shape.tensors, shape.pieces * stride, np.int64)
        self.rows = HostPages(self.pool, offsets, strides, shape.pieces, stride, shape.fragment, self.pages)
        self.nbytes = PART - PART % shape.row
        self.slots = rng.integers(0, 256, (SLOTS, HEADER + PART), np.uint8)
        self.flat = rng.integers(0, 256, (SLOTS, PART), np.uint8)
        self.rng = rng
        self.turn = 0

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """Page ids and a slot."""
        self.turn += 1
        count = self.nbytes // self.rows.row_bytes
        return self.rng.choice(self.pages, count, replace=False).astype(np.int64), self.slots[self.turn % SLOTS]

    def ways(self) -> dict[str, Callable[[np.ndarray, np.ndarray], object]]:
        rows, nbytes, threads = self.rows, self.nbytes, self.threads
        return {
            "memcpy": lambda ids, slot: np.copyto(self.flat[self.turn % SLOTS][:nbytes], slot[HEADER:][:nbytes]),
            "gather": lambda ids, slot: rows.gather_part(ids, 0, nbytes, slot, HEADER, threads),
            "gather, summed": lambda ids, slot: rows.gather_part_summed(ids, 0, nbytes, slot, HEADER, threads),
            "scatter": lambda ids, slot: rows.scatter_part(ids, 0, nbytes, slot, HEADER, threads),
            "scatter, summed": lambda ids, slot: rows.scatter_part_summed(ids, 0, nbytes, slot, HEADER, threads),
            "sum alone": lambda ids, slot: part_checksum(slot[HEADER:][:nbytes]),
        }


def rates(shape: Shape, threads: int, repeat: int) -> dict[str, float]:
    """GB/s of each way."""
    world = World(shape, threads)
    ways = world.ways()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            ids, slot = world.next()
            begin = time.perf_counter()
            way(ids, slot)
            times[name].append(time.perf_counter() - begin)
    world.rows.close()
    return {name: world.nbytes / statistics.quantiles(found, n=10)[0] / 1e9 for name, found in times.items()}


def microseconds(call: Callable[[], object], calls: int = 20_000) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=101)
    parser.add_argument("--threads", type=int, default=1, help="of one copy; a daemon's copies have one each")
    options = parser.parse_args()
    print("python bench/part_checksums.py " + " ".join(sys.argv[1:]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(
        f"load average {os.getloadavg()[0]:.1f}; {options.threads} thread a copy; {options.repeat} copies of each way\n"
    )
    names = ("memcpy", "gather", "gather, summed", "cost", "scatter", "scatter, summed", "cost", "sum alone")
    print(f"{'GB/s of parts of 8 MiB':<32}" + "".join(f"{name:>17}" for name in names))
    for shape in SHAPES:
        found = rates(shape, options.threads, options.repeat)
        line = f"{shape.name:<32}{found['memcpy']:>17.2f}"
        for way in ("gather", "scatter"):
            plain, summed = found[way], found[f"{way}, summed"]
            line += f"{plain:>17.2f}{summed:>17.2f}{plain / summed - 1:>+17.1%}"
        print(line + f"{found['sum alone']:>17.2f}", flush=True)
    header = PartHeader(
        epoch=1 << 60, transfer=9, slot=3, generation=77, lane=0, first_page=100, byte_offset=4096, nbytes=PART
    )
    print(f"\nthe header's share of a part's checksum: {microseconds(lambda: header.checksum_of(1 << 63)):.2f} us")
    print(f"(packing the header, which a part always needs: {microseconds(header.pack):.2f} us)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
