"""Plots of a run, or one picture of two (needs matplotlib). Every tick is a whole number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.loadgen.report import Report
from kvferry.loadgen.runner import TurnRecord

WINDOWS = 60  # of the run, in which a hit rate is taken
SIZE = (7.0, 4.2)


def plots_missing() -> str | None:
    """Why plots cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "plots need the package matplotlib: pip install 'kvferry[plots]'"
    return None


def write_plots(report: Report, turns: Sequence[TurnRecord], folder: Path) -> list[Path]:
    """Returns the files: ttft_by_turn.png, latency.png, hit_rate.png."""
    folder.mkdir(parents=True, exist_ok=True)
    good = [turn for turn in turns if turn.error is None]
    drawn = (("ttft_by_turn", _ttft_by_turn), ("latency", _latency), ("hit_rate", _hit_rate))
    paths = []
    for name, draw in drawn:
        path = folder / f"{name}.png"
        figure, (axis,) = _figure()
        draw(axis, report, good)
        _save(figure, path)
        paths.append(path)
    return paths


def write_comparison(names: Sequence[str], reports: Sequence[Report], folder: Path) -> Path:
    """Returns the file, compared.png: times to first token by turn, times, tokens matched and bytes moved."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: list[tuple[str, list[float]]] = [
        ("tokens matched, %", [100 * report.cached_tokens / max(1, report.prompt_tokens) for report in reports])
    ]
    daemons = [report.daemons for report in reports if report.daemons is not None]
    if len(daemons) == len(reports):
        counts.append(("MB moved", [each.moved_bytes / 1e6 for each in daemons]))
    figure, axes = _figure(3 + len(counts), (6.0, 4.0, 4.0, *(2.0,) * len(counts)))
    for number, (name, report) in enumerate(zip(names, reports, strict=True)):
        turns = range(1, len(report.ttft_by_turn_ms) + 1)
        medians = [by_turn.p50 for by_turn in report.ttft_by_turn_ms]
        axes[0].plot(turns, medians, "o-", color=f"C{number}", label=f"{'AB'[number]}: {name}")
    axes[0].set(xlabel="turn", title="time to first token, ms (p50)")
    axes[0].set_ylim(bottom=0)
    _whole_ticks(axes[0].xaxis, axes[0].yaxis)
    for axis, title, summaries in (
        (axes[1], "time to first token, ms", [report.ttft_ms for report in reports]),
        (axes[2], "request latency, ms", [report.latency_ms for report in reports]),
    ):
        percentiles = ("p50", "p90", "p99")
        _bars(axis, percentiles, [[getattr(each, name) for name in percentiles] for each in summaries])
        axis.set_title(title)
    for axis, (title, values) in zip(axes[3:], counts, strict=True):
        _bars(axis, ("",), [[value] for value in values])
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(reports))
    path = folder / "compared.png"
    _save(figure, path)
    return path


def _bars(axis: Any, names: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    """A bar for each run and name, with its value on it."""
    width = 0.8 / len(values)
    for number, of_run in enumerate(values):
        at = [place + (number - (len(values) - 1) / 2) * width for place in range(len(names))]
        bars = axis.bar(at, of_run, width=0.9 * width, color=f"C{number}")
        axis.bar_label(bars, labels=[f"{value:,.0f}" for value in of_run], fontsize=8)
    axis.set_xticks(range(len(names)), names)
    _whole_ticks(axis.yaxis)
    axis.margins(y=0.12)


def _save(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def _whole_ticks(*lines: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    for line in lines:
        even = MaxNLocator(8, integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
        line.set_major_locator(LogLocator(subs=(1, 2, 5)) if line.get_scale() == "log" else even)
        line.set_major_formatter(FuncFormatter(_whole))
        line.set_minor_formatter(FuncFormatter(_nothing))


def _whole(value: float, place: int | None) -> str:
    """The tick's number, where it is whole: those of a logarithmic axis may be less than 1."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else ""


def _nothing(value: float, place: int | None) -> str:
    return ""


def hit_rates(turns: Sequence[TurnRecord], windows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each of `windows` equal parts of the run its end in seconds, and the share of the prompt tokens of the
    requests that ended in each which were matched, in percent; NaN where none ended."""
    ends = np.array([turn.end_s for turn in turns])
    edges = np.linspace(0, max(1e-9, float(ends.max(initial=0))), windows + 1)
    place = np.clip(np.searchsorted(edges, ends, side="left") - 1, 0, windows - 1)
    asked = np.bincount(place, [turn.prompt_tokens for turn in turns], windows)
    hit = np.bincount(place, [turn.cached_tokens for turn in turns], windows)
    with np.errstate(invalid="ignore"):
        return edges[1:], 100 * hit / np.where(asked > 0, asked, np.nan)


def _figure(columns: int = 1, widths: Sequence[float] = (SIZE[0],)) -> tuple[Any, Any]:
    """A figure, and its axes side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(sum(widths), SIZE[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, width_ratios=widths, squeeze=False)[0]


def _ttft_by_turn(axis: Any, report: Report, good: Sequence[TurnRecord]) -> None:
    turns = range(1, len(report.ttft_by_turn_ms) + 1)
    for name in ("p50", "p90", "p99"):
        axis.plot(turns, [getattr(by_turn, name) for by_turn in report.ttft_by_turn_ms], "o-", label=name)
    axis.set(xlabel="turn", ylabel="time to first token, ms", title="time to first token by turn")
    axis.set_ylim(bottom=0)
    _whole_ticks(axis.xaxis, axis.yaxis)
    axis.legend()


def _latency(axis: Any, report: Report, good: Sequence[TurnRecord]) -> None:
    shares = np.arange(1, len(good) + 1) / max(1, len(good)) * 100
    for name, seconds in (
        ("time to first token", sorted(turn.first_s for turn in good if turn.first_s is not None)),
        ("request latency", sorted(turn.latency_s for turn in good)),
    ):
        axis.step(np.array(seconds) * 1000, shares[: len(seconds)], where="post", label=name)
    axis.set(xlabel="ms", ylabel="requests, %", title="latency distribution")
    if good:
        axis.set_xscale("log")
    _whole_ticks(axis.xaxis, axis.yaxis)
    axis.legend()


def _hit_rate(axis: Any, report: Report, good: Sequence[TurnRecord]) -> None:
    ends, rates = hit_rates(good, min(WINDOWS, max(1, len(good) // 4)))
    axis.plot(ends, rates, "o-", markersize=3)
    axis.set(xlabel="seconds from the start", ylabel="prompt tokens matched, %", title="hit rate over time")
    axis.set_ylim(-2, 102)
    _whole_ticks(axis.xaxis, axis.yaxis)
