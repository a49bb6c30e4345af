"""Reports and requests as files: JSON, CSV, JSON lines; and a report read again."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kvferry.loadgen.report import Report, Summary
from kvferry.loadgen.runner import TurnRecord

MAX_REPORT_BYTES = 64 << 20


class FileError(Exception):
    """A file that cannot be read or written."""


def read_report(path: Path) -> Report:
    """Reads what `--json` or `--format json` wrote. Raises FileError."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise FileError(f"{path}: has {path.stat().st_size} bytes; a report may have {MAX_REPORT_BYTES}")
        return TypeAdapter(Report).validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        detail = error.errors()[0]
        raise FileError(f"{path}: not a report: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None


def write_json(report: Report, path: Path) -> None:
    path.write_text(report.json() + "\n")


def write_csv(report: Report, path: Path) -> None:
    """A row a distribution, then the totals in the column `mean`."""
    columns = [field.name for field in fields(Summary)]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["what", *columns])
        for field in fields(Report):
            value = getattr(report, field.name)
            if isinstance(value, Summary):
                rows.writerow([field.name, *(getattr(value, column) for column in columns)])
            elif isinstance(value, (int, float)):
                rows.writerow([field.name, "", value])
        for k, by_turn in enumerate(report.ttft_by_turn_ms):
            rows.writerow([f"ttft_turn_{k + 1}_ms", *(getattr(by_turn, column) for column in columns)])
        if report.goodput is not None:
            rows.writerow(["goodput_requests_per_s", "", report.goodput.requests_per_s])
        if report.daemons is not None:
            for name, count in asdict(report.daemons).items():
                rows.writerow([f"daemons_{name}", "", count])


def write_requests(turns: Sequence[TurnRecord], path: Path) -> None:
    """A JSON object a request, seconds from the run's start, in the order in which they ended."""
    with path.open("w") as file:
        for turn in turns:
            file.write(json.dumps(asdict(turn)) + "\n")
