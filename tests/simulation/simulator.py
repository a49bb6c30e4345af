"""One seed: daemons, workers, conversations and faults, drawn from it and run until nothing is under way.

The oracle: what a worker reads, what a page holds when it is reported, cached, spilled, restored or decoded, is its
digest's bytes; nobody writes a page that was given to somebody else; a session breaks only by a fault of the network,
and a request fails only for a reason; every request ends; at the end nothing is held.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.proto import common_pb2 as common
from tests.simulation.clock import Clock, Violation, expect
from tests.simulation.daemons import Setting, SimDecode, SimPrefill
from tests.simulation.faults import Faults, draw_faults
from tests.simulation.front import _ALWAYS_WRONG, REQUESTS, Attempt, Conversation, Request
from tests.simulation.network import Peering
from tests.simulation.prompts import PAGE_BYTES, Prompt
from tests.simulation.workers import Process

T = TypeVar("T")

_BOUNDS = ("pages were asked for", "transfers of name", "lost workers are orphaned")  # that a seed may reach
TICK = 0.05
CHECK_EVERY = 64  # events
MORE_REQUESTS = 400  # than were drawn, at most, where there was no restore yet


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    counts: Counter[str]
    events: int
    seconds: float  # virtual


class Simulation:
    def __init__(self, seed: int, *, faults: Faults | None = None, trace: bool = False) -> None:
        self.seed = seed
        clock = self.clock = Clock(seed)
        if trace:
            clock.trace = []
        random = clock.random
        self.faults = draw_faults(clock) if faults is None else faults
        self.counts = clock.counts
        self.requests_left = REQUESTS + random.randint(0, 20)
        self._more = 0 if faults is not None else MORE_REQUESTS
        self.open: set[Request] = set()
        self._due: list[tuple[int, Callable[[], None]]] = []  # faults, by how many requests are still to come then
        self.prompts: tuple[list[Prompt], list[Prompt]] = ([], [])
        decodes, prefills = random.choice([(1, 1), (1, 2), (2, 1)])
        self.prefills = [self._prefill(f"p{i}") for i in range(prefills)]
        peers = {prefill.config.name: "127.0.0.1:1" for prefill in self.prefills}
        self.decodes = [
            SimDecode(clock, _config(f"d{i}", "decode", peers), self._setting(tiered=i == 0), self.faults)
            for i in range(decodes)
        ]
        self.peerings = [Peering(clock, self.faults, d, p) for d in self.decodes for p in self.prefills]
        self.decode_workers = [Process(clock, d, tenant) for d in self.decodes for tenant in (0, 1)]
        self.prefill_workers = [Process(clock, p, tenant) for p in self.prefills for tenant in (0, 1)]
        for number in range(random.choice([4, 8, 16])):
            Conversation(self, number % 4 == 3)
        self._strew_faults()
        clock.background(TICK, self._tick)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        clock = self.clock
        step = clock.step
        while clock.under_way:
            while clock.under_way:
                step()
                if clock.events % CHECK_EVERY == 0:
                    self._check()
            if self.open:  # the prefill side may wait that long before prompts that rest yield their pages
                clock.run_until(clock.now + REST_SECONDS + 2 * TICK)
        if self.open:
            stuck = sorted(self.open, key=lambda request: request.id)
            raise Violation(f"nothing is under way, and {len(stuck)} requests wait; {stuck[0].where()}")
        expect(self.requests_left == 0, f"{self.requests_left} requests were never made")
        self._wind_up()
        counts = self.counts
        for side in (*self.decodes, *self.prefills):
            cache = side.cache
            counts["evicted pages"] += cache.evicted
            counts["host pages evicted"] += cache.tiers.host_evicted
            counts["pages dropped without a copy"] += cache.tiers.dropped
        for decode in self.decodes:
            counts["asked again"] += decode.ready_core.asked_again
            counts["parts with a wrong checksum"] += decode.ready_core.transfer_counters.mismatched_parts
        return Result(self.seed, counts, clock.events, clock.now)

    def _check(self) -> None:
        for side in self.decodes:
            side.check()
        for other in self.prefills:
            other.check()

    def _tick(self) -> None:
        for side in (*self.decodes, *self.prefills):
            side.tick()
        self.clock.background(TICK, self._tick)

    def _wind_up(self) -> None:
        """Every worker leaves, deadlines pass, and nothing may be held."""
        for peering in self.peerings:
            peering.clock.counts["sessions"] += peering.wires
        for process in [*self.decode_workers, *self.prefill_workers]:
            if process.connected:
                process.quiesce()
        self.clock.run_until(self.clock.now + 70.0)
        sides = [*self.decodes, *self.prefills]
        for side in sides:
            side.check()
            side.check_idle()
            self.counts["cached pages checked"] += sum(side.check_cache(t, self.prompts[t]) for t in (0, 1))
        for peering in self.peerings:
            peering.check_idle()
        for side in self.decodes:
            self.counts["stale notifications"] += side.ready_core.transfer_counters.stale_notifications
            self.counts["dropped parts"] += side.ready_core.transfer_counters.dropped_parts
        for side in sides:
            side.check_empty()

    # -- requests --------------------------------------------------------------------------------------------------

    def pick_decode(self, tenant: int) -> Process:
        there = [process for process in self.decode_workers if process.tenant == tenant and process.connected]
        return self.clock.random.choice(there)

    def pick_prefill(self, tenant: int) -> Process:
        there = [process for process in self.prefill_workers if process.tenant == tenant and process.connected]
        return self.clock.random.choice(there)

    def judge_failure(self, request: Request, attempt: Attempt, leg: str, code: int, message: str) -> None:
        name = common.ErrorCode.Name(code)  # type: ignore[arg-type]
        self.counts[f"{leg} {name}"] += 1
        said = f"{leg} of {attempt.name} failed with {name}: {message}"
        if code == common.ERROR_DEADLINE_EXCEEDED:
            expect(request.deadline_ms, f"{said}, though its deadline is far")
        elif code == common.ERROR_RESOURCE_EXHAUSTED:
            expect(any(words in message for words in _BOUNDS), said)
        elif code in _ALWAYS_WRONG:
            raise Violation(said)
        elif self.faults.none and not request.deadline_ms:
            expect(request.errors_allowed, f"{said}, and nothing was wrong")

    # -- faults ----------------------------------------------------------------------------------------------------

    def _strew_faults(self) -> None:
        faults, clock = self.faults, self.clock
        for count, fault in (
            (faults.partitions, self._partition),
            (faults.broken_streams, self._break_stream),
            (faults.decode_crashes, self._crash_decode),
            (faults.prefill_crashes, self._crash_prefill),
            (faults.restarts, self._restart),
            (faults.quiesces, self._quiesce),
        ):
            for _ in range(count):
                self._due.append((clock.random.randrange(self.requests_left), fault))
        self._due.sort(key=lambda due: due[0])

    def request_made(self) -> None:
        """Faults come with requests: so each meets some."""
        self.requests_left -= 1
        if self.requests_left == 0 and self._more > 0 and not self.counts["restores"]:  # a seed meets one
            self.requests_left = min(self._more, 20)
            self._more -= self.requests_left
        while self._due and self._due[-1][0] >= self.requests_left:
            _, fault = self._due.pop()
            self.clock.after(self.clock.between(0.0, 0.02), fault)

    def _wire(self) -> Peering | None:
        there = [peering for peering in self.peerings if peering.wire is not None]
        return self.clock.random.choice(there) if there else None

    def _partition(self) -> None:
        if (peering := self._wire()) is not None and peering.wire is not None:
            self.counts["partitions"] += 1
            peering.wire.partition()

    def _break_stream(self) -> None:
        if (peering := self._wire()) is not None and peering.wire is not None:
            self.counts["broken streams"] += 1
            peering.wire.break_stream()

    def _crash_decode(self) -> None:
        self._replace(self.decode_workers, "decode worker crashes", crash=True)

    def _crash_prefill(self) -> None:
        self._replace(self.prefill_workers, "prefill worker crashes", crash=True)

    def _quiesce(self) -> None:
        workers = self.decode_workers if self.clock.chance(0.5) else self.prefill_workers
        self._replace(workers, "workers that left", crash=False)

    def _replace(self, workers: list[Process], what: str, *, crash: bool) -> None:
        self.counts[what] += 1
        index = self.clock.random.randrange(len(workers))
        old = workers[index]
        workers[index] = Process(self.clock, old.side, old.tenant)
        if crash:
            old.crash(self.clock.between(0.0, 0.1))
        else:
            old.quiesce()

    def _restart(self) -> None:
        """A prefill daemon dies with all that it holds; another one takes its place."""
        self.counts["prefill daemon restarts"] += 1
        index = self.clock.random.randrange(len(self.prefills))
        old = self.prefills[index]
        old.dead = True
        fresh = self.prefills[index] = self._prefill(old.config.name)
        for i, process in enumerate(self.prefill_workers):
            if process.side is old:
                process.daemon_is_gone()
                self.prefill_workers[i] = Process(self.clock, fresh, process.tenant)
        for peering in self.peerings:
            if peering.prefill is old:
                peering.prefill_restarted(fresh)

    # -- what there is ---------------------------------------------------------------------------------------------

    def _prefill(self, name: str) -> SimPrefill:
        return SimPrefill(self.clock, _config(name, "prefill", {}), self._setting(), self.faults)

    def _setting(self, *, tiered: bool = False) -> Setting:
        """`tiered`: surely with a host tier."""
        random = self.clock.random
        pages = random.choice([48, 64, 96])
        host = random.choice([24, 200] if tiered else [0, 24, 200])
        quota = random.choice([None, None, Quota(8, 40), Quota(8, 40, 8, 32)])
        return Setting(
            pages=pages,
            host_pages=host,
            slots=random.choice([2, 4, 8]),
            send_slots=random.choice([1, 2, 4]),
            slot_bytes=64 + random.choice([PAGE_BYTES // 2, PAGE_BYTES * 5 // 2, PAGE_BYTES * 5]),
            policy=random.choice(["lru", "lru", "lfu", "fifo", "priority", "learned"]),
            overcommit=random.choice([1.0, 1.0, 1.0, 4.0]),
            write_through=random.choice([0, 0, 2]),
            quota=quota,
            checksums=self.faults.flips > 0 or random.random() < 0.5,
            zero_freed=random.random() < 0.5,
        )


def _config(name: str, role: str, peers: dict[str, str]) -> DaemonConfig:
    return DaemonConfig(
        role=role, name=name, listen="127.0.0.1:0", socket="/nowhere", peers=peers, page_size=4, max_tokens=4096
    )


def simulated(
    seed: int,
    run: Callable[[Simulation], T],
    *,
    faults: Faults | None = None,
    trace: bool = False,
    made: Callable[[Simulation], None] = lambda simulation: None,
) -> T:
    """`run` of this seed's simulation. Its garbage is collected once, at the end: that is faster."""

    async def inside() -> T:  # sessions make futures of the running loop; nothing here waits for any
        simulation = Simulation(seed, faults=faults, trace=trace)
        made(simulation)
        return run(simulation)

    collecting = gc.isenabled()
    gc.disable()
    try:
        return asyncio.run(inside())
    finally:
        if collecting:
            gc.enable()
        gc.collect()


def simulate(seed: int, *, faults: Faults | None = None) -> Result:
    """Runs one seed. Violation, or an AssertionError of the product, says what was broken."""
    return simulated(seed, Simulation.run, faults=faults)
