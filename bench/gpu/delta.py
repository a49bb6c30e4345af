"""Delta pages between two daemons on two GPUs: gather, NIXL WRITE and scatter, from the worker's report to Ready.

    python bench/gpu/delta.py [--devices cuda:0,cuda:1] [--gib 1]

Two `kvferry serve` processes and this one, which is both workers: it fills a prompt's pages in the prefill daemon's
pool, asks for them at the decode daemon, and compares every byte of both pools afterwards. Page ids are scattered on
both sides, and the pools are layer-major: a page is 64 fragments.

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
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import torch
from nodes import Options, bench
from rates import SCATTERED_LISTS, TLS, RatesActor, scattered_writes

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2

MIB = 1 << 20
LAYERS = 32
TENSORS = 2 * LAYERS
PAGE_SIZE = 16
HEAD_DIM = 128
FRAGMENTS_KIB = (8, 32, 64, 256, 2048)
WARM_UPS = 2
ROUNDS = 7
BATCH = 128  # small prompts at a time
POISON = 0x5A5A5A5A5A5A5A5A
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True, slots=True)
class Row:
    fragment_kib: int
    pages: int
    ready_s: float  # median
    messages_s: float
    stages: dict[str, float]  # mean seconds of a part


def facts(heads: int) -> common_pb2.NamespaceFacts:
    geometry = common_pb2.Geometry(layers=LAYERS, kv_heads=heads, head_dim=HEAD_DIM, dtype="bfloat16", tensors=2)
    return common_pb2.NamespaceFacts(
        model=f"bench-{heads}", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=bytes(32)
    )


class Side:
    """One daemon and this process as its worker."""

    def __init__(self, client: DaemonClient) -> None:
        self.client = client
        self.pages = client.welcome.pages
        memory = torch.as_tensor(client.pools.memories[0])
        self.tensor = memory.view(torch.int64).view(TENSORS, self.pages, -1)  # layer-major
        self.device = memory.device
        self.factors = factors_on(memory.device)


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
    stack: Stack, role: str, device: str, pool_bytes: int, words: list[str], args: argparse.Namespace
) -> Process:
    socket = os.path.join(stack.folder, f"{role}.sock")
    common = ["--name", role, "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE_SIZE)]
    gpu = ["--device", device, "--storage", "layer", "--pool-bytes", str(pool_bytes)]
    slots = ["--slot-bytes", args.slot_bytes, "--slots", str(args.slots)]
    return stack.start(role, ["serve", "--role", role, *common, *gpu, *slots, *words])


async def stages(address: str) -> dict[str, float]:
    """Mean seconds by stage."""
    async with grpc.aio.insecure_channel(address) as channel:
        stats = await cache_pb2_grpc.CacheStub(channel).Stats(cache_pb2.StatsRequest())
    return {stage.stage: stage.mean_ms / 1e3 for side in stats.sides for stage in side.admit_to_ready.stages}


async def measure(kib: int, args: argparse.Namespace) -> Row:
    heads = kib * 1024 // (PAGE_SIZE * HEAD_DIM * 2)
    page_bytes = TENSORS * kib * 1024
    pages = max(1, int(args.gib * (1 << 30)) // page_bytes)
    pool = 2 * pages + 16
    sending, receiving = args.devices.split(",")
    with Stack() as stack:
        first = daemon(stack, "prefill", sending, pool * page_bytes, [], args)
        address = stack.ready(first)
        second = daemon(stack, "decode", receiving, pool * page_bytes, ["--peer", f"prefill={address}"], args)
        decode_address = stack.ready(second)
        sides = []
        for role, name in ((common_pb2.ROLE_PREFILL, "prefill"), (common_pb2.ROLE_DECODE, "decode")):
            socket = os.path.join(stack.folder, f"{name}.sock")
            client = await DaemonClient.connect(socket, role, facts(heads), "bench", deadline_s=60)
            sides.append(Side(client))
        prefill, decode = sides
        try:
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
            for side in sides:
                await side.client.close()
        return Row(kib, pages, statistics.median(times), statistics.median(floor), found)


async def one(prefill: Side, decode: Side, pages: int, check: bool) -> float:
    name = RequestName(os.urandom(16), 1)
    digests, tokens = os.urandom(32 * pages), pages * PAGE_SIZE
    begun = await prefill.client.begin(name, digests=digests, tokens=tokens, tail_digest=b"", deadline_s=60.0)
    source = torch.tensor(begun.pages, device=prefill.tensor.device)
    prefill.tensor[:, source] = torch.randint(1 << 62, (pages,), device=source.device)[None, :, None]
    prefill.tensor[:, source] += torch.arange(prefill.tensor.shape[2], device=source.device)
    prefill.tensor[:, source] += torch.arange(TENSORS, device=source.device)[:, None, None] << 32
    if check:
        decode.tensor.fill_(POISON)
    synchronize(prefill.device, decode.device)
    admitted = await decode.client.admit(
        name, digests=digests, tokens=tokens, tail_digest=b"", prefill="prefill", max_new_tokens=1, deadline_s=60.0
    )
    await compute(prefill, decode)  # meanwhile the Ask arrives
    began = time.perf_counter()
    prefill.client.progress(name, tokens)
    prefill.client.aux(name, b"first")
    await decode.client.ready(name)
    took = time.perf_counter() - began
    if check:
        compare(prefill, decode, source, admitted.pages[:pages])
    await decode.client.abort(name, "measured")
    await prefill.client.ended(name, 30.0)
    return took


async def nothing_missing(prefill: Side, decode: Side) -> float:
    """Seconds from the report to Ready, when the decode daemon holds the whole prompt."""
    digests = os.urandom(32)
    for _ in range(2):
        name = RequestName(os.urandom(16), 1)
        ask = {"digests": digests, "tokens": PAGE_SIZE, "tail_digest": b"", "deadline_s": 30.0}
        await prefill.client.begin(name, **ask)  # type: ignore[arg-type]
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
    for _ in rounds_of_products(*(side.factors for side in sides)):
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
    for tensor in range(TENSORS):
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
    parser.add_argument("--fragments", default=",".join(map(str, FRAGMENTS_KIB)), metavar="KIB,...")
    parser.add_argument("--awake", action="store_true", help="keep the processors from being halted")
    parser.add_argument("--direct", choices=("on", "off"), default="on", help="also NIXL alone")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what follows is undone
    with contextlib.ExitStack() as ended:
        processors = f"{os.cpu_count()} processors, as they are"
        if args.awake:
            processors = ended.enter_context(awake())
        return measure_all(args, processors)


@contextlib.contextmanager
def awake() -> Iterator[str]:
    """Half of the processors for this thread and the processes that it starts, kept from being halted; says so."""
    before = os.sched_getaffinity(0)
    taken = set(sorted(before)[: max(1, len(before) // 2)])
    with contextlib.ExitStack() as ended:
        groups = ended.enter_context(without_autogroup())
        os.sched_setaffinity(0, taken)
        ended.callback(os.sched_setaffinity, 0, before)
        for processor in taken:
            ended.callback(halt, spinner(processor))
        yield f"{len(taken)} of {len(before)} processors, kept from being halted{groups}"


@contextlib.contextmanager
def without_autogroup() -> Iterator[str]:
    try:
        before = AUTOGROUP.read_text()
        AUTOGROUP.write_text(before)  # whether it can be
    except OSError as error:
        yield f" (autogroup is as it was: {error.strerror})"
        return
    try:
        AUTOGROUP.write_text("0")
        yield ""
    finally:
        AUTOGROUP.write_text(before)


def spinner(processor: int) -> subprocess.Popen[bytes]:
    """A process that takes what nobody else wants of a processor, until this one ends."""
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    spin = f"while os.getppid() == {os.getpid()}:\n    for _ in range(10**6): pass"
    code = f"import os\n{idle}\nos.sched_setaffinity(0, {{{processor}}})\n{spin}"
    return subprocess.Popen([sys.executable, "-c", code])


def halt(spinning: subprocess.Popen[bytes]) -> None:
    if spinning.poll() is not None:
        print(f"a process that was to spin has ended with status {spinning.returncode}", file=sys.stderr)
    spinning.kill()
    spinning.wait()


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
    sizes = [int(kib) for kib in args.fragments.split(",")]
    direct = args.direct == "on" and "cpu" not in args.devices
    writes = direct_writes(sizes, nbytes) if direct else {}
    print(
        "fragment   pages  ready ms  GB/s  messages  moved  GB/s  of peer copy, after products     wanted  NIXL  "
        "lists  stages of a part, mean us"
    )
    missed = 0
    for kib in sizes:
        row = asyncio.run(measure(kib, args))
        payload = row.pages * TENSORS * kib * 1024
        moved_s = row.ready_s - row.messages_s
        rate, wanted = payload / moved_s / 1e9, 250 if kib >= 64 else 227
        missed += rate < wanted
        alone = " ".join(f"{each / 1e9:5.0f}" for each in writes.get(kib, ()))
        shares = f"{rate * limit / payload * 1e9:13.0%} {rate * rested / payload * 1e9:15.0%}"
        shown = ", ".join(f"{name} {row.stages[name] * 1e6:.0f}" for name in ("gather", "write", "scatter", "publish"))
        print(
            f"{kib:5} KiB {row.pages:7} {row.ready_s * 1e3:9.2f} {payload / row.ready_s / 1e9:5.0f} "
            f"{row.messages_s * 1e3:9.2f} {moved_s * 1e3:6.2f} {rate:5.0f} {shares}   "
            f"{wanted} {'ok' if rate >= wanted else 'MISS':4} {alone:11}  {shown}",
            flush=True,
        )
    print("every byte of the first and the last round compared, and of pages that no round named")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
