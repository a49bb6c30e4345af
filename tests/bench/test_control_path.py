"""The bench runs with few repetitions and prints every row; what it measures is not judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "control_path.py"
ALL_STAGES = ["worker gRPC", "queue", "match", "ask", "rendezvous", "gather", "nixl", "scatter", "publish", "rest"]
CASES = {
    "full hit: 6 pages matched, 0 moved": ["worker gRPC", "queue", "match", "ask", "rest", "total"],
    "1-page delta: 6 pages matched, 1 moved": [*ALL_STAGES, "total"],
    "9-page delta: 6 pages matched, 9 moved": [*ALL_STAGES, "total"],
}
WITH_LIMIT = {"worker gRPC", "ask", "gather", "nixl", "scatter", "total"}


def bench(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=200)


def test_every_case_has_its_rows_and_they_sum_to_the_total() -> None:
    words = ["--repetitions", "3", "--warm-up", "1", "--history", "6", "--deltas", "0", "1", "9", "--pool-mib", "8"]
    ran = bench(*words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    head, *tables = ran.stdout.split("\n\n")
    assert "load average" in head
    assert "cores" in head
    assert len(tables) == len(CASES)
    for table, (title, stages) in zip(tables, CASES.items(), strict=True):
        lines = table.splitlines()
        assert lines[0].startswith(title)
        rows = {stage: next(line for line in lines if line.startswith(f"{stage} ")) for stage in stages}
        shares = 0
        for stage, row in rows.items():
            fields = row[len(stage) :].split()
            p50, p99 = float(fields[0]), float(fields[1])
            assert p50 <= p99
            shares += int(fields[2].rstrip("%")) if stage != "total" else 0
            assert (len(fields) > 3) is (stage in WITH_LIMIT)
        assert abs(shares - 100) <= len(stages)  # each is rounded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repetitions", "2000"], "at most 1000"),
        (["--page-kib", "20"], "multiple of 16"),
        (["--deltas", "200"], "fit into a slot"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str) -> None:
    ran = bench(*words)
    assert ran.returncode == 2
    assert message in ran.stderr
