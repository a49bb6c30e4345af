"""Where the time of an admit-to-ready goes: two daemons as processes on loopback, real gRPC, real NIXL, no model.

This process plays both workers, and does nothing of what a worker would compute: the prompt's pages are filled, and
progress and aux are with the prefill daemon, before the decode worker admits. Every prompt is `--history` pages that
the decode daemon holds, and a delta; each delta page that arrives is checked. Daemons and workers have the same
monotonic clock, and the daemons report durations by stage (Cache.Stats).

Rows, milliseconds; all but "of it" follow each other and sum to the total:
  worker gRPC   Admit to the daemon and Ready back, on the worker's stream
  queue         until the request is admitted
  match         the decode core's step: check, match, lock, reserve (evicting when the pool is full), enter the tree
  ask           Ask over gRPC: half of the time from Ask to the aux blob; for a full hit all of it, there and back
  rendezvous    at the prefill daemon, from the Ask to the first gather
  gather        pool pages to a slot
  nixl          from the order to the courier until the decode daemon has its notification; "of it, to done": until the
                prefill daemon knows that the write is done
  scatter       slot to pool pages
  publish       the decode core's step that follows: pages readable, Ready
  rest          of the daemon's own admit-to-ready, in no stage

Limits, measured between the requests of the same run: "stream" is a round trip on the worker's own stream that asks
for nothing (Grow by no page), "health" an empty unary call to the prefill daemon over TCP, "memcpy" the same bytes in
one piece by one thread, "courier" a write of the same size by a pair of couriers that nobody else uses. "lookup" is
for comparison only: a unary Cache.Lookup of the history on the Unix socket.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from numpy.typing import NDArray

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.core.counters import RECENT
from kvferry.proto import cache_pb2, common_pb2
from kvferry.proto.cache_pb2_grpc import CacheStub
from kvferry.radix import root_digest
from kvferry.transfer.courier.link import CourierConfig, CourierLink
from kvferry.transfer.courier.messages import Connected, CourierEvent, Notification, PostDone
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.protocol.slots import HEADER_BYTES

PAGE_SIZE = 64
LAYER_KIB = 16  # of a page: 2 tensors x 64 tokens x 2 heads x 32 x bfloat16
SLOT_BYTES = 8 << 20
SECONDS = 60.0  # for anything
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

# How often a stage is recorded, by which its mean becomes a sum.
PER_REQUEST = ("queue", "match", "pages", "aux", "first_token")
PER_TRANSFER = ("first_part", "rendezvous")
PER_PART = ("gather", "write", "scatter", "publish")


class Limit(NamedTuple):
    name: str
    baseline: str
    times: float = 1.0


# Stage -> what bounds it; a full hit's ask goes both ways.
LIMITS = {
    "worker gRPC": Limit("stream", "stream"),
    "ask": Limit("health / 2", "health", 0.5),
    "gather": Limit("memcpy", "memcpy"),
    "nixl": Limit("courier", "courier"),
    "scatter": Limit("memcpy", "memcpy"),
}
FULL_HIT_LIMITS = {"worker gRPC": Limit("stream", "stream"), "ask": Limit("health", "health")}
STAGES = ("worker gRPC", "queue", "match", "ask", "rendezvous", "gather", "nixl", "scatter", "publish", "rest")
FULL_HIT_STAGES = ("worker gRPC", "queue", "match", "ask", "rest")
OF_IT = "  of it, to done"


@dataclass
class Samples:
    """Milliseconds by name, one entry a repetition."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **named: float) -> None:
        for name, value in named.items():
            self.values.setdefault(name, []).append(value)

    def quantile(self, name: str, q: float) -> float:
        return float(np.percentile(self.values[name], q))

    def mean(self, name: str) -> float:
        return float(np.mean(self.values[name]))


