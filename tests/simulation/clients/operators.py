"""An operator who pins, unpins, flushes and drains, by the daemon's own admin service, and what he expects of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import Pin
from kvferry.daemon.services.admin import AdminService
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import common_pb2 as common
from kvferry.radix.digests import DIGEST_BYTES, split_digests
from kvferry.radix.pool import PageState
from tests.simulation.clients.published import READABLE
from tests.simulation.clock import expect
from tests.simulation.prompts import PAGE

if TYPE_CHECKING:
    from tests.simulation.daemons import SimDecode, SimPrefill
    from tests.simulation.prompts import Prompt
    from tests.simulation.simulator import Simulation

MOST_PINNED = 10  # pages of one pin
SECONDS = 3  # that a pin may be for
_LATEST = 30  # prompts, of which one is pinned
_LATE = 0.2  # seconds behind the end of a pin by which it is surely gone


@dataclass(slots=True)
class Pinned:
    """One pin, as the operator was told."""

    side: SimDecode | SimPrefill
    tenant: int
    prompt: Prompt
    number: int
    pages: int
    device: list[int]  # of them, the pages that were on the device
    generations: list[int]
    losses: int  # restores that had failed by then
    epoch: int  # of the pool

    @property
    def pool_left(self) -> bool:
        """Its engine has: every pin ends with the memory."""
        tiers = self.side.tiers
        return not tiers.has_pool.is_set() or tiers.epoch != self.epoch


class Forgotten:
    """What a side may hold since it was flushed: what it kept then, and what came by requests since."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._by: dict[int, dict[bytes, Name | None]] = {}  # tenants, pages, and whose they are; None: anybody's

    def flushed(self, tenant: int, kept: Iterable[bytes]) -> None:
        self._by[tenant] = dict.fromkeys((digest for path in kept for digest in split_digests(path)), None)

    def may_keep(self, tenant: int, name: Name, digests: bytes) -> None:
        by = self._by.get(tenant)
        if by is not None:
            for digest in split_digests(digests):
                by[digest] = name if by.get(digest, name) == name else None

    def came_back(self, tenant: int, digests: Iterable[bytes]) -> None:
        """These came from another daemon, which was not flushed."""
        if tenant in self._by:
            self._by[tenant].update(dict.fromkeys(digests))

    def check(self, tenant: int, name: Name, digests: bytes) -> None:
        """The request is told that these are held."""
        by = self._by.get(tenant)
        if by is not None:
            wrong = [index for index, digest in enumerate(split_digests(digests)) if by.get(digest, name) == name]
            expect(
                not wrong, f"{self._who}: pages {wrong} of {name} matched; they were flushed, and nobody brought them"
            )


