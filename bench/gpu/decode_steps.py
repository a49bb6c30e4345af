"""A process that uses a GPU as an engine's decode does: the matrices of an 8B model are read, step after step, by a
CUDA graph, the next one queued while one runs. A daemon's kernels have the GPU by turns with it.

    python bench/gpu/decode_steps.py      prints the milliseconds of each quarter second's steps until its stdin ends
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

HIDDEN, INSIDE, LAYERS, BATCH = 4096, 14336, 32, 16
TOLD_SECONDS = 0.25
START_SECONDS = 60.0


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


def run() -> None:
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


class Steps:
    """Such a process that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def told(self) -> list[float]:
        """Milliseconds of the steps of each quarter second since the last call."""
        told: list[float] = []
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            told.append(float(self._process.stdout.readline()))
        return told


@contextlib.contextmanager
def beside() -> Iterator[Steps]:
    """RuntimeError: it did not start."""
    words = [sys.executable, "-u", __file__]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], START_SECONDS)[0]:
            raise RuntimeError(f"{' '.join(words)}: no step in {START_SECONDS:.0f} s")
        yield Steps(process)
    finally:
        process.stdin.close()
        process.wait(START_SECONDS)


if __name__ == "__main__":
    run()
