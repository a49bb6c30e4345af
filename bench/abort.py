"""How long an abort takes to be acknowledged, beside an empty message on the same stream.

    python bench/abort.py [--requests N] [--load N]

A decode daemon and this process as its worker. In turn: a request is admitted, holds its pages, and is aborted (Abort
to Ended); and a Grow is sent that asks for no page (Grow to Grown). So both meet the same stream, the same loop and the
same load; `--load` requests are held beside. The limit: an abort's p99 is at most 10 times that of the empty message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time

import numpy as np

from kvferry.daemon.stack import Stack
from kvferry.proto import common_pb2
from kvferry.radix import root_digest
from kvferry.radix.digests import prompt_digests
from kvferry.transfer.geometry import KVGeometry
from kvferry.transfer.namespace import NamespaceFacts
from kvferry.workers.client import DaemonClient
from kvferry.workers.requests import RequestName

PAGE_SIZE = 64
PROMPT_PAGES = 64
TIMES = 10.0


def facts() -> NamespaceFacts:
    geometry = KVGeometry(layers=1, kv_heads=2, head_dim=32, dtype="bfloat16", page_size=PAGE_SIZE)
    return NamespaceFacts("bench", "1", geometry, "sha256_cbor", root_digest())


async def admit(client: DaemonClient, number: int) -> RequestName:
    name = RequestName(os.urandom(16), 1)
    tokens = np.arange(number * 7, number * 7 + PROMPT_PAGES * PAGE_SIZE, dtype=np.uint32)
    prompt = prompt_digests(tokens, page_size=PAGE_SIZE)
    await client.admit(
        name,
        digests=prompt.digests,
        tokens=len(tokens),
        tail_digest=prompt.tail,
        prefill="",
        max_new_tokens=64,
        deadline_s=30,
    )
    await client.ready(name)
    return name


async def measure(socket: str, requests: int, load: int) -> tuple[list[float], list[float]]:
    client = await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts().to_proto(), "bench")
    held = [await admit(client, 1_000_000 + number) for number in range(max(1, load))]
    aborts, empties = [], []
    for number in range(requests):
        name = await admit(client, number)
        begin = time.perf_counter()
        await client.abort(name, "bench")
        aborts.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await client.grow(held[0], PROMPT_PAGES * PAGE_SIZE)
        empties.append(time.perf_counter() - begin)
    for name in held:
        await client.abort(name, "bench")
    await client.close()
    return aborts, empties


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=int, default=32, help="requests held beside, at least 1")
    options = parser.parse_args()
    with Stack() as stack:
        socket = os.path.join(stack.folder, "d.sock")
        words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--pool-bytes", "256MiB"]
        stack.ready(stack.start("daemon", words))
        aborts, empties = asyncio.run(measure(socket, options.requests, options.load))
    print(f"python bench/abort.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"load average {os.getloadavg()[0]:.1f}; {options.requests} of each, {options.load} requests held beside\n")
    print(f"{'milliseconds':<24}{'p50':>8}{'p99':>8}{'max':>8}")
    for what, values in (("abort to ended", aborts), ("empty message", empties)):
        low, high = np.quantile(values, (0.5, 0.99)) * 1e3
        print(f"{what:<24}{low:>8.2f}{high:>8.2f}{max(values) * 1e3:>8.2f}")
    ratio = float(np.quantile(aborts, 0.99) / np.quantile(empties, 0.99))
    print(f"\np99 of an abort is {ratio:.1f} times that of an empty message; the limit is {TIMES:g}")
    return int(ratio > TIMES)


if __name__ == "__main__":
    sys.exit(main())
