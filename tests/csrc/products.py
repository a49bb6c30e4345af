"""`python products.py`: multiplies matrices on the first GPU until its standard input ends, so that what others give to
the GPU waits for its turn. Says `ready` once it does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIZE = 8192


@contextmanager
def computing_beside() -> Iterator[None]:
    """A process that computes on the GPU of this one."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def main() -> None:
    import torch

    left, right = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
    out = left @ right
    torch.cuda.synchronize()
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        for _ in range(20):
            torch.matmul(left, right, out=out)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
