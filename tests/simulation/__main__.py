"""python -m tests.simulation --seed N             replays a seed, and says what is wrong with it
python -m tests.simulation --seeds 0:500 --jobs 2  runs many, and prints what happened in them
With --blocks the engines of each seed have blocks of their own; with --stows prefill's want those back of prompts that
wait, and with --patience they wait for what decode holds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.simulation.faults import Draw, draw_all, draw_faults, with_blocks, with_patience, with_stows
from tests.simulation.simulator import Simulation, simulate, simulated

COMMAND = "python -m tests.simulation"
SETTINGS = {"blocks": with_blocks, "stows": with_stows, "patience": with_patience}
# Of what every seed has, with the counters that it is the sum of.
LEAST = {
    "requests": ("requests",),
    "aborts": ("aborts",),
    "evictions": ("evicted pages", "blocks that another request has had"),
    "restores": ("restores",),
    "crashes": ("decode worker crashes", "prefill worker crashes"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    counts: Counter[str]
    events: int
    problem: str


def outcome(seed: int, faults: Draw = draw_faults) -> Outcome:
    try:
        result = simulate(seed, faults=faults)
    except Exception as error:
        return Outcome(seed, Counter(), 0, f"{type(error).__name__}: {error}")
    return Outcome(seed, result.counts, result.events, "")


def replay(seed: int, faults: Draw, last: int) -> int:
    """With its last events, if something is wrong."""

    def run(simulation: Simulation) -> None:
        result = simulation.run()
        show(Counter(result.counts))
        print(f"seed {seed}: {result.events} events in {result.seconds:.3f} virtual seconds, nothing wrong")

    simulations: list[Simulation] = []
    try:
        simulated(seed, run, faults=faults, trace=True, made=simulations.append)
    except Exception:
        traceback.print_exc()
        for simulation in simulations:
            print(f"faults: {simulation.faults}")
            print("\n".join((simulation.clock.trace or [])[-last:]))
        print(f"seed {seed} found a violation; replay it by: {COMMAND} --seed {seed}{_flag(faults)}")
        return 1
    return 0


def _flag(faults: Draw) -> str:
    drawn, setting = (faults.args[0], faults.func) if isinstance(faults, partial) else (faults, None)
    named = [f" --{name}" for name, draw in SETTINGS.items() if draw is setting]
    return " --all-faults" * (drawn is draw_all) + "".join(named)


def show(counts: Counter[str]) -> None:
    for what, count in sorted(counts.items()):
        print(f"{count:10d}  {what}")


def many(first: int, end: int, faults: Draw, jobs: int) -> int:
    total: Counter[str] = Counter()
    wrong: list[Outcome] = []
    least = dict.fromkeys(LEAST, 1 << 60)
    events, began = 0, time.perf_counter()
    with ProcessPoolExecutor(jobs) as executor:
        for done in executor.map(partial(outcome, faults=faults), range(first, end), chunksize=4):
            if done.problem:
                wrong.append(done)
                print(f"seed {done.seed}: {done.problem}", flush=True)
            else:
                total += done.counts
                events += done.events
                least = {
                    what: min(count, sum(done.counts[each] for each in LEAST[what])) for what, count in least.items()
                }
    seconds = time.perf_counter() - began
    show(total)
    seeds = end - first
    print(
        f"{seeds} seeds ({first} to {end - 1}) in {seconds:.1f} s with {jobs} jobs: {seeds / seconds * 60:.0f} a minute"
    )
    print(f"{events / seconds:.0f} events a second; violations: {len(wrong)}")
    print("least of a seed: " + ", ".join(f"{count} {what}" for what, count in least.items()))
    if wrong:
        print(f"replay the first by: {COMMAND} --seed {wrong[0].seed}{_flag(faults)}")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seed", type=int, help="replay this one")
    chosen.add_argument("--seeds", metavar="FIRST:END", help="run these")
    parser.add_argument("--all-faults", action="store_true", help="every kind of fault in each seed")
    for name in SETTINGS:
        parser.add_argument(f"--{name}", action="append_const", dest="settings", const=name, help="in each seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--last", type=int, default=40, help="events shown of a seed that is wrong (40)")
    options = parser.parse_args()
    logging.getLogger("kvferry").setLevel(logging.CRITICAL)  # they warn of every fault
    faults = draw_all if options.all_faults else draw_faults
    for name in options.settings or ():
        faults = partial(SETTINGS[name], faults)
    if options.seed is not None:
        return replay(options.seed, faults, options.last)
    first, _, end = options.seeds.partition(":")
    return many(int(first), int(end), faults, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
