"""Pages that a decode worker itself is to fill are nobody else's before they are filled, and those of one that is lost
are freed only on proof; who takes over what another was to bring does so once that one's transfer has drained: random
histories, and that they find harm when any one guard is taken away. LOST_FILLERS_SEED=N begins with another seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from kvferry.daemon.core.decode import DecodeCore
from kvferry.daemon.core.decode_leases import LeaseKeeper
from kvferry.daemon.core.lease import Lease
from kvferry.daemon.core.transfers import Asks
from tests.regressions.filling_workers import Harm, run

FIRST = int(os.environ.get("LOST_FILLERS_SEED", "0"))
SEEDS = 100
GUARD_SEEDS = 2000  # most are missed in the first few
# What many seeds must have met: else the oracle has looked at nothing.
MET = (
    "copies between the tiers",
    "losses of a worker with pages to fill",
    "orphans freed on proof",
    "requests failed before their worker had filled pages",
    "requests refused by a full queue",
    "requests that were ready",
    "requests whose worker filled pages",
    "transfers taken over",
)


def run_all(seeds: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + seeds):
        met += run(seed)
    print(f"\n{seeds} seeds from {FIRST} on:")
    for what, count in sorted(met.items()):
        print(f"{count:10d}  {what}")
    missing = [what for what in MET if not met[what]]
    assert not missing, f"nothing of {missing} happened"


def test_lost_fillers_harm_nobody() -> None:
    run_all(SEEDS)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_lost_fillers_harm_nobody_in_many_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        run_all(10_000)


def share_at_once(keeper: LeaseKeeper, lease: Lease) -> bool:
    return lease.keep


def free_at_once(core: DecodeCore, worker: int, now: float) -> None:
    core.worker_gone(worker, now)


def ask_before_it_has_drained(asks: Asks, taker: Lease, lease: Lease, pages: set[int]) -> list[int]:
    asks.ask_on(taker, sorted(pages))
    return []


@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (LeaseKeeper, "shares_while_filling", share_at_once),
        (DecodeCore, "worker_lost", free_at_once),
        (Asks, "give_to", ask_before_it_has_drained),
    ],
)
def test_without_a_guard_harm_is_found(
    owner: type, method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(Harm) as found:
        run_all(GUARD_SEEDS)
    print(f"without {owner.__name__}.{method}: {found.value}")
