"""Pages that a lost worker may still write, in the tree under nothing but a restore's lock: its end takes them out, and
they are orphans until the proof that the worker is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from request_cores import NAMESPACE, Decode, digests, name

from kvferry.daemon.effects import StartCopy, StartTransfer, StopTransfer
from kvferry.daemon.store import Started
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
