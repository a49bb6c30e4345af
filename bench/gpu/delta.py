"""Delta pages between two daemons on two GPUs: gather, NIXL WRITE and scatter, from the worker's report to Ready.

    python bench/gpu/delta.py [--devices cuda:0,cuda:1] [--gib 1] [--pools daemon,engine] [--fragments 8,8x4]

Two `kvferry serve` processes and this one, which is both workers: it fills a prompt's pages in the prefill daemon's
pool, asks for them at the decode daemon, and compares every byte of both pools afterwards. Page ids are scattered on
both sides, and the pools are layer-major: a page is 64 fragments of so many KiB, or with 8x4 16, those of 8 layers, of
4 KiB: 64 KiB. With the pool `engine` both sides' pages are blocks of the workers', in a tensor for each fragment of a
page, which the requests name; what its messages take is taken from the other pool's row.

`ready` is the time from the report that all pages are computed to the Ready that the decode worker gets. Of it,
`messages` is what the same takes for a prompt of which no page is missing: gRPC from worker to daemon, daemon to
daemon and daemon to worker. `moved` is the rest, and GB/s is payload over it. The limit is one plain copy of as many
bytes from GPU to GPU, measured in the same run: right behind another one, and after products as here, when the link has
rested and takes some 0.2 ms to begin. `NIXL` is what one NIXL WRITE of as many scattered fragments does without
kvferry, from its post to DONE, as it comes and with NIXL_UCX_SGL_ENABLE=1 (`lists`). Both GPUs compute until the
report, as in a system at work: idle ones have slow clocks. --awake keeps the processors of a virtual machine from being
halted, as idle=poll does on a host: a halted one takes 0.1 to 0.3 ms to wake, which is paid some ten times a request.
It takes half of the processors for itself and the processes that it starts, and spins on these when nobody else wants
them: with all of them busy Linux looks for no better one when a process wakes, and the group scheduler of sessions
(autogroup, which is off meanwhile) would give the spinning ones shares; either costs a woken process up to a timer
tick, 4 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import numpy as np
import torch
from nodes import Options, bench
from rates import SCATTERED_LISTS, TLS, RatesActor, scattered_writes

from kvferry.client.client import DaemonClient
from kvferry.client.engine_blocks import make_block_files
from kvferry.client.engine_pools import EnginePools
from kvferry.client.requests import RequestName
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.gpu_blocks import registered
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry

sys.path.insert(0, str(Path(__file__).parent.parent))
from awake import awake

MIB = 1 << 20
LAYERS = 32
PAGE_SIZE = 16
HEAD_DIM = 128
FRAGMENTS = "8,32,64,256,2048"
WARM_UPS = 2
ROUNDS = 7
BATCH = 128  # small prompts at a time
POISON = 0x5A5A5A5A5A5A5A5A


@dataclass(frozen=True, slots=True)
class Shape:
    """A page: a fragment of so many KiB for each layer's keys, and for its values."""

    layers: int
    kib: int

    @staticmethod
    def of(word: str) -> Shape:
        """ "8x4": layers and KiB, "32": KiB."""
        layers, _, kib = word.rpartition("x")
        return Shape(int(layers or LAYERS), int(kib))

    @property
    def tensors(self) -> int:
        return 2 * self.layers

    @property
    def page_bytes(self) -> int:
        return self.tensors * self.kib * 1024


@dataclass(frozen=True, slots=True)
class Row:
    pool: str
    pages: int
    ready_s: float  # median
    messages_s: float
    stages: dict[str, float]  # mean seconds of a part


def facts(shape: Shape, pool: str) -> common_pb2.NamespaceFacts:
    heads = shape.kib * 1024 // (PAGE_SIZE * HEAD_DIM * 2)
    geometry = common_pb2.Geometry(layers=shape.layers, kv_heads=heads, head_dim=HEAD_DIM, dtype="bfloat16", tensors=2)
    if pool == "engine":
        geometry.layout, geometry.page_size = common_pb2.LAYOUT_ENGINE, PAGE_SIZE
    made = common_pb2.NamespaceFacts(
        model=f"bench-{heads}", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=bytes(32)
    )
    if pool == "engine":
        made.engine_layout = f"{shape.tensors} tensors of blocks"
    return made


