"""Reports as tables: one, and two side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.loadgen.report import Report, Summary

COLUMNS = tuple(field.name for field in fields(Summary))
MAX_TURNS = 32  # rows of turns
WIDTH = 118  # of the table of times, at least


def console() -> Console:
    """A console as wide as the tables need; a narrower terminal wraps their lines."""
    return Console(width=max(WIDTH, Console().width))


class Row(NamedTuple):
    name: str
    values: Summary


class Total(NamedTuple):
    name: str
    value: float
    text: str


def print_tables(report: Report, console: Console) -> None:
    if report.setup is not None:
        setup = report.setup
        console.print(f"{setup.url}, {setup.model}, {setup.began}", highlight=False)
        console.print(f"{setup.workload}; {setup.loop}; seed {setup.seed}", highlight=False)
    times = Table(title="times in milliseconds", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    times.add_column("")
    for column in COLUMNS:
        times.add_column(column, justify="right", no_wrap=True)
    for row in _rows(report):
        numbers = [_number(getattr(row.values, name)) if row.values.count else "-" for name in COLUMNS[1:]]
        times.add_row(row.name, f"{row.values.count:,}", *numbers)
    console.print(times)
    totals = Table(show_header=False, box=box.SIMPLE)
    totals.add_column()
    totals.add_column(justify="right")
    for total in _totals(report):
        totals.add_row(total.name, total.text)
    console.print(totals)
    for error in report.errors:
        console.print(f"{error.count} x {error.message}", style="red", markup=False, highlight=False)
    if report.daemons_missing is not None:
        console.print(_missing(report.daemons_missing), style="red", markup=False, highlight=False)


def print_comparison(names: tuple[str, str], reports: tuple[Report, Report], console: Console) -> None:
    """Prints two reports side by side, with B / A."""
    table = Table(title=f"A: {names[0]}\nB: {names[1]}", title_justify="left")
    table.add_column("")
    for column in ("A", "B", "B / A"):
        table.add_column(column, justify="right", no_wrap=True)
    first, second = reports
    totals = {total.name: total for total in _totals(second)}
    for a in _totals(first):
        b = totals.get(a.name)
        table.add_row(a.name, a.text, "-" if b is None else b.text, "-" if b is None else _ratio(a.value, b.value))
    for rows, columns in ((_times, ("mean", "p50", "p90", "p99")), (_turns, ("p50",)), (_sizes, ("mean",))):
        others = {row.name: row.values for row in rows(second)}
        for row in rows(first):
            other = others.get(row.name)
            if other is None or not (row.values.count and other.count):
                continue
            if len(columns) > 1 or row.name.endswith(" 1"):
                table.add_section()
            for name in columns:
                x, y = getattr(row.values, name), getattr(other, name)
                table.add_row(f"{row.name}, {name}", _number(x), _number(y), _ratio(x, y))
    console.print(table)
    for name, report in zip(names, reports, strict=True):
        if report.failed:
            console.print(f"{name}: {report.failed} of {report.requests} requests failed", style="red", markup=False)
        if report.daemons_missing is not None:
            console.print(f"{name}: {_missing(report.daemons_missing)}", style="red", markup=False)


def _missing(reason: str) -> str:
    return f"no statistics of the daemons: {reason}"


def _rows(report: Report) -> Iterator[Row]:
    yield from _times(report)
    yield from _turns(report)
    yield from _sizes(report)


def _times(report: Report) -> Iterator[Row]:
    yield Row("time to first token", report.ttft_ms)
    yield Row("inter-token latency", report.inter_token_ms)
    yield Row("time per output token", report.token_ms)
    yield Row("request latency", report.latency_ms)
    if report.late_ms.max > 1:
        yield Row("  of it, sent late", report.late_ms)


def _turns(report: Report) -> Iterator[Row]:
    if len(report.ttft_by_turn_ms) > 1:
        for k, by_turn in enumerate(report.ttft_by_turn_ms[:MAX_TURNS]):
            yield Row(f"  first token, turn {k + 1}", by_turn)


def _sizes(report: Report) -> Iterator[Row]:
    yield Row("input tokens", report.input_tokens)
    yield Row("output tokens", report.output_tokens_each)
    yield Row("turns of a conversation", report.turns)


def _totals(report: Report) -> Iterator[Total]:
    skipped = f" ({report.skipped:,} turns never sent)" if report.skipped else ""
    yield Total("requests", report.requests, f"{report.requests:,}")
    yield Total("errors", report.failed, f"{report.failed:,}{skipped}")
    yield Total("duration, s", report.duration_s, f"{report.duration_s:,.1f}")
    yield Total("requests/s", report.requests_per_s, f"{report.requests_per_s:,.2f}")
    yield Total("output tokens/s", report.output_tokens_per_s, f"{report.output_tokens_per_s:,.1f}")
    yield Total("tokens/s, input and output", report.tokens_per_s, f"{report.tokens_per_s:,.1f}")
    if report.goodput is not None:
        goodput = report.goodput
        share = f" ({goodput.requests:,} requests)"
        yield Total("goodput, requests/s", goodput.requests_per_s, f"{goodput.requests_per_s:,.2f}{share}")
    yield Total("prompt tokens", report.prompt_tokens, f"{report.prompt_tokens:,}")
    yield Total("matched tokens", report.cached_tokens, _share(report.cached_tokens, report.prompt_tokens))
    if report.daemons is not None:
        counts = report.daemons
        device = counts.hit_tokens - counts.host_hit_tokens
        all_bytes = counts.moved_bytes + counts.saved_bytes
        yield Total("hit, device tier, tokens", device, _share(device, counts.queried_tokens))
        yield Total(
            "hit, host tier, tokens", counts.host_hit_tokens, _share(counts.host_hit_tokens, counts.queried_tokens)
        )
        moved = f"{counts.moved_bytes:,} ({counts.moved_pages:,} pages)"
        yield Total("bytes moved", counts.moved_bytes, moved)
        yield Total("bytes saved", counts.saved_bytes, _share(counts.saved_bytes, all_bytes))
        yield Total("pages evicted", counts.evicted_pages, f"{counts.evicted_pages:,}")


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}x" if a else "-"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
