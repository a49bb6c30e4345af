"""Spill and restore of scattered pages between a GPU and pinned host rows, for seven shapes that the field publishes.

Every row: all bytes of one copy of `blocks` pages of `tensors` fragments, from the call (page ids in; the choice of a
strategy, arrays and launches included) to its end, medians. `peak`: one copy of 256 MiB between such memories in this
run. `batch` and `loop`: one cuMemcpyBatchAsync, and a loop of cuMemcpyAsync, over the same fragments, by the same
engine. `list`: the same fragments as a list of addresses and sizes, moved as is chosen for it. limit: bytes / (0.945 x
peak) + 60 us; ok: within it, and not slower than batch. Under load: 8192^3 bf16 products on another stream of this
process, as MPS has those of other processes, pairs with and without copies in turn, two or more copies in flight all
the time, in no order with each other.

    python bench/gpu/copies.py [--repeat 21] [--pairs 20] [--only verify,idle,load] [--beside chosen,staged]
        [--in-flight 2,4] [--apart 0]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry._core import GpuCopy, GpuCopyEngine, PinnedBuffer
from kvferry.transfer.host_tier.copy_plan import OF_LISTS, STRATEGIES, GpuCopies, Strategy

KIB, MIB = 1 << 10, 1 << 20
POISON = 0xA5
SHARE, LATENCY = 0.945, 60e-6  # of the peak; seconds
LOADED_SHARE, SLOWED = 0.78, 0.02
PRODUCT = 8192
PIECES = 6
LIST_STRATEGIES = tuple(name for name, as_list in OF_LISTS.items() if name == as_list)


@dataclass(frozen=True)
class Shape:
    name: str
    tensors: int
    blocks: int
    fragment: int  # bytes
    published_us: float

    @property
    def nbytes(self) -> int:
        return self.tensors * self.blocks * self.fragment


SHAPES = (
    Shape("LLaMA-8B", 64, 64, 32 * KIB, 4519),
    Shape("LLaMA-70B", 160, 64, 32 * KIB, 10239),
    Shape("LLaMA-70B TP4", 160, 32, 8 * KIB, 3299),
    Shape("Qwen2.5-0.5B", 48, 128, 4 * KIB, 3184),
    Shape("Qwen2.5-1.5B", 56, 64, 8 * KIB, 2272),
    Shape("Qwen2.5-3B", 72, 64, 8 * KIB, 2935),
    Shape("Phi-3-mini", 64, 64, 24 * KIB, 3888),
)


@dataclass(frozen=True)
class Pieces:
    copies: list[GpuCopy]

    @property
    def strategy(self) -> str:
        return " ".join(sorted({copy.strategy for copy in self.copies}))

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()


class Field:
    """A shape's tensors on the GPU and its host rows, twice as many pages as are copied: each has neighbours."""

    def __init__(self, shape: Shape, engine: GpuCopyEngine) -> None:
        self.shape = shape
        self.engine = engine
        self.pool = 2 * shape.blocks
        rng = np.random.default_rng(shape.nbytes)
        self.page_ids = rng.permutation(self.pool)[: shape.blocks].astype(np.int64)
        self.row_ids = rng.permutation(self.pool)[: shape.blocks].astype(np.int64)
        # As a daemon allocates its pool: one piece, tensor behind tensor.
        whole = (shape.tensors, self.pool, shape.fragment)
        self.tensors = list(torch.randint(0, 256, whole, dtype=torch.uint8, device="cuda"))
        bases = np.array([tensor.data_ptr() for tensor in self.tensors], np.int64)
        self.pages = engine.pages(bases, np.full(shape.tensors, shape.fragment, np.int64), shape.fragment, self.pool)
        self.rows: NDArray[np.uint8] = np.full((self.pool, self.pages.row_bytes), POISON, np.uint8)
        self.pinned = PinnedBuffer(engine, self.rows)
        self.stream = torch.cuda.Stream()
        self.copies: dict[Strategy | None, GpuCopies] = {name: GpuCopies(engine, name) for name in (None, *STRATEGIES)}
        at = np.arange(shape.tensors) * shape.fragment
        self.on_device = (bases[None, :] + self.page_ids[:, None] * shape.fragment).ravel()
        self.on_host = (self.rows.ctypes.data + self.row_ids[:, None] * self.pages.row_bytes + at[None, :]).ravel()
        self.sizes = np.full(len(self.on_host), shape.fragment, np.int64)
        torch.cuda.synchronize()

    def mover(self, to_host: bool, strategy: Strategy | None) -> Callable[..., GpuCopy]:
        copies = self.copies[strategy]
        return copies.to_host if to_host else copies.from_host

    def copy(self, to_host: bool, strategy: Strategy | None) -> GpuCopy:
        """strategy None: the one that is chosen."""
        return self.mover(to_host, strategy)(
            self.pages, self.page_ids, self.rows, self.row_ids, self.stream.cuda_stream
        )

    def copy_beside(self, to_host: bool, strategy: Strategy | None) -> GpuCopy:
        """In no order with others, as a daemon copies."""
        return self.mover(to_host, strategy)(self.pages, self.page_ids, self.rows, self.row_ids)

    def copy_pieces(self, to_host: bool, strategy: Strategy | None) -> Pieces:
        """The same bytes by several copies, in no order with each other."""
        move = self.mover(to_host, strategy)
        parts = zip(np.array_split(self.page_ids, PIECES), np.array_split(self.row_ids, PIECES), strict=True)
        return Pieces([move(self.pages, page_ids, self.rows, row_ids) for page_ids, row_ids in parts])

    def copy_list(self, to_host: bool, strategy: Strategy | None) -> GpuCopy:
        """The same bytes."""
        copies, stream = self.copies[strategy], self.stream.cuda_stream
        if to_host:
            return copies.list_to_host(self.on_host, self.on_device, self.sizes, stream)
        return copies.list_from_host(self.on_device, self.on_host, self.sizes, stream)

    def expected_rows(self) -> torch.Tensor:
        rows = torch.full(self.rows.shape, POISON, dtype=torch.uint8, device="cuda")
        ids = torch.from_numpy(self.page_ids).cuda()
        rows[torch.from_numpy(self.row_ids).cuda()] = torch.cat([tensor[ids] for tensor in self.tensors], 1)
        return rows

    def check(
        self,
        issue: Callable[[bool, Strategy | None], GpuCopy | Pieces],
        strategy: Strategy,
        beside: Callable[[bool], object],
    ) -> None:
        """Every byte of rows and tensors after a spill and a restore by issue(to_host, strategy), between poisoned
        neighbours. beside(to_host) starts what runs beside each.
        """
        expected = self.expected_rows()
        kept = [tensor.clone() for tensor in self.tensors]
        self.rows[:] = POISON
        torch.cuda.synchronize()
        held = [beside(True)]
        copy = issue(True, strategy)
        copy.wait()
        assert copy.strategy == strategy, f"{copy.strategy} in place of {strategy}: {self.engine.statistics()}"
        if not torch.equal(torch.from_numpy(self.rows).cuda(), expected):
            raise AssertionError(f"{self.shape.name}: {strategy} to the host: rows differ")
        for tensor in self.tensors:
            tensor.fill_(POISON)
        torch.cuda.synchronize()
        held.append(beside(False))
        issue(False, strategy).wait()
        ids = torch.from_numpy(self.page_ids).cuda()
        for number, (tensor, before) in enumerate(zip(self.tensors, kept, strict=True)):
            wanted = torch.full_like(before, POISON)
            wanted[ids] = before[ids]
            if not torch.equal(tensor, wanted):
                raise AssertionError(f"{self.shape.name}: {strategy} to the device: tensor {number} differs")
            tensor.copy_(before)
        torch.cuda.synchronize()
        del held


