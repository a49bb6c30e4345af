"""Faults of a seed, and how often each happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.simulation.clock import Clock

# Of decode and of prefill workers: every seed has one.
_CRASHES = [(decode, prefill) for decode in range(4) for prefill in range(4) if decode or prefill]
# By whether copies between the tiers fail: of the pages that they lose few are pinned, and fewer by pins alone.
_PINS = ((0, 0, 2, 5), (0, 0, 10, 40))


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, and how many of each event there are in the seed."""

    aborts: float = 0.0  # of a request, by its client, at a random moment
    short_deadlines: float = 0.0  # of requests
    post_fails: float = 0.0  # of a write
    repeats: float = 0.0  # of a notification
    flips: float = 0.0  # a bit of a written part is another one
    early: bool = False  # the transport notifies before it has written
    copies_fail: float = 0.0  # of a gather or scatter
    tier_fails: float = 0.0  # of a copy between the tiers
    partitions: int = 0
    broken_streams: int = 0
    decode_crashes: int = 0
    prefill_crashes: int = 0
    restarts: int = 0  # of a prefill daemon
    quiesces: int = 0
    couriers_fail: float = 0.0  # as they start
    standstills: int = 0  # of a process
    held: float = 0.0  # of requests, whose decode worker has KV of the prompt itself
    hangs: float = 0.0  # of them, whose worker hangs as it copies that
    warmups: float = 0.0  # of requests
    pins: int = 0
    flushes: int = 0
    drains: int = 0
    bursts: int = 0  # of one tenant's requests, at its quota
    events: bool = False  # daemons publish what they hold
    lies: float = 0.0  # of tokens that workers send for it: they are not the digests'
    host_files: float = 0.0  # of a daemon with a host tier: that it is in a file
    decode_restarts: int = 0  # of a decode daemon
    blocks: bool = False  # engines of a side, or of both, have blocks of their own
    blunders: float = 0.0  # of their requests, which name a block of another one's
    way_back: bool = False  # prefill daemons fetch whatever decode holds and they lack
    fetch_seconds: float = 1.0  # that they wait at most, for an Ask and for a fetch
    patience: bool = False  # some prefill workers could compute without the daemon's pages, and wait for a fetch alone
    stows: float = 0.0  # of computed prompts in an engine's blocks, which it wants back before they are asked for

    @property
    def none(self) -> bool:
        """Nothing that may fail a request that its client wants."""
        events = self.partitions + self.broken_streams + self.decode_crashes + self.prefill_crashes + self.restarts
        writes = self.post_fails or self.early or self.flips
        others = self.quiesces or self.couriers_fail or self.standstills or self.drains or self.decode_restarts
        return not (events or others or writes or self.blunders or self.copies_fail or self.tier_fails)


Draw = Callable[[Clock], Faults]


def draw_faults(clock: Clock) -> Faults:
    """A seed's: some seeds have none but aborts and a worker's crash, most have several kinds."""
    chance, random = clock.chance, clock.random
    aborts = random.choice([0.05, 0.15, 0.3])
    repeats = random.choice([0.0, 0.05, 0.2])
    if chance(0.1):
        decode_first = chance(0.5)
        few = Faults(
            aborts=aborts, repeats=repeats, decode_crashes=int(decode_first), prefill_crashes=int(not decode_first)
        )
        return replace(_with_operator(clock, few), hangs=0.0, drains=0)
    decode_crashes, prefill_crashes = random.choice(_CRASHES)
    faults = Faults(
        aborts=aborts,
        repeats=repeats,
        short_deadlines=0.05 if chance(0.3) else 0.0,
        post_fails=0.001 if chance(0.4) else 0.0,
        early=chance(0.1),
        flips=random.choice([0.002, 0.02]) if chance(0.5) else 0.0,
        copies_fail=0.005 if chance(0.3) else 0.0,
        tier_fails=random.choice([0.05, 0.2]) if chance(0.5) else 0.0,
        partitions=random.randint(0, 2),
        broken_streams=random.randint(0, 2),
        decode_crashes=decode_crashes,
        prefill_crashes=prefill_crashes,
        restarts=random.randint(0, 1),
        quiesces=random.randint(0, 1),
        couriers_fail=0.1 if chance(0.2) else 0.0,
        standstills=random.randint(0, 3) if chance(0.5) else 0,
    )
    return _with_operator(clock, faults)


def with_blocks(draw: Draw, clock: Clock) -> Faults:
    """Of every seed, whichever it is."""
    return replace(draw(clock), blocks=True, blunders=0.02)


def with_stows(draw: Draw, clock: Clock) -> Faults:
    """Prefill engines have blocks, and have computed prompts wait in the host tier."""
    return replace(draw(clock), blocks=True, blunders=0.02, stows=0.7)


def with_patience(draw: Draw, clock: Clock) -> Faults:
    """Whatever decode holds is fetched, in two of three seeds into an engine's blocks."""
    seed = clock.seed
    waits = (1.0, 0.004)[seed // 3 % 2]
    return replace(
        draw(clock), blocks=seed % 3 > 0, blunders=0.0, way_back=True, fetch_seconds=waits, patience=True, stows=0.3
    )


def with_drains(draw: Draw, clock: Clock) -> Faults:
    """Operators drain daemons all the time."""
    return replace(draw(clock), drains=30)


def draw_all(clock: Clock) -> Faults:
    """A seed's with every kind of event, and whatever else a network, a disk, a client or an operator does."""
    drawn = draw_faults(clock)
    return replace(
        drawn,
        partitions=max(1, drawn.partitions),
        broken_streams=max(1, drawn.broken_streams),
        decode_crashes=max(1, drawn.decode_crashes),
        prefill_crashes=max(1, drawn.prefill_crashes),
        restarts=1,
        quiesces=1,
        couriers_fail=0.1,
        standstills=2,
        held=0.2,
        hangs=0.2,
        warmups=0.1,
        pins=max(3, drawn.pins),
        flushes=2,
        drains=1,
        bursts=1,
        events=True,
        lies=0.03,
        host_files=1.0,
        decode_restarts=1,
    )


def _with_operator(clock: Clock, faults: Faults) -> Faults:
    """Besides: what operators and clients do."""
    chance, random = clock.chance, clock.random
    held = random.choice([0.0, 0.0, 0.1, 0.3])
    events, lies = chance(0.5), chance(0.3)
    return replace(
        faults,
        held=held,
        hangs=random.choice([0.0, 0.1, 0.3]),
        warmups=random.choice([0.0, 0.0, 0.05, 0.1]),
        pins=random.choice(_PINS[faults.tier_fails > 0]),
        flushes=random.choice([0, 0, 1, 3]),
        drains=random.choice([0, 0, 0, 1, 2]),
        bursts=int(chance(0.1)),
        events=events,
        lies=0.03 if events and lies else 0.0,
        host_files=random.choice([0.0, 0.5, 1.0, 1.0]),
        decode_restarts=random.randint(1, 2) if chance(0.35) else 0,
        blocks=clock.seed % 6 == 1,
        blunders=0.02 if clock.seed % 12 == 1 else 0.0,
        way_back=clock.seed % 2 == 0,
        fetch_seconds=(1.0, 0.004)[clock.seed // 2 % 2],
    )
