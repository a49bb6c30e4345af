"""Copies between a vLLM engine's blocks and the daemon's pool on the same GPU, as kvferry's connector makes them.

python bench/gpu/engine_copies.py [--runs 15] [--device 0]

For each shape the blocks of a prompt, scattered over a KV cache in vLLM's layout LBNHC, go to scattered pages of a pool
and back: time from the list of block ids to the end of the copy, beside one plain copy of as many bytes within the GPU
(the limit) and torch's indexing of bytes, layer by layer, measured in the same run. What came back is compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvferry.connectors.blocks import BlockMap, PoolPages
from kvferry.connectors.gpu_mover import GpuMover


class Shape(NamedTuple):
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    blocks: int  # copied

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.block_tokens * 2 * self.head_dim * 2  # keys and values, two bytes each


SHAPES = [
    Shape("LLaMA-8B, a chunk of 2,048 tokens", 32, 8, 128, 16, 128),
    Shape("LLaMA-8B, a prompt of 16,384", 32, 8, 128, 16, 1024),
    Shape("Qwen2.5-0.5B, 2,048 tokens", 24, 2, 64, 16, 128),
    Shape("Qwen2.5-0.5B, 16,384 tokens", 24, 2, 64, 16, 1024),
]


def median(work: Callable[[], object], runs: int) -> float:
    """Seconds."""
    times = []
    for _ in range(runs + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def measure(shape: Shape, device: int, runs: int) -> str:
    where = torch.device("cuda", device)
    random = np.random.default_rng(0)
    total = 2 * shape.blocks
    cache = torch.randint(0, 255, (shape.layers, total, shape.block_bytes), dtype=torch.uint8, device=where)
    blocks = BlockMap(
        np.array([layer.data_ptr() for layer in cache], dtype=np.int64),
        np.full(shape.layers, shape.block_bytes, dtype=np.int64),
        shape.block_bytes,
        total,
        shape.block_tokens,
        1,
        np.zeros(shape.block_bytes, dtype=np.int32),
    )
    memory = torch.zeros(total * blocks.page_bytes, dtype=torch.uint8, device=where)
    pool = PoolPages(memory, memory.data_ptr(), total, blocks.page_bytes)
    own, others = random.permutation(total)[: shape.blocks], random.permutation(total)[: shape.blocks]
    pages = random.permutation(total)[: shape.blocks].tolist()
    end = shape.blocks * shape.block_tokens
    mover = GpuMover(blocks, where)

    def to_pages() -> None:
        mover.to_pages(pool, blocks.places(pool, pages, own.tolist(), 0, end), mover.moment())

    def to_blocks() -> None:
        mover.to_blocks(pool, blocks.places(pool, pages, others.tolist(), 0, end), mover.moment())

    wanted = cache[:, own].clone()
    to_pages()
    to_blocks()
    right = bool((cache[:, others] == wanted).all())
    nbytes = shape.blocks * blocks.row_bytes
    one, other = memory[:nbytes], torch.empty(nbytes, dtype=torch.uint8, device=where)
    by_page = memory.view(total, shape.layers, shape.block_bytes)
    own_ids, page_ids = torch.from_numpy(own).to(where), torch.tensor(pages, device=where)

    def plain() -> None:
        other.copy_(one)
        torch.cuda.synchronize()

    def by_layer() -> None:
        for layer in range(shape.layers):
            by_page[page_ids, layer] = cache[layer, own_ids]
        torch.cuda.synchronize()

    there, back = median(to_pages, runs), median(to_blocks, runs)
    limit, apart = median(plain, runs), median(by_layer, runs)
    return (
        f"{shape.name:34} {nbytes / 2**20:7.0f} {shape.block_bytes / 1024:7.0f} {shape.blocks * shape.layers:9}"
        f" {there * 1e6:9.0f} {nbytes / there / 1e9:6.0f} {back * 1e6:9.0f} {nbytes / back / 1e9:6.0f}"
        f" {limit * 1e6:9.0f} {limit / there:6.0%} {apart / there:7.1f}  {'right' if right else 'WRONG'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    print(f"{torch.cuda.get_device_name(args.device)}, torch {torch.__version__}, medians of {args.runs}")
    print(
        f"{'shape':34} {'MiB':>7} {'KiB':>7} {'places':>9} {'to pages':>9} {'GB/s':>6} {'to blocks':>9} {'GB/s':>6}"
        f" {'plain us':>9} {'of it':>6} {'x torch':>7}  bytes"
    )
    lines = [measure(shape, args.device, args.runs) for shape in SHAPES]
    print("\n".join(lines))
    return 1 if any(line.endswith("WRONG") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
