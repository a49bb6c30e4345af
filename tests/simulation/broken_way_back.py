"""Methods of the way back without what they guard: each stands in for the product's in a test of a guard."""

from __future__ import annotations

from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.decode_leases import LeaseKeeper
from kvferry.daemon.core.lease import Lease
from kvferry.daemon.core.limits import NamedBlocks
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.prefill_entries import EntryKeeper
from kvferry.daemon.core.prefill_entry import Entry
from kvferry.daemon.core.way_back.fetch import Fetch
from kvferry.daemon.core.way_back.fetches import Fetches
from kvferry.daemon.core.way_back.loans import Loans
from kvferry.daemon.core.way_back.returns import Returns
from kvferry.daemon.peers.receiving import Receiving
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.sides.fetching import PrefillFetches
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire

_settle = LeaseKeeper.settle


def settle_beside_returns(keeper: LeaseKeeper, lease: Lease) -> None:
    returns, lease.returns = lease.returns, 0
    _settle(keeper, lease)
    lease.returns = returns


def fetches_without_a_look(keeper: EntryKeeper, entry: Entry) -> bool:
    return bool(entry.sends) or entry.zeroing


def all_is_readable(returns: Returns, lease: Lease, end: int) -> int:
    return end


_readable = Returns._readable


def computed_or_not(returns: Returns, lease: Lease, end: int) -> int:
    written, lease.held_written = lease.held_written, True
    readable = _readable(returns, lease, end)
    lease.held_written = written
    return readable


def gaps_and_all(fetch: Fetch) -> int:
    return fetch.first_page + fetch.there.rfind(1) + 1


_stop = Fetches.stop


def begin_at_once(fetches: Fetches, number: int, reason: str) -> None:
    _stop(fetches, number, reason)
    if (fetch := fetches._open.get(number)) is not None:
        fetches._over(fetch)


_of_pages, _proceed = NamedBlocks.of_pages, Fetches._proceed


def held_or_not(blocks: NamedBlocks, pages: range, held: int = 0) -> tuple[int, ...]:
    return _of_pages(blocks, pages)


def still_named(blocks: NamedBlocks) -> None:
    return None


def fetch_all_the_same(fetches: Fetches, entry: Entry) -> None:
    _proceed(fetches, entry)
    assert entry.prompt is not None
    if entry not in fetches._short:
        entry.prompt.patience = wire.PATIENCE_FETCH


_ask = Loans.ask


def lend_without_a_lock(loans: Loans, session: int, ask: peer.Ask, deadline: float) -> None:
    _ask(loans, session, ask, deadline)
    if (loan := loans._open.get((session, ask.transfer))) is not None:
        loans._holds.unlock(loan.namespace, loan.lock)
        loan.lock = loan.namespace.tree.lock(loan.namespace.tree.match(b""))


def whatever_is_there(cache: Cache, namespace: Namespace, digests: bytes) -> int:
    return namespace.tree.match(digests).pages


_join = PrefillFetches.join


def any_bytes_back(fetches: PrefillFetches, session: SendingSession) -> Receiving:
    """Those of the other direction are looked at."""
    receiving = _join(fetches, session)
    receiving.receiver.checksum_error = lambda header, payload_sum: None  # type: ignore[method-assign]
    return receiving


def lives_on(of_a_session: Fetches | Loans, session: int) -> None:
    return None
