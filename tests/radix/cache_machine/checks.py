"""Checks of a `World` against its model, made between any two steps."""

from __future__ import annotations

from kvferry.daemon.core.namespaces import slack
from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE
from tests.radix.cache_machine.model import Side, chain, content, digest
from tests.radix.cache_machine.requests import Requests
from tests.radix.cache_machine.world import World


def check(world: World, requests: Requests) -> None:
    world.pool.check()
    if world.host is not None:
        world.host.check()
    for side in world.sides:
        side.namespace.tree.check()
        _check_structure(side)
        _check_counts(world, side)
        _check_locks(world, side)
        _check_bytes(world, side)
        _check_matches(world, side)
        _check_index(world, side)
    _check_states(world)
    _check_host_states(world)
    _check_promises(world, requests)


def _check_structure(side: Side) -> None:
    """A page on the device has its parent there."""
    for path in side.device:
        assert len(path) == 1 or path[:-1] in side.device, f"{path} is on the device without its parent"
    assert side.arriving <= side.device.keys()
    assert side.arriving.isdisjoint(side.host), "what is on its way has no second copy"


def _check_counts(world: World, side: Side) -> None:
    tree = side.namespace.tree
    flights = [flight for flight in world.flights if flight.side is side]
    restoring = {path for flight in flights if flight.copy.kind == RESTORE for path in flight.paths}
    copied = {path for flight in flights for path in flight.attached}
    assert (tree.pages, tree.arriving, tree.restoring) == (len(side.device), len(side.arriving), len(restoring))
    assert tree.cached == len(side.device) - len(side.arriving) - len(restoring)
    assert tree.evictable == sum(path not in side.locks for path in side.device)
    assert tree.spilling == len(side.leaving(flights))
    coming = sum(len(flight.paths) - len(flight.detached) for flight in flights if flight.writes_host)
    assert tree.host_pages == len(side.host) + coming
    orphans = sum(side.is_orphan(path) for path in side.host)
    assert tree.orphans == orphans
    assert tree.host_evictable == sum(
        path not in copied and (path in side.device or path not in side.locks) for path in side.host
    )
    assert tree.locks == sum(owner is side for owner, _ in world.lock_paths.values())
    assert tree.copies == len(flights)
    if not side.device and not side.host and not flights:
        assert tree.nodes == 0


def _check_locks(world: World, side: Side) -> None:
    """What is locked stays: in one tier or the other, and under the same page."""
    tree = side.namespace.tree
    for lock, (owner, path) in world.lock_paths.items():
        if owner is side:
            pages = side.pages(path)
            assert (lock.pages, lock.device_pages) == (len(path), len(pages))
            assert tree.path_pages(lock) == pages
            assert tree.match(chain(path)).pages == len(path)


def _check_bytes(world: World, side: Side) -> None:
    """Every readable page holds the bytes of its path."""
    coming = {path for f in world.flights if f.side is side and f.copy.kind == RESTORE for path in f.paths}
    readable = [path for path in side.device if path not in side.arriving and path not in coming]
    wanted = b"".join(content(side.number, path) for path in readable)
    assert world.device_memory.read_all([side.device[path].page for path in readable]) == wanted
    wanted = b"".join(content(side.number, path) for path in side.host)
    assert world.host_memory.read_all([at.page for at in side.host.values()]) == wanted


def _check_matches(world: World, side: Side) -> None:
    """What is held is matched, as far as it is held; and in its own namespace only."""
    for path in side.ends():
        for other in world.sides:
            match = other.namespace.tree.match(chain(path))
            assert (match.pages, match.device_pages) == (other.matched(path), other.matched_device(path))


def _check_index(world: World, side: Side) -> None:
    """Who reads the index finds what is readable, of either tier, and not a page more; in its own namespace only. What
    has left the tree is readable until it is freed: when the step that took it out settles, or a copy of it ends.
    """
    flights = [flight for flight in world.flights if flight.side is side]
    coming = {path for flight in flights if flight.copy.kind == RESTORE for path in flight.paths}
    readable = {path for path in side.device if path not in side.arriving and path not in coming} | side.host.keys()
    readable.update(path for owner, path in world.lingering if owner is side)
    readable.update(path for flight in flights for path in flight.detached)
    for path in side.outputs:  # whatever was ever held
        held = world.index.held_pages(digest(path), side.namespace.id)
        assert held == (path in readable), f"{path} is {'' if held else 'not '}in the index"
    for path in side.ends():
        each = [path[:pages] in readable for pages in range(1, len(path) + 1)]
        held = world.index.held_pages(chain(path), side.namespace.id)
        assert held == (each.index(False) if False in each else len(each)), f"{path}: {held} of {each}"


def _check_states(world: World) -> None:
    """Every device page is in exactly one state, and it is the one that it should be in."""
    pool = world.pool
    expected = dict.fromkeys(world.released, -1)  # whatever it was when it was given back
    for side in world.sides:
        for path, at in side.device.items():
            assert at.page not in expected, f"page {at.page} is held twice"
            expected[at.page] = PageState.ARRIVING if path in side.arriving else PageState.CACHED
    for flight in world.flights:
        state = PageState.RESTORING if flight.copy.kind == RESTORE else PageState.SPILLING
        for path, at in zip(flight.paths, flight.device, strict=True):
            assert (at.page in expected) == (path not in flight.detached)
            expected[at.page] = state
    states = pool.states(list(expected))
    for (page, wanted), state in zip(expected.items(), states, strict=True):
        assert state == wanted or (wanted == -1 and state != PageState.FREE), f"page {page} is {state}, not {wanted}"
    counts = pool.counts()
    assert counts.total == pool.pages
    own = sum(side.namespace.own for side in world.sides)
    assert counts.free == pool.pages - len(expected) - own


def _check_host_states(world: World) -> None:
    host = world.host
    if host is None:
        assert not any(side.host for side in world.sides) and not world.flights
        return
    expected: dict[int, PageState] = {}
    for side in world.sides:
        for at in side.host.values():
            assert at.page not in expected, f"host page {at.page} is held twice"
            expected[at.page] = PageState.CACHED
    for flight in world.flights:
        for at in flight.host:
            assert (at.page in expected) == (not flight.writes_host)
            expected[at.page] = PageState.SPILLING if flight.writes_host else PageState.RESTORING
    assert host.states(list(expected)) == bytes(expected.values())
    assert host.free == host.pages - len(expected)


def _check_promises(world: World, requests: Requests) -> None:
    for side in world.sides:
        namespace, quota = side.namespace, side.namespace.quota
        running = [request for request in requests.all if request.side is side]
        own = [page for request in running for page in request.own]
        assert len(set(own)) == len(own) == namespace.own
        assert set(world.pool.states(own)) <= {PageState.LEASED}
        assert namespace.promised == sum(request.counted for request in running)
        assert namespace.pinned_pages == sum(pin.pages for pin in world.pins.all() if pin.namespace is namespace)
        assert namespace.used == len(side.device) + len(own)
        if quota.hard:
            assert namespace.used <= quota.hard
            assert not world.sound or namespace.used + namespace.promised - namespace.tree.evictable <= quota.hard
        if quota.host_hard:
            assert namespace.tree.host_pages <= quota.host_hard
    # Pages that left the tree under a copy come back when it ends.
    coming = sum(len(flight.detached) for flight in world.flights)
    left = slack(world.pool.free + len(world.released), [side.namespace for side in world.sides])
    assert not world.sound or left + coming >= 0, f"{-left} more pages were promised than can be had"
