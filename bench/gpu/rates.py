"""How fast NIXL writes from one GPU to another, beside a plain peer copy of this run; what polls and posts cost.

Needs two GPUs that reach each other, and NIXL; nothing of kvferry. GB/s are 1e9 bytes; times are medians.

    python bench/gpu/rates.py [--only copies,writes,latency,fragments] [--tls ...] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from actor import MIB, STOP, Actor, Target, clear, memory_type, now
from driver import Memory
from nodes import Bench, Options, bench

KIB = 1 << 10
TLS = "cuda_copy,cuda_ipc,tcp"
SENT, DONE, ARRIVED, ACKNOWLEDGED = range(8, 12)  # words of the board
TOTAL = 4 << 30  # bytes of a row
SCATTERED_LISTS = {"NIXL_UCX_SGL_ENABLE": "1"}


@dataclass(frozen=True)
class Costs:
    """Microseconds of one call, medians."""

    make: float
    make_prepared: float
    transfer: float
    check: float
    release: float
    notifications: float


class RatesActor(Actor):
    """Timed work of one node."""

    def copy_rate(self, name: str, mapped: str, chunk: int, in_flight: int, total: int) -> float:
        """GB/s of plain copies to memory of another process, `in_flight` streams in turn."""
        source, ordinal = self.memories[name]
        target, _ = self.memories[mapped]
        gpu = self.gpus[ordinal]
        streams = [gpu.new_stream() for _ in range(in_flight)]
        places = min(source.nbytes, target.nbytes) // chunk
        begin = now()
        for number in range(max(total // chunk, 1)):
            offset = number % places * chunk
            gpu.copy(
                Memory(target.address + offset, chunk),
                Memory(source.address + offset, chunk),
                streams[number % in_flight],
            )
        for stream in streams:
            gpu.call("cuStreamSynchronize", stream)
        return max(total // chunk, 1) * chunk / (now() - begin)

    def prepare(self, name: str, target: Target, chunk: int) -> int:
        """Descriptor lists of both sides' slots; how many slots."""
        memory, device = self.memories[name]
        places = min(memory.nbytes, target.nbytes) // chunk
        local = np.array([[memory.address, chunk, max(device, 0), chunk, places]], np.uint64)
        remote = np.array([[target.address, chunk, max(target.device, 0), chunk, places]], np.uint64)
        self.lists = (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, memory_type(device)),
            self.agent.prep_xfer_dlist(self.remote, remote, memory_type(target.device)),
        )
        self.indices = [np.array([place], np.int32) for place in range(places)]
        return places

    def make_prepared(self, place: int, notification: bytes) -> Any:
        index = self.indices[place]
        return self.agent.make_prepped_xfer("WRITE", self.lists[0], index, self.lists[1], index, notification)

    def write_rate(self, name: str, target: Target, chunk: int, in_flight: int, total: int, prepared: bool) -> float:
        """GB/s of writes with notifications, each made anew, `in_flight` posted at any time."""
        places = self.prepare(name, target, chunk)
        handles: list[Any] = []
        count = max(total // chunk, 1)
        begin = now()
        number = 0
        while number < count or handles:
            while number < count and len(handles) < in_flight:
                place = number % places
                if prepared:
                    handle = self.make_prepared(place, b"n" * 48)
                else:
                    handle = self.make(name, place * chunk, target, place * chunk, chunk, b"n" * 48)
                self.agent.transfer(handle)
                handles.append(handle)
                number += 1
            handles = [handle for handle in handles if not self._over(handle)]
        return count * chunk / (now() - begin)

    def costs(self, name: str, target: Target, chunk: int, rounds: int) -> Costs:
        self.prepare(name, target, chunk)
        times: list[list[int]] = [[] for _ in range(6)]
        for _ in range(rounds):
            stamps = [now()]
            unused = self.make(name, 0, target, 0, chunk, b"n" * 48)
            stamps.append(now())
            handle = self.make_prepared(0, b"n" * 48)
            stamps.append(now())
            self.agent.transfer(handle)
            stamps.append(now())
            self.agent.check_xfer_state(handle)
            stamps.append(now())
            self.agent.get_new_notifs()
            stamps.append(now())
            while self.agent.check_xfer_state(handle) != "DONE":
                pass
            stamps.append(now())
            self.agent.release_xfer_handle(handle)
            stamps.append(now())
            self.agent.release_xfer_handle(unused)
            for index, (first, second) in enumerate(((0, 1), (1, 2), (2, 3), (3, 4), (6, 7), (4, 5))):
                times[index].append(stamps[second] - stamps[first])
        return Costs(*(statistics.median(of) / 1e3 for of in times))

    def pings(self, name: str, target: Target, chunk: int, rounds: int) -> list[tuple[int, int, int]]:
        """Per write: nanoseconds of the post's call, from it to DONE, to the notification at the other end."""
        self.prepare(name, target, chunk)
        results = []
        for number in range(1, rounds + 1):
            handle = self.make_prepared(0, b"n" * 48)
            sent = now()
            self.agent.transfer(handle)
            posted = now()
            while self.agent.check_xfer_state(handle) != "DONE":
                pass
            done = now()
            self.agent.release_xfer_handle(handle)
            while self.board[ACKNOWLEDGED] < number and not self.board[STOP]:
                pass
            results.append((posted - sent, done - sent, self.board[ARRIVED] - sent))
        return results

    def pongs(self) -> None:
        while not self.board[STOP]:
            for payloads in self.agent.get_new_notifs().values():
                self.board[ARRIVED] = now()
                self.board[ACKNOWLEDGED] += len(payloads)

    def scattered(self, name: str, target: Target, fragment: int, total: int) -> tuple[float, float]:
        """One write of scattered fragments; seconds to make it, from the post to DONE (best of 3)."""
        memory, device = self.memories[name]
        count = total // fragment
        rng = np.random.default_rng(fragment)
        local, remote = (np.zeros((count, 3), np.int64) for _ in range(2))
        for rows, base, of in ((local, memory.address, device), (remote, target.address, target.device)):
            rows[:, 0] = base + rng.permutation(count) * 2 * fragment
            rows[:, 1], rows[:, 2] = fragment, max(of, 0)
        best = made = float("inf")
        for _ in range(3):
            begin = now()
            handle = self.agent.initialize_xfer(
                "WRITE",
                self.agent.get_xfer_descs(local, memory_type(device)),
                self.agent.get_xfer_descs(remote, memory_type(target.device)),
                self.remote,
                b"n" * 48,
            )
            middle = now()
            self.agent.transfer(handle)
            self.drain([handle])
            best, made = min(best, (now() - middle) / 1e9), min(made, (middle - begin) / 1e9)
        return made, best


class Pair:
    """A receiver on GPU 0 and a sender on GPU 1."""

    def __init__(self, on: Bench, nbytes: int, **environment: str) -> None:
        self.on = on
        stamps = [now()]
        self.receiver, self.sender = on.node(0, **environment), on.node(1, **environment)
        for node in (self.receiver, self.sender):
            node.answer(60)
        stamps.append(now())
        self.target, handle = self.receiver.call("allocate", "slots", nbytes, 0)
        self.sender.call("allocate", "source", nbytes, 1)
        self.sender.call("map", "mapped", handle, nbytes, 1)
        metadata = self.receiver.call("agent_up", ["slots"])
        self.receiver.call("connect", self.sender.call("agent_up", ["source"]))
        self.sender.call("connect", metadata)
        stamps.append(now())
        clear(on.board)
        self.poll("poll", 120.0)
        self.sender.call("write", "source", self.target, 65536, 1)
        stamps.append(now())
        steps = [f"{(b - a) / 1e6:.0f}" for a, b in itertools.pairwise(stamps)]
        report(
            f"# ms: processes and contexts {steps[0]}, memory, agents and metadata {steps[1]}, first write {steps[2]}"
        )

    def poll(self, name: str, *arguments: object) -> None:
        self.receiver.send(name, *arguments)

    def stop(self) -> None:
        self.on.stop(self.receiver)
        clear(self.on.board)


def report(line: str = "") -> None:
    print(line, flush=True)


def writes(on: Bench) -> None:
    """WRITE by size and posts in flight, beside plain peer copies."""
    pair = Pair(on, on.size(1024 * MIB))
    total = on.size(TOTAL)
    depths = (1, 2, 4, 8)
    report("GB/s, GPU 1 -> GPU 0; p: from prepared descriptor lists")
    report("chunk      plain copies in streams 1, 2, 4  " + "".join(f"{f'{depth} in flight':>14}" for depth in depths))
    for mib in (0.25, 1, 2, 4, 8, 16, 32, 64, 128):
        chunk = on.size(int(mib * MIB))
        rows = min(total, 2000 * chunk)
        for depth in (1, 2):
            pair.sender.call("copy_rate", "source", "mapped", chunk, depth, rows)
        copies = [pair.sender.call("copy_rate", "source", "mapped", chunk, depth, rows) for depth in (1, 2, 4)]
        cells = []
        for depth in depths:
            rates = [
                pair.sender.call("write_rate", "source", pair.target, chunk, depth, rows, way) for way in (False, True)
            ]
            cells.append(f"{rates[0]:6.1f} p{rates[1]:6.1f}")
        report(
            f"{mib:6} MiB "
            + " ".join(f"{rate:9.1f}" for rate in copies)
            + "   "
            + "".join(f"{cell:>14}" for cell in cells)
        )
    pair.stop()


def latency(on: Bench) -> None:
    """Costs of the calls, and the time from a post to its notification."""
    pair = Pair(on, on.size(512 * MIB))
    for mib in (1, 64):
        costs: Costs = pair.sender.call("costs", "source", pair.target, on.size(mib * MIB), 200)
        report(
            f"us a call, {mib} MiB in flight: initialize_xfer {costs.make:.1f}, make_prepped_xfer"
            f" {costs.make_prepared:.1f}, transfer {costs.transfer:.1f}, check_xfer_state {costs.check:.1f},"
            f" release {costs.release:.1f}, get_new_notifs {costs.notifications:.1f}"
        )
    pair.stop()
    pair.poll("pongs")
    report("one write at a time, both ends spin: us of the post's call, to DONE, to the notification (p50 / p99)")
    for kib in (4, 64, 1024, 8192, 65536):
        pair.on.board[ACKNOWLEDGED] = 0
        rounds: list[tuple[int, int, int]] = pair.sender.call("pings", "source", pair.target, on.size(kib * KIB), 200)
        columns = [sorted(column) for column in zip(*rounds[20:], strict=True)]
        cells = [
            f"{column[len(column) // 2] / 1e3:7.1f} /{column[int(len(column) * 0.99)] / 1e3:7.1f}" for column in columns
        ]
        report(f"{kib:6} KiB  " + "   ".join(cells))
    pair.stop()


@dataclass(frozen=True, slots=True)
class Scattered:
    """One write of scattered fragments: seconds to make it, bytes a second from the post to DONE."""

    made_s: float
    rate: float


def scattered_writes(on: Bench, sizes_kib: Sequence[int], whole: int, **environment: str) -> dict[int, Scattered]:
    """By fragment size: `whole` bytes, or an eighth of them of small fragments, which take long."""
    pair = Pair(on, on.size(2 * whole), **environment)
    found = {}
    for kib in sizes_kib:
        total = on.size(whole // 8 if kib < 64 else whole)
        made, took = pair.sender.call("scattered", "source", pair.target, kib * KIB, total)
        found[kib] = Scattered(made, total / took)
    pair.stop()
    on.end()
    return found


def fragments(on: Bench) -> None:
    """One NIXL WRITE of scattered fragments."""
    report("one WRITE of scattered fragments: GB/s from the post to DONE, ms to make it; SGL: NIXL_UCX_SGL_ENABLE=1")
    sizes = (8, 32, 64, 128, 256, 512, 1024, 2048)
    tables = [scattered_writes(on, sizes, 1024 * MIB, **environment) for environment in ({}, SCATTERED_LISTS)]
    for kib in sizes:
        plain, lists = (f"{table[kib].rate / 1e9:7.1f} GB/s {table[kib].made_s * 1e3:6.1f} ms" for table in tables)
        report(f"{kib:5} KiB  {plain}   SGL {lists}")


ALL: tuple[Callable[[Bench], None], ...] = (writes, latency, fragments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [work.__name__ for work in ALL]
    parser.add_argument("--only", default=",".join(names))
    parser.add_argument("--tls", default=TLS)
    parser.add_argument("--logs", default="")
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(names)}")
    options = Options(arguments.tls, arguments.logs or tempfile.mkdtemp(prefix="rates-"), arguments.scale)
    failed = 0
    for work in ALL:
        if work.__name__ not in wanted:
            continue
        begin = time.monotonic()
        with bench(options, RatesActor) as on:
            try:
                work(on)
            except Exception as error:
                failed += 1
                report(f"{work.__name__}: did not run: {type(error).__name__}: {error}")
        report(f"# {work.__name__}: {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
