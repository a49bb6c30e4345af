"""Parts from one daemon's GPU to another's: pages -> slot -> NIXL WRITE -> slot -> pages, through couriers and links.

Needs two GPUs that reach each other. Each daemon is a process with one event loop, as in a deployment; credits go back
over a socket. The parts are of scattered pages whose rows are 2 MiB of fragments of the given size.

wire: slots only, nothing is gathered or scattered. whole: with both, and the sum of every part's bytes compared in a
round of its own. hop: from the order to post to the notification in the other daemon's event loop. plain: a loop of
copies between the same GPUs in the same run.

    python bench/gpu/slots.py [--mib 1024] [--slots 16] [--slot-mib 64]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import socket
import statistics
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from driver import Gpu, Memory

from kvferry._core import GpuCopy, GpuCopyEngine, GpuWaiter
from kvferry.transfer.courier.link import CourierConfig, CourierLink
from kvferry.transfer.courier.messages import Connected, CourierDied, CourierEvent, Notification, PostDone, PostFailed

KIB, MIB = 1 << 10, 1 << 20
ROW = 2 * MIB
HEADER = 64
PAYLOAD = struct.Struct("<QIIQ")  # post order's time, slot, part, checksum
CREDIT = struct.Struct("<I")
SECONDS = 60.0

now = time.monotonic_ns


@dataclass(frozen=True)
class Round:
    """What both daemons do next. fragment 0: the wire alone; window: parts under way at most; headers: written with a
    part, and read back in the daemon here; the courier reads those of kvferry's own parts."""

    parts: int
    part: int  # bytes
    fragment: int
    window: int
    summed: bool = False
    headers: bool = True


class Stages:
    """Microseconds of each stage of the parts."""

    def __init__(self, *names: str) -> None:
        self._times: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, begun: int) -> None:
        self._times[name].append((now() - begun) / 1e3)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self._times.items() if times}