def timed(issue: Callable[[], GpuCopy]) -> float:
    begin = time.perf_counter()
    copy = issue()
    while not copy.done():
        pass
    return time.perf_counter() - begin


class Peak:
    """The bus's rate in both directions: one copy of 256 MiB of pinned memory."""

    def __init__(self, engine: GpuCopyEngine) -> None:
        self.nbytes = 256 * MIB
        self.engine = engine
        self.host = np.zeros(self.nbytes, np.uint8)
        self.pinned = PinnedBuffer(engine, self.host)
        self.device = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()

    def measure(self, to_host: bool, repeat: int = 7) -> float:
        host, device = np.array([self.host.ctypes.data]), np.array([self.device.data_ptr()])
        move = self.engine.copy_list_to_host if to_host else self.engine.copy_list_from_host
        to, source = (host, device) if to_host else (device, host)
        issue = partial(move, to, source, np.array([self.nbytes]), self.stream.cuda_stream)
        timed(issue)
        return self.nbytes / statistics.median(timed(issue) for _ in range(repeat))


def arrow(to_host: bool) -> str:
    return "to host" if to_host else "to device"


def idle(engine: GpuCopyEngine, peak: Peak, repeat: int) -> None:
    peaks = {to_host: peak.measure(to_host) for to_host in (True, False)}
    rates = f"{peaks[True] / 1e9:.1f} GB/s to host, {peaks[False] / 1e9:.1f} GB/s to device"
    print(f"\nidle GPU: peak {rates}, medians of {repeat}")
    print(
        f"{'shape':14} {'':9} {'MiB':>4} {'plan':>7} {'us':>6} {'limit':>6} {'':4} {'GB/s':>5} {'share':>6} "
        f"{'batch us':>9} {'x':>5} {'loop us':>8} {'x':>5} {'kernel us':>9} {'pitched us':>10} {'list us':>8} "
        f"{'published':>9} {'x':>5}"
    )
    for shape in SHAPES:
        field = Field(shape, engine)
        for to_host in (True, False):
            ways: tuple[Strategy | None, ...] = (None, *STRATEGIES)
            times: dict[Strategy | None, list[float]] = {way: [] for way in ways}
            of_list: list[float] = []
            plan = field.copy(to_host, None).strategy
            for way in ways:
                for _ in range(3):
                    timed(partial(field.copy, to_host, way))
            for _ in range(3):
                timed(partial(field.copy_list, to_host, None))
            for _ in range(repeat):  # in turn: what drifts, drifts for all
                for way in ways:
                    times[way].append(timed(partial(field.copy, to_host, way)))
                of_list.append(timed(partial(field.copy_list, to_host, None)))
            median = {way: statistics.median(of) for way, of in times.items()}
            took, batch, loop = median[None], median["batch"], median["loop"]
            limit = shape.nbytes / (SHARE * peaks[to_host]) + LATENCY
            rate = shape.nbytes / took
            print(
                f"{shape.name:14} {arrow(to_host):9} {shape.nbytes / MIB:4.0f} {plan:>7} {took * 1e6:6.0f} "
                f"{limit * 1e6:6.0f} {'ok' if took <= min(limit, batch) else 'MISS':4} {rate / 1e9:5.1f} "
                f"{rate / peaks[to_host]:6.1%} "
                f"{batch * 1e6:9.0f} {batch / took:5.1f} {loop * 1e6:8.0f} {loop / took:5.1f} "
                f"{median['kernel'] * 1e6:9.0f} {median['pitched'] * 1e6:10.0f} "
                f"{statistics.median(of_list) * 1e6:8.0f} "
                f"{shape.published_us:9.0f} {shape.published_us / took / 1e6:5.1f}",
                flush=True,
            )