class CourierPair:
    """Two couriers that nobody else uses; `write` gives the milliseconds until the notification is here."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[CourierEvent] = asyncio.Queue()
        self._posts = 0

    async def start(self) -> CourierPair:
        configs = [CourierConfig(SLOT_BYTES, receive_slots=n, send_slots=1 - n) for n in (0, 1)]
        self.links = [await CourierLink.start(config, self._events.put_nowait, SECONDS) for config in configs]
        self._sender, self._receiver = self.links
        for link, other, slots in ((self._sender, self._receiver, 1), (self._receiver, self._sender, 0)):
            link.connect(other.metadata, other.receive_address, slots, SLOT_BYTES)
        for _ in self.links:
            assert isinstance(await self._next(), Connected)
        return self

    async def write(self, nbytes: int) -> float:
        self._posts += 1
        begin = time.monotonic()
        self._receiver.expect(1)
        self._sender.post(self._posts, 0, 0, nbytes, bytes(28))
        elapsed = 0.0
        for _ in range(2):  # in either order
            event = await self._next()
            assert isinstance(event, Notification | PostDone), event
            if isinstance(event, Notification):
                elapsed = time.monotonic() - begin
        self._receiver.expect(0)
        return elapsed * 1e3

    async def stop(self) -> None:
        for link in self.links:
            await link.stop(SECONDS)

    async def _next(self) -> CourierEvent:
        return await asyncio.wait_for(self._events.get(), SECONDS)


class Daemons:
    """The two daemons, a worker's session with each, and their statistics."""

    def __init__(self, stack: Stack, page_kib: int, pool_bytes: int) -> None:
        def start(role: str, *words: str) -> Process:
            common = ["--name", role, "--listen", "127.0.0.1:0", "--socket", self.socket(role)]
            sizes = ["--page-size", str(PAGE_SIZE), "--pool-bytes", str(pool_bytes), "--slot-bytes", str(SLOT_BYTES)]
            return stack.start(role, ["serve", "--role", role, *common, *sizes, *words])

        self._folder = stack.folder
        self._addresses = {"prefill": stack.ready(start("prefill"))}
        decode = start("decode", "--peer", f"prefill={self._addresses['prefill']}")
        self._addresses["decode"] = stack.ready(decode)
        geometry = KVGeometry(page_kib // LAYER_KIB, 2, 32, "bfloat16", PAGE_SIZE)
        assert geometry.page_bytes == page_kib << 10
        self.facts = NamespaceFacts("control-path", "1", geometry, "sha256_cbor", root_digest())
        self.transfers = 0  # with pages

    def socket(self, role: str) -> str:
        return os.path.join(self._folder, f"{role}.sock")

    async def connect(self) -> None:
        facts = self.facts.to_proto()
        self.prefill = await DaemonClient.connect(self.socket("prefill"), common_pb2.ROLE_PREFILL, facts, "bench")
        self.decode = await DaemonClient.connect(self.socket("decode"), common_pb2.ROLE_DECODE, facts, "bench")
        self._channels = [grpc.aio.insecure_channel(a, options=CHANNEL_OPTIONS) for a in self._addresses.values()]
        self._channels.append(grpc.aio.insecure_channel(f"unix:{self.socket('decode')}", options=CHANNEL_OPTIONS))
        self._stats = [CacheStub(channel) for channel in self._channels[:2]]
        self._health = HealthStub(self._channels[0])
        self._lookup = CacheStub(self._channels[2])

    async def close(self) -> None:
        await self.decode.close()
        await self.prefill.close()
        for channel in self._channels:
            await channel.close(None)

    async def health(self) -> None:
        await self._health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)

    async def lookup(self, digests: bytes) -> None:
        request = cache_pb2.LookupRequest(namespace_id=self.facts.id, digests=digests)
        await self._lookup.Lookup(request, timeout=SECONDS)

    async def sums(self) -> dict[str, float]:
        """Stage -> milliseconds since the start, from the means of windows that are not full yet."""
        sums = dict.fromkeys((*PER_REQUEST, *PER_TRANSFER, *PER_PART), 0.0)
        for stub in self._stats:
            reply: cache_pb2.StatsReply = await stub.Stats(cache_pb2.StatsRequest(), timeout=SECONDS)
            side = reply.sides[0]
            for stage in side.admit_to_ready.stages:
                if stage.stage in PER_REQUEST:
                    count = side.admit_to_ready.count
                else:
                    count = side.transfers.parts if stage.stage in PER_PART else self.transfers
                assert count <= RECENT, "the window of the daemon's means is full"
                sums[stage.stage] = stage.mean_ms * count
        return sums

    async def prefilled(self, digests: bytes, delta: int, fill: int) -> RequestName:
        """A request that the prefill daemon has all of: pages, progress, aux."""
        name, tokens = RequestName(os.urandom(16), 1), len(digests) // 32 * PAGE_SIZE
        self.prefill.begin(name, digests=digests, tokens=tokens, tail_digest=b"", deadline_s=SECONDS)
        begun = await self.prefill.begun(name)
        pages_of(self.prefill)[list(begun.pages[len(begun.pages) - delta :])] = fill
        self.prefill.progress(name, tokens)
        self.prefill.aux(name, b"first token")
        # Messages are taken in order: once a later one is answered, these were.
        later = RequestName(os.urandom(16), 1)
        self.prefill.begin(later, digests=b"", tokens=1, tail_digest=bytes(32), deadline_s=SECONDS)
        await self.prefill.begun(later)
        await self.prefill.abort(later, "it was only to be answered")
        return name

    async def request(self, digests: bytes, delta: int, fill: int, samples: Samples) -> None:
        """One admit-to-ready of a prompt whose last `delta` pages are new, and what its stages took."""
        tokens = len(digests) // 32 * PAGE_SIZE
        name = await self.prefilled(digests, delta, fill)
        before = await self.sums()
        begin = time.monotonic()
        admitted = await self.decode.admit(
            name,
            digests=digests,
            tokens=tokens,
            tail_digest=b"",
            prefill="prefill",
            max_new_tokens=1,
            deadline_s=SECONDS,
        )
        ready = await self.decode.ready(name)
        total = (time.monotonic() - begin) * 1e3
        self.transfers += delta > 0
        assert ready.delta_pages == delta, f"{ready.delta_pages} pages came, not {delta}"
        came = pages_of(self.decode)[list(admitted.pages[len(admitted.pages) - delta :])]
        assert bool((came == fill).all()), "a wrong byte came"
        begin = time.monotonic()
        await self.decode.grow(name, tokens)
        samples.add(stream=(time.monotonic() - begin) * 1e3)
        await self.decode.finish(name, tokens=tokens, digests=b"")
        await self.prefill.ended(name, SECONDS)
        after = await self.sums()
        spent = {stage: after[stage] - before[stage] for stage in after}
        _attribute(samples, total, ready.elapsed_us / 1e3, spent, delta)


