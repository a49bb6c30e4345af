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
import multiprocessing as mp
import socket
import statistics
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from driver import Gpu, Memory
from ends import KIB, MIB, SECONDS, Round, now, run_daemon


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