class Products:
    """Matrix products on a stream of their own."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.stream = torch.cuda.Stream()
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self, count: int) -> None:
        with torch.cuda.stream(self.stream):
            self.begin.record(self.stream)
            for _ in range(count):
                torch.matmul(self.a, self.b, out=self.c)
            self.end.record(self.stream)

    def seconds(self) -> float:
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


@dataclass
class Loaded:
    slowed: float
    rate: float  # bytes a second


def under_products(
    issue: Callable[[], GpuCopy], nbytes: int, products: Products, count: int, pairs: int, in_flight: int
) -> Loaded:
    """So many copies are in flight as long as the products run; those that ended before them count."""
    slowed, rates = [], []

    def alone() -> float:
        products.start(count)
        return products.seconds()

    def together() -> float:
        products.start(count)
        time.sleep(0.002)  # they run now
        begin = last = 0.0
        done = -in_flight  # that find out how it is now
        queue = [issue() for _ in range(in_flight)]
        while not products.end.query():
            if queue[0].done():
                last = time.perf_counter()
                done += 1
                begin = begin if done > 0 else last
                queue = [*queue[1:], issue()]
        for copy in queue:
            copy.wait()
        rates.append(done * nbytes / (last - begin) if done > 0 else 0.0)
        return products.seconds()

    for pair in range(pairs):  # the second of a pair finds a warmer GPU: each is the second in turn
        first, second = (alone, together) if pair % 2 == 0 else (together, alone)
        times = {first: first(), second: second()}
        slowed.append(times[together] / times[alone] - 1)
    return Loaded(statistics.median(slowed), statistics.median(rates))


def load(engine: GpuCopyEngine, peak: Peak, pairs: int, ways: tuple[Strategy | None, ...], in_flight: int) -> None:
    peaks = {to_host: peak.measure(to_host) for to_host in (True, False)}
    products = Products()
    for _ in range(3):
        products.start(20)
    alone = products.seconds() / 20
    flops = 2 * PRODUCT**3 / alone / 1e12
    print(
        f"\n{in_flight} copies in flight beside {PRODUCT}^3 bf16 products ({alone * 1e6:.0f} us, {flops:.0f} TFLOP/s "
        f"alone), medians of {pairs}"
    )
    print(f"{'shape':14} {'':9} {'by':>7} {'us':>6} {'GB/s':>5} {'share':>6} {'product slowed':>14}      copies")
    for shape in SHAPES:
        field = Field(shape, engine)
        field.copies[None].beside = True
        count = 40 + int((10 + in_flight) * shape.nbytes / 40e9 / alone)
        for to_host in (True, False):
            for way in ways:
                before = {name: engine.statistics()[name]["copies"] for name in STRATEGIES}
                issue = partial(field.copy_beside, to_host, way)
                found = under_products(issue, shape.nbytes, products, count, pairs, in_flight)
                after = {name: engine.statistics()[name]["copies"] - before[name] for name in STRATEGIES}
                share = found.rate / peaks[to_host]
                holds = share >= LOADED_SHARE and found.slowed <= SLOWED
                print(
                    f"{shape.name:14} {arrow(to_host):9} {way or 'chosen':>7} "
                    f"{shape.nbytes / max(found.rate, 1) * 1e6:6.0f} {found.rate / 1e9:5.1f} {share:6.1%} "
                    f"{found.slowed:14.1%} {'ok' if holds else 'MISS':4} "
                    f"{', '.join(f'{name} {number}' for name, number in after.items() if number)}",
                    flush=True,
                )


def verify(engine: GpuCopyEngine) -> None:
    products = Products()
    for shape in SHAPES:
        field, other = Field(shape, engine), Field(shape, engine)
        for strategy in STRATEGIES:
            field.check(field.copy, strategy, lambda to_host: None)
            field.check(field.copy, strategy, lambda to_host: products.start(8))
            field.check(field.copy, strategy, partial(other.copy, strategy=strategy))
            field.check(field.copy_pieces, strategy, lambda to_host: products.start(8))
        for strategy in LIST_STRATEGIES:
            field.check(field.copy_list, strategy, lambda to_host: None)
            field.check(field.copy_list, strategy, lambda to_host: products.start(8))
            field.check(field.copy_list, strategy, partial(other.copy_list, strategy=strategy))
    done = f"{len(SHAPES)} shapes, both directions, idle, beside products and another copy"
    print(f"every byte right: {done}, {', '.join(STRATEGIES)}; as lists {', '.join(LIST_STRATEGIES)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="verify,idle,load")
    parser.add_argument("--beside", default="chosen", help="strategies measured under load")
    parser.add_argument("--in-flight", default="2,4", help="copies under load")
    parser.add_argument("--apart", type=int, help="apart_percent of the engine (default: its own)")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    engine = GpuCopyEngine(0) if arguments.apart is None else GpuCopyEngine(0, apart_percent=arguments.apart)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    if "verify" in parts:
        verify(engine)
        time.sleep(1.5)  # the engine forgets that the GPU was busy
    peak = Peak(engine)
    if "idle" in parts:
        idle(engine, peak, arguments.repeat)
    if "load" in parts:
        ways: dict[str, Strategy | None] = {"chosen": None, **{name: name for name in STRATEGIES}}
        beside = tuple(ways[name] for name in arguments.beside.split(","))
        for in_flight in map(int, arguments.in_flight.split(",")):
            load(engine, peak, arguments.pairs, beside, in_flight)
    print(f"\ncounters: {engine.statistics()}")


if __name__ == "__main__":
    main()
