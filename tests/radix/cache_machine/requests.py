"""Requests against a `World`: the protocol by which a core comes to pages and gives them back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvferry.radix.pool import PageState
from kvferry.radix.tree import RESTORE, Lock
from tests.radix.cache_machine.model import Path, Side, content, prefixes
from tests.radix.cache_machine.world import OUTPUT, PROMPT, World

MAX_ROUNDS = 100  # of copies ended, until pages that were promised must be there


@dataclass(eq=False)
class Request:
    side: Side
    prompt: Path  # full pages
    growth: int  # pages promised behind the prompt, not given yet
    tail: bool  # one more page, that is not full
    computes: bool  # the prompt's missing pages itself; else they arrive, and others may follow
    priority: int
    lock: Lock | None = None
    admitted: bool = False
    counted: int = 0  # its part of the namespace's promise
    own: list[int] = field(default_factory=list)  # pages in order, behind those of the locked path
    in_tree: int = 0  # leading pages of the prompt that the lock covers

    @property
    def wanted(self) -> int:
        return len(self.prompt) + self.tail


class Requests:
    """Those that wait or run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all: list[Request] = []

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.all if not request.admitted]

    @property
    def running(self) -> list[Request]:
        return [request for request in self.all if request.admitted]

    @property
    def filling(self) -> list[Request]:
        return [request for request in self.running if self.missing(request)]

    @property
    def growing(self) -> list[Request]:
        return [request for request in self.running if request.growth]

    @property
    def ready(self) -> list[Request]:
        return [request for request in self.running if self.is_ready(request)]

    # -- admission -----------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Unless it could never be had."""
        if request.wanted + request.growth <= self.world.cache.most(request.side.namespace):
            self.all.append(request)
            self.advance(request)

    def advance(self, request: Request) -> None:
        if request.lock is None:
            self._reserve(request)
        if request.lock is not None and not request.admitted:
            self._claim(request)

    def _reserve(self, request: Request) -> None:
        world, side = self.world, request.side
        match = side.matched_device(request.prompt)
        later = self._later(request.growth)
        if not world.cache.fits(side.namespace, request.wanted - match + later):
            return
        lock = world.lock(side, request.prompt, request.priority)
        if not world.cache.fits(side.namespace, request.wanted - lock.device_pages + later):
            world.give_up(side, lock)
            return
        request.lock = lock
        self._promise(request, request.wanted - lock.device_pages, request.growth)

    def _claim(self, request: Request) -> None:
        world, side, lock = self.world, request.side, request.lock
        assert lock is not None
        held = lock.device_pages
        # More may have come since it was reserved; nothing of it can have gone.
        request.lock = world.lock(side, request.prompt, request.priority)
        world.give_up(side, lock)
        lock = request.lock
        assert lock.device_pages >= held
        now = request.wanted - lock.device_pages
        self._promise(request, now, request.growth)
        taken = world.take(side, now)
        if taken is None:
            return
        self._promise(request, 0, request.growth)
        request.admitted = True
        restored = lock.pages - lock.device_pages
        if restored:
            world.restore(side, lock, taken[:restored])
        assert lock.device_pages == lock.pages
        request.own, request.in_tree = taken[restored:], lock.pages
        full = len(request.prompt) - request.in_tree
        if request.computes:
            for path, page in zip(prefixes(request.prompt)[request.in_tree :], request.own, strict=False):
                world.device_memory.write(page, content(side.number, path))
        elif full:
            world.pool.move(request.own[:full], PageState.LEASED, PageState.ARRIVING)
            self._publish(request, full)

    def _publish(self, request: Request, pages: int) -> None:
        """Its next pages enter the tree, and the lock covers them too."""
        path = request.prompt[: request.in_tree + pages]
        own, request.own = request.own[:pages], request.own[pages:]
        self.world.insert(request.side, path, own, request.in_tree, PROMPT, request.priority, request.lock)
        request.in_tree = len(path)

    def publish(self, request: Request, pages: int) -> None:
        """Of what it has computed."""
        self._publish(request, min(pages, len(request.prompt) - request.in_tree))

    # -- running -------------------------------------------------------------------------------------------------

    def missing(self, request: Request) -> list[Path]:
        """Pages on its path that anybody who waits for them may bring."""
        assert request.lock is not None
        return [path for path in prefixes(self.world.path_of(request.lock)) if path in request.side.arriving]

    def is_ready(self, request: Request) -> bool:
        assert request.lock is not None
        states = self.world.pool.states(request.side.pages(self.world.path_of(request.lock)))
        return set(states) <= {PageState.CACHED, PageState.SPILLING}

    def arrive(self, request: Request, which: int) -> None:
        side = request.side
        coming = [path for i, path in enumerate(self.missing(request)) if which >> i & 1]
        for path in coming:
            self.world.device_memory.write(side.device[path].page, content(side.number, path))
        side.namespace.tree.arrived([side.device[path].page for path in coming])
        side.arriving.difference_update(coming)

    def grow(self, request: Request, pages: int, *, patient: bool) -> bool:
        """Inside its promise. If it is patient, copies end until it has its pages."""
        world = self.world
        self._promise(request, pages, request.growth - pages)
        taken = world.take(request.side, pages)
        for _ in range(MAX_ROUNDS):
            if taken is not None or not patient or not world.flights:
                break
            # Some of them in vain: what cannot be spilled is dropped.
            world.end_copy(world.flights[0], 0x5555 if len(world.flights) % 3 == 0 else 0)
            taken = world.take(request.side, pages)
        if taken is None:
            assert not patient or not world.sound, "growth inside the promise has failed"
            self._promise(request, 0, request.growth)
            return False
        request.growth -= pages
        self._promise(request, 0, request.growth)
        for page in taken:
            world.device_memory.write(page, b"\x11" * 32)
        request.own += taken
        return True

    # -- ends ----------------------------------------------------------------------------------------------------

    def finish(self, request: Request, output: Path) -> Path:
        """`output`: symbols of the generated pages, as many as it has full pages for. Returns the whole path."""
        world, side = self.world, request.side
        if request.in_tree < len(request.prompt):
            self._publish(request, len(request.prompt) - request.in_tree)
        output = output[: len(request.own)]
        path = request.prompt + output
        own, rest = request.own[: len(output)], request.own[len(output) :]
        request.own = []
        for prefix, page in zip(prefixes(path)[len(request.prompt) :], own, strict=True):
            world.device_memory.write(page, content(side.number, prefix))
        if output:
            world.insert(side, path, own, len(request.prompt), OUTPUT, request.priority, None)
        world.release(side, rest)
        self._leave(request)
        return path

    def serve(self, request: Request, output: Path, failing: int) -> Path:
        """All of its life; it is aborted where it would wait for another one. Returns what is its path then. `failing`:
        the pages that fail of each copy that it waits for.
        """
        self.open(request)
        if request not in self.all:
            return request.prompt
        while not request.admitted and request.lock is not None and self.world.flights:
            self.world.end_copy(self.world.flights[0], failing)
            self.advance(request)
        if request.admitted:
            restores = [flight for flight in self.world.flights if flight.copy.kind == RESTORE]
            for flight in restores:
                self.world.end_copy(flight, failing)
            self.arrive(request, -1)
            assert self.is_ready(request)
            if request.growth == 0 or self.grow(request, request.growth, patient=True):
                return self.finish(request, output)
        self.abort(request)
        return request.prompt

    def abort(self, request: Request) -> None:
        self.world.release(request.side, request.own)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.all.remove(request)
        self._promise(request, 0, 0)
        if request.lock is not None:
            self.world.give_up(request.side, request.lock)
            request.lock = None

    # -- promises ------------------------------------------------------------------------------------------------

    def _later(self, growth: int) -> int:
        return math.ceil(growth / self.world.setup.overcommit)

    def _promise(self, request: Request, now: int, growth: int) -> None:
        counted = now + self._later(growth)
        request.side.namespace.promised += counted - request.counted
        request.counted = counted
