"""The tables of gpu_compare.py, from the rows that its runs kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gpu_turns import STAGES, Measured, median
from rich.console import Console
from rich.table import Table

AT_ONCE = ("at-once", "back")  # whose front end streams prefill's token
SYSTEMS = ("alone", "nixl", "offload", "kvferry", "blocks", "first", "first-blocks", *AT_ONCE)


@dataclass(frozen=True, slots=True)
class Key:
    """Of a cell."""

    cache: str
    state: str  # of the caches: "young", "wrapped", or "cold", prefill's emptied before each turn
    at_once: int
    output: int
    ranks: str = "1:1"  # tensor-parallel, of prefill and of decode
    population: int = 0  # chats in a round; 0: those that are asked at a time

    @property
    def chats(self) -> int:
        """In a round."""
        return max(self.at_once, self.population)

    def __str__(self) -> str:
        of = f" of {self.population} chats" if self.population else ""
        cell = f"{self.at_once}{of} at a time, {self.output} tokens out, decode cache {self.cache}, {self.state}"
        return cell if self.ranks == "1:1" else f"{cell}, ranks {self.ranks}"


def spread(values: list[float]) -> str:
    """Median and the quarter on each side."""
    if not values:
        return "-"
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    return f"{median(ordered):.1f} ({low:.0f}-{high:.0f})"


class Visit(NamedTuple):
    got: Measured
    turns: int  # of each chat
    memory: dict[str, int]  # MiB of GPUs'
    cores: dict[str, float]  # of processors, in use in the mean


def merged(parts: list[dict[str, Any]]) -> dict[Key, dict[str, list[Visit]]]:
    """What was measured by cell and system, in the order of the visits."""
    cells: dict[Key, dict[str, list[Visit]]] = {}
    for part in parts:
        for row in part["rows"]:
            at = cells.setdefault(Key(**row["key"]), {})
            visit = Visit(Measured.of(row["got"]), part["shape"]["turns"], row["memory"], row.get("cores", {}))
            at.setdefault(row["system"], []).append(visit)
    return cells


Row = dict[str, str]  # by column
PARTS = ("load", "P queue", "P prefill", *STAGES, "NIXL read", "NIXL post", "D queue", "D prefill")
EARLY = ("2nd", "3rd", "4th")


def tables(key: Key, systems: dict[str, list[Visit]]) -> list[Table]:
    there = {system: systems[system] for system in SYSTEMS if system in systems}
    restored = {name: row for name, visits in there.items() if (row := restores_of(visits))}
    chosen = {name: choices_of(visits) for name, visits in there.items()}
    steps = {name: steps_row(name, visits) for name, visits in there.items()}
    return [
        shown(f"{key}: turns 2 and later", {name: sums_of(visits) for name, visits in there.items()}),
        shown("TTFT in ms, turn by turn", {name: turns_of(key, visits) for name, visits in there.items()}),
        shown("ms between tokens", {name: gaps_of(visits) for name, visits in there.items()}),
        *([shown("steps to the first token, mean ms", steps)] if any(steps.values()) else []),
        shown("mean parts, ms", {name: parts_of(visits) for name, visits in there.items()}),
        *([shown("restored from the host tier", restored)] if restored else []),
        *([shown("prompts that lacked pages", chosen)] if any(chosen.values()) else []),
        shown("GPU memory, processors", {name: processes_of(visits) for name, visits in there.items()}),
    ]


def shown(title: str, rows: dict[str, Row]) -> Table:
    """A row for each system, a column for whatever any has."""
    table = Table("system", title=title)
    there = dict.fromkeys(name for row in rows.values() for name in row)
    names = [name for name in there if any(row.get(name, "-") != "-" for row in rows.values())]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for system, row in rows.items():
        table.add_row(system, *(row.get(name, "-") for name in names))
    return table


def told_by(visits: list[Visit]) -> dict[str, list[float]]:
    """What the servers said, of all rounds."""
    names = dict.fromkeys(name for visit in visits for name in visit.got.told)
    return {name: [value for visit in visits for value in visit.got.told.get(name, [])] for name in names}


def sums_of(visits: list[Visit]) -> Row:
    told, all_got = told_by(visits), [visit.got for visit in visits]
    ttft = [value for got in all_got for value in got.ttft_ms]
    answers, prefill = len(ttft), told.get("P e2e", [])
    failed = sum(told.get("NIXL failed", [])) + sum(told.get("kvferry failed", []))
    moved = sum(told.get("kvferry bytes", [])) + sum(told.get("NIXL bytes", []))
    return {
        "answers": str(answers) + (f" ({failed:.0f} FAILED)" if failed else ""),
        "turn 1: TTFT ms": spread([value for got in all_got for value in got.first_ms]),
        "TTFT ms": spread(ttft) + " " + "/".join(f"{median(got.ttft_ms):.0f}" for got in all_got),
        "prefill ms": f"{median(prefill):.1f}" if prefill else "-",
        "hand-off ms": f"{sum(ttft) / answers - sum(prefill) / len(prefill):.1f}" if prefill else "-",
        "between ms": f"{median([value for got in all_got for value in got.between_ms]):.2f}",
        "/s": spread([value for got in all_got for value in got.per_second]),
        "MiB each": f"{moved / answers / (1 << 20):.1f}",
        "D hits": f"{sum(told.get('D hit tokens', [])) / answers:.0f}",
        "P computed": f"{sum(told['P computed']) / answers:.0f}" if "P computed" in told else "-",
        "fetched": f"{fetched / answers:.0f}" if (fetched := sum(told.get("kvferry fetched", []))) else "-",
    }


def turns_of(key: Key, visits: list[Visit]) -> Row:
    found = {
        f"turn {turn + 1}": [ms for each in visits for ms in each.got.turn_ms(turn, each.turns, key.chats)]
        for turn in range(max(visit.turns for visit in visits))
    }
    return {name: spread(values) for name, values in found.items()}


def gaps_of(visits: list[Visit]) -> Row:
    """Medians, of later ones those of all of an answer's; and of the longest of an answer."""
    answers = [gaps for visit in visits for gaps in visit.got.gaps_ms if gaps]
    found = {name: [gaps[n] for gaps in answers if len(gaps) > n] for n, name in enumerate(EARLY)}
    found["later"] = [gap for gaps in answers for gap in gaps[len(EARLY) :]]
    found["longest later"] = [max(gaps[len(EARLY) :]) for gaps in answers if len(gaps) > len(EARLY)]
    return {name: spread(values) for name, values in found.items() if values}


