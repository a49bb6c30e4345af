"""Decode steps without an engine: prints the milliseconds of each quarter second's until its stdin ends."""

from __future__ import annotations

import select
import sys
import time

import torch

HIDDEN, INSIDE, LAYERS, BATCH = 4096, 14336, 32, 16
TOLD_SECONDS = 0.25


def captured() -> torch.cuda.CUDAGraph:
    """A step's products."""
    shapes = ((HIDDEN, HIDDEN * 3 // 2), (HIDDEN, HIDDEN), (HIDDEN, 2 * INSIDE), (INSIDE, HIDDEN))
    layers = [[torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes] for _ in range(LAYERS)]
    inputs = {size: torch.randn(BATCH, size, device="cuda", dtype=torch.bfloat16) for size in (HIDDEN, INSIDE)}
    torch.mm(inputs[HIDDEN], layers[0][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            for matrix in layer:
                torch.mm(inputs[matrix.shape[0]], matrix)
    return graph


def decode_steps() -> None:
    """Uses the GPU as an engine's decode does: the matrices of an 8B model are read, step after step, by a CUDA graph,
    the next one queued while one runs."""
    graph = captured()
    ends = [torch.cuda.Event() for _ in range(2)]
    steps, began = 0, time.perf_counter()
    while not select.select([sys.stdin], [], [], 0)[0]:
        graph.replay()
        ends[steps % 2].record()
        if steps:
            ends[(steps - 1) % 2].synchronize()
        steps += 1
        if (now := time.perf_counter()) - began >= TOLD_SECONDS:
            print(f"{1e3 * (now - began) / steps:.3f}", flush=True)
            steps, began = 0, now
    torch.cuda.synchronize()


if __name__ == "__main__":
    decode_steps()
