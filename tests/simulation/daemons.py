"""The product's two sides, with pools, tiers and copies of the simulation under them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache, CacheLimits
from kvferry.daemon.core.effects import Effect, StartFetch, StartTransfer
from kvferry.daemon.core.kv_events import TokenChain
from kvferry.daemon.core.limits import BlockShape, Name
from kvferry.daemon.core.namespaces import Quota, slack
from kvferry.daemon.memory.host_tier import HostTier
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.server import POLL_SECONDS, TICK_SECONDS
from kvferry.daemon.services.peer import PeerService
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.digests import DIGEST_BYTES, root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.host_tier.index import layout_fingerprint
from kvferry.transfer.protocol.slots import HEADER_BYTES
from tests.simulation.clients import watching
from tests.simulation.clients.published import Published
from tests.simulation.clock import Clock, Violation, expect
from tests.simulation.ends import check_fetches, check_receiver, check_returns, check_sender
from tests.simulation.loops import ProcessLoop
from tests.simulation.prompts import ENGINE_GEOMETRY, GEOMETRY, PAGE, content
from tests.simulation.storage.blocks import BlockMemory
from tests.simulation.storage.memory import Memory
from tests.simulation.storage.parts import SimPoolMemory
from tests.simulation.storage.tier import LooseRows, SimTier

if TYPE_CHECKING:
    from tests.simulation.clients.operators import Forgotten
    from tests.simulation.faults import Faults
    from tests.simulation.network import Network
    from tests.simulation.prompts import Prompt
    from tests.simulation.storage.disk import SimDisk

ROOT = root_digest(b"simulation")
TENANTS = tuple(NamespaceFacts("model", "1", GEOMETRY, "sha256_cbor", ROOT, salt) for salt in (b"", b"\x01" * 32))
ENGINE_TENANTS = tuple(replace(facts, geometry=ENGINE_GEOMETRY, engine_layout="places") for facts in TENANTS)


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one daemon, drawn for a seed."""

    pages: int
    host_pages: int
    slots: int  # of either end
    slot_bytes: int  # header and pages
    policy: str
    overcommit: float
    write_through: int
    write_ahead: float
    quota: Quota | None  # of the second tenant
    checksums: bool  # of the parts of its sessions
    zero_freed: bool
    ranks: int
    geometry: KVGeometry = GEOMETRY
    way_back: bool = False
    blocks: int = 0  # of its engine's, that the pages are
    block_tokens: int = 0


# Of a side that stands alone in a test, which replaces what it is about.
PLAIN = Setting(
    pages=8,
    host_pages=0,
    slots=2,
    slot_bytes=4096,
    policy="lru",
    overcommit=1.0,
    write_through=0,
    write_ahead=0.0,
    quota=None,
    checksums=False,
    zero_freed=False,
    ranks=1,
)