STEPS = ("front end", "P front end", "P queue", "P prefill", "hand-off", "D front end", "D queue", "D first step")
"""Where the milliseconds to a first token are: they follow each other."""


def steps_of(system: str, told: Mapping[str, float], ttft_ms: float) -> dict[str, float]:
    """STEPS of one system, which sum to its mean TTFT; `told`: means of what its servers said.

    One vLLM: queue and prefill are D's. Legs in series: all of prefill's stand before decode's. Legs at once: decode's
    load runs beside prefill's queue and prefill, and the hand-off is what it takes beyond them; where the front end
    streams prefill's token (AT_ONCE), decode has no part in it."""
    queue, prefill, end = (told.get(f"P {name}", 0.0) for name in ("queue", "prefill", "e2e"))
    waited, first = told.get("D queue", 0.0), told.get("D prefill", 0.0)
    found = {"P queue": queue, "P prefill": prefill, "D first step": first}
    front = told["D TTFT"] - waited - first
    if not end:
        found |= {"D front end": front, "D queue": waited}
    elif "load" not in told:
        found |= {"P front end": end - queue - prefill, "D front end": front, "D queue": waited}
    elif system in AT_ONCE:
        found |= {"P front end": end - queue - prefill, "D first step": 0.0}
    else:
        hand_off = told["load"] - queue - prefill
        found |= {"hand-off": hand_off, "D front end": front, "D queue": waited - told["load"]}
    found["front end"] = ttft_ms - sum(found.values())
    return {name: found.get(name, 0.0) for name in STEPS}


