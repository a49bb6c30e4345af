"""The end of a storm: nothing was wrong and nothing stays held; and its table in bench/results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.faults.recovery import COLUMNS, Row
from tests.faults.storm import Storm, table_of
from tests.support.engines import settled

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SHORT_DEADLINE_S = 3.0  # of a turn; for so long a prompt is kept that was computed for a decode daemon that is gone


def finish(storm: Storm) -> None:
    print(f"\n{storm.table()}")
    assert not storm.wrong, storm.wrong
    storm.calm()
    for name in ("decode-0", "prefill-0", "prefill-1"):
        settled(storm.replica(name), 30)


def write_table(rows: Sequence[Row], name: str, test: str, below: str = "") -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    (RESULTS / name).write_text(
        f"python -m pytest tests/faults -m nightly -k {test}\n"
        f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load average {os.getloadavg()[0]:.1f}\n"
        f"{COLUMNS if rows else ''}\n{table_of(rows) if rows else ''}\n{below}"
    )
