"""Bursts of one tenant's requests, which its quota keeps waiting, beside another tenant's; and who may have to wait.

The bound is none in time: whoever fits into the pool, and before whom only requests wait that quotas of their own
namespaces keep out, has its pages at the core's next step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.prefill_entry import Entry
from kvferry.daemon.core.reservations import Hold
from tests.simulation.clock import expect
from tests.simulation.front import Request
from tests.simulation.prompts import PAGE

if TYPE_CHECKING:
    from kvferry.daemon.core.lease import Lease
    from tests.simulation.daemons import SimDecode, SimPrefill
    from tests.simulation.simulator import Simulation

LEAST, MOST = 40, 80  # requests of a burst
BESIDE = 6  # of the other tenant
MANY = 32  # that wait: as far as the core looks past those without room
STEPS = 8  # of the core, in none of which a request that fits has had its pages


class Burst:
    """Whoever sends it: requests that are made at once, of which none follows on another."""

    remote = 0.3  # of its prompts, computed by a prefill worker

    def __init__(self, simulation: Simulation, side: SimDecode, tenant: int, requests: int) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.side, self.tenant, self.left = side.config.name, tenant, requests

    def begin(self, pages: int) -> None:
        random, clock = self.clock.random, self.clock
        for _ in range(self.left):
            tokens = [random.randrange(1 << 16) for _ in range(random.randint(PAGE, pages * PAGE))]
            output = self.simulation.draw_output(2)
            request = Request(self, tokens, output)
            self.simulation.open.add(request)
            clock.after(clock.between(0.0, 0.02), request.begin)

    def over(self, request: Request) -> None:
        self.simulation.open.remove(request)
        self.left -= 1


def burst(simulation: Simulation) -> None:
    """The second tenant's, at a decode daemon that has a quota for it, and a few of the first one's."""
    clock = simulation.clock
    sides = [side for side in simulation.decodes if side.setting.quota is not None]
    if not sides or not simulation.serves(1):
        return
    side = clock.random.choice(sides)
    simulation.counts["bursts"] += 1
    Burst(simulation, side, 1, clock.random.randint(LEAST, MOST)).begin(12)
    clock.after(clock.between(0.02, 0.2), Burst(simulation, side, 0, BESIDE).begin, 3)


class Queues:
    """Looks at who waits at every side, again and again."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        # By side, who waits and fits, and since which message of its workers.
        self._seen: dict[str, tuple[Lease | Entry, int]] = {}

    def look(self) -> None:
        for side in self._simulation.sides:
            who = side.config.name
            waits = _waits_in_vain(side, self._simulation.counts)
            if waits is None:
                self._seen.pop(who, None)
                continue
            before, since = self._seen.get(who, (None, 0))
            if before is not waits:
                self._seen[who] = waits, side.handled
                continue
            steps = side.handled - since
            expect(steps < STEPS, f"{who}: {waits.name} fits, and waits behind those that their own quotas keep out")


def _waits_in_vain(side: SimDecode | SimPrefill, counts: dict[str, int]) -> Lease | Entry | None:
    """The first that fits of those who wait, if nobody before it waits for room."""
    core = side.ready_core
    if not core._supply.queue:
        return None
    cache, seen = core.cache, list[Namespace]()
    for number, waiting in enumerate(core._supply.queue, 1):
        hold = waiting.hold
        if isinstance(waiting, Entry) and not waiting.asked:
            return None  # they have bounds of their own
        if hold.namespace not in seen and _fits(cache, hold):
            return waiting
        if hold.namespace not in seen:
            seen.append(hold.namespace)
        if not _kept_by_quota(cache, hold):
            return None
        counts["looks past 32 at their quota"] += number == MANY
    return None


def _fits(cache: Cache, hold: Hold) -> bool:
    """Even if it matched nothing."""
    pages = hold.wanted + _later(hold)
    return pages <= cache.reachable(hold.namespace) and cache.fits(hold.namespace, pages)


def _kept_by_quota(cache: Cache, hold: Hold) -> bool:
    """By its own namespace's, or by what those of others protect."""
    namespace: Namespace = hold.namespace
    if hold.wanted + _later(hold) > cache.reachable(namespace):
        return True
    here = namespace.tree.match(hold.digests).device_pages
    return not namespace.within_hard(max(0, hold.wanted - here) + _later(hold))


def _later(hold: Hold) -> int:
    return math.ceil(hold.growth / hold.overcommit)