class Copies:
    """Hands the ends of copies to the loop, from one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter = GpuWaiter()
        self._then: dict[GpuCopy, Callable[[], None]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="copies")
        self._thread.start()

    def when_done(self, copy: GpuCopy, then: Callable[[], None]) -> None:
        self._then[copy] = then
        self._waiter.add(copy)

    def _run(self) -> None:
        while not self._stopped:
            ended = self._waiter.wait(0.5)
            if ended:
                self._loop.call_soon_threadsafe(self._hand_on, ended)

    def _hand_on(self, ended: list[GpuCopy]) -> None:
        for copy in ended:
            assert copy.done()
            self._then.pop(copy)()

    def close(self) -> None:
        self._stopped = True
        self._waiter.wake()
        self._thread.join()


class Daemon:
    """One end: its pool, its courier, its credits."""

    def __init__(self, device: int, arguments: argparse.Namespace, credits: socket.socket) -> None:
        self.engine = GpuCopyEngine(device)
        self.device = device
        self.slots: int = arguments.slots
        self.slot_bytes: int = arguments.slot_mib * MIB + 4096
        self.pool_bytes: int = 2 * arguments.mib * MIB
        self.pool = self.engine.allocate(self.pool_bytes)
        self.credits = credits
        self.copies = Copies()
        self.ids = np.random.default_rng(7).permutation(self.pool_bytes // ROW).astype(np.int64)
        self.layouts: dict[int, Any] = {}
        self.link: CourierLink
        self.round: Round
        self.connected, self.finished = asyncio.Event(), asyncio.Event()
        self.failure = ""

    def fill(self) -> None:
        data = np.random.default_rng(self.device).integers(0, 256, 64 * MIB, np.uint8)
        for offset in range(0, self.pool_bytes, len(data)):
            size = min(len(data), self.pool_bytes - offset)
            to, source = np.array([self.pool.address + offset]), np.array([data.ctypes.data])
            self.engine.copy_list_from_host(to, source, np.array([size])).wait()

    def layout(self, fragment: int) -> Any:
        """Fragment f of page p lies in tensor f, as a layer-major pool has it."""
        if fragment not in self.layouts:
            tensors, pages = ROW // fragment, self.pool_bytes // ROW
            bases = self.pool.address + np.arange(tensors, dtype=np.int64) * pages * fragment
            self.layouts[fragment] = self.engine.pages(bases, np.full(tensors, fragment, np.int64), fragment, pages)
        return self.layouts[fragment]

    async def start(self, sending: bool) -> None:
        config = CourierConfig(
            slot_bytes=self.slot_bytes,
            receive_slots=0 if sending else self.slots,
            send_slots=self.slots if sending else 0,
            devices=(self.device,),
            port_range=(21700, 21763),
        )
        self.link = await CourierLink.start(config, self.on_event, SECONDS, lambda _: self.engine)

    def on_event(self, event: CourierEvent) -> None:
        if isinstance(event, Connected):
            self.connected.set()
        elif isinstance(event, PostDone):
            self.on_done(event.post_id)
        elif isinstance(event, Notification):
            self.on_part(event.payload)
        elif isinstance(event, PostFailed | CourierDied):
            self.failure = event.message
            self.finished.set()

    def ids_of(self, part: int) -> Any:
        pages = self.round.part // ROW
        return self.ids[(np.arange(pages) + part * pages) % len(self.ids)]

    def on_done(self, post_id: int) -> None:
        raise AssertionError(f"a receiver's post {post_id}")

    def on_part(self, payload: bytes) -> None:
        raise AssertionError(f"a sender's notification {payload!r}")


class Sender(Daemon):
    def begin(self, work: Round) -> None:
        self.round = work
        self.finished.clear()
        self.remote, self.free = (list(range(min(self.slots, work.window))) for _ in range(2))
        self.sent, self.done, self.began = 0, 0, now()
        self.stages = Stages("gather")
        self.pump()

    def pump(self) -> None:
        work = self.round
        while self.free and self.remote and self.sent < work.parts:
            slot, remote, part = self.free.pop(), self.remote.pop(), self.sent
            self.sent += 1
            if not work.fragment:
                self.post(slot, remote, part, 0)
                continue
            address = self.link.gpu_slots.send_slot(slot).address + HEADER
            gather = self.engine.gather_part_summed if work.summed else self.engine.gather_part
            header = struct.pack("<Q", part).ljust(HEADER, b"\0") if work.headers else b""
            begun = now()
            copy = gather(self.layout(work.fragment), self.ids_of(part), 0, work.part, address, header=header)
            self.copies.when_done(copy, partial(self.gathered, slot, remote, part, begun, copy))

    def gathered(self, slot: int, remote: int, part: int, begun: int, copy: GpuCopy) -> None:
        self.stages.add("gather", begun)
        checksum = copy.checksum() if self.round.summed else 0
        self.post(slot, remote, part, checksum)

    def post(self, slot: int, remote: int, part: int, checksum: int) -> None:
        payload = PAYLOAD.pack(now(), remote, part, checksum)
        self.link.post(part * 64 + slot, slot, remote, HEADER + self.round.part, payload)

    def on_done(self, post_id: int) -> None:
        self.free.append(post_id % 64)
        self.done += 1
        if self.done == self.round.parts:
            self.finished.set()
        self.pump()

    def on_credits(self) -> None:
        data = self.credits.recv(4096)
        for (slot,) in CREDIT.iter_unpack(data):
            self.remote.append(slot)
        self.pump()


class Receiver(Daemon):
    def begin(self, work: Round) -> None:
        self.round = work
        self.finished.clear()
        self.link.expect(1)
        self.hops: list[float] = []
        self.arrived = self.wrong = 0
        self.stages = Stages("read header", "scatter")

    def on_part(self, payload: bytes) -> None:
        posted, slot, part, checksum = PAYLOAD.unpack(payload)
        self.hops.append((now() - posted) / 1e3)
        work = self.round
        if not work.fragment:
            self.credit(slot)
            return
        where = self.link.gpu_slots.receive_slot(slot)
        if work.headers:
            begun = now()
            self.wrong += struct.unpack_from("<Q", self.engine.read(where.address, HEADER))[0] != part
            self.stages.add("read header", begun)
        address = where.address + HEADER
        scatter = self.engine.scatter_part_summed if work.summed else self.engine.scatter_part
        begun = now()
        copy = scatter(self.layout(work.fragment), self.ids_of(part), 0, work.part, address)
        self.copies.when_done(copy, partial(self.scattered, slot, begun, copy, checksum))

    def scattered(self, slot: int, begun: int, copy: GpuCopy, checksum: int) -> None:
        self.stages.add("scatter", begun)
        self.wrong += self.round.summed and copy.checksum() != checksum
        self.credit(slot)

    def credit(self, slot: int) -> None:
        self.arrived += 1
        self.ended = now()
        if self.arrived == self.round.parts:
            self.finished.set()
        self.credits.send(CREDIT.pack(slot))


async def live(control: Connection, sending: bool, device: int, credits: socket.socket, arguments: Any) -> None:
    loop = asyncio.get_running_loop()
    end: Sender | Receiver = (Sender if sending else Receiver)(device, arguments, credits)
    begin = now()
    await end.start(sending)
    started = (now() - begin) / 1e6
    end.fill()
    control.send((end.link.metadata, end.link.receive_ranks, end.slots if not sending else 0, end.slot_bytes, started))
    metadata, ranks, slots, slot_bytes, _ = await loop.run_in_executor(None, control.recv)
    end.link.connect(metadata, 0, slots, slot_bytes, ranks)
    await asyncio.wait_for(end.connected.wait(), SECONDS)
    if isinstance(end, Sender):
        credits.setblocking(False)
        loop.add_reader(credits, end.on_credits)
    control.send("up")
    try:
        while (word := await loop.run_in_executor(None, control.recv)) is not None:
            end.begin(word)
            if isinstance(end, Receiver):
                control.send("ready")
            await asyncio.wait_for(end.finished.wait(), SECONDS)
            if end.failure:
                raise RuntimeError(end.failure)
            if isinstance(end, Receiver):
                control.send((end.ended, end.hops, end.wrong, end.stages.medians()))
            else:
                control.send((end.began, end.stages.medians()))
    finally:
        await end.link.stop(10)
        end.copies.close()


def run_daemon(control: Connection, sending: bool, device: int, credits: socket.socket, arguments: Any) -> None:
    try:
        asyncio.run(live(control, sending, device, credits, arguments))
    except BaseException:
        control.send(RuntimeError(traceback.format_exc()))
        raise


@dataclass(frozen=True)
class Result:
    rate: float  # GB/s
    hops: list[float]  # microseconds, ascending
    wrong: int  # parts with wrong bytes
    stages: dict[str, float]  # microseconds, medians


class Pair:
    """Two daemons and what is said to them."""

    def __init__(self, source: int, target: int, arguments: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self.name = f"GPU {source} -> GPU {target}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.controls, self.processes = [], []
        for sending, device, end in ((True, source, ours), (False, target, theirs)):
            control, other = context.Pipe()
            process = context.Process(target=run_daemon, args=(other, sending, device, end, arguments))
            process.start()
            self.controls.append(control)
            self.processes.append(process)

    def connect(self) -> None:
        ups = [self.hear(i) for i in (0, 1)]
        for i in (0, 1):
            self.controls[i].send(ups[1 - i])
        for i in (0, 1):
            assert self.hear(i) == "up"
        print(f"# {self.name}: couriers up after {ups[0][4]:.0f} and {ups[1][4]:.0f} ms", flush=True)

    def hear(self, i: int) -> Any:
        if not self.controls[i].poll(SECONDS):
            raise RuntimeError(f"{self.name}: no word from {'sender' if i == 0 else 'receiver'}")
        word = self.controls[i].recv()
        if isinstance(word, Exception):
            raise word
        return word

    def begin(self, work: Round) -> None:
        self.controls[1].send(work)
        assert self.hear(1) == "ready"
        self.controls[0].send(work)

    def end(self, work: Round) -> Result:
        began, stages = self.hear(0)
        ended, hops, wrong, more = self.hear(1)
        return Result(work.parts * work.part / (ended - began), sorted(hops), wrong, stages | more)

    def stop(self) -> None:
        for control in self.controls:
            control.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def peer_copy(control: Connection, source: int, target: int, chunk: int) -> None:
    """The plain copy's rate, by two contexts of one process."""
    to, of = Gpu(target), Gpu(source)
    to.use()
    there = to.allocate(chunk)
    of.use()
    here = of.allocate(chunk)
    of.call("cuCtxEnablePeerAccess", to.context, 0)
    rates = []
    for _ in range(4):
        begin = now()
        for _ in range(40):
            of.copy(there, Memory(here.address, chunk))
        of.sync()
        rates.append(40 * chunk / (now() - begin))
    control.send(max(rates))


