"""Pages in the tree that a lost worker may still write: they count as orphans, and are orphans until the proof that the
worker is gone, also where it is the end of a restore that takes them out of the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from request_cores import NAMESPACE, Decode, digests, name

from kvferry.daemon.config import DaemonConfig
from kvferry.daemon.decode_side import DecodeSide
from kvferry.daemon.effects import StartCopy, StartTransfer, StopTransfer
from kvferry.daemon.errors import RequestError
from kvferry.daemon.side_tiers import SideTiers
from kvferry.daemon.stats import side_stats
from kvferry.daemon.store import Started
from kvferry.proto import common_pb2 as common
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE

PAGES = 16
LOST, OTHER = 1, 2  # workers
A, B, C, D = (name(number) for number in range(1, 5))


def drain(side: Decode) -> None:
    for stop in side.of(StopTransfer):
        side.core.transfer_drained(stop.transfer, 2.0)
    side.take()


def one_worker(side: Decode) -> Started:
    """It is to fill pages 0 and 1, and follows itself with a longer prompt, of which the host has pages 2 and 3."""
    rest, parents = digests("x", 4)[2 * DIGEST_BYTES :], digests("x", 3)[DIGEST_BYTES:]
    side.store.recover(side.store.namespace(NAMESPACE), rest, parents, [0, 1], bytes(2))
    side.admit(A, "x", 2, worker=LOST, held=2)
    side.admit(C, "x", 4, worker=LOST)
    (copy,) = side.of(StartCopy)
    side.core.worker_lost(LOST, 2.0)
    side.take()
    drain(side)
    return copy.started


def two_workers(side: Decode) -> Started:
    """The other one brings pages 2 and 3 behind those to fill, which go to the host, and restores them."""
    side.admit(A, "x", 2, worker=LOST, held=2)
    side.admit(B, "x", 4, worker=OTHER)
    (start,) = side.of(StartTransfer)
    side.core.pages_arrived(start.ask.transfer, range(2, 4), 1.0)
    side.core.transfer_completed(start.ask.transfer, 1.0)
    side.core.abort(OTHER, B, 1.0)
    assert side.store.spill(2) == 2
    side.core.tick(1.0)
    side.take()
    (copy,) = side.of(StartCopy)
    side.core.copy_ended(copy.started.number, [], 0, 0.001, 1.0)
    side.admit(C, "x", 5, worker=OTHER)
    (copy,) = side.of(StartCopy)
    side.core.worker_lost(LOST, 2.0)
    side.take()
    drain(side)
    side.core.abort(OTHER, C, 2.0)
    side.take()
    return copy.started


@pytest.mark.parametrize("wrong", [0, 1, 2])  # pages of the restore
@pytest.mark.parametrize("restore_begins", [one_worker, two_workers])
def test_pages_that_the_end_of_a_restore_takes_out_of_the_tree_stay_orphans(
    restore_begins: Callable[[Decode], Started], wrong: int
) -> None:
    side = Decode(PAGES, host_pages=PAGES)
    pool = side.store.pool
    restore = restore_begins(side)
    assert restore.copy.kind == RESTORE and len(restore.copy.device) == 2
    withheld = side.core.leases[A].pages[:]
    assert set(pool.states(withheld)) == {int(PageState.ARRIVING)}, "the restore's lock is over them"

    side.core.copy_ended(restore.number, restore.copy.device[:wrong], wrong, 0.001, 2.0)
    side.take()
    assert set(pool.states(withheld)) == {int(PageState.ORPHANED)}
    assert pool.counts().orphaned == 2 and pool.free == PAGES - 2, "what nobody writes is free"

    side.admit(D, "y", PAGES - 2, worker=OTHER)
    pages = side.core.leases[D].pages
    assert len(pages) == PAGES - 2 and not {*pages} & {*withheld}
    (start,) = side.of(StartTransfer)
    side.core.pages_arrived(start.ask.transfer, range(PAGES - 2), 2.0)
    side.core.transfer_completed(start.ask.transfer, 2.0)
    side.core.aux("p", D, b"first token", 2.0)
    side.take()
    assert side.told("ready") and pool.counts().cached == len(pages)
    side.core.worker_lost(OTHER, 3.0)
    assert set(pool.states(withheld)) == {int(PageState.ORPHANED)}

    side.core.worker_gone(LOST, 4.0)
    assert pool.counts().orphaned == 0 and pool.free == 2
    side.core.worker_gone(OTHER, 4.0)
    assert not side.core.leases and side.store.locks == 0
    pool.check()
    side.store.namespace(NAMESPACE).tree.check()


def test_withheld_pages_count_as_orphaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the bound, at it and past it; first another's lock keeps them in the tree."""
    monkeypatch.setattr(SideTiers, "page_bytes", 64)
    monkeypatch.setattr(SideTiers, "row_bytes", 64)
    side = Decode(PAGES)
    shell = DecodeSide(DaemonConfig(role="decode", orphaned_share=2 / PAGES), bytes(16), time.monotonic)
    shell.core = side.core

    def counted() -> tuple[int, int]:
        return side_stats(shell).quarantine.orphaned_pages, side.store.pool.counts().orphaned

    def check_refusal(pages: int) -> None:
        with pytest.raises(RequestError, match=rf"^{pages} pages of .* are orphaned .* bound is 2 ") as refused:
            shell.check_quarantine()
        assert refused.value.code == common.ERROR_RESOURCE_EXHAUSTED

    side.admit(A, "x", 2, worker=LOST, held=2)
    side.admit(B, "y", 1, worker=LOST + OTHER, held=1)
    side.admit(C, "x", 3, worker=OTHER)
    side.admit(D, "y", 2, worker=OTHER)
    assert counted() == (0, 0)
    side.core.worker_lost(LOST, 1.0)
    assert counted() == (2, 0)
    check_refusal(2)
    side.core.worker_lost(LOST + OTHER, 1.0)
    assert counted() == (3, 0)
    check_refusal(3)
    side.take()
    drain(side)
    side.core.worker_gone(OTHER, 2.0)
    assert counted() == (3, 3), "the same pages, out of the tree"
    check_refusal(3)
    side.core.worker_gone(LOST, 3.0)
    assert counted() == (1, 1)
    shell.check_quarantine()
    side.core.worker_gone(LOST + OTHER, 3.0)
    assert counted() == (0, 0) and side.store.pool.free == PAGES


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_pool_of_one_page_is_usable_until_it_is_orphaned(share: float) -> None:
    side = Decode(1)
    shell = DecodeSide(DaemonConfig(role="decode", orphaned_share=share), bytes(16), time.monotonic)
    shell.core = side.core
    assert shell.orphaned_bound == 0
    shell.check_quarantine()
    side.admit(A, "x", 1, worker=LOST, held=1)
    shell.check_quarantine()
    side.core.worker_lost(LOST, 1.0)
    with pytest.raises(RequestError, match=r"^1 pages of .* are orphaned .* bound is 0 "):
        shell.check_quarantine()
    side.take()
    drain(side)
    side.core.worker_gone(LOST, 2.0)
    shell.check_quarantine()
