"""Pages that are given on are cleared first, and namespaces have a bound."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache import MAX_NAMESPACES, Cache, CacheLimits
from kvferry.daemon.core.effects import Outbox, ZeroPages
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name

NAMESPACE = bytes(32)


def taken(cache: Cache, pages: int) -> list[int]:
    """A request has had them and gives them back."""
    namespace = cache.namespace(NAMESPACE)
    given = cache.take(namespace, pages)
    assert given is not None
    cache.release(namespace, given)
    cache.settle()
    return given


def test_only_pages_that_were_used_before_are_cleared() -> None:
    cache = Cache(4, 4, limits=CacheLimits(zero_freed=True))
    first = taken(cache, 2)
    assert cache.take_unclean() == ()
    again = taken(cache, 4)
    assert {*again} > {*first} and {*cache.take_unclean()} == {*first}
    assert cache.zeroed == 2


def test_memory_that_was_somebody_elses_is_cleared_at_its_first_use() -> None:
    cache = Cache(4, 4, limits=CacheLimits(zero_freed=True, used_before=True))
    assert {*taken(cache, 2)} == {*cache.take_unclean()}


def test_pages_are_cleared_before_anybody_is_told_of_them() -> None:
    cache = Cache(4, 4, limits=CacheLimits(zero_freed=True, used_before=True))
    outbox = Outbox(cache)
    taken(cache, 1)
    outbox.tell_ended(1, Name(bytes(16), 1))
    first, *_ = outbox.take()
    assert isinstance(first, ZeroPages)


def test_so_many_namespaces() -> None:
    cache = Cache(4, 4)
    for number in range(MAX_NAMESPACES):
        cache.namespace(number.to_bytes(32, "big"))
    with pytest.raises(RequestError, match=f"one more than {MAX_NAMESPACES}"):
        cache.namespace(b"m" * 32)
    assert cache.namespace(bytes(32)) is cache.namespaces[bytes(32)], "those that are there stay"
