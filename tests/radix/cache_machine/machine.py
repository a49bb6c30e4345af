"""Rules that drive a `World` and its requests, and what holds after each of them."""

from __future__ import annotations

import sys
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import currently_in_test_context, note
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.daemon.core.cache import CacheLimits
from kvferry.daemon.core.namespaces import Quota
from kvferry.radix.pool import PageState, PoolExhausted
from kvferry.radix.tree import policy_names
from tests.radix.cache_machine import admin
from tests.radix.cache_machine.checks import check
from tests.radix.cache_machine.model import Path, Side, chain, prefixes
from tests.radix.cache_machine.requests import Request, Requests
from tests.radix.cache_machine.world import Setup, World

NAMESPACES = (b"\x01" * 32, b"\x02" * 32, b"\x03" * 32)
MAX_REQUESTS = 6

indexes = st.integers(0, 15)
masks = st.integers(0, (1 << 16) - 1)
failing = st.one_of(st.just(0), masks)
suffixes = st.lists(st.integers(0, 2), max_size=6).map(tuple)
cuts = st.integers(0, 3)
kinds = st.integers(0, 15)


def parts(kind: int) -> tuple[bool, bool, int]:
    """Whether a request has a partial page, computes its pages itself, and its priority."""
    return bool(kind & 1), bool(kind & 2), (kind >> 2) - 1


