"""The simulation finds harm when any one guard of the product is taken away: each test patches one named method."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from kvferry.daemon.core.admission_queue import Admission, QueueWalk
from kvferry.daemon.core.blocks.block_tier import BlockCopy, BlockTier
from kvferry.daemon.core.blocks.stows import Stows
from kvferry.daemon.core.cache import Cache, FlushCount
from kvferry.daemon.core.decode import DecodeCore
from kvferry.daemon.core.decode_leases import LeaseKeeper
from kvferry.daemon.core.kv_events import KvEventLog, TokenChain
from kvferry.daemon.core.lease import Lease
from kvferry.daemon.core.limits import Name, NamedBlocks
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import Pin, Pins
from kvferry.daemon.core.prefill import PrefillCore
from kvferry.daemon.core.prefill_entries import EntryKeeper
from kvferry.daemon.core.prefill_entry import Entry, EntryState
from kvferry.daemon.core.reservations import Hold, Holds
from kvferry.daemon.core.single_flight import Arrivals, WaiterT
from kvferry.daemon.core.way_back.fetch import Fetch
from kvferry.daemon.core.way_back.fetches import Fetches
from kvferry.daemon.core.way_back.loans import Loans
from kvferry.daemon.core.way_back.returns import Returns
from kvferry.daemon.memory import host_tier
from kvferry.daemon.memory.block_table import BlockTable
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.peers.session import Session
from kvferry.daemon.sides import workers
from kvferry.daemon.sides.fetching import PrefillFetches
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.tree import PROMPT, Lock
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.host_tier.index import RowIndex
from kvferry.transfer.protocol.coverage import Coverage
from kvferry.transfer.protocol.receiver import Receiver, _Incoming
from kvferry.transfer.protocol.slots import Credit, CreditPurse, CreditTable, PartHeader, PartNotice
from tests.simulation import broken_way_back as back
from tests.simulation.faults import Draw, Faults, draw_faults, with_drains, with_patience, with_stows
from tests.simulation.simulator import simulate
from tests.simulation.storage.test_disk import believe_the_file, clear_nothing

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


def share_while_filling(keeper: LeaseKeeper, lease: Lease) -> bool:
    return lease.keep


def share_in_any_case(keeper: LeaseKeeper, lease: Lease) -> None:
    if not lease.local and lease.keep and lease.to_fill:
        keeper._keep(lease, len(lease.digests) // DIGEST_BYTES, PROMPT, lease.digests)


_judge, _admit, _begin, _flush = QueueWalk.judge, DecodeCore.admit, PrefillCore.begin, Cache.flush


def count_those_at_their_quota(walk: QueueWalk[Any], admission: Admission) -> None:
    _judge(walk, Admission.NO_ROOM if admission is Admission.OVER_QUOTA else admission)


def admit_warmup_as_any(
    core: DecodeCore, worker: int, space: bytes, name: Name, request: wire.Admit, deadline: float, now: float
) -> None:
    request.warmup = False
    _admit(core, worker, space, name, request, deadline, now)


def begin_warmup_as_any(
    core: PrefillCore, worker: int, space: bytes, name: Name, request: wire.Begin, deadline: float, now: float
) -> None:
    request.warmup = False
    _begin(core, worker, space, name, request, deadline, now)


def flush_all(cache: Cache, namespaces: Iterable[Namespace]) -> FlushCount:
    return _flush(cache, cache.namespaces.values())


def pin_what_is_promised(pins: Pins, namespace: Namespace, digests: bytes, until: float) -> Pin:
    fits = pins._cache.fits
    pins._cache.fits = lambda namespace, pages: True  # type: ignore[method-assign]
    try:
        return _pin(pins, namespace, digests, until)
    finally:
        pins._cache.fits = fits  # type: ignore[method-assign]


_pin = Pins.pin


def keep_lost_pages(pins: Pins, namespace: Namespace) -> None:
    return None


def want_none(log: KvEventLog, namespace: bytes, digests: bytes) -> int:
    return len(digests) // DIGEST_BYTES


def any_tokens(chain: TokenChain, path: Sequence[bytes], parent: bytes | None, tokens: Sequence[int]) -> int:
    return len(path)


def nobody_comes_back(core: DecodeCore, worker: int, name: Name) -> bool:
    return False


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


_settle = LeaseKeeper.settle


def settle_beside_copies(keeper: LeaseKeeper, lease: Lease) -> None:
    copies, lease.copies = lease.copies, set()
    _settle(keeper, lease)
    lease.copies = copies


def any_block(tier: BlockTier, lease: Lease) -> None:
    return None


def gathers_without_a_look(keeper: EntryKeeper, entry: Entry) -> bool:
    return entry.zeroing


def the_whole_page(table: BlockTable, pages: Sequence[int], cache: int) -> None:
    return None


def whatever_is_before(tier: BlockTier, namespace: Namespace, copy: BlockCopy) -> bool:
    return True


_stored = BlockTier._stored


def store_what_failed(tier: BlockTier, copy: BlockCopy, failed: Sequence[int]) -> None:
    _stored(tier, copy, ())


def keep_wrong_rows(tier: BlockTier, lease: Lease, page: int) -> None:
    return None


def stows_without_a_look(keeper: EntryKeeper, entry: Entry) -> bool:
    return bool(entry.sends) or entry.zeroing or entry.fetch is not None


def rows_without_a_look(keeper: EntryKeeper, entry: Entry) -> bool:
    return not (entry.prompt is not None and entry.prompt.rows) and _copies_run(keeper, entry)


_copies_run, _ended = EntryKeeper.copies_run, Stows.ended


def stow_what_was_asked_for(stows: Stows, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> bool:
    copy = stows._running.get(number)
    if copy is not None and not copy.entry.done:
        copy.entry.state = EntryState.COMPUTED
    return _ended(stows, number, failed, mismatched, seconds)


def stow_what_failed(stows: Stows, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> bool:
    return _ended(stows, number, (), mismatched, seconds)


@dataclass(frozen=True)
class Guard:
    owner: object  # a class or a module
    method: str
    mutant: object
    faults: Faults  # that lead to where it stands
    first: int = 0  # seed with which harm is found at once
    all: Draw = draw_faults  # all faults, where those of each seed do not lead there


FILES = Faults(host_files=1.0, decode_restarts=8, restarts=4)
BREAKS = Faults(broken_streams=20)
FILLS = Faults(held=0.5, hangs=0.2)
BLOCKS = Faults(aborts=0.3, tier_fails=0.2, blocks=True, blunders=0.1)
BACK = Faults(restarts=4, tier_fails=0.1, way_back=True)
BROKEN_BACK = replace(BACK, broken_streams=20)
STOWS = Faults(aborts=0.3, tier_fails=0.2, blocks=True, stows=1.0)
WAITS = Faults(aborts=0.1, blocks=True, way_back=True, patience=True)
ALL_STOWS, ALL_WAITS = partial(with_stows, draw_faults), partial(with_patience, draw_faults)
ALL_DRAINS = partial(with_drains, draw_faults)
CRASHES = Faults(aborts=0.1, decode_crashes=12, prefill_crashes=12)
GUARDS = {
    "generation": Guard(CreditTable, "generation_matches", any_generation, Faults(repeats=0.2)),
    "coverage": Guard(Coverage, "covered", any_page, Faults(), 1),
    "all lanes": Guard(_Incoming, "written", any_lane, Faults(), 2),
    "content binding": Guard(Receiver, "check_binding", any_content, Faults(early=True), 1),
    "checksum": Guard(Receiver, "checksum_error", any_bytes, Faults(flips=0.02)),
    "checksum of what comes back": Guard(PrefillFetches, "join", back.any_bytes_back, replace(BACK, flips=0.02)),
    "credit spent once": Guard(CreditPurse, "take", keep_the_credit, Faults()),
    "orphaned pages, decode": Guard(DecodeCore, "worker_lost", free_at_once, CRASHES),
    "orphaned pages, prefill": Guard(PrefillCore, "worker_lost", free_at_once, CRASHES, 2),
    "lock before promise": Guard(Holds, "refusal_once_locked", promise_the_locked, Faults()),
    "single-flight takeover": Guard(Arrivals, "hand_over", nobody_takes_over, Faults(aborts=0.3)),
    "tails being cleared": Guard(EntryKeeper, "copies_run", clear_without_a_look, Faults(aborts=0.3), 4),
    "copies at a session's end": Guard(Session, "_tear_down", while_copies_run, BREAKS, 1),
    "couriers are reaped": Guard(Session, "_tear_down", couriers_live_on, BREAKS, 6),
    "proof of a worker's end": Guard(Worker, "lets_go", without_a_look, CRASHES, 6),
    "what a worker had queued": Guard(workers, "SETTLE_SECONDS", 0.0, CRASHES, 3),
    "entries are cleared": Guard(RowIndex, "clear", clear_nothing, FILES, 12),
    "rows of a file are verified": Guard(HostTier, "_take", believe_the_file, FILES, 12),
    "rows are verified": Guard(host_tier, "verify_rows", all_are_right, Faults(tier_fails=0.2)),
    "pages that their worker fills": Guard(LeaseKeeper, "shares_while_filling", share_while_filling, FILLS),
    "filled beside another": Guard(LeaseKeeper, "_share", share_in_any_case, FILLS, 1),
    "who is over a quota of its own": Guard(QueueWalk, "judge", count_those_at_their_quota, Faults(bursts=4), 1),
    "warm-ups, decode": Guard(DecodeCore, "admit", admit_warmup_as_any, Faults(warmups=0.3)),
    "warm-ups, prefill": Guard(PrefillCore, "begin", begin_warmup_as_any, Faults(warmups=0.3)),
    "namespaces of a flush": Guard(Cache, "flush", flush_all, Faults(flushes=10), 1),
    "promises before pins": Guard(Pins, "pin", pin_what_is_promised, Faults(pins=40), 9),
    "pins of what is lost": Guard(Pins, "shorten", keep_lost_pages, Faults(pins=40, tier_fails=0.3), 4),
    "tokens that are wanted": Guard(KvEventLog, "wanted_from", want_none, Faults(events=True)),
    "tokens of a page": Guard(TokenChain, "fitting", any_tokens, Faults(events=True, lies=0.1)),
    "who comes back to a drain": Guard(DecodeCore, "comes_back", nobody_comes_back, Faults(drains=30), 4, ALL_DRAINS),
    "blocks of copies that run": Guard(LeaseKeeper, "settle", settle_beside_copies, BLOCKS),
    "blocks of others": Guard(BlockTier, "claim", any_block, BLOCKS),
    "blocks that are gathered from": Guard(EntryKeeper, "copies_run", gathers_without_a_look, BLOCKS, 1),
    "blocks behind a prompt's end": Guard(BlockTable, "last_bytes", the_whole_page, BLOCKS),
    "paths of what is stored": Guard(BlockTier, "_path_is_held", whatever_is_before, BLOCKS),
    "stores that failed": Guard(BlockTier, "_stored", store_what_failed, BLOCKS, 1),
    "rows that are wrong": Guard(BlockTier, "forget_wrong", keep_wrong_rows, BLOCKS),
    "locks of what goes back": Guard(LeaseKeeper, "settle", back.settle_beside_returns, replace(BACK, aborts=0.9), 5),
    "what can be read goes back": Guard(Returns, "_readable", back.all_is_readable, BACK),
    "locks of what is lent": Guard(Loans, "ask", back.lend_without_a_lock, BACK, 9),
    "what can be read is lent": Guard(Cache, "readable", back.whatever_is_there, BACK, 11),
    "held blocks that are computed": Guard(Returns, "_readable", back.computed_or_not, WAITS, 12, ALL_WAITS),
    "pages that are fetched into": Guard(
        EntryKeeper, "copies_run", back.fetches_without_a_look, replace(BACK, aborts=0.9)
    ),
    "fetched pages behind a gap": Guard(
        Fetch, "ready", property(back.gaps_and_all), replace(BACK, fetch_seconds=0.004)
    ),
    "copies of a fetch that is stopped": Guard(
        Fetches, "stop", back.begin_at_once, replace(BACK, fetch_seconds=0.004), 4
    ),
    "fetches of a session that is over": Guard(Fetches, "session_down", back.lives_on, BROKEN_BACK),
    "loans to a session that is over": Guard(Loans, "session_down", back.lives_on, BROKEN_BACK, 1),
    "blocks that are copied to the tier": Guard(EntryKeeper, "copies_run", stows_without_a_look, STOWS, 1, ALL_STOWS),
    "rows that are sent": Guard(EntryKeeper, "copies_run", rows_without_a_look, STOWS, 0, ALL_STOWS),
    "blocks that are sent": Guard(Stows, "ended", stow_what_was_asked_for, STOWS, 1, ALL_STOWS),
    "prompts that are not in the tier": Guard(Stows, "ended", stow_what_failed, STOWS, 1, ALL_STOWS),
    "blocks that an engine holds": Guard(NamedBlocks, "of_pages", back.held_or_not, WAITS, 0, ALL_WAITS),
    "blocks into which nothing came": Guard(
        NamedBlocks, "forget", back.still_named, replace(WAITS, fetch_seconds=0.004), 11, ALL_WAITS
    ),
    "who was told to compute": Guard(
        Fetches, "_proceed", back.fetch_all_the_same, replace(WAITS, fetch_seconds=0.004, blocks=False), 0, ALL_WAITS
    ),
    "order of proofs": Guard(Receiver, "end", drained_at_once, Faults(aborts=0.9), 1),
}


def harm(guard: Guard, monkeypatch: pytest.MonkeyPatch, faults: Faults | Draw, first: int = 0) -> str:
    monkeypatch.setattr(guard.owner, guard.method, guard.mutant)
    name = getattr(guard.owner, "__name__", guard.owner)
    for seed in range(first, SEEDS):
        try:
            simulate(seed, faults=faults)
        except Exception as error:  # whatever ends the run: with the guard nothing does
            return f"without {name}.{guard.method}, seed {seed}: {type(error).__name__}: {error}"
    pytest.fail(f"{SEEDS} seeds found no harm without {name}.{guard.method}")


# Those whose first seed with harm takes seconds. One is a request that waits a minute of the simulation's time.
LONG = (
    "blocks behind a prompt's end",
    "copies of a fetch that is stopped",
    "loans to a session that is over",
    "orphaned pages, decode",
    "orphaned pages, prefill",
    "paths of what is stored",
    "pins of what is lost",
    "proof of a worker's end",
    "rows of a file are verified",
    "rows that are wrong",
    "what a worker had queued",
    "what can be read is lent",
    "who comes back to a drain",
    "who is over a quota of its own",
)


@pytest.mark.parametrize(
    "guard", [pytest.param(guard, marks=[pytest.mark.nightly] if guard in LONG else []) for guard in GUARDS]
)
def test_without_a_guard_harm_is_found(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the faults that it is for, and so at once."""
    print(harm(GUARDS[guard], monkeypatch, GUARDS[guard].faults, GUARDS[guard].first))


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # some need many seeds, beside other work
@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_harm_is_found_among_all_faults(
    guard: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = harm(GUARDS[guard], monkeypatch, GUARDS[guard].all)
    with capsys.disabled():
        print(f"\n{found}")