class Side:
    """One daemon and this process as its worker; memory: its blocks, where the pool is its own."""

    def __init__(self, client: DaemonClient, memory: torch.Tensor | None, tensors: int) -> None:
        self.client = client
        self.pages = client.welcome.pages
        self.in_blocks = memory is not None
        if memory is None:
            memory = torch.as_tensor(client.pools.memories[0])
        self.tensor = memory.view(torch.int64).view(tensors, self.pages, -1)  # layer-major
        self.device = memory.device
        self.products = [factors_on(memory.device)]

    def blocks(self, pages: int) -> tuple[int, ...]:
        """Any of its own, to be named; none where the daemon gives pages."""
        return tuple(random.sample(range(self.pages), pages)) if self.in_blocks else ()

    async def let_go(self, name: RequestName) -> None:
        await (self.client.release if self.in_blocks else self.client.abort)(name, "measured")


async def connected(stack: Stack, role: str, device: str, shape: common_pb2.NamespaceFacts, blocks: int) -> Side:
    """blocks: of the worker's own memory; 0: the pool is the daemon's."""
    socket = os.path.join(stack.folder, f"{role}.sock")
    as_role = common_pb2.ROLE_PREFILL if role == "prefill" else common_pb2.ROLE_DECODE
    memory, own = None, None
    if blocks:
        geometry = KVGeometry.from_proto(shape.geometry)
        memory, own = own_blocks(geometry, blocks, torch.device(device))
    client = await DaemonClient.connect(socket, as_role, shape, "bench", deadline_s=60, own=own)
    return Side(client, memory, 2 * shape.geometry.layers)


