"""Seeds of the simulation; a failing one is replayed by `python -m tests.simulation --seed N`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.simulation.__main__ import LEAST, Outcome, outcome, show
from tests.simulation.clock import Clock
from tests.simulation.faults import Draw, Faults, draw_all, draw_faults, with_blocks, with_patience, with_stows
from tests.simulation.front import REQUESTS
from tests.simulation.simulator import simulate

Setting = Callable[[Draw, Clock], Faults]

ROOT = Path(__file__).resolve().parents[2]
# What a run of many seeds must have met: else the oracle has looked at nothing.
MET = (
    "answered",
    "aborts",
    "asked again",
    "cached pages checked",
    "chunks of host tiers",
    "copies in pieces",
    "copies of some heads",
    "decode daemon restarts",
    "decode worker crashes",
    "dropped parts",
    "entries found again",
    "evicted pages",
    "fetches that were stopped",
    "headers told by couriers",
    "host pages evicted",
    "host tiers that stay small",
    "pages cleared",
    "pages that came back",
    "pages that travelled",
    "partitions",
    "parts with a flipped bit",
    "parts with a wrong checksum",
    "prefill daemon restarts",
    "prefill worker crashes",
    "repeated notifications",
    "restored pages with a wrong checksum",
    "restores",
    "restores that failed",
    "rows that were damaged",
    "scatters that failed",
    "spills",
    "spills that failed",
    "stale notifications",
    "tails cleared",
    "tried again",
    "writes in pieces",
)
MANIFOLD = (16, 29)  # seeds that meet all of it with every kind of fault
# Likewise, of a large run.
MET_BY_MANY = (
    "couriers that did not start",
    "couriers that stood still",
    "daemons that stood still",
    "engines registered again",
    "workers that stood still",
    "answered though a daemon drained",
    "bursts",
    "copies of a worker's own that hang",
    "CPU blocks published",
    "CPU blocks withdrawn",
    "drains",
    "flushes",
    "flushes that were refused",
    "GPU blocks published",
    "GPU blocks withdrawn",
    "looks past 32 at their quota",
    "pages filled behind the end of their request",
    "pages filled by decode workers",
    "pages filled by workers that were lost",
    "pages flushed",
    "pages that another's fetch brought",
    "pages that came from another decode daemon",
    "pins",
    "pins that ran out",
    "pins that were let go",
    "pins that were refused",
    "prompts not taken",
    "published pages compared",
    "requests not taken",
    "requests that came back to a daemon that drains",
    "requests that failed while their worker filled pages",
    "tokens that were wrong",
    "warm-ups",
    "warm-ups left as their prompt was computed",
)
MANY = 1000
# Likewise, of seeds whose engines have blocks of their own.
MET_WITH_BLOCKS = (
    "blocks that another request has had",
    "blocks that were named twice",
    "engines registered again",
    "looks for free blocks in vain",
    "prefixes that end within a page",
    "restores that failed",
    "stores",
    "stores of blocks that are another request's too",
    "tails of blocks cut",
    "tokens loaded into blocks",
)
BLOCKS = (3, 10)  # seeds that meet all of it
# What these never meet: their sides have one rank, one decode daemon and one tenant, and what is behind a prompt's end
# is the engine's to clear.
NEVER_WITH_BLOCKS = (
    "bursts",
    "copies of some heads",
    "looks past 32 at their quota",
    "pages that came from another decode daemon",
    "tails cleared",
)
# Likewise, of prefill engines that want blocks back of what waits, and that wait for what is fetched: with such seeds.
MET_WITH_STOWS = (
    "engines registered again",
    "parts sent from the host tier",
    "prompts that wait in the host tier",
    "spills that failed",
    "stows of what was asked for",
    "stows that had no room, or failed",
    "tails of blocks cut",
)
MET_WITH_PATIENCE = (
    "engines that waited long enough for pages",
    "fetches behind what ends within a page",
    "fetches into blocks",
    "fetches that were stopped",
    "pages that came back",
    "pages that came from another decode daemon",
    "prompts that wait in the host tier",
    "rows that were verified to be lent",
)
WAITING = {with_stows: (MET_WITH_STOWS, (10,)), with_patience: (MET_WITH_PATIENCE, (9, 10, 19))}
MANY_WAITING = 300


def judge(outcomes: list[Outcome], always: Sequence[str] = MET, never: Sequence[str] = ()) -> None:
    wrong = [f"seed {done.seed}: {done.problem}" for done in outcomes if done.problem]
    assert not wrong, "\n".join([*wrong, "replay by: python -m tests.simulation --seed N"])
    total: Counter[str] = Counter()
    for done in outcomes:
        total += done.counts
        assert done.counts["requests"] >= REQUESTS
        for what, counters in LEAST.items():
            assert any(done.counts[each] for each in counters), f"seed {done.seed} had no {what}"
    print(f"\n{len(outcomes)} seeds, {outcomes[0].seed} to {outcomes[-1].seed}:")
    show(total)
    met = (*MET, *MET_BY_MANY, *MET_WITH_BLOCKS) if len(outcomes) >= MANY else always
    missing = [what for what in met if not total[what] and what not in never]
    assert not missing, f"nothing of {missing} happened"
    found = [what for what in never if total[what]]
    assert not found, f"{found} happened, of what never does"


def test_seeds() -> None:
    first = int(os.environ.get("SIMULATION_SEED", "0"))
    judge([outcome(seed, draw_all) for seed in (*MANIFOLD, first)])


def test_seeds_with_blocks() -> None:
    some = [outcome(seed, partial(with_blocks, draw_all)) for seed in BLOCKS]
    judge(some, MET_WITH_BLOCKS, NEVER_WITH_BLOCKS)


@pytest.mark.parametrize("setting", WAITING)
def test_seeds_with_prompts_that_wait(setting: Setting) -> None:
    met, seeds = WAITING[setting]
    judge([outcome(seed, partial(setting, draw_all)) for seed in seeds], met)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("setting", WAITING)
def test_many_seeds_with_prompts_that_wait(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        faults = partial(outcome, faults=partial(setting, draw_all))
        outcomes = list(executor.map(faults, range(MANY_WAITING), chunksize=8))
    with capsys.disabled():
        judge(outcomes, WAITING[setting][0])


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("faults", "never"),
    [(draw_faults, ()), (draw_all, ()), (partial(with_blocks, draw_faults), NEVER_WITH_BLOCKS)],
)
def test_many_seeds(faults: Draw, never: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        outcomes = list(executor.map(partial(outcome, faults=faults), range(1000), chunksize=8))
    with capsys.disabled():
        judge(outcomes, never=never)


def test_some_aborts() -> None:
    assert mostly_aborted(3)["aborts"] > 100


@pytest.mark.nightly
def test_a_hundred_thousand_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    """At random instants, beside crashes and failing copies."""
    total: Counter[str] = Counter()
    seed = 0
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        while total["aborts"] < 100_000:
            for counts in executor.map(mostly_aborted, range(seed, seed + 64)):
                total += counts
            seed += 64
    with capsys.disabled():
        print(f"\n{seed} seeds:")
        show(total)


def mostly_aborted(seed: int) -> Counter[str]:
    faults = Faults(aborts=0.95, repeats=0.1, copies_fail=0.005, tier_fails=0.05, decode_crashes=1, prefill_crashes=1)
    return simulate(seed, faults=faults).counts


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_without_faults_every_request_is_answered(seed: int) -> None:
    counts = simulate(seed, faults=Faults()).counts
    assert counts["answered"] == counts["requests"] >= REQUESTS
    assert counts["session ends"] == 0


@pytest.mark.nightly
def test_where_only_clients_abort_nobody_else_fails() -> None:
    """The oracle then takes no error for an answer (Faults.none)."""
    for seed in range(100):
        counts = simulate(seed, faults=Faults(aborts=0.15, repeats=0.1)).counts
        assert counts["failed"] == 0 and counts["answered"] + counts["aborted"] == counts["requests"] >= REQUESTS


def test_a_seed_is_replayed_exactly() -> None:
    """By processes where hashes of bytes are others; in this one, what earlier tests left behind may yet run."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "1"]
    said = []
    for hash_seed in ("1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        said.append(run.stdout)
    assert said[0] == said[1]
    assert re.search(r"seed 1: \d{4,} events in [\d.]+ virtual seconds, nothing wrong", said[0]), said[0]
