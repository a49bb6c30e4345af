"""SGLang's prefill and decode with its own NIXL backend, decode's radix cache off and on, and with kvferry's:
multi-turn chats, the same client and the same flags for each. In the systems named -half decode's pool has half of what
the largest number of chats needs, and SGLang's own host tier is measured beside kvferry's.

bash bench/gpu/sglang.sh OUT compare [--systems nixl-off nixl-on kvferry nixl-on-half nixl-host-half kvferry-half]
                                     [--at-once 1 4 32] [--rounds 2] [--ranks 2] [--chunk 4096]

What was measured before, in OUT/compare.json, is kept and stands in the table, too: systems may come one run after the
other. --ranks: of each engine, by tensor parallelism; --chunk: tokens that prefill computes in one step, SGLang's own
choice without; names of systems get them. Behind the table is what must hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from servers import KVFERRY, NIXL, OUT, PACK, RADIX, DidNotStart, Machine, Model, System

FIRST, MORE, TURNS, OUTPUT = 8192, 512, 4, 16
PREFILL_TOKENS, ROOM, HALF = 400_000, 340_000, 157_000
HOST, WAITING = "48GiB", "16GiB"
HICACHE = ("--enable-hierarchical-cache", "--hicache-size", "48")
SYSTEMS = {
    "nixl-off": (System("nixl-off", NIXL), ROOM),
    "nixl-on": (System("nixl-on", NIXL, RADIX), ROOM),
    "kvferry": (System("kvferry", KVFERRY, RADIX), ROOM),
    "kvferry-host": (System("kvferry-host", KVFERRY, RADIX, HOST), ROOM),
    "nixl-on-half": (System("nixl-on-half", NIXL, RADIX), HALF),
    "nixl-host-half": (System("nixl-host-half", NIXL, (*RADIX, *HICACHE)), HALF),
    "kvferry-half": (System("kvferry-half", KVFERRY, RADIX, HOST, WAITING), HALF),
}
CELL_SECONDS = 240.0
KEPT = "compare.json"
NO_WORSE = 1.05  # x of the better of SGLang's own
HALF_MS, HALF_LATE_MS, HALF_RPS = 450.0, 650.0, 35.0
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A system's, with so many chats: medians of turns 2 to 4."""

    ttft: float  # ms
    late: float
    rps: float
    mib: float
    itl: float


