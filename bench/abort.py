"""How long an abort takes to be acknowledged, beside an empty message on the same stream.

    python bench/abort.py [--requests N] [--load N]

A decode daemon and this process as its worker. In turn: a request is admitted, holds its pages, and is aborted (Abort
to Ended); and a Grow is sent that asks for no page (Grow to Grown). So both meet the same stream, the same loop and the
same load; `--load` requests are held beside. The limit: an abort's p99 is at most 10 times that of the empty message.

Then the same where pages move: a prefill daemon has the whole prompt, of which the decode daemon has nothing, and the
abort comes at a random moment of the transfer. Ended then waits for the copies into the request's pages that run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import sys
import time

import grpc
import numpy as np

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import common_pb2
from kvferry.radix import root_digest
from kvferry.radix.digests import PromptDigests, prompt_digests
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts

PAGE_SIZE = 64
PROMPT_PAGES = 64
PROMPT_TOKENS = PROMPT_PAGES * PAGE_SIZE
TIMES = 10.0
WARM_UP = 10
MOVING_LAYERS = 16  # where pages move: a prompt has 16 MiB, in parts of 1 MiB
SLOT_BYTES = "1MiB"


def facts(layers: int = 1) -> NamespaceFacts:
    geometry = KVGeometry(layers=layers, kv_heads=2, head_dim=32, dtype="bfloat16", page_size=PAGE_SIZE)
    return NamespaceFacts("bench", "1", geometry, "sha256_cbor", root_digest())


def prompt_of(number: int) -> PromptDigests:
    tokens = np.arange(number * 7, number * 7 + PROMPT_TOKENS, dtype=np.uint32)
    return prompt_digests(tokens, page_size=PAGE_SIZE)


async def admit(client: DaemonClient, number: int) -> RequestName:
    name = RequestName(os.urandom(16), 1)
    await ask(client, name, prompt_of(number), prefill="")
    await client.ready(name)
    return name


async def ask(client: DaemonClient, name: RequestName, prompt: PromptDigests, prefill: str) -> None:
    await client.admit(
        name,
        digests=prompt.digests,
        tokens=PROMPT_TOKENS,
        tail_digest=prompt.tail,
        prefill=prefill,
        max_new_tokens=64,
        deadline_s=30,
    )


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
        await client.grow(held[0], PROMPT_TOKENS)
        empties.append(time.perf_counter() - begin)
    for name in held:
        await client.abort(name, "bench")
    await client.close()
    return aborts, empties


class Moving:
    """A prefill and a decode daemon, and a worker of each: prompts are computed before they are asked for."""

    def __init__(self, prefill: DaemonClient, decode: DaemonClient) -> None:
        self.prefill, self.decode = prefill, decode

    async def begin(self, number: int) -> RequestName:
        """The prefill daemon has all of it, and the transfer begins."""
        name, prompt, prefill = RequestName(os.urandom(16), 1), prompt_of(number), self.prefill
        prefill.begin(name, digests=prompt.digests, tokens=PROMPT_TOKENS, tail_digest=prompt.tail, deadline_s=30)
        await prefill.begun(name)
        prefill.progress(name, PROMPT_TOKENS)
        prefill.aux(name, b"first token")
        await ask(self.decode, name, prompt, prefill="prefill")
        return name

    async def abort(self, name: RequestName) -> float:
        """Both halves, as a front end would; the decode half's seconds."""
        begin = time.perf_counter()
        await self.decode.abort(name, "bench")
        elapsed = time.perf_counter() - begin
        await self.prefill.abort(name, "bench")
        return elapsed


async def measure_moving(sockets: dict[str, str], requests: int) -> tuple[list[float], list[float]]:
    roles = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
    there = facts(MOVING_LAYERS).to_proto()
    clients = [await DaemonClient.connect(sockets[role], roles[role], there, "bench") for role in ("prefill", "decode")]
    moving = Moving(*clients)
    held = await admit(moving.decode, 1_000_000)
    whole = []
    for number in range(WARM_UP):
        name = await moving.begin(number)
        begin = time.perf_counter()
        await moving.decode.ready(name)
        whole.append(time.perf_counter() - begin)
        await moving.abort(name)
    chance, typical = random.Random(1), float(np.median(whole))
    aborts, empties = [], []
    for number in range(WARM_UP, WARM_UP + requests):
        name = await moving.begin(number)
        await asyncio.sleep(chance.uniform(0.0, 0.9 * typical))
        aborts.append(await moving.abort(name))
        begin = time.perf_counter()
        await moving.decode.grow(held, PROMPT_TOKENS)
        empties.append(time.perf_counter() - begin)
    await moving.decode.abort(held, "bench")
    for client in clients:
        await client.close()
    return aborts, empties


def start(stack: Stack, role: str, *words: str) -> tuple[Process, str]:
    socket = os.path.join(stack.folder, f"{role}.sock")
    common = ["serve", "--role", role, "--name", role, "--listen", "127.0.0.1:0", "--socket", socket]
    return stack.start(role, [*common, "--pool-bytes", "256MiB", *words]), socket


def aborted_transfers(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return int(fetch(channel).sides[0].transfers.aborted)


def show(rows: dict[str, list[float]]) -> float:
    """A table of two rows; the ratio of their p99."""
    print(f"{'milliseconds':<24}{'p50':>8}{'p99':>8}{'max':>8}")
    p99 = []
    for what, values in rows.items():
        low, high = np.quantile(values, (0.5, 0.99)) * 1e3
        p99.append(high)
        print(f"{what:<24}{low:>8.2f}{high:>8.2f}{max(values) * 1e3:>8.2f}")
    ratio = float(p99[0] / p99[1])
    print(f"p99 of an abort is {ratio:.1f} times that of an empty message; the limit is {TIMES:g}\n")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=int, default=32, help="requests held beside, at least 1")
    options = parser.parse_args()
    with Stack() as stack:
        daemon, socket = start(stack, "decode")
        stack.ready(daemon)
        aborts, empties = asyncio.run(measure(socket, options.requests, options.load))
    with Stack() as stack:
        slots = ["--slot-bytes", SLOT_BYTES]
        prefill, prefill_socket = start(stack, "prefill", *slots)
        decode, decode_socket = start(stack, "decode", *slots, "--peer", f"prefill={stack.ready(prefill)}")
        address = stack.ready(decode)
        sockets = {"prefill": prefill_socket, "decode": decode_socket}
        moving, beside = asyncio.run(measure_moving(sockets, options.requests))
        met = aborted_transfers(address)
    print(f"python bench/abort.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"load average {os.getloadavg()[0]:.1f}; {options.requests} of each, {options.load} requests held beside\n")
    ratios = [show({"abort to ended": aborts, "empty message": empties})]
    print(f"while pages move, {met} of the aborts in the middle of the transfer")
    ratios.append(show({"abort to ended": moving, "empty message": beside}))
    return int(max(ratios) > TIMES)


if __name__ == "__main__":
    sys.exit(main())
