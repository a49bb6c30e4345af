"""One seed: daemons, workers, conversations and faults, drawn from it and run until nothing is under way.

The oracle: what a worker reads, what a page holds when it is reported, cached, spilled, restored or decoded, is its
digest's bytes; nobody writes a page that was given to somebody else; a session breaks only by a fault of the network,
and a request fails only for a reason; every request ends; at the end nothing is held.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from unittest import mock

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.namespaces import Quota
from kvferry.daemon.core.way_back import choice
from kvferry.proto import common_pb2 as common
from tests.simulation.clients.bursts import Queues, burst
from tests.simulation.clients.operators import Operator
from tests.simulation.clock import Clock, Violation, expect
from tests.simulation.daemons import Setting, SimDecode, SimPrefill, sized
from tests.simulation.engines import EngineProcess, engines_installed
from tests.simulation.faults import Draw, Faults, draw_faults
from tests.simulation.front import _ALWAYS_WRONG, REQUESTS, Attempt, Conversation, Request
from tests.simulation.loops import ProcessLoop
from tests.simulation.network import Network
from tests.simulation.pools import of_blocks, pools_with_blocks
from tests.simulation.prompts import PAGE, PAGE_BYTES, Prompt
from tests.simulation.restarts import Restarts
from tests.simulation.workers import Process

T = TypeVar("T")

_BOUNDS = ("pages were asked for", "transfers of name", "are orphaned until these let go")  # that a seed may reach
END_SECONDS = 20.0
IDLE_SECONDS = 70.0  # in which every deadline has passed
LATE_SECONDS = 4.0  # behind all that, for what is late: notifications, the end of a peer that is not heard
STUCK_SECONDS = 300.0  # in which every request ends: its deadlines, and standstills
CHECK_EVERY = 128  # events
# Of every request: behind a standstill some are late.
TRANSFER_SECONDS: float = DaemonConfig.model_fields["transfer_seconds"].default
MORE_REQUESTS = 400  # than were drawn, at most, where there was no restore yet


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    counts: Counter[str]
    events: int
    seconds: float  # virtual


class Simulation:
    def __init__(self, seed: int, *, faults: Faults | Draw = draw_faults, trace: bool = False) -> None:
        self.seed = seed
        clock = self.clock = Clock(seed)
        if trace:
            clock.trace = []
        random = clock.random
        self.faults = faults if isinstance(faults, Faults) else faults(clock)
        self.counts = clock.counts
        self._fillers_crash = 0  # workers that are to crash as they fill pages
        self._stood_until = -1e9  # the end of the last standstill
        self.requests_left = REQUESTS + random.randint(0, 20)
        self._more = 0 if isinstance(faults, Faults) else MORE_REQUESTS
        self.open: set[Request] = set()
        self._due: list[tuple[int, Callable[[], None]]] = []  # faults, by how many requests are still to come then
        self.prompts: tuple[list[Prompt], list[Prompt]] = ([], [])
        self.network = Network(clock, self.faults)
        self.processes: list[ProcessLoop] = []  # of daemons, also dead ones
        self.restarts = Restarts(self)
        self.ranked = seed % 3 == 2  # its daemons have several ranks
        decodes, prefills = random.choice([(1, 1), (1, 2), (2, 1)])
        self._pools = dict.fromkeys(("decode", "prefill"), "daemon")
        if self.faults.blocks:
            decodes, prefills = 2 if self.faults.patience and seed % 2 else 1, 1
            self._pools = pools_with_blocks(self.faults, random)
            self.ranked = False
        elif (decodes, prefills) == (1, 1) and self.seed % 3 == 0:
            self._pools = dict.fromkeys(self._pools, "engine")
        tenants = (0, 1) if set(self._pools.values()) == {"daemon"} else (0,)
        self.prefills = [self.new_prefill(f"p{i}") for i in range(prefills)]
        self.decodes = [self.new_decode(f"d{i}", tiered=i == 0) for i in range(decodes)]
        self.decode_workers = [self.new_worker(clock, d, tenant) for d in self.decodes for tenant in tenants]
        self.prefill_workers = [self.new_worker(clock, p, tenant) for p in self.prefills for tenant in tenants]
        for number in range(random.choice([4, 8, 16])):
            Conversation(self, tenants[number % 4 == 3 and -1])
        self.operator = Operator(self)
        self._strew_faults()
        self.queues = Queues(self)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        clock = self.clock
        step = clock.step
        while self.open or self.requests_left:
            step()
            if clock.events % CHECK_EVERY == 0:
                self._check()
        for process in (*self.decode_workers, *self.prefill_workers):
            if process.connected and process.blocks is not None:
                process.blocks.check_back()
        self._wind_up()
        counts = self.counts
        for side in (*self.decodes, *self.prefills):
            cache = side.cache
            counts["evicted pages"] += cache.evicted
            counts["host pages evicted"] += cache.tiers.host_evicted
            counts["pages dropped without a copy"] += cache.tiers.dropped
        for prefill in self.prefills:
            counts["pages that another's fetch brought"] += prefill.ready_core.fetches.followed_tokens // PAGE
        for decode in self.decodes:
            counts["asked again"] += decode.ready_core.asked_again
            counts["parts with a wrong checksum"] += decode.ready_core.transfer_counters.mismatched_parts
        return Result(self.seed, counts, clock.events, clock.now)

    def _check(self) -> None:
        self.operator.check()
        self.queues.look()
        for side in (*self.decodes, *self.prefills):
            side.check()
            side.check_published()
        oldest = min((request.began for request in self.open), default=self.clock.now)
        if self.clock.now - oldest > STUCK_SECONDS:
            stuck = sorted(self.open, key=lambda request: request.id)
            raise Violation(f"{len(stuck)} requests wait, the oldest since {oldest:.1f} s; {stuck[0].where()}")

    def _wind_up(self) -> None:
        """Every worker leaves, deadlines pass, and nothing may be held."""
        for process in [*self.decode_workers, *self.prefill_workers]:
            if process.connected:
                process.quiesce()
        self._run_on(IDLE_SECONDS, lambda: any(side.in_hand for side in self.sides))
        self.clock.run_until(self.clock.now + LATE_SECONDS)
        sides = self.sides  # one that was drained has come again meanwhile
        for side in sides:
            side.check()
            side.check_published()
            side.check_idle()
            self.counts["cached pages checked"] += sum(side.check_cache(t, self.prompts[t]) for t in (0, 1))
        for decode in self.decodes:
            self.counts["stale notifications"] += decode.ready_core.transfer_counters.stale_notifications
            self.counts["dropped parts"] += decode.ready_core.transfer_counters.dropped_parts
        for side in sides:
            side.check_empty()
        ends = [side.process.create_task(side.end()) for side in sides]
        self._run_on(END_SECONDS, lambda: not all(end.done() for end in ends))
        late = [side.config.name for side, end in zip(sides, ends, strict=True) if not end.done()]
        expect(not late, f"{late} do not end within {END_SECONDS:g} s")
        for end in ends:
            end.result()
        expect(not self.network.couriers, f"{len(self.network.couriers)} couriers are left")

    def _run_on(self, seconds: float, needed: Callable[[], bool]) -> None:
        """So long at most."""
        until = self.clock.now + seconds
        while needed() and self.clock.now < until:
            self.clock.run_until(self.clock.now + 0.5)

    # -- requests --------------------------------------------------------------------------------------------------

    def pick_decode(self, tenant: int, side: str | None, drains: bool) -> Process:
        """`drains`: not one that drains, if there is another."""
        return self._pick(
            [each for each in self.decode_workers if side in (None, each.side.config.name)], tenant, drains
        )

    def pick_prefill(self, tenant: int, drains: bool) -> Process:
        return self._pick(self.prefill_workers, tenant, drains)

    def _pick(self, workers: list[Process], tenant: int, drains: bool) -> Process:
        there = _here(workers, tenant)
        if drains:
            there = [process for process in there if not process.side.draining] or there
        return self.clock.random.choice(there)

    def serves(self, tenant: int) -> bool:
        """Whether there is somebody for both legs of a request."""
        workers = (self.decode_workers, self.prefill_workers)
        return all(any(each.tenant == tenant and each.connected for each in some) for some in workers)

    def draw_output(self, pages: int) -> list[int]:
        """Tokens of as many pages at most; more where a daemon promises less than its requests may grow by."""
        random = self.clock.random
        most = 3 * pages if any(side.setting.overcommit > 1.0 for side in self.decodes) else pages
        return [random.randrange(1 << 16) for _ in range(random.randint(1, most * PAGE))]

    def judge_failure(self, request: Request, attempt: Attempt, leg: str, code: int, message: str) -> None:
        name = common.ErrorCode.Name(code)  # type: ignore[arg-type]
        self.counts[f"{leg} {name}"] += 1
        said = f"{leg} of {attempt.name} failed with {name}: {message}"
        if code == common.ERROR_DEADLINE_EXCEEDED:
            stood = self.clock.now - self._stood_until < TRANSFER_SECONDS
            expect(request.deadline_ms or stood, f"{said}, though its deadline is far")
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
            (faults.restarts, self.restarts.prefill),
            (faults.quiesces, self._quiesce),
            (faults.standstills, self._stand_still),
            (faults.pins, self.operator.pin),
            (faults.flushes, self.operator.flush),
            (faults.drains, self.operator.drain),
            (faults.bursts, partial(burst, self)),
            (faults.decode_restarts, self.restarts.decode),
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
            self.restarts.mend_tiers()
        while self._due and self._due[-1][0] >= self.requests_left:
            _, fault = self._due.pop()
            self.clock.after(self.clock.between(0.0, 0.02), fault)

    def _partition(self) -> None:
        """Nothing arrives for a while; both sides may notice, or neither."""
        if routes := self.network.routes():
            self.counts["partitions"] += 1
            self.clock.random.choice(routes).cut(self.clock.between(0.05, 10.0))

    def _break_stream(self) -> None:
        if routes := self.network.routes():
            self.counts["broken streams"] += 1
            self.clock.random.choice(routes).break_streams()

    def _stand_still(self) -> None:
        """A process stops for 0.1 to 60 s, and its clock has jumped on with the world's as it goes on."""
        random = self.clock.random
        seconds = 0.1 * 600.0 ** random.random()
        workers = [process for process in (*self.decode_workers, *self.prefill_workers) if process.connected]
        kind = random.choice(["daemons", "daemons", "workers", "couriers"])
        self.counts[f"{kind} that stood still"] += 1
        if kind == "couriers":
            if couriers := self.network.couriers:
                courier = random.choice(couriers)
                courier.stand_still(seconds)
                self._stands(courier.daemon, seconds)
            return
        loop = random.choice(workers).loop if kind == "workers" else random.choice(self.sides).process
        loop.stand_still(seconds)
        self._stands(loop, seconds)

    def _stands(self, loop: ProcessLoop, seconds: float) -> None:
        until = self.clock.now + seconds
        self._stood_until = max(self._stood_until, until)
        for route in self.network.routes_of(loop):
            route.disturbed_at = max(route.disturbed_at, until)

    def _crash_decode(self) -> None:
        self._replace(self.decode_workers, "decode worker crashes", crash=True)
        self._fillers_crash += self.faults.held > 0

    def worker_fills(self, process: Process) -> None:
        """It copies what it holds itself: for every crash of any, one more falls into that."""
        if self._fillers_crash:
            self._fillers_crash -= 1
            self.clock.after(self.clock.between(0.0, 0.005), self._crash_filler, process)

    def _crash_filler(self, process: Process) -> None:
        if process in self.decode_workers:
            self._replace([process], "decode worker crashes", crash=True)

    def _crash_prefill(self) -> None:
        self._replace(self.prefill_workers, "prefill worker crashes", crash=True)

    def _quiesce(self) -> None:
        workers = self.decode_workers if self.clock.chance(0.5) else self.prefill_workers
        self._replace(workers, "workers that left", crash=False)

    def _replace(self, some: list[Process], what: str, *, crash: bool) -> None:
        """One of these leaves, and another comes."""
        old = self.clock.random.choice(some)
        if not old.connected:  # it has yet to come
            return
        self.counts[what] += 1
        workers = self.decode_workers if old in self.decode_workers else self.prefill_workers
        workers[workers.index(old)] = self.new_worker(self.clock, old.side, old.tenant)
        if crash:
            old.crash(self.clock.between(0.0, 3.0))
        else:
            old.quiesce()

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def sides(self) -> list[SimDecode | SimPrefill]:
        return [*self.decodes, *self.prefills]

    def new_worker(self, clock: Clock, side: SimDecode | SimPrefill, tenant: int) -> Process:
        return (EngineProcess if side.config.pool == "engine" else Process)(clock, side, tenant)

    def new_prefill(self, name: str) -> SimPrefill:
        setting = self._setting(tiered=self.faults.stows > 0)
        setting = of_blocks(setting, self.faults, "prefill", self._pools["prefill"], self.clock.random)
        config = sized(_config(name, "prefill", {}, self._pools["prefill"]), setting)
        side = SimPrefill(self.clock, config, setting, self.faults, self.network, self.restarts.disk(name))
        self._add(side)
        self.network.daemons[_address(name)] = side
        return side

    def new_decode(self, name: str, *, tiered: bool) -> SimDecode:
        setting = self._setting(tiered=tiered)
        setting = of_blocks(setting, self.faults, "decode", self._pools["decode"], self.clock.random)
        peers = {prefill.config.name: _address(prefill.config.name) for prefill in self.prefills}
        config = sized(_config(name, "decode", peers, self._pools["decode"]), setting)
        side = SimDecode(self.clock, config, setting, self.faults, self.network, self.restarts.disk(name))
        self._add(side)
        return side

    def _add(self, side: SimDecode | SimPrefill) -> None:
        self.processes.append(side.process)

    def _setting(self, *, tiered: bool = False) -> Setting:
        """`tiered`: surely with a host tier."""
        random = self.clock.random
        pages = random.choice([48, 64, 96])
        host = random.choice([24, 200] if tiered else [0, 24, 200])
        quota = random.choice([None, None, Quota(8, 40), Quota(8, 40, 8, 32)])
        if self.faults.bursts and quota is None:
            quota = Quota(8, 40)
        return Setting(
            pages=pages,
            host_pages=host,
            slots=random.choice([1, 2, 4, 8]),
            slot_bytes=64 + random.choice([PAGE_BYTES // 2, PAGE_BYTES * 5 // 2, PAGE_BYTES * 5]),
            policy=random.choice(["lru", "lru", "lfu", "fifo", "priority", "learned"]),
            overcommit=random.choice([1.0, 1.0, 1.0, 4.0]),
            write_through=random.choice([0, 0, 2]),
            write_ahead=(0.125, 0.0, 0.5)[self.clock.seed % 3],
            quota=quota,
            checksums=self.faults.flips > 0 or random.random() < 0.5,
            zero_freed=random.random() < 0.5,
            ranks=random.choice([1, 2, 2, 4, 4, 8]) if self.ranked else 1,
            way_back=self.faults.way_back,
        )


def _here(workers: list[Process], tenant: int) -> list[Process]:
    """The workers of a tenant that are there; else those that come again."""
    mine = [process for process in workers if process.tenant == tenant]
    return [process for process in mine if process.connected] or mine


def _config(name: str, role: str, peers: dict[str, str], pool: str) -> DaemonConfig:
    return DaemonConfig.model_validate(
        {
            "role": role,
            "name": name,
            "listen": "127.0.0.1:0",
            "socket": "/nowhere",
            "shm_dir": "/nowhere",
            "peers": peers,
            "page_size": 4,
            "max_tokens": 4096,
            "pool": "daemon" if pool == "daemon" else "engine",
        }
    )


def _address(name: str) -> str:
    return f"127.0.0.1:{1 + int(name[1:])}"


def simulated(
    seed: int,
    run: Callable[[Simulation], T],
    *,
    faults: Faults | Draw = draw_faults,
    trace: bool = False,
    made: Callable[[Simulation], None] = lambda simulation: None,
) -> T:
    """`run` of this seed's simulation. Its garbage is collected once, at the end: that is faster."""

    collecting = gc.isenabled()
    gc.disable()
    processes: list[ProcessLoop] = []
    try:
        simulation = Simulation(seed, faults=faults, trace=trace)
        processes = simulation.processes
        made(simulation)
        seconds = simulation.faults.fetch_seconds
        waits = mock.patch.multiple(choice, FORCED_SECONDS=seconds, LEAST_SECONDS=seconds)
        with simulation.network.installed(), engines_installed(simulation), waits:
            return run(simulation)
    finally:
        for process in processes:
            process.forget()
        Violation.first = None
        if collecting:
            gc.enable()
        gc.collect()


def simulate(seed: int, *, faults: Faults | Draw = draw_faults) -> Result:
    """Runs one seed. Violation, or an AssertionError of the product, says what was broken."""
    return simulated(seed, Simulation.run, faults=faults)