def pages_of(client: DaemonClient) -> NDArray[np.uint8]:
    """The pool's bytes, (pages, page_bytes)."""
    memory = client.pools.memories[0]
    assert isinstance(memory, np.ndarray)
    return memory.reshape(client.pools.pages, client.geometry.page_bytes)


def _attribute(samples: Samples, total: float, elapsed: float, spent: dict[str, float], delta: int) -> None:
    round_trip = spent["first_token"] - spent["match"]
    stages = {"worker gRPC": total - elapsed - spent["publish"], "queue": spent["queue"], "match": spent["match"]}
    if delta:
        stages["ask"] = (round_trip - spent["rendezvous"]) / 2
        stages["rendezvous"], stages["gather"] = spent["rendezvous"], spent["gather"]
        stages["nixl"] = spent["first_part"] - stages["ask"] - spent["rendezvous"] - spent["gather"]
        stages["scatter"], stages["publish"] = spent["scatter"], spent["publish"]
    else:
        stages["ask"] = round_trip
    stages["rest"] = total - sum(stages.values())
    samples.add(**stages, total=total)
    if delta:
        samples.add(**{OF_IT: spent["write"]})


def memcpy_ms(source: NDArray[np.uint8], ring: NDArray[np.uint8], index: int, nbytes: int) -> float:
    """Into another part of the ring each time, since pool pages are seldom in a processor's cache."""
    start = index * nbytes % (len(ring) - nbytes)
    begin = time.monotonic()
    ring[start : start + nbytes] = source[:nbytes]
    return (time.monotonic() - begin) * 1e3


async def timed_ms(call: Callable[[], Awaitable[None]]) -> float:
    begin = time.monotonic()
    await call()
    return (time.monotonic() - begin) * 1e3


