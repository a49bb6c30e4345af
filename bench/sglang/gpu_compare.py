"""SGLang's prefill and decode with its own NIXL backend, decode's radix cache off and on, and with kvferry's:
multi-turn chats, the same client and the same flags for each. In the systems named -half decode's pool has half of what
the largest number of chats needs, and SGLang's own host tier is measured beside kvferry's.

bash bench/sglang/gpu.sh compare [--systems nixl-off nixl-on kvferry nixl-on-half nixl-host-half kvferry-half]
                                 [--at-once 1 4 32] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from servers import DECODE_PORT, OUT, PACK, PREFILL_PORT, RADIX, DidNotStart, Machine, System, start_pair, stop_pair

FIRST, MORE, TURNS, OUTPUT = 8192, 512, 4, 16
PREFILL_TOKENS, ROOM, HALF = 400_000, 340_000, 157_000
HOST = "48GiB"
HICACHE = ("--enable-hierarchical-cache", "--hicache-size", "48")
SYSTEMS = {
    "nixl-off": (System("nixl-off", "nixl"), ROOM),
    "nixl-on": (System("nixl-on", "nixl", RADIX), ROOM),
    "kvferry": (System("kvferry", "kvferry", RADIX), ROOM),
    "kvferry-host": (System("kvferry-host", "kvferry", RADIX, HOST), ROOM),
    "nixl-on-half": (System("nixl-on-half", "nixl", RADIX), HALF),
    "nixl-host-half": (System("nixl-host-half", "nixl", (*RADIX, *HICACHE)), HALF),
    "kvferry-half": (System("kvferry-half", "kvferry", RADIX, HOST), HALF),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=[name for name in SYSTEMS if name != "kvferry-host"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 32])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = False
    for name in args.systems:
        try:
            rows += measured(name, args.at_once, args.rounds)
        except (DidNotStart, subprocess.SubprocessError) as error:
            failed = True
            print(f"== {name} failed: {error}", flush=True)
        (OUT / "compare.json").write_text(json.dumps(rows))
    show(rows)
    return int(failed)


def measured(name: str, at_once: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The cells of one system. With the half-sized pool only the largest number of chats."""
    system, tokens = SYSTEMS[name]
    began, rows = time.monotonic(), []
    with Machine() as machine:
        start_pair(machine, system, prefill_tokens=PREFILL_TOKENS, decode_tokens=tokens)
        print(f"== {name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        drive(name, 2, 1, warm=True)
        for chats in [max(at_once)] if tokens == HALF else at_once:
            before = counted(machine)
            found = drive(name, chats, rounds)
            after = counted(machine)
            for row in found:
                if after is not None and before is not None:
                    row["mb"] = (after - before) / len(found) / row["conv"] / (1 << 20)
            rows += found
        for server in ("p", "d"):
            for line in machine.errors(server):
                print(f"   {server}: {line}", flush=True)
        if system.backend == "kvferry":
            print(machine.daemon_tails(1500), flush=True)
            print(machine.stats("decode").transfers, machine.stats("decode").host, flush=True)
        stop_pair(machine)
    return rows


def counted(machine: Machine) -> int | None:
    """Bytes that decode's daemon has received; None: SGLang counts itself."""
    return None if machine.stack is None else machine.stats("decode").transfers.delta_bytes


def drive(name: str, chats: int, rounds: int, *, warm: bool = False) -> list[dict[str, Any]]:
    """One cell's rows, a turn each. SubprocessError where the client fails."""
    out = OUT / "cell.json"
    shape = {"first": 1024 if warm else FIRST, "more": MORE, "turns": 2 if warm else TURNS, "output": OUTPUT}
    words = [sys.executable, str(PACK / "bench_sglang.py"), "--prefill", f"http://127.0.0.1:{PREFILL_PORT}"]
    words += ["--decode", f"http://127.0.0.1:{DECODE_PORT}", "--label", name, "--json", str(out), "--flush"]
    words += ["--conversations", str(chats), "--rounds", str(rounds), "--seed", "7" if warm else str(chats)]
    words += [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    subprocess.run(words, check=True, timeout=240)
    rows: list[dict[str, Any]] = json.loads(Path(out).read_text())
    return [{key: value for key, value in row.items() if key != "tokens"} for row in rows]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="turns 2 to 4: medians of the turns' own")
    for head in ("system", "chats", "TTFT p50 ms", "p90 ms", "requests/s", "MiB a request", "ITL p50 ms"):
        table.add_column(head, justify="left" if head == "system" else "right")
    for name, chats in dict.fromkeys((row["label"], row["conv"]) for row in rows):
        later = [row for row in rows if (row["label"], row["conv"]) == (name, chats) and row["turn"] > 1]
        cells = [median(row[key] for row in later) for key in ("ttft50", "ttft90", "rps", "mb", "itl50")]
        ttft, late, rps, mib, itl = cells
        table.add_row(
            name, str(chats), f"{1e3 * ttft:.0f}", f"{1e3 * late:.0f}", f"{rps:.1f}", f"{mib:.0f}", f"{1e3 * itl:.1f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
