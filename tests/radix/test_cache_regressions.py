"""What the cache machine has found, each in as few steps as it takes."""

from __future__ import annotations

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.namespaces import Namespace, Quota
from tests.radix.cache_model import Path, chain

A, B = b"\x01" * 32, b"\x02" * 32


def store_of(pages: int, host_pages: int, a: Quota, b: Quota, write_through_hits: int = 0) -> Cache:
    limits = CacheLimits(quotas={A: a, B: b}, write_through_hits=write_through_hits)
    return Cache(pages, 4, host_pages=host_pages, limits=limits)


def end_copies(store: Cache) -> None:
    for started in store.copies.take_started():
        ended = store.copies.ended(started.number, [], 0, 0.0)
        store.pruned(ended.namespace, ended.removed)


def take(store: Cache, namespace: Namespace, pages: int) -> list[int]:
    """Promised pages, as soon as copies have ended."""
    assert store.fits(namespace, pages)
    namespace.promised += pages
    while (taken := store.take(namespace, pages)) is None:
        assert store.copies.running, "pages were promised, are not there, and nothing is under way"
        end_copies(store)
    namespace.promised -= pages
    return taken


def put(store: Cache, namespace: Namespace, path: Path) -> None:
    """Pages that a request has finished with."""
    result = namespace.tree.insert(chain(path), take(store, namespace, len(path)))
    store.publish(namespace, len(path) - len(result.duplicates))
    store.release(namespace, result.duplicates)


def drain(store: Cache, namespace: Namespace, pages: int) -> None:
    """Others' pages, or its own, go to make room for a moment."""
    store.release(namespace, take(store, namespace, pages))
    end_copies(store)
    store.settle()


def test_its_own_share_is_had_in_one_take() -> None:
    """Four of five cached pages are protected. The first of them that went left fewer protected ones, so that more was
    its own share than before; `take` gave up, though no copy was under way.
    """
    store = store_of(16, 0, Quota(soft=4), Quota())
    a, b = store.namespace(A), store.namespace(B)
    put(store, a, (0,) * 5)
    others = take(store, b, 6)
    assert len(take(store, a, 8)) == 8
    store.release(b, others)


def test_a_hard_quota_of_the_host_holds_while_the_host_has_free_pages() -> None:
    store = store_of(8, 8, Quota(host_hard=2), Quota())
    a, b = store.namespace(A), store.namespace(B)
    put(store, a, (0,) * 5)
    drain(store, b, 8)
    assert a.tree.host_pages <= 2


def test_a_hard_quota_of_the_host_holds_for_write_through() -> None:
    store = store_of(8, 8, Quota(host_hard=2), Quota(), write_through_hits=1)
    a = store.namespace(A)
    put(store, a, (0,) * 5)
    a.tree.unlock(a.tree.lock(a.tree.match(chain((0,) * 5))))
    store.eviction.write_through()
    assert a.tree.host_pages <= 2


def test_no_host_page_of_a_victim_is_freed_for_what_needs_none() -> None:
    """What B evicts of A has host pages: room for it was made out of what A's soft quota protects."""
    store = store_of(8, 4, Quota(host_soft=3), Quota())
    a, b = store.namespace(A), store.namespace(B)
    for path in ((0, 0), (1, 1)):
        put(store, a, path)
    drain(store, b, 8)
    locks = []
    for path in ((0, 0), (1, 1)):
        locks.append(a.tree.lock(a.tree.match(chain(path))))
        store.restore(a, locks[-1], take(store, a, 2))
        end_copies(store)
    a.tree.unlock(locks[1])
    assert (a.tree.pages, a.tree.host_pages, a.tree.evictable) == (4, 4, 2)
    drain(store, b, 6)
    assert a.tree.host_pages >= 3