class SimSide:
    """Common to both roles."""

    clock: Clock
    process: ProcessLoop
    setting: Setting
    faults: Faults
    pages_memory: Memory
    handled = 0  # messages of workers
    published: Published | None = None
    forgotten: Forgotten | None = None  # once something was flushed
    ending = False  # in order
    unclaimed = True  # its pool is to be an engine's, and none has come yet

    @property
    def tenants(self) -> tuple[NamespaceFacts, ...]:
        return TENANTS if self.setting.geometry is GEOMETRY else ENGINE_TENANTS

    @property
    def dead(self) -> bool:
        return self.process.ended

    def furnish(
        self,
        clock: Clock,
        setting: Setting,
        faults: Faults,
        process: ProcessLoop | None = None,
        disk: SimDisk | None = None,
    ) -> None:
        side = cast(AnySide, self)
        self.clock, self.setting, self.faults = clock, setting, faults
        self.process = process or ProcessLoop(clock, side.config.name)
        side.tiers.epoch = clock.random.getrandbits(63)
        limits = CacheLimits(
            policy=setting.policy,
            write_through_hits=setting.write_through,
            write_ahead=setting.write_ahead,
            quotas={self.tenants[1].id: setting.quota} if setting.quota is not None else None,
            zero_freed=setting.zero_freed,
            used_before=side.config.pool == "engine",
            in_blocks=setting.blocks > 0,
        )
        cache = Cache(setting.pages, PAGE, host_pages=setting.host_pages, host_there=0, limits=limits)
        cache.clock.now = clock.now
        if setting.blocks:
            self.pages_memory = BlockMemory(cache, side.config.name, clock, setting.block_tokens)
        else:
            self.pages_memory = Memory(cache, side.config.name, ranks=setting.ranks)
        if faults.events:
            side.event_sink = self.published = Published(clock, self.pages_memory, ROOT, faults.lies)
            cache.log_events(TokenChain.of(self.tenants[0]))
        memory, tier = self.pool_of(self.pages_memory), None
        if cache.host is not None:
            tier = self._open_tier(cache, memory, disk)
        side.tiers.take(self.tenants[0], cache, cast(PoolMemory, memory), cast("HostTier | None", tier))
        if setting.blocks:
            side.tiers._blocks = BlockShape(setting.blocks, setting.block_tokens, PAGE)
            side.tiers._engine_stows = faults.stows > 0 and setting.block_tokens == PAGE
        self.process.here(side.tiers_made, cache)
        for facts in self.tenants:
            cache.namespace(facts.id)

    def _open_tier(self, cache: Cache, memory: SimPoolMemory, disk: SimDisk | None) -> SimTier:
        """As `open_tier`. With other ranks the file of the daemon before is another layout's, and replaced."""
        assert cache.host is not None
        pages, setting = cache.host_asked, self.setting
        layout = layout_fingerprint(setting.geometry, setting.ranks)
        waits = setting.blocks and cast(AnySide, self).role == "prefill"  # nothing of it is for the next daemon
        rows = LooseRows(pages) if disk is None or waits else disk.open(pages, layout)
        tier = SimTier(self.process, memory, rows, failing=self.faults.tier_fails, checksums=setting.checksums)
        cache.host.log_frees = True
        return tier

    def pool_of(self, memory: Memory) -> SimPoolMemory:
        """What the daemon knows of this memory."""
        pool = SimPoolMemory(self.clock, memory, self.faults.copies_fail, self.setting.ranks, self.setting.geometry)
        pool.tell = self.process.deliver
        return pool

    def enter(self, tenant: int, events: object, lock: object = None) -> Worker:
        """A worker that is here, and holds the lock of its session file."""
        side = cast(AnySide, self)
        number = side.workers.new_number()
        worker = Worker(
            number, f"w{number}", self.tenants[tenant].id, cast(Any, lock), cast(Any, events), attached=True
        )
        side.workers.enter(worker)
        side.tiers.has_pool.set()  # the first one brings the pool
        return worker

    def serve(self, *loops: Coroutine[Any, Any, None]) -> None:
        """Runs them, and the daemon's ticks, until it ends."""
        self._served = [self.process.create_task(work) for work in (self._tick(), *loops)]
        for task in self._served:
            task.add_done_callback(self._task_ends)

    async def drain(self, seconds: float, streams_end: Callable[[], None]) -> None:
        """Its end in order, as `Daemon` has it: what it has accepted may finish, for so long; what it has cached is
        saved."""
        side, loop = cast(AnySide, self), self.process
        side.draining = self.ending = True
        deadline = loop.time() + seconds
        while side.busy and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        deadline = loop.time() + seconds
        await side.spill_all(deadline)
        left = side.cache.evictable if side.saves and loop.time() < deadline else 0
        expect(left == 0, f"{side.config.name}: {left} pages are neither saved nor dropped as it ends")
        streams_end()
        self.pages_memory.abandoned = True
        await self.end()

    async def end(self) -> None:
        """As the daemon's own, behind its drain: it takes no session more."""
        cast(AnySide, self).draining = True
        for task in self._served:
            task.cancel()
        await asyncio.wait(self._served)
        while cast(AnySide, self).open_sessions:
            await asyncio.sleep(0.02)
        await cast(AnySide, self).close()

    async def _tick(self) -> None:
        """As the daemon's own."""
        loop = self.process
        while True:
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            cast(AnySide, self).tick(max(0.0, loop.time() - due))

    def _task_ends(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise Violation(f"{self.process.name} ends: {error!r}")

    def check(self) -> None:
        """At any moment."""
        cache = cast(AnySide, self).cache
        who = cast(AnySide, self).config.name
        if self.pages_memory.blocks is not None:
            self.pages_memory.blocks.check()
        counts = cache.pool.counts()
        expect(counts.total == cache.pool.pages, f"{who}: {counts} are not {cache.pool.pages} pages")
        if self.setting.overcommit == 1.0:
            left = slack(cache.pool.free, cache.namespaces.values())
            expect(left >= 0, f"{who}: {-left} more pages are promised than can be had")
        for namespace in cache.namespaces.values():
            used, hard = namespace.used, namespace.quota.hard
            expect(not hard or used <= hard, f"{who}: a tenant uses {used} pages; its quota is {hard}")

    def check_published(self) -> None:
        """At any moment."""
        side = cast(AnySide, self)
        if self.published is not None and not self.dead and self.pages_memory.mapped:
            host = side.cache.host
            self.published.check(cast(SimTier, side.tiers.host) if host is not None else None, host)

    @property
    def in_hand(self) -> int:
        """What it has still to do with requests, copies and workers; a daemon that stands still has something."""
        side = cast(AnySide, self)
        core, cache = side.ready_core, side.cache
        requests = core.running + core.waiting_requests + core.active_transfers + core.draining_transfers
        held = cache.locks + cache.copies.running + cache.promised + len(core.pins)
        return requests + held + side.workers.may_write + (self.process.reads_at > self.clock.now)

    def check_idle(self) -> None:
        """Nobody asks for anything: nothing is held."""
        cache = cast(AnySide, self).cache
        who = cast(AnySide, self).config.name
        held = {"locks": cache.locks, "copies": cache.copies.running, "promised": cache.promised}
        for name, value in held.items():
            expect(value == 0, f"{who}: {value} {name} leaked")
        counts = cache.pool.counts()
        expect(counts.free + counts.cached == counts.total, f"{who}: pages leaked: {counts}")
        expect(len(cast(AnySide, self).ready_core.pins) == 0, f"{who}: pins leaked")
        for namespace in cache.namespaces.values():
            expect(namespace.pinned_pages == 0, f"{who}: {namespace.pinned_pages} pinned pages leaked")
            expect(namespace.own == 0, f"{who}: {namespace.own} pages of requests leaked")
            namespace.tree.check()
        cache.pool.check()

    def check_cache(self, tenant: int, prompts: Iterable[Prompt]) -> int:
        """Every page that the tree has on the device for these prompts; how many."""
        cache = cast(AnySide, self).cache
        tree = cache.namespaces[self.tenants[tenant].id].tree
        seen = 0
        for prompt in prompts:
            lock = tree.lock(tree.match(prompt.digests))
            pages = tree.path_pages(lock)
            self.pages_memory.check(pages, prompt.contents, "the cache")
            tree.unlock(lock)
            seen += len(pages)
        return seen

    def check_empty(self) -> None:
        """After the cache was flushed."""
        cache = cast(AnySide, self).cache
        who = cast(AnySide, self).config.name
        cache.flush(cache.namespaces.values())
        cast(AnySide, self).flush()
        if self.published is not None:
            self.published.check_empty()
        expect(cache.pool.free == cache.pool.pages, f"{who}: pages leaked: {cache.pool.counts()}")
        host = cache.host
        expect(host is None or host.free == host.pages, f"{who}: host rows leaked")


class SimDecode(SimSide, DecodeSide):
    def __init__(
        self,
        clock: Clock,
        config: DaemonConfig,
        setting: Setting,
        faults: Faults,
        network: Network | None = None,
        disk: SimDisk | None = None,
    ) -> None:
        process = ProcessLoop(clock, config.name)
        dial = dial_plainly if network is None else network.dial(process)
        DecodeSide.__init__(self, config, clock.random.randbytes(16), lambda: clock.now, dial)
        self.prompts: dict[Name, Prompt] = {}  # as asked for, of stays with a prefill daemon
        self._coming: dict[int, tuple[Prompt, int, tuple[int, ...]]] = {}  # by transfer: prompt, first page, page ids
        self.furnish(clock, setting, faults, process, disk)
        if network is not None:
            self.serve(*(link.run() for link in self.links.values()))

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        self.handled += 1
        handle = partial(super().handle, worker, kind)
        if kind == "admit":
            watching.admit(self, worker, message, handle)
        elif self.published is not None and kind in ("page_tokens", "finish"):
            watching.tokens(self, self.published, message, handle)
        else:
            handle(message)

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, StartTransfer):
            name = Name(effect.ask.name.request_id, effect.ask.name.attempt)
            self._coming[effect.ask.transfer] = (self.prompts[name], effect.ask.first_page, effect.page_ids)
        super().perform(effect)

    def on_pages(self, transfer: int, prompt_pages: Iterable[int]) -> None:
        indexes = list(prompt_pages)
        prompt, first, page_ids = self._coming[transfer]
        pages = [page_ids[index - first] for index in indexes]
        self.pages_memory.check(pages, [prompt.contents[index] for index in indexes], "a page reported as arrived")
        super().on_pages(transfer, indexes)

    def check(self) -> None:
        super().check()
        check_returns(self.ready_core, self.returns._sendings, self.config.name)

    def check_idle(self) -> None:
        super().check_idle()
        core = self.ready_core
        expect(core.returns.active == 0, f"{self.config.name}: {core.returns.active} sends back leaked")
        expect(not core.leases, f"{self.config.name}: leases leaked: {[str(name) for name in core.leases]}")
        expect(core.active_transfers == 0, f"{self.config.name}: {core.active_transfers} transfers leaked")
        for link in self.links.values():
            who = f"{self.config.name} to {link.name}"
            for name, left in (("pending", link._pending), ("asked", link._asked), ("copying", link._copying)):
                expect(not left, f"{who}: the link remembers {name} {left}")
            if link.session is not None and link.session.up:
                check_receiver(link.session.receiving.receiver, who)
                if (returning := link.session.returning) is not None:
                    check_sender(returning, self.config.slots, f"{who}, back")