async def measure(args: argparse.Namespace, stack: Stack) -> dict[int, Samples]:
    """Delta pages -> samples."""
    daemons = Daemons(stack, args.page_kib, args.pool_mib << 20)
    await daemons.connect()
    couriers = await CourierPair().start()
    source, ring = np.ones(SLOT_BYTES, np.uint8), np.ones(128 << 20, np.uint8)
    history = os.urandom(32 * args.history)
    results: dict[int, Samples] = {}
    try:
        await daemons.request(history, args.history, 1, Samples())
        for delta in args.deltas:
            warm, samples = Samples(), Samples()
            nbytes = delta * args.page_kib << 10
            for i in range(args.warm_up + args.repetitions):
                into = samples if i >= args.warm_up else warm
                digests = history + os.urandom(32 * delta)
                await daemons.request(digests, delta, i % 255 + 1, into)
                into.add(health=await timed_ms(daemons.health))
                into.add(lookup=await timed_ms(lambda: daemons.lookup(history)))
                if delta:
                    into.add(memcpy=memcpy_ms(source, ring, i, nbytes))
                    into.add(courier=await couriers.write(nbytes + HEADER_BYTES))
            results[delta] = samples
    finally:
        await couriers.stop()
        await daemons.close()
    return results


def print_case(delta: int, samples: Samples, page_kib: int, history: int) -> None:
    what = f"{delta}-page delta" if delta else "full hit"
    print(f"\n{what}: {history} pages matched, {delta} moved ({delta * page_kib} KiB)")
    print("stage                  p50       p99   share   limit            p50  p50 / limit")
    limits, stages = (LIMITS, STAGES) if delta else (FULL_HIT_LIMITS, FULL_HIT_STAGES)
    bound, total = 0.0, samples.mean("total")
    for stage in stages:
        line = _line(samples, stage, total)
        if (limit := limits.get(stage)) is not None:
            best = samples.quantile(limit.baseline, 50) * limit.times
            bound += best
            line += f"   {limit.name:<10} {best:9.3f}  {samples.quantile(stage, 50) / best:11.1f}"
        print(line)
        if stage == "nixl":
            print(_line(samples, OF_IT, total))
    ratio = samples.quantile("total", 50) / bound
    print(_line(samples, "total", total) + f"   {'sum':<10} {bound:9.3f}  {ratio:11.1f}")
    print(f"beside: lookup    {samples.quantile('lookup', 50):9.3f} {samples.quantile('lookup', 99):9.3f}")


def _line(samples: Samples, name: str, total: float) -> str:
    p50, p99, share = samples.quantile(name, 50), samples.quantile(name, 99), samples.mean(name) / total
    # Adding 0.0 takes the sign from a zero.
    return f"{name:<17} {round(p50, 3) + 0.0:9.3f} {round(p99, 3) + 0.0:9.3f}  {round(share, 2) + 0.0:5.0%}"


def machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=250, help="of each delta (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=30, help="not counted, of each delta (default %(default)s)")
    parser.add_argument("--deltas", type=int, nargs="+", default=[0, 1, 100], metavar="PAGES")
    parser.add_argument("--history", type=int, default=100, metavar="PAGES", help="that are held (default %(default)s)")
    parser.add_argument("--page-kib", type=int, default=64, metavar="KIB", help=f"a multiple of {LAYER_KIB}")
    parser.add_argument("--pool-mib", type=int, default=128, metavar="MIB", help="of each daemon (default %(default)s)")
    args = parser.parse_args()
    requests = 1 + len(args.deltas) * (args.warm_up + args.repetitions)
    if args.repetitions < 1 or args.warm_up < 0 or requests > RECENT:
        parser.error(f"these are {requests} requests; at most {RECENT}: the daemons' means are of so many")
    if args.page_kib < LAYER_KIB or args.page_kib % LAYER_KIB or min(args.deltas) < 0 or args.history < 1:
        parser.error(f"--page-kib must be a multiple of {LAYER_KIB}, --deltas not negative, --history at least 1")
    if (max(*args.deltas, args.history) * args.page_kib << 10) + HEADER_BYTES > SLOT_BYTES:
        parser.error(f"delta and history must each fit into a slot of {SLOT_BYTES >> 20} MiB, or stages overlap")
    print(f"python bench/control_path.py {shlex.join(sys.argv[1:])}".rstrip())
    print(machine())
    before = os.getloadavg()[0]
    with Stack() as stack:
        results = asyncio.run(measure(args, stack))
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after; milliseconds;", end=" ")
    print(f"{args.repetitions} requests a table after {args.warm_up}; pages of {args.page_kib} KiB")
    for delta, samples in results.items():
        print_case(delta, samples, args.page_kib, args.history)


if __name__ == "__main__":
    main()
