"""A run's numbers, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.loadgen.daemon_stats import DaemonCounts
from kvferry.loadgen.runner import RunRecord

MAX_ERRORS = 20  # kinds of errors that are listed


@dataclass(frozen=True, slots=True)
class Distribution:
    """In milliseconds; of no values: zeros."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ErrorCount:
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    duration_s: float
    requests: int  # sent
    failed: int
    skipped: int  # never sent, because an earlier turn of their conversation failed
    requests_per_s: float  # that did not fail
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # matched, by the replies' usage
    ttft_ms: Distribution
    inter_token_ms: Distribution
    latency_ms: Distribution
    ttft_by_turn_ms: tuple[Distribution, ...]
    daemons: DaemonCounts | None  # None: not asked
    errors: tuple[ErrorCount, ...]

    @property
    def ok(self) -> bool:
        return self.failed == 0 and self.requests > 0

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def distribution(seconds: Iterable[float]) -> Distribution:
    values = np.fromiter(seconds, dtype=np.float64) * 1000
    if not len(values):
        return Distribution(0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Distribution(len(values), float(values.mean()), p50, p90, p99)


def make_report(record: RunRecord, daemons: DaemonCounts | None) -> Report:
    good = [turn for turn in record.turns if turn.error is None]
    errors = Counter(turn.error for turn in record.turns if turn.error is not None)
    turns = 1 + max((turn.turn for turn in good), default=-1)
    output_tokens = sum(turn.output_tokens for turn in good)
    return Report(
        duration_s=record.duration_s,
        requests=len(record.turns),
        failed=len(record.turns) - len(good),
        skipped=record.skipped,
        requests_per_s=len(good) / record.duration_s,
        output_tokens_per_s=output_tokens / record.duration_s,
        prompt_tokens=sum(turn.prompt_tokens for turn in good),
        output_tokens=output_tokens,
        cached_tokens=sum(turn.cached_tokens for turn in good),
        ttft_ms=distribution(turn.first_s for turn in good if turn.first_s is not None),
        inter_token_ms=distribution(gap for turn in good for gap in turn.gaps_s),
        latency_ms=distribution(turn.latency_s for turn in good),
        ttft_by_turn_ms=tuple(
            distribution(turn.first_s for turn in good if turn.turn == k and turn.first_s is not None)
            for k in range(turns)
        ),
        daemons=daemons,
        errors=tuple(ErrorCount(message, count) for message, count in errors.most_common(MAX_ERRORS)),
    )


def print_tables(report: Report, console: Console) -> None:
    times = Table(title="milliseconds")
    for column in ("", "mean", "p50", "p90", "p99", "count"):
        times.add_column(column, justify="left" if not column else "right")
    _row(times, "time to first token", report.ttft_ms)
    _row(times, "inter-token latency", report.inter_token_ms)
    _row(times, "request latency", report.latency_ms)
    for k, by_turn in enumerate(report.ttft_by_turn_ms):
        _row(times, f"  first token, turn {k + 1}", by_turn)
    console.print(times)
    totals = Table(show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for name, value in _totals(report):
        totals.add_row(name, value)
    console.print(totals)
    for error in report.errors:
        console.print(f"{error.count} x {error.message}", style="red", markup=False, highlight=False)


def _row(table: Table, name: str, values: Distribution) -> None:
    numbers = (values.mean, values.p50, values.p90, values.p99)
    table.add_row(name, *(f"{number:,.1f}" if values.count else "-" for number in numbers), f"{values.count:,}")


def _totals(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{report.requests:,}"),
        ("errors", f"{report.failed:,} ({report.skipped:,} turns skipped)" if report.failed else "0"),
        ("duration", f"{report.duration_s:,.1f} s"),
        ("throughput", f"{report.requests_per_s:,.2f} requests/s"),
        ("", f"{report.output_tokens_per_s:,.1f} output tokens/s"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("matched tokens", _share(report.cached_tokens, report.prompt_tokens)),
    ]
    if report.daemons is not None:
        all_bytes = report.daemons.moved_bytes + report.daemons.saved_bytes
        rows += [
            ("bytes moved", f"{report.daemons.moved_bytes:,} ({report.daemons.moved_pages:,} pages)"),
            ("bytes saved", _share(report.daemons.saved_bytes, all_bytes)),
        ]
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