class Operator:
    """He talks to a daemon as others do: one that stands still answers when it goes on."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock, self.counts = simulation, simulation.clock, simulation.counts
        self.pinned: list[Pinned] = []

    def _ask(self, call: Callable[[SimDecode | SimPrefill], None]) -> None:
        side = self.clock.random.choice(self.simulation.sides)
        side.process.deliver(self.clock.now, call, side)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self) -> None:
        self._ask(self._pin)

    def _pin(self, side: SimDecode | SimPrefill) -> None:
        clock, random = self.clock, self.clock.random
        tenant, pages = random.randrange(2), random.randint(1, MOST_PINNED)
        prompts = self.simulation.prompts[tenant][-_LATEST:]
        if not prompts:
            return
        prompt, seconds = random.choice(prompts), random.randint(1, SECONDS)
        digests = prompt.digests[: pages * DIGEST_BYTES]
        if not digests:
            return
        request = admin.PinRequest(namespace_id=side.tenants[tenant].id, digests=digests, seconds=seconds)
        try:
            reply = AdminService({side.role: side})._pin(request)
        except RequestError as error:
            expect(
                error.code in (common.ERROR_NOT_FOUND, common.ERROR_RESOURCE_EXHAUSTED),
                f"{side.config.name}: a pin is refused: {error.message}",
            )
            self.counts["pins that were refused"] += 1
            return
        pin = _pins(side)[reply.pin]
        self.counts["pins"] += 1
        device = pin.namespace.tree.path_pages(pin.lock)
        expect(0 < pin.pages <= pages and reply.pinned_tokens == pin.pages * PAGE, f"{pin.pages} pages are pinned")
        generations = side.pages_memory.generations(device)
        lost = self.counts["restores that failed"]
        held = Pinned(side, tenant, prompt, reply.pin, pin.pages, device, generations, lost, side.tiers.epoch)
        self.pinned.append(held)
        side.check()  # no promise is broken by it
        if clock.chance(0.5):
            side.process.deliver(clock.now + clock.between(0.0, seconds), self._unpin, held)
        side.process.deliver(clock.now + seconds + _LATE, self._expired, held)

    def _unpin(self, held: Pinned) -> None:
        self._forget_ended()
        self._check(held, _pins(held.side).get(held.number))
        every = self.clock.chance(0.2)
        there = _pins(held.side)
        request = admin.UnpinRequest(pin=0 if every else held.number)
        unpinned = AdminService({held.side.role: held.side})._unpin(request).unpinned
        gone = [other for other in self.pinned if other.side is held.side and (every or other is held)]
        living = sum(other.number in there for other in gone)  # others have run out
        expect(unpinned == living, f"{held.side.config.name}: {unpinned} pins ended, not {living}")
        self.pinned = [other for other in self.pinned if other not in gone]
        self.counts["pins that were let go"] += len(gone)

    def _forget_ended(self) -> None:
        self.pinned = [held for held in self.pinned if not held.side.dead and not held.pool_left]

    def _expired(self, held: Pinned) -> None:
        self._forget_ended()
        if held not in self.pinned:
            return
        side = held.side
        if side.process.awake_at > self.clock.now - _LATE:  # it has just gone on, and may not have ticked
            side.process.deliver(self.clock.now + _LATE, self._expired, held)
            return
        self.pinned.remove(held)
        expect(held.number not in _pins(side), f"{side.config.name}: a pin stays behind its end")
        self.counts["pins that ran out"] += 1

    def check(self) -> None:
        """At any moment: what is pinned is where it was."""
        if not self.pinned:
            return
        self._forget_ended()
        for held in self.pinned:
            self._check(held, _pins(held.side).get(held.number))
        for side in self.simulation.sides:
            for namespace in side.cache.namespaces.values():
                pages = sum(pin.pages for pin in side.ready_core.pins.all() if pin.namespace is namespace)
                expect(
                    namespace.pinned_pages == pages, f"{side.config.name}: {namespace.pinned_pages} pages are pinned"
                )

    def _check(self, held: Pinned, pin: Pin | None) -> None:
        """It ends by itself, within a tick. What comes back for a request may be lost, and the pin end before it."""
        side, memory = held.side, held.side.pages_memory
        if pin is None:
            return
        if self.counts["restores that failed"] == held.losses:
            expect(pin.pages == held.pages, f"{side.config.name}: {pin.pages} of {held.pages} pages are pinned still")
        device = pin.namespace.tree.path_pages(pin.lock)
        kept = len(held.device)
        expect(device[:kept] == held.device, f"{side.config.name}: pinned pages are not where they were")
        memory.check_kept(held.device, held.generations, "an operator pinned them")
        memory.check(held.device, held.prompt.contents, "a pinned page")
        match = pin.namespace.tree.match(held.prompt.digests)
        expect(match.pages >= pin.pages, f"{side.config.name}: {match.pages} of {pin.pages} pinned pages are held")
        states = side.cache.pool.states(device)
        expect(
            all(state in READABLE or state in (PageState.RESTORING, PageState.ARRIVING) for state in states),
            f"{side.config.name}: pinned pages are in states {list(states)}",
        )
        left = side.ready_core.pins._holds.abandoned(pin.namespace, pin.lock)
        expect(left is None, f"{side.config.name}: nobody brings page {left} of a pin")

    # -- flushes ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self._ask(self._flush)

    def _flush(self, side: SimDecode | SimPrefill) -> None:
        tenant = self.clock.random.choice([None, 0, 1])
        tenants = (0, 1) if tenant is None else (tenant,)
        spaces = [side.cache.namespaces[each.id] for each in side.tenants]
        before = [_held(space) for space in spaces]
        request = admin.FlushRequest(
            namespace_id=b"" if tenant is None else side.tenants[tenant].id, strict=self.clock.chance(0.2)
        )
        # The service ticks behind the flush, and who waits takes the pages: it is judged before that.
        side.tick = partial(self._flushed, side, tenants, before)  # type: ignore[method-assign]
        try:
            AdminService({side.role: side})._flush(request)
        except RequestError as error:
            may = request.strict or side.tiers.reads_file
            expect(may and error.code == common.ERROR_FAILED_PRECONDITION, f"a flush: {error.message}")
            kept = [_held(space) for space in spaces] == before
            expect(kept, f"{side.config.name}: a flush that was refused has freed pages")
            self.counts["flushes that were refused"] += 1
        finally:
            del side.tick

    def _flushed(self, side: SimDecode | SimPrefill, tenants: Sequence[int], before: list[tuple[int, int]]) -> None:
        self.counts["flushes"] += 1
        if side.forgotten is None:
            side.forgotten = Forgotten(side.config.name)
        for tenant, facts in enumerate(side.tenants):
            space = side.cache.namespaces[facts.id]
            if tenant not in tenants:
                expect(_held(space) == before[tenant], f"{side.config.name}: another tenant's pages were flushed")
                continue
            left = space.tree.evictable
            expect(
                space.tree.copies or not left, f"{side.config.name}: {left} pages that nobody holds were not flushed"
            )
            self.counts["pages flushed"] += before[tenant][0] - space.tree.pages
            side.forgotten.flushed(tenant, self._kept(side, tenant))
        type(side).tick(side)

    def _kept(self, side: SimDecode | SimPrefill, tenant: int) -> Iterable[bytes]:
        """What its tree has of any prompt, and what requests that run may bring."""
        tree = side.cache.namespaces[side.tenants[tenant].id].tree
        for prompt in self.simulation.prompts[tenant]:
            yield prompt.digests[: tree.match(prompt.digests).pages * DIGEST_BYTES]
        for request in self.simulation.open:
            if request.conversation.tenant == tenant:
                yield request.whole.digests

    # -- drains ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """No new work for a while, as before a daemon's end."""
        self._ask(self._drain)

    def _drain(self, side: SimDecode | SimPrefill) -> None:
        if side.draining:
            return
        self.counts["drains"] += 1
        side.draining = True
        side.process.deliver(self.clock.now + self.clock.random.uniform(0.02, 0.4), self._serve, side)

    def _serve(self, side: SimDecode | SimPrefill) -> None:
        side.draining = side.ending


def _pins(side: SimDecode | SimPrefill) -> dict[int, Pin]:
    return {pin.number: pin for pin in side.ready_core.pins.all()}


def _held(space: Namespace) -> tuple[int, int]:
    return space.tree.pages, space.tree.host_pages
