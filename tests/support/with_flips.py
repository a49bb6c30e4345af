"""`python with_flips.py COMMAND ...`: kvferry's command line in this process, in which a bit of some received parts
flips in the slot, after NIXL has written it and before it is copied out; in sessions with checksums alone. The
environment's FLIP_EVERY says which: one of so many, by chance, all with 1. Not by count: transfers with that many parts
left would lose the same one each time. FLIP_FROM in its place: all from that one on, counted from 0; for transfers that
are not tried again. A command is `PYTHON -m kvferry WORDS`, as `Stack.start` puts it behind a
prefix.
"""

from __future__ import annotations

import itertools
import os
import random
import sys

import numpy as np

from kvferry.daemon.memory.gpu import GpuPartCopies
from kvferry.daemon.memory.interface import ScatterEnd
from kvferry.daemon.memory.shared import SharedPartCopies
from kvferry.transfer.protocol.receiver import Scatter
from kvferry.transfer.protocol.slots import HEADER_BYTES

EVERY = int(os.environ.get("FLIP_EVERY", "3"))
FROM = int(os.environ.get("FLIP_FROM", "-1"))
chance = random.Random(EVERY)
numbers = itertools.count()


def flips() -> bool:
    """Whether a bit of the next part does."""
    return chance.randrange(EVERY) == 0 if FROM < 0 else next(numbers) >= FROM


def flip_in_shared_memory(copies: SharedPartCopies, scatter: Scatter) -> None:
    copies._slots.receive_slot(scatter.slot)[HEADER_BYTES + scatter.nbytes // 2] ^= 0x10


def flip_on_gpu(copies: GpuPartCopies, scatter: Scatter) -> None:
    engine, _ = copies._lanes[scatter.lane]
    address = copies._slot_of(scatter.slot).address + HEADER_BYTES + scatter.nbytes // 2
    flipped = np.array([engine.read(address, 1)[0] ^ 0x10], np.uint8)
    source = np.array([flipped.ctypes.data])
    engine.copy_list_from_host(np.array([address]), source, np.ones(1, np.int64), strategy="loop").wait()


shared_scatter, gpu_scatter = SharedPartCopies.scatter, GpuPartCopies.scatter


def in_shared_memory(copies: SharedPartCopies, scatter: Scatter, done: ScatterEnd) -> None:
    if copies._sums and flips():
        flip_in_shared_memory(copies, scatter)
    shared_scatter(copies, scatter, done)


def on_gpu(copies: GpuPartCopies, scatter: Scatter, done: ScatterEnd) -> None:
    if copies._sums and flips():
        flip_on_gpu(copies, scatter)
    gpu_scatter(copies, scatter, done)


if __name__ == "__main__":
    SharedPartCopies.scatter = in_shared_memory  # type: ignore[method-assign]
    GpuPartCopies.scatter = on_gpu  # type: ignore[method-assign]
    from kvferry.daemon.cli.main import main

    words = sys.argv[1:]
    sys.argv = ["kvferry", *words[words.index("kvferry") + 1 :]]
    sys.exit(main())
