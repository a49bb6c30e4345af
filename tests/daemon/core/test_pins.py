"""Pins: what they hold, for how long, and when they are refused."""

from __future__ import annotations

import pytest

from kvferry.daemon.core import pins as pins_module
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import Pins
from kvferry.daemon.core.reservations import Holds
from kvferry.daemon.core.single_flight import Arrivals
from kvferry.proto import common_pb2 as common
from kvferry.radix.pool import PageState
from tests.radix.letters import chain

PAGES = 16
DIGEST = 32


class World:
    def __init__(self, host_pages: int = 0) -> None:
        self.cache = Cache(PAGES, 4, host_pages=host_pages)
        self.namespace = self.cache.namespace(bytes(32))
        self.pins = Pins(self.cache, Holds(self.cache, Arrivals()))

    def take(self, pages: int, namespace: Namespace | None = None) -> list[int]:
        """As an admitted request does, waiting for copies."""
        namespace = namespace or self.namespace
        assert self.cache.fits(namespace, pages)
        namespace.promised += pages
        while (taken := self.cache.take(namespace, pages)) is None:
            assert self.cache.copies.running
            self.end_copies()
        namespace.promised -= pages
        return taken

    def end_copies(self) -> None:
        for started in self.cache.copies.take_started():
            ended = self.cache.copies.ended(started.number, [], 0, 0.0)
            self.cache.pruned(ended.namespace, ended.removed)

    def put(self, prompt: str) -> None:
        """Finishes a request: its pages are cached."""
        digests, held = chain(prompt), self.held(prompt)
        pages = self.take(len(prompt))
        result = self.namespace.tree.insert(digests, pages)
        self.cache.publish(self.namespace, len(prompt) - len(result.duplicates))
        self.cache.release(self.namespace, result.duplicates)
        assert len(result.duplicates) == held

    def held(self, prompt: str) -> int:
        return int(self.namespace.tree.match(chain(prompt)).pages)


def test_a_pin_holds_the_longest_held_prefix() -> None:
    world = World()
    world.put("abcd")
    pin = world.pins.pin(world.namespace, chain("abcdefg"), until=10.0)
    assert (pin.number, pin.pages, world.namespace.pinned_pages) == (1, 4, 4)
    assert not world.cache.fits(world.namespace, PAGES - 3)
    world.cache.release(world.namespace, world.take(PAGES - 4))
    assert world.held("abcd") == 4
    part = world.pins.pin(world.namespace, chain("abxyz"), until=10.0)
    assert (part.pages, len(world.pins)) == (2, 2)
    world.namespace.tree.check()


def test_a_flush_leaves_what_is_pinned() -> None:
    world = World()
    world.put("abcd")
    world.put("xy")
    world.pins.pin(world.namespace, chain("ab"), until=10.0)
    count = world.cache.flush([world.namespace])
    assert (count.device, count.host, count.skipped) == (4, 0, 2)
    assert (world.held("abcd"), world.held("xy")) == (2, 0)


def test_a_pin_expires() -> None:
    world = World()
    world.put("abcd")
    world.pins.pin(world.namespace, chain("abcd"), until=10.0)
    later = world.pins.pin(world.namespace, chain("ab"), until=20.0)
    world.pins.expire(9.999)
    assert len(world.pins) == 2
    world.pins.expire(10.0)
    assert world.pins.all() == [later]
    assert (world.namespace.pinned_pages, world.cache.evictable) == (2, 2)
    world.pins.expire(1e9)
    assert (world.namespace.pinned_pages, world.cache.evictable, world.cache.locks) == (0, 4, 0)


def test_unpin_one_or_all() -> None:
    world = World()
    world.put("abcd")
    numbers = [world.pins.pin(world.namespace, chain("abcd"[:n]), until=10.0).number for n in (1, 2, 4)]
    assert numbers == [1, 2, 3]
    assert world.pins.unpin(2) == 1
    assert world.pins.unpin(2) == 0, "it is over"
    assert world.pins.unpin(99) == 0
    assert world.pins.unpin(0) == 2
    assert world.pins.unpin(0) == 0
    assert (world.cache.locks, world.namespace.pinned_pages) == (0, 0)
    assert world.pins.pin(world.namespace, chain("a"), until=10.0).number == 4, "no number comes twice"


def test_nothing_held_is_not_found() -> None:
    world = World()
    world.put("abcd")
    with pytest.raises(RequestError) as refused:
        world.pins.pin(world.namespace, chain("xyz"), until=10.0)
    assert refused.value.code == common.ERROR_NOT_FOUND
    assert (world.cache.locks, len(world.pins)) == (0, 0)


def test_pages_on_their_way_are_not_pinned() -> None:
    world = World()
    world.put("ab")
    tree, pages = world.namespace.tree, world.take(3)
    world.cache.pool.move(pages, PageState.LEASED, PageState.ARRIVING)
    filler = tree.lock(tree.insert(chain("abcde"), pages, start=2).match)
    world.cache.publish(world.namespace, 3)
    tree.arrived(pages[:1])
    pin = world.pins.pin(world.namespace, chain("abcde"), until=10.0)
    assert pin.pages == 3
    with pytest.raises(RequestError):
        # Only the arriving part is asked for, as far as it differs.
        world.pins.pin(world.namespace, chain("x"), until=10.0)
    world.cache.pruned(world.namespace, tree.prune(filler, 3))
    assert world.held("abcde") == 3
    world.pins.unpin(0)
    tree.check()


def test_pages_of_the_host_tier_are_held_there() -> None:
    world = World(host_pages=8)
    world.put("abcd")
    world.cache.release(world.namespace, world.take(PAGES))
    world.end_copies()
    tree = world.namespace.tree
    assert (tree.pages, tree.host_pages, tree.host_evictable) == (0, 4, 4)
    pin = world.pins.pin(world.namespace, chain("abcd"), until=10.0)
    assert (pin.pages, tree.host_evictable, tree.evict_host(8)) == (4, 0, 0)
    world.pins.unpin(pin.number)
    assert tree.evict_host(8) == 4
    tree.check()


def test_a_pin_may_not_take_what_was_promised() -> None:
    world = World()
    world.put("abcdefgh")
    assert world.cache.fits(world.namespace, PAGES - 2)
    world.namespace.promised += PAGES - 2
    assert world.pins.pin(world.namespace, chain("ab"), until=10.0).pages == 2
    with pytest.raises(RequestError, match="3 pages cannot be pinned") as refused:
        world.pins.pin(world.namespace, chain("abc"), until=10.0)
    assert refused.value.code == common.ERROR_RESOURCE_EXHAUSTED
    assert (world.cache.locks, world.namespace.pinned_pages, len(world.pins)) == (1, 2, 1)
    world.namespace.promised -= 1
    assert world.pins.pin(world.namespace, chain("abc"), until=10.0).pages == 3


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "MAX_PINS", 3)
    world = World()
    world.put("ab")
    for _ in range(3):
        world.pins.pin(world.namespace, chain("ab"), until=10.0)
    with pytest.raises(RequestError, match="3 pins are held; the bound is 3") as refused:
        world.pins.pin(world.namespace, chain("ab"), until=10.0)
    assert refused.value.code == common.ERROR_RESOURCE_EXHAUSTED
    assert world.pins.unpin(1) == 1
    assert world.pins.pin(world.namespace, chain("ab"), until=10.0).number == 4