def plain(source: int, target: int, chunk: int) -> float:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer_copy, args=(theirs, source, target, chunk))
    process.start()
    rate: float = ours.recv() if ours.poll(30) else 0.0
    process.join(10)
    return rate


def line(pairs: list[Pair], work: Round, text: str, peak: float) -> None:
    for pair in pairs:
        pair.begin(work)
    results = [pair.end(work) for pair in pairs]
    for pair, result in zip(pairs, results, strict=True):
        hops = result.hops
        stages = ", ".join(f"{name} {time:.0f}" for name, time in result.stages.items())
        wrong = f" {result.wrong} PARTS WRONG" if result.wrong else ""
        print(
            f"{pair.name} {text:30} {work.window:3} {result.rate:8.1f} {result.rate / peak:7.2f}   "
            f"{statistics.median(hops):7.0f} {hops[int(len(hops) * 0.99)]:7.0f}   {stages}{wrong}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="moved in a round")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--slot-mib", type=int, default=64)
    arguments = parser.parse_args()
    total = arguments.mib * MIB
    peak = plain(1, 0, 64 * MIB)
    pairs = [Pair(1, 0, arguments), Pair(0, 1, arguments)]
    for pair in pairs:
        pair.connect()
    one = pairs[:1]
    print(f"plain copies of 64 MiB, GPU 1 -> GPU 0: {peak:.1f} GB/s; {arguments.slots} slots of each kind")
    print("                 what                       window     GB/s  x plain   hop us p50     p99   stages, us p50")
    line(pairs, Round(64, 32 * MIB, 64 * KIB, 8, summed=True), "(warming up)", peak)
    for mib in (4, 8, 16, 32, 64):
        line(one, Round(40, mib * MIB, 0, 1), f"wire {mib} MiB, one by one", peak)
        for window in (4, 8, 16):
            line(one, Round(4 * total // (mib * MIB), mib * MIB, 0, window), f"wire {mib} MiB", peak)
    for kib in (8, 32, 64, 256, 2048):
        text = f"of {kib} KiB"
        for mib, window in ((16, 16), (32, 4), (32, 8), (32, 16), (64, 8)):
            work = Round(2 * total // (mib * MIB), mib * MIB, kib * KIB, window)
            line(one, work, f"whole {mib} MiB {text}", peak)
        parts = 2 * total // (32 * MIB)
        line(one, Round(parts, 32 * MIB, kib * KIB, 8, summed=True), f"whole 32 MiB {text}, summed", peak)
        line(one, Round(parts, 32 * MIB, kib * KIB, 8, headers=False), f"whole 32 MiB {text}, no headers", peak)
    for mib, headers in ((32, True), (32, False), (64, True)):
        work = Round(8 * total // (mib * MIB), mib * MIB, 64 * KIB, 8, headers=headers)
        line(pairs, work, f"both ways, {mib} MiB{'' if headers else ', no headers'}", peak)
    for pair in pairs:
        pair.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
