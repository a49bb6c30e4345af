"""`python dying_worker.py killed|forked|execs`: a worker that maps a daemon's pool on a GPU, and queues copies to its
pages without end. Standard input: a Welcome, in hexadecimal. It says `ready` once they run. With `forked` a child
shares what it had open for the GPU; with `execs` the next line makes another program of it, which does nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading

from kvferry.proto import worker_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry


def main(how: str) -> None:
    import torch

    from kvferry.client.attachment import Attachment

    welcome = worker_pb2.Welcome.FromString(bytes.fromhex(sys.stdin.readline()))
    # As an engine, which has used its GPU before: the driver's files are opened before the lock's.
    torch.zeros(1, device="cuda:0")
    if how == "forked" and os.fork() == 0:
        signal.pause()
    attachment = Attachment(welcome.session_file, welcome, KVGeometry.from_proto(welcome.geometry))
    (pool,) = attachment.pools.memories
    assert isinstance(pool, torch.Tensor)
    sources = [torch.full_like(pool, value) for value in (0xA5, 0x5A)]
    torch.cuda.synchronize()
    threading.Timer(0.3, lambda: print("ready", flush=True)).start()
    if how == "execs":
        threading.Thread(target=becomes_another).start()
    while True:
        for source in sources:
            pool.copy_(source, non_blocking=True)


def becomes_another() -> None:
    sys.stdin.readline()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])


if __name__ == "__main__":
    main(sys.argv[1])
