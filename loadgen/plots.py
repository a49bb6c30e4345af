"""Plots of a run (needs matplotlib): TTFT by turn, the distribution of latencies, the hit rate over time."""

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
        figure, axis = _figure()
        draw(axis, report, good)
        axis.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, dpi=100)
        paths.append(path)
    return paths


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


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _ttft_by_turn(axis: Any, report: Report, good: Sequence[TurnRecord]) -> None:
    turns = range(1, len(report.ttft_by_turn_ms) + 1)
    for name in ("p50", "p90", "p99"):
        axis.plot(turns, [getattr(by_turn, name) for by_turn in report.ttft_by_turn_ms], "o-", label=name)
    axis.set(xlabel="turn", ylabel="time to first token, ms", title="time to first token by turn")
    axis.set_ylim(bottom=0)
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
    axis.legend()


def _hit_rate(axis: Any, report: Report, good: Sequence[TurnRecord]) -> None:
    ends, rates = hit_rates(good, min(WINDOWS, max(1, len(good) // 4)))
    axis.plot(ends, rates, "o-", markersize=3)
    axis.set(xlabel="seconds from the start", ylabel="prompt tokens matched, %", title="hit rate over time")
    axis.set_ylim(-2, 102)
