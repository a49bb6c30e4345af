"""The simulation finds harm when any one guard of the product is taken away: each test patches one named method."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from kvferry.daemon.core.admission_queue import Admission
from kvferry.daemon.core.decode import DecodeCore
from kvferry.daemon.core.prefill import PrefillCore
from kvferry.daemon.core.prefill_entries import EntryKeeper
from kvferry.daemon.core.prefill_entry import Entry
from kvferry.daemon.core.reservations import Hold, Holds
from kvferry.daemon.core.single_flight import Arrivals, WaiterT
from kvferry.daemon.memory import host_tier
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.peers.session import Session
from kvferry.daemon.sides import workers
from kvferry.daemon.sides.workers import Worker
from kvferry.radix.tree import Lock
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.host_tier.index import RowIndex
from kvferry.transfer.protocol.coverage import Coverage
from kvferry.transfer.protocol.receiver import Receiver, _Incoming
from kvferry.transfer.protocol.slots import Credit, CreditPurse, CreditTable, PartHeader, PartNotice
from tests.simulation.clock import Violation
from tests.simulation.faults import Faults
from tests.simulation.simulator import simulate
from tests.simulation.test_disk import believe_the_file, clear_nothing

SEEDS = 1000


def any_generation(table: CreditTable, slot: int, generation: int) -> bool:
    return True


def any_page(coverage: Coverage, start: int, nbytes: int) -> range:
    return coverage.touched(start, nbytes)


def any_content(receiver: Receiver, notice: PartNotice, header: PartHeader) -> None:
    return None


def keep_the_credit(purse: CreditPurse, rank: int = 0) -> Credit:
    return purse.held()[0]


def free_at_once(core: DecodeCore | PrefillCore, worker: int, now: float) -> None:
    core.worker_gone(worker, now)


def promise_the_locked(holds: Holds, hold: Hold, lock: Lock) -> Admission | None:
    return None


def clear_without_a_look(keeper: EntryKeeper, entry: Entry) -> bool:
    return bool(entry.sends)


def nobody_takes_over(arrivals: Arrivals[WaiterT], waiter: WaiterT) -> dict[WaiterT, list[int]]:
    waiter.filling.clear()
    return {}


def any_lane(incoming: _Incoming, lane: int, start: int, nbytes: int) -> list[int]:
    arrived = [page for page in incoming.coverage[lane].written(start, nbytes) if incoming.missing[page]]
    for page in arrived:
        incoming.missing[page] = 0
    return arrived


def any_bytes(receiver: Receiver, header: PartHeader, payload_sum: int) -> str | None:
    return None


_end = Receiver.end


def drained_at_once(receiver: Receiver, transfer: int) -> bool:
    _end(receiver, transfer)
    return True


_tear_down = Session._tear_down


async def while_copies_run(session: Session, tasks: list[asyncio.Task[None]], start: asyncio.Task[CourierLink]) -> None:
    session._copies = 0
    await _tear_down(session, tasks, start)


async def nothing(*arguments: object) -> None:
    return None


async def couriers_live_on(session: Session, tasks: list[asyncio.Task[None]], start: asyncio.Task[CourierLink]) -> None:
    if start.done() and not start.cancelled() and start.exception() is None:
        start.result().stop = nothing  # type: ignore[method-assign]
    await _tear_down(session, tasks, start)


def without_a_look(worker: Worker) -> bool:
    return True


def all_are_right(*rows: object) -> list[int]:
    return []


@dataclass(frozen=True)
class Guard:
    owner: object  # a class or a module
    method: str
    mutant: object
    faults: Faults  # that lead to where it stands


FILES = Faults(host_files=1.0, decode_restarts=8, restarts=4)
BREAKS = Faults(broken_streams=20)
CRASHES = Faults(aborts=0.1, decode_crashes=12, prefill_crashes=12)
GUARDS = {
    "generation": Guard(CreditTable, "generation_matches", any_generation, Faults(repeats=0.2)),
    "coverage": Guard(Coverage, "covered", any_page, Faults()),
    "all lanes": Guard(_Incoming, "written", any_lane, Faults()),
    "content binding": Guard(Receiver, "check_binding", any_content, Faults(early=True)),
    "checksum": Guard(Receiver, "checksum_error", any_bytes, Faults(flips=0.02)),
    "credit spent once": Guard(CreditPurse, "take", keep_the_credit, Faults()),
    "orphaned pages, decode": Guard(DecodeCore, "worker_lost", free_at_once, CRASHES),
    "orphaned pages, prefill": Guard(PrefillCore, "worker_lost", free_at_once, CRASHES),
    "lock before promise": Guard(Holds, "refusal_once_locked", promise_the_locked, Faults()),
    "single-flight takeover": Guard(Arrivals, "hand_over", nobody_takes_over, Faults(aborts=0.3)),
    "tails being cleared": Guard(EntryKeeper, "copies_run", clear_without_a_look, Faults(aborts=0.3)),
    "copies at a session's end": Guard(Session, "_tear_down", while_copies_run, BREAKS),
    "couriers are reaped": Guard(Session, "_tear_down", couriers_live_on, BREAKS),
    "proof of a worker's end": Guard(Worker, "lets_go", without_a_look, CRASHES),
    "what a worker had queued": Guard(workers, "SETTLE_SECONDS", 0.0, CRASHES),
    "entries are cleared": Guard(RowIndex, "clear", clear_nothing, FILES),
    "rows of a file are verified": Guard(HostTier, "recover", believe_the_file, FILES),
    "rows are verified": Guard(host_tier, "verify_rows", all_are_right, Faults(tier_fails=0.2)),
    "order of proofs": Guard(Receiver, "end", drained_at_once, Faults(aborts=0.9)),
}


def harm(guard: Guard, monkeypatch: pytest.MonkeyPatch, faults: Faults | None) -> str:
    monkeypatch.setattr(guard.owner, guard.method, guard.mutant)
    name = getattr(guard.owner, "__name__", guard.owner)
    for seed in range(SEEDS):
        try:
            simulate(seed, faults=faults)
        except (Violation, AssertionError) as error:
            return f"without {name}.{guard.method}, seed {seed}: {type(error).__name__}: {error}"
    pytest.fail(f"{SEEDS} seeds found no harm without {name}.{guard.method}")


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_harm_is_found(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the faults that it is for, and so at once."""
    print(harm(GUARDS[guard], monkeypatch, GUARDS[guard].faults))


@pytest.mark.nightly
@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_harm_is_found_among_all_faults(
    guard: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = harm(GUARDS[guard], monkeypatch, None)
    with capsys.disabled():
        print(f"\n{found}")