class Counted(NamedTuple):
    """Bytes that came from prefill, and from the host tier in so many seconds, the sum over copies."""

    received: int
    restored: int
    seconds: float


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=[name for name in SYSTEMS if name != "kvferry-host"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--chunk", type=int, metavar="TOKENS")
    args = parser.parse_args(words)
    rows, failed = kept(), False
    for name in args.systems:
        system, tokens = SYSTEMS[name]
        if args.ranks > 1:
            system = replace(system, name=f"{system.name}-{args.ranks}-ranks", ranks=args.ranks)
        if args.chunk:
            system = replace(system, name=f"{system.name}-{args.chunk}-a-step")
        rows = [row for row in rows if row["label"] != system.name]
        began = time.monotonic()
        with Machine(system) as machine:
            try:
                flags = ("--chunked-prefill-size", str(args.chunk)) if args.chunk else ()
                machine.start_pair(Model(flags, PREFILL_TOKENS, tokens))
                machine.wait()
                print(f"== {system.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
                rows += measured(machine, [max(args.at_once)] if tokens == HALF else args.at_once, args.rounds)
            except (DidNotStart, subprocess.SubprocessError) as error:
                failed = True
                print(f"== {system.name} failed: {error}", flush=True)
        keep(rows)
    show(rows)
    return int(failed)


def kept() -> Rows:
    """What was measured before."""
    path = OUT.parent / KEPT
    rows: Rows = json.loads(path.read_text()) if path.exists() else []
    return rows


def keep(rows: Rows) -> None:
    (OUT.parent / KEPT).write_text(json.dumps(rows))


def measured(machine: Machine, at_once: Sequence[int], rounds: int) -> Rows:
    """The cells of a pair that is ready, behind a short one of as many chats: SGLang is slow at first batches."""
    rows: Rows = []
    drive(machine, max(at_once), 1, {"first": 1024, "turns": 2, "seed": 7})
    for chats in at_once:
        before = counted(machine)
        found = drive(machine, chats, rounds, {"first": FIRST, "turns": TURNS, "seed": chats})
        if before is not None and (after := counted(machine)) is not None:
            requests = len(found) * chats
            for row in found:
                row["mb"] = (after.received - before.received) / requests / (1 << 20)
            restored, seconds = after.restored - before.restored, after.seconds - before.seconds
            if restored:
                rate = f"{restored / seconds / (1 << 30):.1f} GiB/s, copies by themselves"
                told = f"{restored / requests / (1 << 20):.0f} MiB a request from the host tier at {rate}"
                print(f"== {machine.system.name}, {chats} chats: {told}", flush=True)
        rows += found
    machine.say_errors()
    return rows


def counted(machine: Machine) -> Counted | None:
    """Decode's daemon's; None: SGLang counts itself."""
    if machine.stack is None:
        return None
    side = machine.stats("decode")
    restored = side.tiers.restored_pages * side.host.page_bytes
    return Counted(side.transfers.delta_bytes, restored, side.tiers.restore_seconds)


def drive(machine: Machine, chats: int, rounds: int, shape: dict[str, int]) -> Rows:
    """One cell's rows, a turn each. SubprocessError where the client fails."""
    out = OUT / "cell.json"
    words = [sys.executable, str(PACK / "bench_sglang.py"), "--prefill", machine.url("p"), "--decode", machine.url("d")]
    words += ["--label", machine.system.name, "--json", str(out), "--flush", "--bootstrap-port"]
    words += [str(machine.bootstrap_port), "--conversations", str(chats), "--rounds", str(rounds)]
    shape = {**shape, "more": MORE, "output": OUTPUT}
    words += [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    subprocess.run(words, check=True, timeout=CELL_SECONDS)
    rows: Rows = json.loads(Path(out).read_text())
    out.unlink()
    return [{key: value for key, value in row.items() if key != "tokens"} for row in rows]


def show(rows: Rows) -> None:
    table = Table(title="turns 2 to 4: medians of the turns' own")
    for head in ("system", "chats", "TTFT p50 ms", "p90 ms", "requests/s", "MiB a request, turn 1 too", "ITL p50 ms"):
        table.add_column(head, justify="left" if head == "system" else "right")
    cells = cells_of(rows)
    for (name, chats), cell in cells.items():
        numbers = f"{cell.ttft:.0f}", f"{cell.late:.0f}", f"{cell.rps:.1f}", f"{cell.mib:.0f}", f"{cell.itl:.1f}"
        table.add_row(name, str(chats), *numbers)
    Console(width=120).print(table)
    for line in verdicts(cells):
        print(line, flush=True)


def cells_of(rows: Rows) -> dict[tuple[str, int], Cell]:
    """By the system's name and the number of chats."""
    cells = {}
    for name, chats in dict.fromkeys((row["label"], row["conv"]) for row in rows):
        turns = [row for row in rows if (row["label"], row["conv"]) == (name, chats)]
        later = [row for row in turns if row["turn"] > 1]
        ttft, late, rps, itl = (median(row[key] for row in later) for key in ("ttft50", "ttft90", "rps", "itl50"))
        mib = mean(row["mb"] for row in turns)  # kvferry's daemon counts over all of them
        cells[name, chats] = Cell(1e3 * ttft, 1e3 * late, rps, mib, 1e3 * itl)
    return cells


def verdicts(cells: Mapping[tuple[str, int], Cell]) -> list[str]:
    """What must hold, of the cells that there are."""
    lines = []
    for (name, chats), ours in cells.items():
        if not name.startswith("kvferry"):
            continue
        if "-half" in name:
            lines.append(f"{name}, {chats} chats: {_half(ours)}")
            continue
        ranks = name.removeprefix("kvferry-host").removeprefix("kvferry")
        own = [cell for other in ("nixl-off", "nixl-on") if (cell := cells.get((other + ranks, chats)))]
        if own:
            ttft, rps = min(cell.ttft for cell in own), max(cell.rps for cell in own)
            well = ours.ttft <= NO_WORSE * ttft and ours.rps * NO_WORSE >= rps
            lines.append(
                f"{name}, {chats} chats: {'holds' if well else 'DOES NOT HOLD'}: TTFT {ours.ttft / ttft:.2f} x, "
                f"requests/s {ours.rps / rps:.2f} x of the better of SGLang's own"
            )
    return lines


def _half(ours: Cell) -> str:
    well = ours.ttft <= HALF_MS and ours.late <= HALF_LATE_MS and ours.rps >= HALF_RPS
    return (
        f"{'holds' if well else 'DOES NOT HOLD'}: TTFT p50 {ours.ttft:.0f} (at most {HALF_MS:.0f}), p90 "
        f"{ours.late:.0f} ({HALF_LATE_MS:.0f}), {ours.rps:.1f} requests/s (at least {HALF_RPS:.0f})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
