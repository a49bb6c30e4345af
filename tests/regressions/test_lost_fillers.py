"""Pages that a decode worker itself is to fill are withheld when it is lost, and freed only on proof: random histories,
and that they find harm when any one guard is taken away. LOST_FILLERS_SEED=N begins with another seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import pytest
from filling_workers import Harm, run

from kvferry.daemon.arrivals import Arrivals, WaiterT
from kvferry.daemon.decode_core import DecodeCore
from kvferry.daemon.holds import Hold, Holds
from kvferry.daemon.namespaces import Namespace

FIRST = int(os.environ.get("LOST_FILLERS_SEED", "0"))
SEEDS = 100
GUARD_SEEDS = 2000  # most are missed in the first few
# What many seeds must have met: else the oracle has looked at nothing.
MET = (
    "copies between the tiers",
    "losses of a worker with pages to fill",
    "orphans freed on proof",
    "requests failed that waited for a lost worker",
    "requests refused by a full queue",
    "requests that were ready",
    "requests whose worker filled pages",
    "restores that ended below a withheld page",
    "withheld pages kept in the tree by another's lock",
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


def withhold_nothing(holds: Holds, hold: Hold, pages: Sequence[int]) -> None:
    return None


def leave_in_the_tree(holds: Holds, hold: Hold) -> None:
    return None


def never_blocked(holds: Holds, hold: Hold, digests: bytes) -> bool:
    return False


def free_at_once(core: DecodeCore, worker: int, now: float) -> None:
    core.worker_gone(worker, now)


def free_all(holds: Holds, namespace: Namespace, removed: list[int]) -> None:
    holds._arriving.forget(removed)
    holds._store.pruned(namespace, removed)


_is_good, _copy_ended = Holds.is_good, DecodeCore.copy_ended
_abandon, _hand_over = Arrivals.abandon, Arrivals.hand_over


def free_what_a_copy_held(
    core: DecodeCore, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float
) -> None:
    """All that the end of the copy itself takes out of the tree, and nothing else."""

    def removed(namespace: Namespace, pages: list[int]) -> None:
        del core._holds.removed
        free_all(core._holds, namespace, pages)

    core._holds.removed = removed  # type: ignore[method-assign]
    _copy_ended(core, number, failed, mismatched, seconds, now)


def good_with_what_is_withheld(holds: Holds, hold: Hold) -> bool:
    return not hold.readable_only or _is_good(holds, hold)


def fail_no_waiter(arrivals: Arrivals[WaiterT], pages: Iterable[int]) -> list[WaiterT]:
    _abandon(arrivals, pages)
    return []


def keep_no_page(arrivals: Arrivals[WaiterT], waiter: WaiterT, kept: Collection[int] = ()) -> dict[WaiterT, list[int]]:
    return _hand_over(arrivals, waiter)


@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (Holds, "withhold", withhold_nothing),
        (Holds, "take_out", leave_in_the_tree),
        (Holds, "blocked", never_blocked),
        (Holds, "removed", free_all),
        (DecodeCore, "copy_ended", free_what_a_copy_held),
        (DecodeCore, "worker_lost", free_at_once),
        (Arrivals, "abandon", fail_no_waiter),
        (Arrivals, "hand_over", keep_no_page),
        pytest.param(Holds, "is_good", good_with_what_is_withheld, marks=pytest.mark.nightly),  # few seeds find it
    ],
)
def test_without_a_guard_harm_is_found(
    owner: type, method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(Harm) as found:
        run_all(GUARD_SEEDS)
    print(f"without {owner.__name__}.{method}: {found.value}")