def setup_of(random: Random) -> Setup:
    """Small pools; quotas, where there are any, of which the soft ones together are no more than there is."""
    pages = random.choice([random.randint(8, 16), random.randint(8, 40)])
    host_pages = random.choice([0, random.randint(1, 12), *(random.randint(8, 60) for _ in range(5))])
    quotas = {}
    for name in NAMESPACES:
        soft, host_soft = random.randint(0, pages // 3), random.randint(0, host_pages // 3)
        hard, host_hard = random.randint(0, pages), random.randint(0, host_pages)
        quotas[name] = Quota(
            soft=soft if random.random() < 0.5 else 0,
            hard=max(soft, hard) if random.random() < 0.5 else 0,
            host_soft=host_soft if random.random() < 0.5 else 0,
            host_hard=max(host_soft, host_hard) if random.random() < 0.5 else 0,
        )
    limits = CacheLimits(
        policy=random.choice(sorted(policy_names())),
        evict_output_first=random.random() < 0.5,
        write_through_hits=random.choice([0, 0, 1, 2, 3]),
        write_ahead=random.choice([0.0, 0.3, 1.0]),
        quotas=quotas if random.random() < 0.5 else None,
    )
    overcommit = 2.0 if random.random() < 0.15 else 1.0
    return Setup(pages, host_pages, limits, NAMESPACES[: random.randint(1, 3)], overcommit)


class CacheMachine(RuleBasedStateMachine):
    steps = 0  # of all machines

    @initialize(random=st.randoms(use_true_random=False))
    def begin(self, random: Random) -> None:
        setup = setup_of(random)
        if currently_in_test_context():
            note(repr(setup))
        self.world = World(setup)
        self.requests = Requests(self.world)
        self.history: list[tuple[int, Path]] = [(0, ())]  # whose prompts later ones may continue

    def side(self, index: int) -> Side:
        return self.world.sides[index % len(self.world.sides)]

    def prompt(self, side: int, base: int, cut: int, suffix: Path = ()) -> tuple[Side, Path]:
        """Continues an earlier one, or a part of it; mostly in its own namespace."""
        number, past = self.history[-1 - base % len(self.history)]
        path = (past[: len(past) - cut % (len(past) + 1)] + suffix)[:16]
        return self.world.sides[number] if side >= 4 else self.side(side), path

    def remember(self, side: Side, path: Path) -> None:
        if (side.number, path) not in self.history:
            self.history.append((side.number, path))
            del self.history[1:-15]

    # -- requests ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests.all) < MAX_REQUESTS)
    @rule(side=indexes, base=indexes, cut=cuts, suffix=suffixes, growth=st.integers(0, 6), kind=kinds)
    def open(self, side: int, base: int, cut: int, suffix: Path, growth: int, kind: int) -> None:
        chosen, prompt = self.prompt(side, base, cut, suffix)
        self.remember(chosen, prompt)
        self.requests.open(Request(chosen, prompt, growth, *parts(kind)))

    @rule(side=indexes, base=indexes, cut=cuts, suffix=suffixes, output=suffixes, kind=kinds, failing=failing)
    def serve(self, side: int, base: int, cut: int, suffix: Path, output: Path, kind: int, failing: int) -> None:
        """A request from its beginning to its end, if it need not wait for another one."""
        chosen, prompt = self.prompt(side, base, cut, suffix)
        request = Request(chosen, prompt, len(output), *parts(kind))
        self.remember(chosen, self.requests.serve(request, output, failing))

    @precondition(lambda self: self.requests.running and len(self.requests.all) < MAX_REQUESTS)
    @rule(index=indexes, pages=st.integers(1, 16), kind=kinds)
    def follow(self, index: int, pages: int, kind: int) -> None:
        """A second request for what another one may still wait for."""
        leader = self.requests.running[index % len(self.requests.running)]
        self.requests.open(Request(leader.side, leader.prompt[:pages], 1, *parts(kind)))

    @precondition(lambda self: self.requests.waiting)
    @rule(index=indexes)
    def advance(self, index: int) -> None:
        waiting = self.requests.waiting
        self.requests.advance(waiting[index % len(waiting)])

    @precondition(lambda self: self.requests.filling)
    @rule(index=indexes, which=st.one_of(st.just(-1), masks))
    def arrive(self, index: int, which: int) -> None:
        filling = self.requests.filling
        self.requests.arrive(filling[index % len(filling)], which)

    @precondition(lambda self: self.requests.ready)
    @rule(index=indexes, pages=st.integers(1, 4))
    def publish(self, index: int, pages: int) -> None:
        ready = self.requests.ready
        self.requests.publish(ready[index % len(ready)], pages)

    @precondition(lambda self: self.requests.growing)
    @rule(index=indexes, pages=st.integers(1, 4), patient=st.booleans())
    def grow(self, index: int, pages: int, patient: bool) -> None:
        growing = self.requests.growing
        request = growing[index % len(growing)]
        self.requests.grow(request, min(pages, request.growth), patient=patient)

    @precondition(lambda self: len(self.requests.growing) > 1)
    @rule(flip=st.booleans())
    def all_grow(self, flip: bool) -> None:
        """Every promise is called in at once."""
        for request in self.requests.growing[:: -1 if flip else 1]:
            self.requests.grow(request, request.growth, patient=True)

    @precondition(lambda self: self.requests.ready)
    @rule(index=indexes, output=suffixes)
    def finish(self, index: int, output: Path) -> None:
        ready = self.requests.ready
        request = ready[index % len(ready)]
        self.remember(request.side, self.requests.finish(request, output))

    @precondition(lambda self: self.requests.filling and len(self.requests.all) < MAX_REQUESTS)
    @rule(index=indexes, suffix=suffixes, pages=st.integers(1, 40), flip=st.booleans())
    def strand(self, index: int, suffix: Path, pages: int, flip: bool) -> None:
        """Another one's pages come before those that they hang on, and it ends: nothing holds them, so that they are
        spilled. Then what they hang on may go too.
        """
        leader = self.requests.filling[index % len(self.requests.filling)]
        request = Request(leader.side, leader.prompt + suffix, 0, *parts(0))
        self.requests.open(request)
        if request in self.requests.all:
            if request.admitted:
                self.requests.arrive(request, -1 << len(self.requests.missing(leader)))
            self.requests.abort(request)
            self.world.spill(pages)
            if flip:
                self.requests.abort(leader)

    @precondition(lambda self: any(flight.holds for flight in self.world.flights))
    @rule(index=indexes)
    def abort_restoring(self, index: int) -> None:
        """Leaves a restore to itself."""
        restores = [flight for flight in self.world.flights if flight.holds]
        flight = restores[index % len(restores)]
        for request in self.requests.running:
            assert request.lock is not None
            if request.side is flight.side and self.world.path_of(request.lock)[: len(flight.holds)] == flight.holds:
                self.requests.abort(request)

    @precondition(lambda self: len(self.requests.all) > 2)
    @rule(index=indexes)
    def abort(self, index: int) -> None:
        self.requests.abort(self.requests.all[index % len(self.requests.all)])

    # -- copies --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.flights)
    @rule(index=indexes, failing=failing)
    def end_copy(self, index: int, failing: int) -> None:
        flights = self.world.flights
        self.world.end_copy(flights[index % len(flights)], failing)

    @precondition(lambda self: len(self.world.flights) > 1)
    @rule()
    def end_copies(self) -> None:
        self.world.end_copies()

    @rule(pages=st.integers(1, 16))
    def spill(self, pages: int) -> None:
        self.world.spill(pages)

    @precondition(lambda self: self.world.setup.limits.write_through_hits and self.world.host is not None)
    @rule()
    def write_through(self) -> None:
        self.world.write_through()

    @precondition(lambda self: self.world.cache.eviction.ahead and self.world.host is not None)
    @rule()
    def write_ahead(self) -> None:
        self.world.write_ahead()

    # -- administration ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.pins) < 4 and any(side.device or side.host for side in self.world.sides))
    @rule(side=indexes, base=indexes, cut=cuts, seconds=st.integers(1, 9))
    def pin(self, side: int, base: int, cut: int, seconds: int) -> None:
        self.world.pin(*self.prompt(side, base, cut), self.world.now + seconds)

    @precondition(lambda self: len(self.world.pins))
    @rule(index=indexes)
    def unpin(self, index: int) -> None:
        pins = self.world.pins.all()
        assert self.world.pins.unpin(pins[index % len(pins)].number) == 1

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        world = self.world
        world.now += seconds
        world.cache.clock.now = world.now
        world.pins.expire(world.now)
        assert all(pin.until > world.now for pin in world.pins.all())
        world.settle()

    @precondition(lambda self: self.world.pool.free < self.world.pool.pages // 2)
    @rule(side=indexes)
    def flush(self, side: int) -> None:
        admin.flush(self.world, [self.side(side)])

    @rule(side=indexes, pages=st.integers(1, 40), patient=st.booleans())
    def press(self, side: int, pages: int, patient: bool) -> None:
        """Takes as many pages as can be had, for a moment: the others go, or to the host."""
        chosen = self.side(side)
        pages = next((n for n in range(pages, 0, -1) if self.world.cache.fits(chosen.namespace, n)), 0)
        request = Request(chosen, (), pages, *parts(0))
        self.requests.open(request)
        if request in self.requests.all:
            if request.admitted:
                self.requests.grow(request, pages, patient=patient)
            self.requests.abort(request)

    @precondition(lambda self: sum(len(side.host) for side in self.world.sides) > 2)
    @rule(keep=st.one_of(st.just(-1), st.integers(0, (1 << 60) - 1)), order=masks, batches=st.integers(1, 3))
    def restart(self, keep: int, order: int, batches: int) -> None:
        self.requests.all.clear()
        admin.restart(self.world, keep, order, batches)

    @rule(side=indexes, base=indexes, cut=cuts)
    def look(self, side: int, base: int, cut: int) -> None:
        """A short lock; and what is refused changes nothing."""
        world = self.world
        chosen, path = self.prompt(side, base, cut)
        lock = world.lock(chosen, path)
        tree = chosen.namespace.tree
        with pytest.raises(PoolExhausted):
            world.pool.allocate(world.pool.free + 1)
        free = [page for page in range(world.pool.pages) if world.pool.state(page) is PageState.FREE]
        if free:
            with pytest.raises(AssertionError):
                world.pool.free_pages([free[side % len(free)]])
        for request in self.requests.running:
            assert request.lock is not None
            held = prefixes(world.path_of(request.lock))
            if request.side is chosen and any(p in chosen.arriving and chosen.locks[p] == 1 for p in held):
                with pytest.raises(AssertionError):
                    tree.unlock(request.lock)
            if request.side is chosen and request.own:
                stranger = (*path, 7, 7)
                with pytest.raises(ValueError, match="start"):
                    tree.insert(chain(stranger), request.own[:1], len(stranger) - 1)
        world.give_up(chosen, lock)
        with pytest.raises(AssertionError):
            tree.unlock(lock)

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):  # before `begin` there is nothing
            CacheMachine.steps += 1
            check(self.world, self.requests)

    def teardown(self) -> None:
        """Nothing leaks."""
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:
            return
        world = self.world
        for request in list(self.requests.all):
            self.requests.abort(request)
        world.pins.unpin(0)
        world.end_copies()
        admin.flush(world, world.sides)
        check(world, self.requests)
        assert world.pool.free == world.pool.pages
        assert world.host is None or world.host.free == world.host.pages
        for side in world.sides:
            tree, namespace = side.namespace.tree, side.namespace
            assert (tree.pages, tree.host_pages, tree.nodes, tree.locks, tree.copies) == (0, 0, 0, 0, 0)
            assert (namespace.own, namespace.promised, namespace.pinned_pages) == (0, 0, 0)
