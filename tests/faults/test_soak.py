"""Ten minutes of the synthetic load at full speed with a random fault every five seconds: memory stays flat, every
request ends, and no byte is wrong, though bits flip on the way. SOAK_SECONDS shortens it. In short: some seconds with
one fault, which is the same every time.
"""

from __future__ import annotations

import os
import threading
import time

import grpc
import pytest

from tests.faults.outcome import SHORT_DEADLINE_S, finish, write_table
from tests.faults.storm import DEADLINE_S, Pace, Storm, among_flips
from tests.faults.usage import Usage, table, trends, usage_of
from tests.support.engines import stats
from tests.support.stacks import running_stack

EVERY = 5.0  # seconds
SHORT_S, SHORT_SEED = 6.0, 4
MORE_SHARE = 0.15  # of memory in the end


class Sampler(threading.Thread):
    """Once a second, between faults and in them."""

    def __init__(self, storm: Storm) -> None:
        super().__init__(name="sampler")
        self.samples: list[Usage] = []
        self._storm = storm
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(1.0):
            self.samples.append(usage_of((), self._storm.shm_dir))

    def end(self) -> None:
        self._over.set()
        self.join(10)


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_some_seconds_with_a_fault() -> None:
    soak(SHORT_S, SHORT_S, SHORT_SEED, SHORT_DEADLINE_S)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_minutes_with_a_fault_every_five_seconds() -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    samples, said = soak(seconds, EVERY, int(os.environ.get("SOAK_SEED", str(int(time.time())))))
    write_table([], "faults-soak.txt", "ten_minutes", said)
    found = trends(samples)
    if seconds >= 120:
        for name in ("resident_kib", "descriptors", "shared_kib"):
            trend = found[name]
            # By its slope and by its ends: where much was down for a while early on, the slope alone is no growth.
            growth = min(trend.per_thousand * len(samples) / 1000, trend.end - trend.start)
            assert growth <= MORE_SHARE * trend.start, f"{name}: {trend}\n{said}"


def found_flips(storm: Storm) -> int:
    """By the decode daemon that is there now; 0: none, or it is not there."""
    try:
        return stats(storm.replica("decode-0")).transfers.mismatched_parts
    except grpc.RpcError:
        return 0


def soak(seconds: float, every: float, seed: int, deadline_s: float = DEADLINE_S) -> tuple[list[Usage], str]:
    """What was used, and what is to be said of it; asserts that no byte was wrong and that nothing stays held."""
    fast = Pace(0, 0)
    with (
        running_stack() as stack,
        Storm(stack, seed=seed, pace=fast, place=among_flips, deadline_s=deadline_s) as storm,
    ):
        storm.wait_for_service(time.monotonic(), 60)
        sampler = Sampler(storm)
        sampler.start()
        began, faults, flips = time.monotonic(), [], 0
        try:
            while (at := time.monotonic()) < began + seconds:
                what, fault, lasting = storm.any_fault()
                mend = fault()
                time.sleep(min(lasting, every - 1))
                if mend is not None:
                    mend()
                faults.append(what)
                assert not storm.wrong, storm.wrong
                time.sleep(max(0.0, at + every - time.monotonic()))
                flips = max(flips, found_flips(storm))
        finally:
            sampler.end()
        storm.wait_for_service(time.monotonic(), 60)
        finish(storm)
        assert max(flips, found_flips(storm)) > 0
    outcomes = [seen.outcome for seen in storm.seen]
    counted = ", ".join(f"{outcomes.count(each)} {each}" for each in ("ok", "failed", "wrong"))
    said = (
        f"seed {seed}: {len(faults)} faults in {time.monotonic() - began:.0f} s, one every {every:g} s "
        f"(the first: {faults[0]}); turns: {counted}; all ended\n\n"
        f"{table(sampler.samples)}\n(samples: one a second, of all processes)\n"
    )
    print(said)
    assert not storm.wrong, storm.wrong
    return sampler.samples, said
