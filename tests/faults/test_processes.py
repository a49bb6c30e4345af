"""Processes that are killed, stopped and ended under load: no wrong byte, every request ends, nothing stays held."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from engines import settled, stats
from stacks import running_stack
from storm import Storm, among_flips, children_of, memory_of

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
LOCKS_BACK_S = 10.0


def finish(storm: Storm) -> None:
    print(f"\n{storm.table()}")
    assert not storm.wrong, storm.wrong
    storm.calm()
    for name in ("decode-0", "prefill-0", "prefill-1"):
        settled(storm.replica(name), 30)


@pytest.mark.timeout(180)
def test_a_storm_in_short() -> None:
    """Bits flip all the while, too: such parts are asked for again."""
    with running_stack() as stack, Storm(stack, clients=3, place=among_flips) as storm:
        rows = [
            storm.suffer("SIGKILL prefill-0", lambda: storm.kill("prefill-0")),
            storm.suffer("SIGSTOP a courier of decode-0", lambda: storm.stop_courier("decode-0"), lasting=0.5),
        ]
        finish(storm)
        transfers = stats(storm.replica("decode-0")).transfers
        assert transfers.mismatched_parts > 0
        assert transfers.asked_again > 0
    assert all(row.wrong == 0 for row in rows)
    assert rows[0].failed > 0, "the fault met nothing"


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


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_ten_minutes_with_a_fault_every_five_seconds() -> None:
    end = time.monotonic() + 600
    with running_stack() as stack, Storm(stack, clients=4, seed=int(time.time()), place=among_flips) as storm:
        while time.monotonic() < end:
            what, fault, lasting = storm.any_fault()
            print(storm.suffer(what, fault, lasting=lasting), flush=True)
            time.sleep(2)
        finish(storm)
        write_table(storm, "faults-soak.txt", "ten_minutes")


def cycles(count: int) -> None:
    """The peer of a daemon is killed and started again, over and over: what the daemon holds does not grow."""
    with running_stack() as stack, Storm(stack, clients=2, host_tier=False) as storm:
        decode = storm.parts["decode-0"].process.popen.pid
        storm.suffer("SIGKILL prefill-0, warm-up", lambda: storm.kill("prefill-0"))
        before, couriers = memory_of(decode), children_of(decode)
        for number in range(count):
            storm.suffer(f"SIGKILL prefill-0, {number}", lambda: storm.kill("prefill-0"))
        finish(storm)
        resident, descriptors = memory_of(decode)
        assert descriptors <= before[1] + 8, f"descriptors went from {before[1]} to {descriptors}"
        assert resident <= before[0] + 20_000 + 100 * count, f"memory went from {before[0]} to {resident} KiB"
        assert children_of(decode) == couriers, "couriers were left"


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_hundred_restarts_leave_no_growth() -> None:
    cycles(100)


def write_table(storm: Storm, name: str, test: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    (RESULTS / name).write_text(
        f"python -m pytest tests/faults -m nightly -k {test}\n"
        f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load average {os.getloadavg()[0]:.1f}\n"
        "requests by outcome, from the fault until all routes served again; seconds from the fault until\n"
        "the first request in flight failed, until the last of those in flight had ended and its locks were back, and\n"
        f"until turns by way of each prefill replica, and of none, were answered again\n\n{storm.table()}\n"
    )