def steps_row(system: str, visits: list[Visit]) -> Row:
    """STEPS and their sum; nothing where vLLM's timers are not known."""
    ttft = [value for visit in visits for value in visit.got.ttft_ms]
    told = {name: fmean(values) for name, values in told_by(visits).items()}
    if not ttft or "D TTFT" not in told:
        return {}
    if "kvferry loads" in told:
        told["load"] = 1000 * sum(told_by(visits)["kvferry load seconds"]) / len(ttft)
    steps = steps_of(system, told, fmean(ttft))
    return {name: f"{each:.1f}" if each else "-" for name, each in {**steps, "all": sum(steps.values())}.items()}


def parts_of(visits: list[Visit]) -> Row:
    """Of each load, each part of one, or each request."""
    told = told_by(visits)
    if loads := sum(told.get("kvferry loads", [])):
        told["load"] = [1000 * sum(told["kvferry load seconds"]) / loads]
    return {name: f"{median(told[name]):.1f}" if name in told else "-" for name in PARTS}


def processes_of(visits: list[Visit]) -> Row:
    """Of each its most memory, and processors in use, the median of the visits."""
    names = dict.fromkeys(name for visit in visits for name in (*visit.memory, *visit.cores))
    return {name: process_told(name, visits) for name in names}


def process_told(name: str, visits: list[Visit]) -> str:
    mib = max(visit.memory.get(name, 0) for visit in visits)
    cores = [visit.cores[name] for visit in visits if name in visit.cores]
    return f"{mib / 1024:.1f} GiB" + (f", {median(cores):.2f}" if cores else "")


def restores_of(visits: list[Visit]) -> Row:
    """Seconds are those while any ran; shares of the strategies are of the bytes of both directions."""
    told = told_by(visits)
    nbytes, seconds = (sum(told.get(f"kvferry restore{what}", [])) for what in ("d bytes", " seconds"))
    if not nbytes:
        return {}
    copied = {name.removeprefix("copied "): sum(each) for name, each in told.items() if name.startswith("copied ")}
    shares = {name: f"{100 * each / sum(copied.values()):.0f} %" for name, each in copied.items() if each}
    return {"GiB": f"{nbytes / (1 << 30):.1f}", "seconds": f"{seconds:.1f}", **shares}


def choices_of(visits: list[Visit]) -> Row:
    """What the prefill daemons chose, with the way back."""
    sums = {name.removeprefix("way back "): sum(each) for name, each in told_by(visits).items() if "way back" in name}
    return {name: f"{count:.0f}" for name, count in sums.items() if count}


def write_table(args: argparse.Namespace) -> int:
    parts = [json.loads(line) for name in args.files for line in Path(name).read_text().splitlines()]
    console = Console(record=True, width=190)
    for told in sorted({f"{part['machine']}, {', '.join(part['devices'])}" for part in parts}):
        console.print(told)
    for name in ("model", "places"):
        console.print(*sorted({part[name] for part in parts if name in part}), sep="\n")
    shapes = sorted({tuple(part["shape"][name] for name in ("first", "more", "turns")) for part in parts})
    console.print(", ".join(f"first turns of {a} tokens, {b} more in each of {c - 1} turns" for a, b, c in shapes))
    console.print(
        "medians (a quarter on each side), and of each visit; hand-off: TTFT less prefill's own end to end, in the mean"
    )
    for key, systems in merged(parts).items():
        console.print(*tables(key, systems), sep="\n")
    if args.output:
        Path(args.output).write_text(console.export_text())
    return 0