class SimPrefill(SimSide, PrefillSide):
    def __init__(
        self,
        clock: Clock,
        config: DaemonConfig,
        setting: Setting,
        faults: Faults,
        network: Network | None = None,
        disk: SimDisk | None = None,
    ) -> None:
        PrefillSide.__init__(self, config, clock.random.randbytes(16), lambda: clock.now)
        self.furnish(clock, setting, faults, disk=disk)
        self.service = PeerService(self)
        if network is not None:
            self.serve()

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        self.handled += 1
        if kind == "begin":
            watching.begin(self, message, partial(super().handle, worker, kind))
        else:
            super().handle(worker, kind, message)

    @property
    def in_hand(self) -> int:
        return super().in_hand + len(self.ready_core.entries)

    def check(self) -> None:
        super().check()
        check_fetches(self.ready_core, self.sessions, self.config.name)

    def check_idle(self) -> None:
        super().check_idle()
        core = self.ready_core
        expect(not core.entries, f"{self.config.name}: entries leaked: {[str(name) for name in core.entries]}")
        expect(core.active_transfers == 0, f"{self.config.name}: {core.active_transfers} sends leaked")
        expect(len(core.fetches) == 0, f"{self.config.name}: {len(core.fetches)} fetches leaked")
        expect(len(core.fetches.look_ups) == 0, f"{self.config.name}: {len(core.fetches.look_ups)} look-ups leaked")
        waits = core.fetches._searching, core.fetches._following
        expect(not any(waits), f"{self.config.name}: some wait for answers or for others' fetches: {waits}")
        for session in self.sessions.values():
            who = f"{self.config.name} to {session.remote}"
            if session.up:
                check_sender(session.sending, self.config.slots, who)
                if session.fetching is not None:
                    check_receiver(session.fetching.receiver, f"{who}, back")

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, StartFetch):
            watching.fetch(self, effect)
        super().perform(effect)

    def on_fetched(self, transfer: int, prompt_pages: Sequence[int]) -> None:
        fetch = self.ready_core.fetches._open[transfer]
        prompt = fetch.entry.prompt
        assert prompt is not None
        pages = [fetch.page_ids[index - fetch.first_page] for index in prompt_pages]
        digests = [prompt.digests[index * DIGEST_BYTES :][:DIGEST_BYTES] for index in prompt_pages]
        self.pages_memory.check(pages, list(map(content, digests)), "a page reported as fetched")
        self.clock.counts["pages that came back"] += len(pages)
        if fetch.session != fetch.entry.session:
            self.clock.counts["pages that came from another decode daemon"] += len(pages)
        if self.forgotten is not None:
            tenant = [facts.id for facts in self.tenants].index(prompt.namespace_id)
            self.forgotten.came_back(tenant, digests)
        super().on_fetched(transfer, prompt_pages)

    def on_fetch_drained(self, transfer: int) -> None:
        self.clock.counts["fetches that were stopped"] += 1
        super().on_fetch_drained(transfer)


def sized(config: DaemonConfig, setting: Setting) -> DaemonConfig:
    """The configuration as the setting has it; its slots may be smaller than it allows."""
    sizes = {"slots": setting.slots, "slot_bytes": setting.slot_bytes - HEADER_BYTES, "ranks": setting.ranks}
    checksums = "on" if setting.checksums else "off"
    way_back = "always" if setting.way_back else "off"
    others = {"checksums": checksums, "overcommit": setting.overcommit, "way_back": way_back}
    return config.model_copy(update={**sizes, **others})
