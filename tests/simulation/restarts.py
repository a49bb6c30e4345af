"""Daemons that end and come again, and the disks on which they find what their host tiers had."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from tests.simulation.prompts import PAGE_BYTES
from tests.simulation.storage.disk import End, SimDisk

if TYPE_CHECKING:
    from tests.simulation.daemons import SimDecode, SimPrefill
    from tests.simulation.simulator import Simulation
    from tests.simulation.storage.tier import SimTier
    from tests.simulation.workers import Process

_ENDS: tuple[End, ...] = ("killed", "killed", "power", "closed", "closed")  # of a decode daemon


class Restarts:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._clock = simulation, simulation.clock
        self._disks: dict[str, SimDisk | None] = {}  # by daemon

    def disk(self, name: str) -> SimDisk | None:
        """The same for every daemon of the name."""
        clock = self._clock
        if name not in self._disks:
            there = clock.chance(self._simulation.faults.host_files)
            self._disks[name] = SimDisk(clock.random, PAGE_BYTES) if there else None
        return self._disks[name]

    def prefill(self) -> None:
        """A prefill daemon dies with all that it holds; another one takes its place."""
        simulation = self._simulation
        self._clock.counts["prefill daemon restarts"] += 1
        index = self._clock.random.randrange(len(simulation.prefills))
        old = simulation.prefills[index]
        self._kill(old, self._clock.random.choice(("killed", "killed", "power")))
        fresh = simulation.prefills[index] = simulation.new_prefill(old.config.name)
        self._workers_come_again(simulation.prefill_workers, old, fresh)

    def decode(self) -> None:
        """A decode daemon is killed, loses its power, or ends in order; the next one finds its host tier's file."""
        random = self._clock.random
        self._end(random.choice(self._simulation.decodes), random.choice(_ENDS))

    def mend_tiers(self) -> None:
        """An operator ends each decode daemon whose host tier came to nothing: the next one's may grow."""
        for side in list(self._simulation.decodes):
            if side.cache.host is not None and side.tiers.host.is_nothing:
                self._clock.counts["daemons ended for a tier without a row"] += 1
                self._end(side, "closed")

    def _end(self, old: SimDecode, how: End) -> None:
        clock = self._clock
        if how == "closed" and old.ending:
            return
        clock.counts["decode daemon restarts"] += 1
        clock.counts[f"decode daemons {how}"] += 1
        if how != "closed":
            self._kill(old, how)
            self._replace(old)
            return
        draining = old.drain(clock.between(0.02, 0.5), partial(self._streams_end, old))
        old.process.create_task(draining).add_done_callback(partial(self._ended, old))

    def _streams_end(self, side: SimDecode) -> None:
        """The daemon hears its workers no more; they notice it when it is gone."""
        for worker in list(side.workers.here.values()):
            cast("Process", worker.events).daemon_leaves()

    def _ended(self, old: SimDecode, ended: asyncio.Task[None]) -> None:
        ended.result()
        self._lose(old)
        self._replace(old)

    def _replace(self, old: SimDecode) -> None:
        simulation = self._simulation
        index = simulation.decodes.index(old)
        fresh = simulation.decodes[index] = simulation.new_decode(old.config.name, tiered=index == 0)
        self._workers_come_again(simulation.decode_workers, old, fresh)

    def _kill(self, side: SimDecode | SimPrefill, how: Literal["killed", "power"]) -> None:
        if side.cache.host is not None:
            cast("SimTier", side.tiers.host).die(how)
        self._lose(side)

    def _lose(self, side: SimDecode | SimPrefill) -> None:
        side.process.die()
        self._simulation.network.lose(side.process)

    def _workers_come_again(
        self, workers: list[Process], old: SimDecode | SimPrefill, fresh: SimDecode | SimPrefill
    ) -> None:
        for i, process in enumerate(workers):
            if process.side is old:
                process.daemon_is_gone()
                workers[i] = self._simulation.new_worker(self._clock, fresh, process.tenant)
