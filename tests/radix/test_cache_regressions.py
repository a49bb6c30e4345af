"""Bugs that the cache machine has found, each in as few steps as it takes."""

from __future__ import annotations

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.namespaces import Namespace, Quota
from tests.radix.cache_machine.model import Path, chain

A, B = b"\x01" * 32, b"\x02" * 32


def cache_of(pages: int, host_pages: int, a: Quota, b: Quota, write_through_hits: int = 0) -> Cache:
    limits = CacheLimits(quotas={A: a, B: b}, write_through_hits=write_through_hits)
    return Cache(pages, 4, host_pages=host_pages, limits=limits)


def end_copies(cache: Cache) -> None:
    for started in cache.copies.take_started():
        ended = cache.copies.ended(started.number, [], 0, 0.0)
        cache.pruned(ended.namespace, ended.removed)


def take(cache: Cache, namespace: Namespace, pages: int) -> list[int]:
    """Promised pages, as soon as copies have ended."""
    assert cache.fits(namespace, pages)
    namespace.promised += pages
    while (taken := cache.take(namespace, pages)) is None:
        assert cache.copies.running, "pages were promised, are not there, and nothing is under way"
        end_copies(cache)
    namespace.promised -= pages
    return taken


def put(cache: Cache, namespace: Namespace, path: Path) -> None:
    """Pages that a request has finished with."""
    result = namespace.tree.insert(chain(path), take(cache, namespace, len(path)))
    cache.publish(namespace, len(path) - len(result.duplicates))
    cache.release(namespace, result.duplicates)


def drain(cache: Cache, namespace: Namespace, pages: int) -> None:
    """Others' pages, or its own, go to make room for a moment."""
    cache.release(namespace, take(cache, namespace, pages))
    end_copies(cache)
    cache.settle()


def test_its_own_share_is_had_in_one_take() -> None:
    """Four of five cached pages are protected. The first of them that went left fewer protected ones, so that more was
    its own share than before; `take` gave up, though no copy was under way.
    """
    cache = cache_of(16, 0, Quota(soft=4), Quota())
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, (0,) * 5)
    others = take(cache, b, 6)
    assert len(take(cache, a, 8)) == 8
    cache.release(b, others)


def test_a_hard_quota_of_the_host_holds_while_the_host_has_free_pages() -> None:
    cache = cache_of(8, 8, Quota(host_hard=2), Quota())
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, (0,) * 5)
    drain(cache, b, 8)
    assert a.tree.host_pages <= 2


def test_a_hard_quota_of_the_host_holds_for_write_through() -> None:
    cache = cache_of(8, 8, Quota(host_hard=2), Quota(), write_through_hits=1)
    a = cache.namespace(A)
    put(cache, a, (0,) * 5)
    a.tree.unlock(a.tree.lock(a.tree.match(chain((0,) * 5))))
    cache.eviction.write_through()
    assert a.tree.host_pages <= 2


def test_what_is_copied_ahead_goes_at_once_and_no_more_is_copied_than_that() -> None:
    limits = CacheLimits(write_ahead=0.5, quotas={A: Quota(host_hard=3)})
    cache = Cache(8, 4, host_pages=8, limits=limits)
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, (0,) * 4)
    cache.eviction.write_ahead()
    assert not cache.copies.running, "as much is free"
    put(cache, b, (1,) * 4)
    copied = 0
    for _ in range(8):
        cache.eviction.write_ahead()
        cache.eviction.write_ahead()
        assert cache.copies.running <= 1, "one at a time"
        copied += cache.copies.running
        end_copies(cache)
    assert 0 < copied <= 4 and not cache.copies.running
    assert a.tree.host_pages == b.tree.host_pages == 2, "each has a share of what is to be ahead"
    assert cache.take(b, 0) == [] and len(take(cache, b, 2)) == 2
    assert cache.tiers.spilled == 0 and cache.tiers.backed_up == 4, "nothing waited for a spill"


def test_no_host_page_of_a_victim_is_freed_for_what_needs_none() -> None:
    """What B evicts of A has host pages: room for it was made out of what A's soft quota protects."""
    cache = cache_of(8, 4, Quota(host_soft=3), Quota())
    a, b = cache.namespace(A), cache.namespace(B)
    for path in ((0, 0), (1, 1)):
        put(cache, a, path)
    drain(cache, b, 8)
    locks = []
    for path in ((0, 0), (1, 1)):
        locks.append(a.tree.lock(a.tree.match(chain(path))))
        cache.restore(a, locks[-1], take(cache, a, 2))
        end_copies(cache)
    a.tree.unlock(locks[1])
    assert (a.tree.pages, a.tree.host_pages, a.tree.evictable) == (4, 4, 2)
    drain(cache, b, 6)
    assert a.tree.host_pages >= 3
