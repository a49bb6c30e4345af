"""Namespaces of one cache: what each may use, what it keeps from the others, and that promises are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.namespaces import Namespace, Quota, slack
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE, Lock
from tests.radix.letters import chain

PAGES = 24
A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


def cache_of(host_pages: int = 0, **quotas: Quota) -> Cache:
    by_id = {{"a": A, "b": B, "c": C}[name]: quota for name, quota in quotas.items()}
    return Cache(PAGES, 4, host_pages=host_pages, limits=CacheLimits(quotas=by_id))


def end_copies(cache: Cache) -> None:
    for started in cache.copies.take_started():
        ended = cache.copies.ended(started.number, [], 0, 0.0)
        cache.pruned(ended.namespace, ended.removed)


def take(cache: Cache, namespace: Namespace, pages: int) -> list[int]:
    """As an admitted request does, waiting for copies."""
    assert cache.fits(namespace, pages)
    namespace.promised += pages
    while (taken := cache.take(namespace, pages)) is None:
        assert cache.copies.running, "the promise cannot be kept"
        end_copies(cache)
    namespace.promised -= pages
    return taken


def put(cache: Cache, namespace: Namespace, path: str) -> None:
    """Finishes a request: its pages are cached."""
    pages = take(cache, namespace, len(path))
    result = namespace.tree.insert(chain(path), pages)
    cache.publish(namespace, len(path) - len(result.duplicates))
    cache.release(namespace, result.duplicates)


def held(namespace: Namespace, path: str) -> int:
    return int(namespace.tree.match(chain(path)).pages)


@pytest.mark.parametrize("quota", [(-1, 0), (0, -1), (5, 4)])
def test_quotas_that_cannot_be(quota: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="device quota is"):
        Quota(*quota)
    with pytest.raises(ValueError, match="host quota is"):
        Quota(0, 0, *quota)


def test_namespaces_do_not_match_each_other() -> None:
    cache = cache_of()
    a, b = cache.namespace(A), cache.namespace(B)
    assert cache.namespace(A) is a
    put(cache, a, "abcd")
    assert (held(a, "abcd"), held(b, "abcd")) == (4, 0)
    put(cache, b, "ab")
    assert (held(a, "abcd"), held(b, "abcd"), cache.pool.free) == (4, 2, PAGES - 6), "pages are not shared"
    cache.flush([b])
    assert (held(a, "abcd"), held(b, "abcd")) == (4, 0)


def test_without_quotas_the_least_recently_used_go_first() -> None:
    cache = cache_of()
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, "abcdefgh")
    put(cache, b, "abcdefgh")
    put(cache, a, "xy")
    cache.release(b, take(cache, b, PAGES - 18 + 8))
    assert (held(a, "abcdefgh"), held(b, "abcdefgh"), held(a, "xy")) == (0, 8, 2)
    assert (a.evicted, b.evicted, cache.evicted) == (8, 0, 8)


def test_a_hard_quota_bounds_what_a_namespace_uses() -> None:
    cache = cache_of(a=Quota(hard=8))
    a, b = cache.namespace(A), cache.namespace(B)
    assert (cache.most(a), cache.most(b)) == (8, PAGES)
    put(cache, b, "abcd")
    for path in ("abcd", "efgh", "ijklmn", "opqrstuv", "w"):
        put(cache, a, path)
        assert a.used <= 8 and held(a, path) == len(path)
    assert held(b, "abcd") == 4, "others do not pay for it"
    assert not cache.fits(a, 9) and cache.fits(a, 8)
    lock = a.tree.lock(a.tree.match(chain("w")))
    assert not cache.fits(a, 8) and cache.fits(a, 7)
    a.promised += 3
    assert not cache.fits(a, 5) and cache.fits(a, 4) and cache.fits(b, PAGES - 1 - 3)
    a.promised -= 3
    a.tree.unlock(lock)


def test_a_soft_quota_keeps_pages_from_the_others() -> None:
    cache = cache_of(a=Quota(soft=8))
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, "abcdefghijkl")
    put(cache, b, "abcd")
    assert not cache.fits(b, PAGES - 7) and cache.fits(b, PAGES - 8)
    put(cache, b, "mnopqrstuvwxyzab")  # PAGES - 8
    assert (a.used, held(a, "abcdefghijkl"), b.used) == (8, 8, 16)
    put(cache, b, "x" * 16)
    assert (a.used, b.used) == (8, 16)
    assert cache.fits(a, PAGES) and cache.available() == 16
    put(cache, a, "y" * PAGES)
    assert (a.used, b.used) == (PAGES, 0)


def test_a_soft_quota_protects_no_more_than_is_cached() -> None:
    cache = cache_of(a=Quota(soft=8))
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, "ab")
    assert cache.fits(b, PAGES - 2) and not cache.fits(b, PAGES - 1)
    own = take(cache, a, 8)  # of its own request: nobody evicts these, but its cached pages are above the quota now
    assert cache.fits(b, PAGES - 8)
    cache.release(a, own)


def test_promises_count_against_the_namespaces_own_pages_first() -> None:
    cache = cache_of(a=Quota(soft=8))
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, "abcdefgh")
    assert cache.fits(a, 8)
    a.promised += 8
    assert cache.fits(b, PAGES - 8), "they can all be had from its own protected pages"
    b.promised += PAGES - 8
    assert not cache.fits(a, 1) and not cache.fits(b, 1)
    for namespace, pages in ((b, PAGES - 8), (a, 8)):
        taken = cache.take(namespace, pages)
        assert taken is not None
        namespace.promised -= pages
        cache.release(namespace, taken)


@pytest.mark.parametrize("first", [1, 2, 5, PAGES])
def test_what_was_promised_can_be_taken_in_parts(first: int) -> None:
    """Whatever of its own pages are evicted, the rest of them is still its own to evict."""
    cache = cache_of(b=Quota(soft=4))
    b = cache.namespace(B)
    put(cache, b, "abcd")
    assert cache.fits(b, PAGES)
    b.promised = PAGES
    for pages in (first, PAGES - first):
        assert cache.take(b, pages) is not None
        b.promised -= pages


def test_host_pages_under_the_soft_quota_are_kept_from_the_others() -> None:
    cache = cache_of(host_pages=8, a=Quota(host_soft=4))
    a, b = cache.namespace(A), cache.namespace(B)
    put(cache, a, "abcdef")
    cache.release(b, take(cache, b, PAGES))
    end_copies(cache)
    assert (a.tree.pages, a.tree.host_pages) == (0, 6)
    put(cache, b, "abcdefgh")
    cache.release(a, take(cache, a, PAGES))
    end_copies(cache)
    assert a.tree.host_pages == 4 and held(a, "abcdef") == 4
    assert b.tree.host_pages <= 4


def test_a_hard_quota_bounds_the_host_pages() -> None:
    cache = cache_of(host_pages=16, a=Quota(host_hard=4))
    a, b = cache.namespace(A), cache.namespace(B)
    for path in ("abc", "def", "ghi"):
        put(cache, a, path)
        cache.release(b, take(cache, b, PAGES))
        end_copies(cache)
        assert a.tree.host_pages <= 4


# -- promises are kept -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    namespace: Namespace
    promised: int
    pages: list[int] = field(default_factory=list)
    lock: Lock | None = None


paths = st.text("ab", min_size=1, max_size=8)
shares = st.integers(0, 1 << 20)


class StoreMachine(RuleBasedStateMachine):
    """Requests of three namespaces with quotas drawn at random. Whatever was promised can be taken, once the copies
    that are under way have ended, well or not.
    """

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        quotas = {}
        for namespace_id in (A, B, C):
            soft = data.draw(st.sampled_from([0, 4, 8]))
            hard = data.draw(st.sampled_from([0, soft + 2, soft + 6, 16]))
            host_soft = data.draw(st.sampled_from([0, 4]))
            quotas[namespace_id] = Quota(soft, hard, host_soft, data.draw(st.sampled_from([0, host_soft + 3])))
        limits = CacheLimits(
            quotas=quotas,
            policy=data.draw(st.sampled_from(["lru", "lfu", "fifo", "priority"])),
            evict_output_first=data.draw(st.booleans()),
            write_through_hits=data.draw(st.sampled_from([0, 2])),
            write_ahead=data.draw(st.sampled_from([0.0, 0.5])),
        )
        self.cache = Cache(PAGES, 4, host_pages=data.draw(st.sampled_from([0, 5, 12, 40])), limits=limits)
        self.namespaces = [self.cache.namespace(namespace_id) for namespace_id in quotas]
        self.requests: list[Request] = []
        self.locks: list[tuple[Namespace, Lock]] = []
        self.copies: list[CopyStarted] = []

    # -- steps ---------------------------------------------------------------------------------------------------

    @rule(which=shares, path=paths, data=st.data())
    def serve(self, which: int, path: str, data: st.DataObject) -> None:
        """A whole request at once."""
        namespace = self.namespaces[which % 3]
        if self.cache.fits(namespace, len(path)):
            namespace.promised += len(path)
            request = Request(namespace, len(path))
            self.requests.append(request)
            request.pages += self.taken(request, len(path), data)
            self.finish(len(self.requests) - 1, path, 0, 0)

    @rule(which=shares, pages=st.integers(0, 12) | st.integers(12, PAGES))
    def promise(self, which: int, pages: int) -> None:
        namespace = self.namespaces[which % 3]
        if self.cache.fits(namespace, pages):
            namespace.promised += pages
            self.requests.append(Request(namespace, pages))

    @rule(which=shares, path=paths, more=st.integers(0, 8), data=st.data())
    def admit(self, which: int, path: str, more: int, data: st.DataObject) -> None:
        """A request with a matched path, what of it is on the host being restored."""
        namespace = self.namespaces[which % 3]
        lock = namespace.tree.lock(namespace.tree.match(chain(path)))
        absent = lock.pages - lock.device_pages
        if not self.cache.fits(namespace, absent + more):
            namespace.tree.unlock(lock)
            return
        namespace.promised += absent + more
        request = Request(namespace, absent + more, lock=lock)
        self.requests.append(request)
        if absent:
            pages = self.taken(request, absent, data)
            assert lock.pages - lock.device_pages == absent
            self.cache.restore(namespace, lock, pages)
            self.collect()

    @precondition(lambda self: any(request.promised for request in self.requests))
    @rule(which=shares, share=shares, data=st.data())
    def take(self, which: int, share: int, data: st.DataObject) -> None:
        able = [request for request in self.requests if request.promised]
        request = able[which % len(able)]
        request.pages += self.taken(request, 1 + share % request.promised, data)

    def taken(self, request: Request, pages: int, data: st.DataObject) -> list[int]:
        namespace, cache = request.namespace, self.cache
        while (taken := cache.take(namespace, pages)) is None:
            self.collect()
            assert self.copies, f"{pages} promised pages cannot be had, and no copy is under way"
            self.end_copy(data)
        self.collect()
        namespace.promised -= pages
        request.promised -= pages
        assert len(set(taken)) == pages
        assert set(cache.pool.states(taken)) <= {PageState.LEASED}
        return taken

    @precondition(lambda self: self.requests)
    @rule(which=shares, share=shares)
    def release(self, which: int, share: int) -> None:
        request = self.requests[which % len(self.requests)]
        cut = share % (len(request.pages) + 1)
        self.cache.release(request.namespace, request.pages[cut:])
        del request.pages[cut:]

    @precondition(lambda self: self.requests)
    @rule(which=shares, path=paths, kind=st.integers(0, 1), priority=st.integers(-2, 2))
    def finish(self, which: int, path: str, kind: int, priority: int) -> None:
        """Its pages are cached, as far as there are digests for them, and what it was promised goes back."""
        request = self.requests.pop(which % len(self.requests))
        namespace, pages = request.namespace, request.pages
        fresh = pages[: len(path)]
        result = namespace.tree.insert(chain(path[: len(fresh)]), fresh, 0, kind, priority)
        self.cache.publish(namespace, len(fresh) - len(result.duplicates))
        self.cache.release(namespace, [*result.duplicates, *pages[len(fresh) :]])
        namespace.promised -= request.promised
        if request.lock is not None:
            namespace.tree.unlock(request.lock)

    @rule(which=shares, path=paths)
    def lock(self, which: int, path: str) -> None:
        """A pin, or the lock of a request that was promised nothing."""
        namespace = self.namespaces[which % 3]
        lock = namespace.tree.lock(namespace.tree.match(chain(path)))
        if self.cache.fits(namespace, 0):
            self.locks.append((namespace, lock))
        else:
            namespace.tree.unlock(lock)

    @precondition(lambda self: self.locks)
    @rule(which=shares)
    def unlock(self, which: int) -> None:
        namespace, lock = self.locks.pop(which % len(self.locks))
        namespace.tree.unlock(lock)

    @rule(which=shares)
    def flush(self, which: int) -> None:
        self.cache.flush(self.namespaces[: 1 + which % 3])

    @rule()
    def write_through(self) -> None:
        self.cache.eviction.write_through()
        self.collect()

    @rule()
    def write_ahead(self) -> None:
        self.cache.eviction.write_ahead()
        self.collect()

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.copies) - 1))
        pages = st.sampled_from(self.copies[index].copy.device)
        self.end(index, data.draw(st.just([]) | st.lists(pages, unique=True)))

    def end(self, index: int, failed: list[int]) -> None:
        started = self.copies.pop(index)
        device = started.copy.device
        ended = self.cache.copies.ended(started.number, failed, 0, 0.0)
        self.cache.pruned(ended.namespace, ended.removed)
        assert ended.namespace.id == started.namespace_id
        if started.copy.kind == RESTORE:
            assert set(ended.readable) | set(ended.lost) | set(ended.removed) <= set(device)
        ended.namespace.tree.arrived(ended.lost)  # as if they had been asked for again, and had come
        self.collect()

    def collect(self) -> None:
        self.copies += self.cache.copies.take_started()

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def promises_can_be_kept(self) -> None:
        for namespace in self.namespaces:
            assert namespace.promised == sum(r.promised for r in self.requests if r.namespace is namespace)
            assert namespace.own == sum(len(r.pages) for r in self.requests if r.namespace is namespace)
            quota = namespace.quota
            assert not quota.hard or namespace.used <= quota.hard
            assert not quota.host_hard or namespace.tree.host_pages <= quota.host_hard
            assert namespace.within_hard(0)
            namespace.tree.check()
        self.cache.settle()
        assert slack(self.cache.pool.free, self.namespaces) >= 0
        assert self.cache.pool.free + sum(namespace.used for namespace in self.namespaces) == PAGES
        assert self.cache.copies.running == len(self.copies)
        self.cache.pool.check()

    def teardown(self) -> None:
        """Everything can be had again once all is over."""
        while self.requests:
            self.finish(0, "", 0, 0)
        while self.locks:
            self.unlock(0)
        while self.copies:
            self.end(0, [])
        self.cache.flush(self.namespaces)
        self.cache.settle()
        nodes = sum(namespace.tree.nodes for namespace in self.cache.namespaces.values())
        assert (self.cache.pool.free, self.cache.locks, nodes) == (PAGES, 0, 0)
        assert self.cache.host is None or self.cache.host.free == self.cache.host.pages


TestPromises = StoreMachine.TestCase
TestPromises.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
