"""Pages that somebody may still write, or that hold what somebody wrote: they go to nobody else before that is over."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import pytest

from kvferry import _core
from kvferry._core import HostPages
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import EndSend, OpenSend, StartTransfer
from kvferry.daemon.core.errors import unavailable
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.memory.host_tier import cache_limits
from kvferry.radix.pool import PageState
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Decode, Prefill, name

OWNER, FOLLOWER = 1, 2  # workers


def deadline_passes(side: Decode) -> None:
    side.core.tick(DEADLINE - 1.0)


def stream_breaks(side: Decode) -> None:
    side.core.worker_lost(OWNER, 1.0)


def request_fails(side: Decode) -> None:
    side.core.transfer_failed(1, unavailable("the prefill worker is gone"), 1.0)


def worker_answers(side: Decode) -> None:
    side.core.abort(OWNER, name(1), 2.0)


def worker_is_proven_gone(side: Decode) -> None:
    side.core.worker_gone(OWNER, 2.0)


@pytest.mark.parametrize(
    ("fails", "lets_go"),
    [
        (deadline_passes, worker_answers),
        (deadline_passes, worker_is_proven_gone),
        (request_fails, worker_answers),
        (request_fails, worker_is_proven_gone),
        (stream_breaks, worker_is_proven_gone),
    ],
)
def test_pages_that_a_worker_fills_go_to_nobody_before_it_lets_go(
    fails: Callable[[Decode], None], lets_go: Callable[[Decode], None]
) -> None:
    """Pages 0 to 3 are the worker's to fill, 4 and 5 come from the prefill daemon. Who wants the same ones, before it
    fails or after, brings them himself.
    """
    side = Decode(40)
    side.admit(name(1), "x", 6, worker=OWNER, held=4)
    (own,) = side.of(StartTransfer)
    pages = side.core.leases[name(1)].pages[:]
    assert own.page_ids == tuple(pages[4:6])
    side.core.leases[name(1)].deadline = DEADLINE - 1.0
    side.admit(name(2), "x", 7, worker=FOLLOWER)
    (start,) = side.of(StartTransfer)
    assert len(start.page_ids) == 7 and not {*start.page_ids} & {*pages}
    fails(side)
    side.core.transfer_drained(1, 1.5)
    side.take()
    assert not side.of(StartTransfer)
    assert set(side.cache.pool.states(pages[:4])) == {int(PageState.ORPHANED)}
    side.admit(name(3), "x", 7, worker=FOLLOWER)
    assert [start.page_ids for start in side.of(StartTransfer)] == [()], "one brings them for both"
    side.core.pages_arrived(start.ask.transfer, range(7), 1.5)
    for number in (2, 3):
        side.core.aux("p", name(number), b"first token", 1.5)
    side.take()
    assert len(side.told("ready")) == 2
    lets_go(side)
    side.cache.settle()
    assert set(side.cache.pool.states(pages)) == {int(PageState.FREE)}
    assert set(side.core.leases) == {name(2), name(3)}
    side.cache.pool.check()
    side.cache.namespace(NAMESPACE).tree.check()


def taken(cache: Cache, pages: int) -> tuple[int, ...]:
    """What of `pages` pages must be cleared first."""
    namespace: Namespace = cache.namespace(NAMESPACE)
    got = cache.take(namespace, pages)
    assert got is not None and len(got) == pages
    unclean = cache.take_unclean()
    cache.release(namespace, got)
    cache.settle()
    return unclean


def test_an_engines_memory_is_cleared_at_its_first_use_whatever_its_size() -> None:
    cache = Cache(4, PAGE, limits=CacheLimits(zero_freed=True, used_before=True))
    assert len(taken(cache, 4)) == 4, "it holds what the engine had there"
    for pages in (9, 2):
        cache.forget_device()
        cache.resize(pages)
        assert len(taken(cache, pages)) == pages
        assert len(taken(cache, pages)) == pages
    own = Cache(4, PAGE, limits=CacheLimits(zero_freed=True))
    assert not taken(own, 4) and len(taken(own, 4)) == 4, "new memory of the daemon's is clean"
    off = Cache(4, PAGE, limits=CacheLimits(used_before=True))
    off.resize(8)
    assert not taken(off, 8)


@pytest.mark.parametrize(
    ("settings", "before"), [({}, False), ({"pool": "engine"}, True), ({"device": "cuda:0"}, True)]
)
def test_only_new_memory_of_the_kernels_is_taken_for_clear(settings: dict[str, str], before: bool) -> None:
    limits = cache_limits(DaemonConfig(role="decode", zero_freed="on", **settings), in_blocks=False)
    assert limits.zero_freed and limits.used_before is before


def test_asks_that_nobody_opened_end_with_done() -> None:
    """Else whoever keeps something for each of them keeps it as long as the session lasts."""
    side = Prefill()
    for number in range(1, 9):
        side.ask(name(1), number, "x", 3)
    side.core.done(1, name(1), 0.0)
    side.take()
    assert [end.transfer for end in side.of(EndSend)] == list(range(1, 9))
    for end in side.of(EndSend):
        side.core.send_ended(1, end.transfer, 0.0)
    side.core.done(1, name(1), 0.0)
    side.take()
    assert not side.of(EndSend) and not side.of(OpenSend)


def test_what_is_written_to_pages_is_what_was_added_up() -> None:
    """The slot changes while its part is scattered: here by the scatter itself, since slot and pages are two mappings
    of the same memory. Fragments of 100 bytes are no whole words; the first one's page is the second one's slot.
    """
    fragment = 100
    file = os.memfd_create("late")
    os.ftruncate(file, 4 * fragment)
    memory, again = (np.frombuffer(mmap.mmap(file, 4 * fragment), np.uint8) for _ in range(2))
    os.close(file)
    memory[2 * fragment :] = np.random.default_rng(1).integers(0, 256, 2 * fragment, dtype=np.uint8)
    first, second = memory[2 * fragment : 3 * fragment].copy(), memory[3 * fragment :].copy()
    pages = HostPages(memory, np.zeros(1, np.int64), np.full(1, fragment, np.int64), 1, fragment, fragment, 4)
    total = pages.scatter_part_summed(np.array([3, 0], np.int64), 0, 2 * fragment, again, 2 * fragment)
    written = np.concatenate([memory[3 * fragment :], memory[:fragment]])
    assert total == _core.part_checksum(written)
    assert (written == np.concatenate([first, second])).all()
