"""Processes that are killed, stopped and ended under load: no wrong byte, every request ends, nothing stays held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engines import settled
from stacks import running_stack
from storm import Storm

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
LOCKS_BACK_S = 10.0


def finish(storm: Storm) -> None:
    print(f"\n{storm.table()}")
    assert not storm.wrong, storm.wrong
    storm.calm()
    for name in ("decode-0", "prefill-0", "prefill-1"):
        settled(storm.replica(name), 30)


FAULTS = (
    ("SIGKILL", "kill", 0.0),
    ("SIGTERM", "terminate", 0.0),
    ("SIGSTOP 1 s", "stop", 1.0),
    ("SIGSTOP 5 s", "stop", 5.0),
)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_process_and_every_fault() -> None:
    with running_stack() as stack, Storm(stack, clients=4, seed=1) as storm:
        for part in sorted(storm.parts):
            for what, method, lasting in FAULTS:
                row = storm.suffer(f"{what} {part}", lambda m=method, p=part: getattr(storm, m)(p), lasting=lasting)
                print(row, flush=True)
        for daemon in ("prefill-0", "decode-0"):
            storm.suffer(f"SIGKILL a courier of {daemon}", lambda d=daemon: storm.kill_courier(d))
            storm.suffer(f"SIGSTOP 5 s courier of {daemon}", lambda d=daemon: storm.stop_courier(d), lasting=5.0)
        finish(storm)
        write_table(storm, "faults.txt", "every_process")
    slow = [row for row in storm.rows if row.released is not None and row.released > LOCKS_BACK_S + 6]
    assert not slow, "\n".join(map(str, slow))


def write_table(storm: Storm, name: str, test: str, below: str = "") -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    (RESULTS / name).write_text(
        f"python -m pytest tests/faults -m nightly -k {test}\n"
        f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load average {os.getloadavg()[0]:.1f}\n"
        "requests by outcome, from the fault until all routes served again; seconds from the fault until\n"
        "the first request in flight failed, until the last of those in flight had ended and its locks were back, and\n"
        f"until turns by way of each prefill replica, and of none, were answered again\n\n{storm.table()}\n{below}"
    )
