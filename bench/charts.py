"""The README's two charts, out of the files in bench/results: `make charts`.

    python bench/charts.py [--dest docs/img]

bytes_ttft.svg: bytes moved and times to first token beside vLLM's NixlConnector. hit_rate.svg: the hit rate of a trace
against the size of the pool. Colours are as far from white as from black, so that both backgrounds will do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "img"
SYSTEMS = ("nixl", "kvferry")
GREY, BLUE, ORANGE = "#7a7a7a", "#2878d8", "#c26a00"
COLOURS = {"nixl": GREY, "kvferry": BLUE}
NAMES = {"nixl": "NixlConnector", "kvferry": "kvferry"}
POLICIES = {"optimum": ("Belady's optimum", GREY, "--"), "learned": ("learned", BLUE, "-"), "lru": ("LRU", ORANGE, "-")}
NO_END = "no end"  # a pool that holds everything
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and sharp at any size
    "svg.hashsalt": "kvferry",  # the same picture has the same bytes
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY
    ),
}


class Case(NamedTuple):
    """Both systems' value in one case."""

    name: str
    nixl: float
    kvferry: float


class HitRates(NamedTuple):
    """Hit rates in percent, by policy, a value for each size."""

    requests: str
    blocks: list[int]
    percent: dict[str, list[float]]


# -- what the files say -----------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│\n ").split("│")]


def cases(text: str, title: str, column: int) -> list[tuple[tuple[str, ...], Case]]:
    """Tables whose title matches: its groups, and the first number of a column in both systems' rows. ValueError where
    a table lacks one."""
    found = []
    for table in re.split(r"(?=^ .*turn|^ .*TTFT in ms)", text, flags=re.MULTILINE):
        if (named := re.search(title, table.partition("\n")[0])) is None:
            continue
        rows = [cells(line) for line in table.splitlines() if line.startswith("│")]
        values = {row[0]: row[column].split()[0] for row in rows if row[0] in SYSTEMS}
        if set(values) != set(SYSTEMS):
            raise ValueError(f"the table {named[0]!r} has rows of {sorted(values)}; it must have {SYSTEMS}")
        found.append((named.groups(), Case("", *(float(values[system]) for system in SYSTEMS))))
    return found


def moved_megabytes(results: Path) -> list[Case]:
    text = (results / "vllm-compare.txt").read_text()
    found = cases(text, r"^ +(evicting|large) decode cache", column=1)
    names = {"evicting": "small, decode cache", "large": "large, decode cache"}
    return [case._replace(name=names[group]) for (group,), case in found]


def first_token_milliseconds(results: Path) -> list[Case]:
    text = (results / "gpu_compare.txt").read_text()
    found = cases(text, r"(\d+) at a time, .*, (young|wrapped): turns 2 and later", column=3)
    return [case._replace(name=n if age == "young" else f"{n}, cache full") for (n, age), case in found]


def hit_rates(results: Path) -> HitRates:
    """The first table: no host tier."""
    table = (results / "trace_replay.txt").read_text().split("\n\n\n")[0]
    blocks: list[int] = []
    percent: dict[str, list[float]] = {}
    for line in table.splitlines():
        row = re.match(r" *([\d,]+)? +(no end|[a-z]+) +(\d+\.\d+) ", line)
        if row is None:
            continue
        if row[1]:
            blocks.append(int(row[1].replace(",", "")))
        percent.setdefault(row[2], []).append(float(row[3]))
    asked = re.search(r"^([\d,]+) requests", table, re.MULTILINE)
    if asked is None or not blocks or {len(rates) for rates in percent.values()} != {len(blocks)}:
        raise ValueError("trace_replay.txt has no table of hit rates of each policy at each size")
    return HitRates(asked[1], blocks, percent)


# -- pictures ---------------------------------------------------------------------------------------------------------


def compared(axis: Any, drawn: Sequence[Case], title: str) -> None:
    """Two bars a case, each with its number."""
    places = range(len(drawn))
    for side, system in enumerate(SYSTEMS):
        values = [getattr(case, system) for case in drawn]
        at = [place + (side - 0.5) * 0.38 for place in places]
        bars = axis.bar(at, values, width=0.36, color=COLOURS[system], label=NAMES[system])
        axis.bar_label(bars, labels=[f"{value:.0f}" for value in values], padding=2, fontsize=8, color=COLOURS[system])
    axis.set_xticks(list(places), [case.name.replace(", ", "\n") for case in drawn])
    axis.set_title(title, loc="left")
    axis.tick_params(length=0)
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    axis.margins(y=0.15)


def bytes_ttft(results: Path) -> Figure:
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 4))
    compared(left, moved_megabytes(results), "MB moved, 5 turns, on CPUs")
    compared(right, first_token_milliseconds(results), "time to first token, ms (p50), H100s, by requests at a time")
    left.legend(*left.get_legend_handles_labels(), frameon=False, loc="upper right", fontsize=8)
    return figure


def hit_rate(results: Path) -> Figure:
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axis = figure.subplots()
    rates = hit_rates(results)
    bound = rates.percent[NO_END][0]
    axis.axhline(bound, color=GREY, linewidth=0.8, linestyle=":")
    axis.annotate("a pool without end", (rates.blocks[0], bound), (0, 3), textcoords="offset points", fontsize=8)
    for policy, (name, colour, line) in POLICIES.items():
        axis.plot(rates.blocks, rates.percent[policy], line, marker="o", markersize=3.5, color=colour, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(rates.blocks, [f"{size:,}" for size in rates.blocks])
    axis.set_ylim(0, 42)
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    axis.grid(axis="y", alpha=0.25)
    axis.set_xlabel("pool, blocks of 512 tokens")
    axis.set_title(f"prompt tokens found, %: {rates.requests} requests of a chat service", loc="left")
    axis.legend(frameon=False, loc="lower right", fontsize=8)
    return figure


CHARTS = {"bytes_ttft.svg": bytes_ttft, "hit_rate.svg": hit_rate}


def write_charts(results: Path, dest: Path) -> list[Path]:
    dest.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in CHARTS.items():
            figure = draw(results)
            figure.patch.set_alpha(0)
            for axis in figure.axes:
                axis.patch.set_alpha(0)
            FigureCanvasSVG(figure).print_svg(dest / name, metadata={"Date": None, "Creator": None})
    return [dest / name for name in CHARTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=IMAGES)
    for path in write_charts(RESULTS, parser.parse_args().dest):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
