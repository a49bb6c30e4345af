"""The host tier beside one GPU: how fast it comes to be, and its copies against the link.

    python bench/gpu/host_tier.py [--gib 56] [--seconds 4] [--only daemon growth copies beside] [--rounds 2]
                                  [--strategies auto staged] [--buffers 8x16 10+5x16] [--new-memory 16]
                                  [--engine vllm] [--host-dir DIR]

Daemon: `kvferry serve --role decode` with a tier of --gib and without one, by turns: seconds until it is ready, until
its first worker has a pool, and from then until the first part of the tier may be used and until all may; the longest
that statistics took meanwhile; its memory. With --host-dir the tier is a file there, which the next one finds again.
Before it --new-memory GiB, which are kept, are had for the first time, by turns as a tier has them and by writing.

Growth: seconds from a tier of nothing until its first GiB and all of it are pinned and may be used, the longest
standstill of the event loop meanwhile, what lies in huge pages, and what the driver takes to allocate pinned memory
itself (1 GiB, in this run). The first time a virtual machine may have to get its memory from its host, at the host's
speed: the same again tells.
Copies: those of a daemon, prompts of 64 MiB or 128 MiB, so many under way at a time; the link: one copy of 1 GiB each
way, and both ways at once. Beside: the same while another process uses the GPU as an engine's decode does, or vLLM
answers requests there (--engine vllm, which needs what bench/vllm does), as each copy's strategy is chosen (auto) and
with one strategy for all; once for each of --buffers, which are staging buffers of restores, of spills, and their MiB.
Each tells the GPU memory that it took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import mmap
import os
import re
import resource
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast
from unittest import mock

import grpc
import numpy as np
import torch

from kvferry._core import GpuCopyEngine
from kvferry.client.client import DaemonClient
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory import gpu_ranks
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.memory.gpu_probe import near_cpus
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.proto import common_pb2
from kvferry.radix.digests import root_digest
from kvferry.radix.tree import RESTORE, SPILL
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.host_tier.copy_plan import GpuCopies
from kvferry.transfer.host_tier.copy_strategies import AUTO, ENVIRONMENT, STRATEGIES
from kvferry.transfer.host_tier.rows import AnonymousRows
from kvferry.transfer.mapping import populate

GIB, MIB = 1 << 30, 1 << 20
SHAPES = {
    "2 MiB": (KVGeometry(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16), 64),
    "64 KiB": (KVGeometry(layers=16, kv_heads=2, head_dim=64, dtype="bfloat16", page_size=8), 1024),
}
POOL_BYTES, TIER_BYTES = 4 * GIB, 8 * GIB
UNDER_WAY = 6  # copies in each direction
WAYS: dict[str, tuple[Any, ...]] = {"spills": (SPILL,), "restores": (RESTORE,), "both": (SPILL, RESTORE)}
PARTS = ("daemon", "growth", "copies", "beside")
ENGINES = {"steps": "steps.py", "vllm": "serving.py"}
START_SECONDS, STOP_SECONDS = 240.0, 60.0


class Engine:
    """A process of beside/ that uses the GPU. A daemon's kernels have it by turns with that."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def told(self) -> list[float]:
        """Milliseconds of the decode steps of each quarter second since the last call."""
        told: list[float] = []
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], 0)[0]:
            told.append(float(self._process.stdout.readline()))
        return told


@contextlib.contextmanager
def beside(engine: str) -> Iterator[Engine]:
    """RuntimeError: it did not start."""
    words = [sys.executable, "-u", str(Path(__file__).parent / "beside" / ENGINES[engine])]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], START_SECONDS)[0]:
            raise RuntimeError(f"{' '.join(words)}: no step in {START_SECONDS:.0f} s")
        yield Engine(process)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Copy:
    """As `kvferry._core.Copy`, as far as a tier asks."""

    kind: Any
    device: list[int]
    host: list[int]
    digests: bytes
    parents: bytes
    outputs: bytes


