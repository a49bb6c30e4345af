"""A peer, its worker and couriers are killed over and over, and started again: what the daemons hold does not grow."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults.outcome import finish, write_table
from tests.faults.storm import Storm
from tests.faults.usage import Usage, table, trends, usage_of
from tests.support.engines import stats
from tests.support.stacks import running_stack

DEADLINE_S = 1.5  # of a turn: one whose prefill half is gone waits for so long
FIRST = 6  # cycles before the first sample: what is made once is made by then
MORE_DESCRIPTORS, MORE_KIB = 8, 24 << 10  # that the decode daemon and its worker may have in the end
KIB_PER_THOUSAND = 32 << 10  # by the slope, of a run that is long enough to have one


def kill_something(storm: Storm, number: int) -> None:
    """Of six, three couriers, two workers and a daemon, of either peer; and what was killed serves again."""
    peer = f"prefill-{number // 6 % 2}"
    kind = number % 6
    if kind % 2 == 0:
        storm.kill_courier("decode-0" if kind else peer)
    else:
        storm.kill(peer if kind == 3 else f"{peer}-worker")()
    storm.wait_for_service(time.monotonic(), 60)


def cycles(storm: Storm, count: int) -> list[Usage]:
    kept = [storm.parts[name].process.popen.pid for name in ("decode-0", "decode-0-worker")]
    samples = []
    for number in range(count):
        kill_something(storm, number)
        assert not storm.wrong, storm.wrong
        if number >= FIRST:
            samples.append(usage_of(kept, storm.shm_dir))
    assert stats(storm.replica("decode-0")).quarantine.lost_workers == 0
    return samples


def check(samples: list[Usage]) -> None:
    found = trends(samples)
    for name, more in (
        ("kept_descriptors", MORE_DESCRIPTORS),
        ("kept_threads", 4),
        ("kept_kib", MORE_KIB),
        ("processes", 2),  # a courier that ends while its successor starts
        ("descriptors", 3 * MORE_DESCRIPTORS),
        ("shared_files", 2),
        ("shared_kib", 0),
    ):
        assert found[name].end <= found[name].start + more, f"{name}: {found[name]}\n{table(samples)}"


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_some_cycles_and_a_courier_that_stops() -> None:
    """Several at a time: both couriers of the decode daemon, over and over, and once a daemon and both workers."""
    with running_stack() as stack, Storm(stack, clients=1, host_tier=False, deadline_s=DEADLINE_S) as storm:
        kept = [storm.parts[name].process.popen.pid for name in ("decode-0", "decode-0-worker")]
        storm.wait_for_service(time.monotonic(), 60)
        mends = [storm.kill("prefill-0"), storm.kill("prefill-1-worker")]
        killed = 3  # a daemon takes its worker with it
        for mend in mends:
            mend()
        samples = []
        while killed < 8:
            storm.wait_for_service(time.monotonic(), 60)
            samples.append(usage_of(kept, storm.shm_dir))
            killed += storm.kill_couriers("decode-0")
        row = storm.suffer("SIGSTOP a courier of decode-0", lambda: storm.stop_courier("decode-0"), lasting=0.5)
        samples.append(usage_of(kept, storm.shm_dir))
        finish(storm)
        print(table(samples))
        assert stats(storm.replica("decode-0")).quarantine.lost_workers == 0
        check(samples)
    assert row.wrong == 0
    assert any(seen.outcome == "failed" for seen in storm.seen), "the faults met nothing"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_thousand_cycles_leave_no_growth() -> None:
    """CYCLES makes them fewer."""
    count = int(os.environ.get("CYCLES", "1000"))
    with running_stack() as stack, Storm(stack, clients=2, host_tier=False, deadline_s=DEADLINE_S) as storm:
        began = time.monotonic()
        samples = cycles(storm, count)
        took = time.monotonic() - began
        storm.suffer("SIGKILL prefill-0, the last one", lambda: storm.kill("prefill-0"))
        finish(storm)
        outcomes = [seen.outcome for seen in storm.seen]
        counted = ", ".join(f"{outcomes.count(each)} {each}" for each in ("ok", "failed", "wrong"))
        said = (
            f"\n{count} cycles in {took:.0f} s, {took / count:.2f} s each; turns: {counted}\n\n{table(samples)}\n"
            "kept: the decode daemon and its worker, which are never killed\n"
        )
        print(said)
        write_table(storm.rows, "faults-cycles.txt", "thousand_cycles", said)
        check(samples)
        if count >= 1000:
            assert trends(samples)["kept_kib"].per_thousand <= KIB_PER_THOUSAND, said