def own_blocks(geometry: KVGeometry, blocks: int, device: torch.device) -> tuple[torch.Tensor, EnginePools]:
    """As an engine has them: a tensor of all blocks for each layer's keys, and for its values."""
    tensors = 2 * geometry.layers
    if device.type == "cpu":
        own = make_block_files(geometry, PAGE_SIZE, blocks, [tensors], "/dev/shm")
        return torch.as_tensor(own.pools.memories[0]), own
    nbytes = geometry.page_bytes // tensors
    memory = torch.empty(tensors * blocks * nbytes, dtype=torch.uint8, device=device)
    bases = memory.data_ptr() + np.arange(tensors, dtype=np.int64) * blocks * nbytes
    order = np.repeat(np.arange(PAGE_SIZE, dtype=np.int32), nbytes // PAGE_SIZE)
    places = BlockMap(bases, np.full(tensors, nbytes, np.int64), nbytes, blocks, PAGE_SIZE, 1, order)
    return memory, registered(places, geometry, device.index)


async def scatter(prefill: Side, decode: Side, pages: int) -> None:
    """Fills both pools with prompts of one page, the least recently used of which lie here and there: what a large
    prompt evicts for itself are scattered pages."""
    rng = random.Random(1)
    batch = max(1, min(BATCH, pages // 4))  # a daemon lets prompts that nobody asked for have half of its pool
    for start in range(0, pages, batch):
        names = [RequestName(os.urandom(16), 1) for _ in range(min(batch, pages - start))]
        asks = [{"digests": os.urandom(32), "tokens": PAGE_SIZE, "tail_digest": b"", "deadline_s": 30.0} for _ in names]
        begin, admit = prefill.client.begin, partial(decode.client.admit, prefill="prefill", max_new_tokens=1)
        for call in (begin, admit):
            await asyncio.gather(*(call(name, **ask) for name, ask in zip(names, asks, strict=True)))
        rng.shuffle(names)
        for name in names:
            prefill.client.progress(name, PAGE_SIZE)
            prefill.client.aux(name, b"first")
        await asyncio.gather(*(decode.client.ready(name) for name in names))
        await asyncio.gather(*(decode.client.finish(name, tokens=PAGE_SIZE, digests=b"") for name in names))
        await asyncio.gather(*(prefill.client.ended(name, 30.0) for name in names))


def daemon(
    stack: Stack, role: str, device: str, pool: list[str], words: list[str], args: argparse.Namespace
) -> Process:
    socket = os.path.join(stack.folder, f"{role}.sock")
    common = ["--name", role, "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE_SIZE)]
    gpu = ["--device", device, *pool]
    slots = ["--slot-bytes", args.slot_bytes, "--slots", str(args.slots)]
    return stack.start(role, ["serve", "--role", role, *common, *gpu, *slots, *words])


async def stages(address: str) -> dict[str, float]:
    """Mean seconds by stage."""
    async with grpc.aio.insecure_channel(address) as channel:
        stats = await cache_pb2_grpc.CacheStub(channel).Stats(cache_pb2.StatsRequest())
    return {stage.stage: stage.mean_ms / 1e3 for side in stats.sides for stage in side.admit_to_ready.stages}


async def measure(page: Shape, pool: str, messages_s: float, args: argparse.Namespace) -> Row:
    """messages_s: where the pool's row has to be told."""
    pages = max(1, int(args.gib * (1 << 30)) // page.page_bytes)
    there = 2 * pages + 16
    own = ["--storage", "layer", "--pool-bytes", str(there * page.page_bytes)]
    flags = ["--pool", "engine"] if pool == "engine" else own
    sending, receiving = args.devices.split(",")
    with Stack() as stack:
        first = daemon(stack, "prefill", sending, flags, [], args)
        address = stack.ready(first)
        second = daemon(stack, "decode", receiving, flags, ["--peer", f"prefill={address}"], args)
        decode_address = stack.ready(second)
        shape, blocks = facts(page, pool), there if pool == "engine" else 0
        prefill = await connected(stack, "prefill", sending, shape, blocks)
        decode = await connected(stack, "decode", receiving, shape, blocks)
        try:
            floor = [messages_s]
            if not blocks:
                await scatter(prefill, decode, 2 * pages)
                floor = [await nothing_missing(prefill, decode) for _ in range(ROUNDS)]
            times = []
            for number in range(WARM_UPS + ROUNDS):
                took = await one(prefill, decode, pages, check=number in (0, WARM_UPS + ROUNDS - 1))
                if number >= WARM_UPS:
                    times.append(took)
            found = await stages(decode_address) | await stages(address)
        except BaseException:
            print(first.tail(30), second.tail(30), sep="\n", file=sys.stderr)
            raise
        finally:
            for side in (prefill, decode):
                await side.client.close()
        return Row(pool, pages, statistics.median(times), statistics.median(floor), found)


async def one(prefill: Side, decode: Side, pages: int, check: bool) -> float:
    name = RequestName(os.urandom(16), 1)
    digests, tokens = os.urandom(32 * pages), pages * PAGE_SIZE
    ask = {"digests": digests, "tokens": tokens, "tail_digest": b"", "deadline_s": 60.0}
    sent, received = prefill.blocks(pages), decode.blocks(pages)
    prefill.client.begin(name, blocks=sent, **ask)  # type: ignore[arg-type]
    begun = await prefill.client.begun(name)
    source = torch.tensor(sent or begun.pages, device=prefill.tensor.device)
    prefill.tensor[:, source] = torch.randint(1 << 62, (pages,), device=source.device)[None, :, None]
    prefill.tensor[:, source] += torch.arange(prefill.tensor.shape[2], device=source.device)
    prefill.tensor[:, source] += torch.arange(len(prefill.tensor), device=source.device)[:, None, None] << 32
    if check:
        decode.tensor.fill_(POISON)
    synchronize(prefill.device, decode.device)
    admit = partial(decode.client.admit, prefill="prefill", max_new_tokens=1, blocks=received)
    admitted = await admit(name, **ask)  # type: ignore[arg-type]
    await compute(prefill, decode)  # meanwhile the Ask arrives
    began = time.perf_counter()
    prefill.client.progress(name, tokens)
    prefill.client.aux(name, b"first")
    await decode.client.ready(name)
    took = time.perf_counter() - began
    if check:
        compare(prefill, decode, source, received or admitted.pages[:pages])
    await decode.let_go(name)
    await prefill.client.ended(name, 30.0)
    return took


async def nothing_missing(prefill: Side, decode: Side) -> float:
    """Seconds from the report to Ready, when the decode daemon holds the whole prompt."""
    digests = os.urandom(32)
    for _ in range(2):
        name = RequestName(os.urandom(16), 1)
        ask = {"digests": digests, "tokens": PAGE_SIZE, "tail_digest": b"", "deadline_s": 30.0}
        prefill.client.begin(name, **ask)  # type: ignore[arg-type]
        await prefill.client.begun(name)
        await decode.client.admit(name, prefill="prefill", max_new_tokens=1, **ask)  # type: ignore[arg-type]
        await compute(prefill, decode)
        began = time.perf_counter()
        prefill.client.progress(name, PAGE_SIZE)
        prefill.client.aux(name, b"first")
        ready = await decode.client.ready(name)
        took = time.perf_counter() - began
        await decode.client.finish(name, tokens=PAGE_SIZE, digests=b"")
        await prefill.client.ended(name, 30.0)
    assert ready.delta_pages == 0, ready
    return took


async def compute(*sides: Side) -> None:
    """Some 50 ms of matrix products on each GPU."""
    for _ in rounds_of_products(*(factors for side in sides for factors in side.products)):
        await asyncio.sleep(0)


def factors_on(device: torch.device) -> list[torch.Tensor]:
    return [torch.ones(4096, 4096, dtype=torch.bfloat16, device=device) for _ in range(2)]


def rounds_of_products(*factors: list[torch.Tensor]) -> Iterator[None]:
    """A product on each GPU a round, for 50 ms; none on a CPU."""
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        for pair in factors:
            if pair[0].is_cuda:
                torch.mm(*pair)
        synchronize(*(pair[0].device for pair in factors))
        yield


def synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def compare(prefill: Side, decode: Side, source: torch.Tensor, pages: tuple[int, ...]) -> None:
    target = torch.tensor(pages, device=decode.tensor.device)
    for tensor in range(len(prefill.tensor)):
        moved = decode.tensor[tensor, target].to(source.device)
        if not torch.equal(moved, prefill.tensor[tensor, source]):
            raise AssertionError(f"tensor {tensor}: the pages differ")
    held = torch.ones(decode.pages, dtype=torch.bool, device=target.device)
    held[target] = False
    span = int(target.max() - target.min()) + 1
    assert len(pages) < 16 or span > 1.3 * len(pages), f"{len(pages)} pages within {span}: not scattered"
    if not bool((decode.tensor[:, held] == POISON).all()):
        others = int((decode.tensor[:, held] != POISON).sum())
        raise AssertionError(f"{others} words of pages that nobody named have changed")


def peer_copies(devices: str, nbytes: int) -> tuple[float, float]:
    """Seconds of a plain copy of so many bytes, medians of 10: one right behind the other, and each after products."""
    sending, receiving = (torch.device(text) for text in devices.split(","))
    source = torch.empty(nbytes, dtype=torch.uint8, device=sending)
    target = torch.empty(nbytes, dtype=torch.uint8, device=receiving)
    factors = [factors_on(device) for device in (sending, receiving)]

    def copy() -> float:
        synchronize(sending, receiving)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(sending, receiving)
        return time.perf_counter() - began

    def copy_after_products() -> float:
        for _ in rounds_of_products(*factors):
            pass
        return copy()

    at_once, after = (statistics.median([way() for _ in range(12)][2:]) for way in (copy, copy_after_products))
    return at_once, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0,cuda:1", metavar="FROM,TO")
    parser.add_argument("--gib", type=float, default=1.0, help="of a prompt's pages")
    parser.add_argument("--slot-bytes", default="64MiB")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--fragments", default=FRAGMENTS, metavar="KIB,LAYERSxKIB,...")
    parser.add_argument("--pools", default="daemon", metavar="daemon,engine", help="whose they are, in this order")
    parser.add_argument("--awake", action="store_true", help="keep the processors from being halted")
    parser.add_argument("--direct", choices=("on", "off"), default="on", help="also NIXL alone")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what follows is undone
    with contextlib.ExitStack() as ended:
        processors = f"{os.cpu_count()} processors, as they are"
        if args.awake:
            processors = ended.enter_context(awake())
        return measure_all(args, processors)


def direct_writes(sizes_kib: list[int], nbytes: int) -> dict[int, tuple[float, float]]:
    """Bytes a second of NIXL alone by fragment size, as it comes and with lists of fragments."""
    tables = []
    for environment in ({}, SCATTERED_LISTS):
        with bench(Options(TLS, tempfile.mkdtemp(prefix="delta-"), 1), RatesActor) as on, quiet():
            tables.append(scattered_writes(on, sizes_kib, nbytes, **environment))
    return {kib: (tables[0][kib].rate, tables[1][kib].rate) for kib in sizes_kib}


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())


def measure_all(args: argparse.Namespace, processors: str) -> int:
    """The table; 1 where a row misses what is wanted."""
    nbytes = int(args.gib * (1 << 30))
    limit, rested = peer_copies(args.devices, nbytes)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    print(f"{gpu}, torch {torch.__version__}, {args.slots} slots of {args.slot_bytes}")
    print(
        f"plain peer copy of {args.gib:g} GiB: {limit * 1e3:.2f} ms, {nbytes / limit / 1e9:.0f} GB/s; after 50 ms of "
        f"products: {rested * 1e3:.2f} ms, {nbytes / rested / 1e9:.0f} GB/s"
    )
    print(processors)
    shapes = [Shape.of(word) for word in args.fragments.split(",")]
    direct = args.direct == "on" and "cpu" not in args.devices
    writes = direct_writes(list({shape.kib: None for shape in shapes}), nbytes) if direct else {}
    print(
        "pool    fragments of a page   pages  ready ms  GB/s  messages  moved  GB/s  of peer copy, after products     "
        "wanted  NIXL  lists  stages of a part, mean us"
    )
    missed = 0
    messages: dict[Shape, float] = {}
    for shape, pool in itertools.product(shapes, args.pools.split(",")):
        row = asyncio.run(measure(shape, pool, messages.get(shape, 0.0), args))
        messages[shape] = row.messages_s
        payload = row.pages * shape.page_bytes
        moved_s = row.ready_s - row.messages_s
        rate, wanted = payload / moved_s / 1e9, 250 if shape.kib >= 64 else 227
        missed += rate < wanted
        alone = " ".join(f"{each / 1e9:5.0f}" for each in writes.get(shape.kib, ()))
        shares = f"{rate * limit / payload * 1e9:13.0%} {rate * rested / payload * 1e9:15.0%}"
        shown = ", ".join(f"{name} {row.stages[name] * 1e6:.0f}" for name in ("gather", "write", "scatter", "publish"))
        print(
            f"{row.pool:7} {shape.tensors:8} x {shape.kib:4} KiB {row.pages:7} {row.ready_s * 1e3:9.2f} "
            f"{payload / row.ready_s / 1e9:5.0f} "
            f"{row.messages_s * 1e3:9.2f} {moved_s * 1e3:6.2f} {rate:5.0f} {shares}   "
            f"{wanted} {'ok' if rate >= wanted else 'MISS':4} {alone:11}  {shown}",
            flush=True,
        )
    print("every byte of the first and the last round compared, and of pages that no round named")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