def pool_of(geometry: KVGeometry) -> GpuPoolMemory:
    shape = PoolShape(geometry, 1, StorageOrder.LAYER_MAJOR, POOL_BYTES // geometry.page_bytes)
    return GpuPoolMemory.create(shape, [0])


def tier_of(memory: GpuPoolMemory, nbytes: int) -> tuple[HostTier, Cache]:
    shape = memory.shape
    pages = nbytes // shape.geometry.page_bytes
    cache = Cache(shape.pages, shape.geometry.page_size, host_pages=pages, host_there=0)
    rows = AnonymousRows(pages, shape.geometry.page_bytes)
    return HostTier(memory, rows, pages, checksums=False, near=near_cpus([0])), cache


def taken() -> float:
    """MiB of the device's memory that anybody has."""
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / MIB


class Buffers(NamedTuple):
    restores: int
    spills: int
    mib: int


def buffers_of(words: str) -> Buffers:
    """As many each way ("8x16"), or more for restores than for spills ("10+5x16"), of so many MiB. ValueError."""
    found = re.fullmatch(r"(\d+)(?:\+(\d+))?x(\d+)", words)
    if found is None or not all(2 <= int(number) <= 64 for number in found.groups("2")):
        raise ValueError(f"{words!r} must be as 8x16 or 10+5x16, each number 2 to 64")
    return Buffers(int(found[1]), int(found[2] or found[1]), int(found[3]))


@contextlib.contextmanager
def staging(buffers: Buffers | None) -> Iterator[None]:
    """Copies are staged in these, or as a daemon's are."""
    if buffers is None:
        yield
        return

    def made(ordinal: int) -> tuple[GpuCopies, GpuCopies]:
        restores, spills = (
            GpuCopyEngine(ordinal, deep_buffers=number, buffer_bytes=buffers.mib * MIB)
            for number in (buffers.restores, buffers.spills)
        )
        return GpuCopies(spills, restores=restores), GpuCopies(restores)

    print("staged in {} buffers of restores, {} of spills, of {} MiB:".format(*buffers), flush=True)
    with mock.patch.object(gpu_ranks, "copiers", made):
        yield


async def stalls(longest: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest[0] = max(longest[0], time.perf_counter() - before - 0.001)


def in_huge_pages(pid: int) -> float:
    """GiB of a process's anonymous memory."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) / MIB for line in lines if line.startswith("AnonHugePages:"))


def memory_of(pid: int) -> str:
    with open(f"/proc/{pid}/status") as lines:
        told = {name: int(value.split()[0]) / MIB for name, _, value in (line.partition(":") for line in lines)
                if name in ("VmRSS", "VmLck", "VmPin")}  # fmt: skip
    parts = [f"{name} {gib:.1f} GiB" for name, gib in told.items()]
    return ", ".join([*parts, f"in huge pages {in_huge_pages(pid):.1f} GiB"])


async def daemon(gib: int, device: str, host_dir: str) -> None:
    """Times of one that is started, has one worker, and is ended; gib: 0 without a tier; host_dir: "" in memory."""
    geometry, _ = SHAPES["2 MiB"]
    facts = NamespaceFacts("bench", "1", geometry, "sha256_cbor", root_digest()).to_proto()
    with Stack() as stack:
        socket = os.path.join(stack.folder, "d.sock")
        words = ["serve", "--role", "decode", "--name", "d", "--socket", socket, "--listen", "127.0.0.1:0"]
        words += ["--device", device, "--page-size", str(geometry.page_size), "--pool-bytes", "256MiB"]
        host = ["--host-bytes", f"{gib}GiB", *(["--host-dir", host_dir] if host_dir else [])]
        began = time.perf_counter()
        process = stack.start("d", [*words, *(host if gib else [])])
        stack.ready(process)
        ready = time.perf_counter()
        client = await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts, "bench", deadline_s=60.0)
        served = time.perf_counter()
        told = f"a tier of {gib} GiB: ready {ready - began:.2f} s, a worker has its pool {served - ready:.2f} s later"
        print(told + await asyncio.to_thread(growing, socket, served), flush=True)
        print(f"  {memory_of(process.popen.pid)}", flush=True)
        await client.close()


def growing(socket: str, began: float) -> str:
    """When the first part of its tier was there, and all; "" without one."""
    first = longest = 0.0
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        fetch(channel)  # connects
        while True:
            asked = time.perf_counter()
            side = fetch(channel).sides[0]
            host = side.host
            longest = max(longest, time.perf_counter() - asked)
            first = first or (time.perf_counter() - began) * (host.pages > 0)
            if side.tiers.host_stays:
                return f", {side.tiers.host_stays}"
            if host.pages >= host.asked_pages:
                break
            time.sleep(0.005)
    whole = time.perf_counter() - began
    if not host.pages:
        return ""
    return f", the first of it {first:.2f} s, all {whole:.2f} s later; statistics took {1e3 * longest:.0f} ms at most"


async def growth(name: str, nbytes: int, which: str, memory: GpuPoolMemory) -> None:
    geometry, _ = SHAPES[name]
    tier, cache = tier_of(memory, nbytes)
    longest, times, before = [0.0], [], taken()
    watching = asyncio.create_task(stalls(longest))
    began = time.perf_counter()
    await tier.grow(cache, bytes(32), lambda: times.append(time.perf_counter() - began))
    watching.cancel()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert cache.host is not None
    print(
        f"pages of {name}, {which}: first GiB {times[0]:.2f} s, {cache.host.pages * geometry.page_bytes / GIB:.0f} GiB "
        f"{times[-1]:.2f} s = {nbytes / GIB / times[-1]:.1f} GiB/s; loop stood still {1e3 * longest[0]:.1f} ms; "
        f"resident {resident / GIB:.1f} GiB, {in_huge_pages(os.getpid()):.1f} of them in huge pages, and "
        f"{taken() - before:.0f} MiB of the GPU's memory",
        flush=True,
    )
    began = time.perf_counter()
    await tier.close()
    print(f"  and let go in {time.perf_counter() - began:.2f} s", flush=True)


def new_memory(nbytes: int) -> mmap.mmap:
    """Taken GiB by GiB, by turns as a tier takes it and written by as many threads; new where nobody has had it since
    the machine began."""
    memory = populate.reserve(nbytes)
    spent: dict[str, list[float]] = {"taken": [], "written": []}
    with ThreadPoolExecutor(populate.THREADS) as threads:
        for number, part in enumerate(np.split(np.frombuffer(memory, np.uint8), nbytes // GIB)):
            name = ("taken", "written")[number % 2]
            began = time.perf_counter()
            if name == "taken":
                populate.populate(part.data)
            else:
                deque(threads.map(lambda piece: piece.fill(1), np.array_split(part, 4 * populate.THREADS)), 0)
            spent[name].append(time.perf_counter() - began)
    for name, times in spent.items():
        told = " ".join(f"{1 / seconds:.0f}" for seconds in times)
        print(f"new memory, every second GiB {name}: {len(times) / sum(times):.1f} GiB/s: {told}", flush=True)
    return memory


def allocated() -> float:
    """GiB/s of the driver's own pinned allocation."""
    began = time.perf_counter()
    memory = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - began
    del memory
    return 1 / seconds


def link() -> dict[str, float]:
    """GiB/s of one large copy each way, alone, and of both at once."""
    device = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(ways: tuple[int, ...]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    to, source = (host, device) if way == 0 else (device, host)
                    to[way].copy_(source[way], non_blocking=True)
        torch.cuda.synchronize()
        return 8 * len(ways) / (time.perf_counter() - began)

    rate((0, 1))
    return {"spills": rate((0,)), "restores": rate((1,)), "both": rate((0, 1))}


async def copies(name: str, ways: tuple[Any, ...], seconds: float, tier: HostTier, cache: Cache) -> float:
    """GiB/s of so many copies at a time in each of these directions."""
    geometry, each = SHAPES[name]
    assert cache.host is not None
    places = min(cache.pool.pages, cache.host.pages) // each // 2  # each direction has a half of both tiers
    moved, running, ended = 0, 0, asyncio.Event()
    numbers = itertools.count()
    until = time.perf_counter() + seconds

    def start(way: Any, place: int) -> None:
        nonlocal running
        running += 1
        half = (way == RESTORE) * places
        pages = range((half + place) * each, (half + place + 1) * each)
        rows = list(pages)
        copy = Copy(way, list(pages), rows, bytes(32 * each), bytes(32 * each), bytes(each))

        def done(*_: object) -> None:
            nonlocal moved, running
            running -= 1
            moved += each * geometry.page_bytes
            if time.perf_counter() < until:
                start(way, (place + UNDER_WAY) % places)
            elif running == 0:
                ended.set()

        tier.start(CopyStarted(next(numbers), bytes(32), cast(Any, copy)), done)

    began = time.perf_counter()
    for way in ways:
        for place in range(UNDER_WAY):
            start(way, place)
    await ended.wait()
    return moved / GIB / (time.perf_counter() - began)


async def _without(steps: Engine | None) -> float:
    """Milliseconds of a step without a copy, now: an engine's grow with what it computes."""
    if steps is None:
        return 0.0
    steps.told()
    await asyncio.sleep(1.0)
    return median(steps.told())


async def rates(seconds: float, peaks: dict[str, float], steps: Engine | None = None) -> None:
    for name, (geometry, _) in SHAPES.items():
        with contextlib.closing(pool_of(geometry)) as memory:
            tier, cache = tier_of(memory, TIER_BYTES)
            before = taken()
            await tier.grow(cache, bytes(32), lambda: None)
            for what, ways in WAYS.items():
                await copies(name, ways, 0.5, tier, cache)
                alone = await _without(steps)
                rate = await copies(name, ways, seconds, tier, cache)
                told = f"pages of {name}, {what}: {rate:.1f} GiB/s, {rate / peaks[what]:.2f} of the link"
                print(
                    told + (f"; a step {median(steps.told()):.2f} ms, {alone:.2f} before" if steps else ""), flush=True
                )
            used = {each: counts.bytes for each, counts in memory.copy_statistics().strategies.items() if counts.bytes}
            ways_used = ", ".join(f"{each} {nbytes / GIB:.0f} GiB" for each, nbytes in used.items())
            print(f"  {ways_used}; {taken() - before:.0f} MiB of the GPU's memory", flush=True)
            await tier.close()


async def beside_steps(seconds: float, peaks: dict[str, float], strategies: list[str], engine: str) -> None:
    with beside(engine) as steps:
        await asyncio.sleep(2.0)
        for strategy in strategies:
            os.environ[ENVIRONMENT] = strategy
            print(f"strategy {strategy}:", flush=True)
            await rates(seconds, peaks, steps)
        os.environ[ENVIRONMENT] = AUTO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=56)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--strategies", nargs="+", choices=(AUTO, *STRATEGIES), default=[AUTO, *STRATEGIES])
    parser.add_argument(
        "--buffers", nargs="+", type=buffers_of, default=[None], help="each way, or restores+spills, x their MiB"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of daemons that are started, with a tier and without")
    parser.add_argument("--new-memory", type=int, default=0, metavar="GIB", help="had before them, 2 or more")
    parser.add_argument("--device", default="cuda:0", help="of those daemons")
    parser.add_argument("--engine", choices=ENGINES, default="steps", help="which uses the GPU meanwhile")
    parser.add_argument("--host-dir", default="", metavar="DIR", help="of those daemons: their tier is a file")
    args = parser.parse_args()
    kept = new_memory(args.new_memory * GIB) if args.new_memory else None
    for gib in (0, args.gib) * args.rounds if "daemon" in args.only else ():
        asyncio.run(daemon(gib, args.device, args.host_dir))
    del kept
    if set(args.only) == {"daemon"}:
        return
    print(f"{torch.cuda.get_device_name()}; the driver allocates pinned memory at {allocated():.1f} GiB/s", flush=True)
    for name, (geometry, _) in SHAPES.items() if "growth" in args.only else ():
        for which in ("the first time", "again"):
            with contextlib.closing(pool_of(geometry)) as memory:
                asyncio.run(growth(name, args.gib * GIB, which, memory))
    peaks = link()
    print("the link: " + ", ".join(f"{name} {rate:.1f} GiB/s" for name, rate in peaks.items()), flush=True)
    if "copies" in args.only:
        asyncio.run(rates(args.seconds, peaks))
    if "beside" in args.only:
        for buffers in args.buffers:
            with staging(buffers):
                asyncio.run(beside_steps(args.seconds, peaks, args.strategies, args.engine))


if __name__ == "__main__":
    main()
