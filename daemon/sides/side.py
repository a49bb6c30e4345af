"""One role of a daemon: its core, its workers and tiers, and the carrying out of its core's effects. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.counters import Latencies
from kvferry.daemon.core.effects import BindPages, Effect, ForgetRows, StartCopy, ToWorker, ZeroPages, tier_effects
from kvferry.daemon.core.errors import RequestError, exhausted, unavailable
from kvferry.daemon.core.kv_events import EventSink, TokenChain
from kvferry.daemon.core.limits import Name, name_of
from kvferry.daemon.core.tier_copies import CopyStarted
from kvferry.daemon.memory.host_tier import cache_limits
from kvferry.daemon.peers.handshake import has_way_back
from kvferry.daemon.peers.session import SessionBroken, report_invariant
from kvferry.daemon.peers.traces import traces_of
from kvferry.daemon.sides.core_interface import Core
from kvferry.daemon.sides.engine_pool import EnginePool
from kvferry.daemon.sides.rank_words import Pass, Refuse, Word
from kvferry.daemon.sides.registering import Registering
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.daemon.sides.workers import Ranks, SideWorkers, Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import REQUEST_ID_BYTES
from kvferry.transfer.geometry.namespace import NamespaceFacts

log = logging.getLogger(__name__)

SPILL_PAGES = 256  # of one step at the end
LATE_SECONDS = 0.1  # of a tick: by more the daemon stood still

CoreT = TypeVar("CoreT", bound=Core)


class Side(Generic[CoreT]):
    """Base of both roles."""

    role: str

    def __init__(self, config: DaemonConfig, incarnation: bytes, now: Callable[[], float]) -> None:
        self.config = config
        self.incarnation = incarnation
        self.now = now
        self.draining = False
        self.event_sink: EventSink | None = None  # set before the first worker comes
        self.traces = traces_of(self.role)
        self.core: CoreT | None = None
        self.tasks = SideTasks(self.role)
        self.tiers = SideTiers(self.role, config, incarnation, self)
        session_files = os.path.join(config.shm_dir, f"kvferry-{incarnation.hex()}-{self.role}-worker-")
        self.workers = SideWorkers(session_files, self, self.tasks)
        self._engine = EnginePool(self.role, self, self.tiers.forget_pool) if config.pool == "engine" else None
        sends_back = self.role == "decode" and has_way_back(config)
        owned = self.workers, self._engine, self.tasks
        self._registering = Registering(config, incarnation, self.tiers, *owned, sends_back=sends_back)
        self._effects: deque[Effect] = deque()
        self._flushing = False
        self._zeroing = False  # pages are being cleared: effects wait
        self._closed = False
        self._halted = False

    # -- what the roles differ in --------------------------------------------------------------------------------

    def make_core(self, cache: Cache) -> CoreT:
        raise AssertionError("a side has a role")

    def perform(self, effect: Effect) -> None:
        raise AssertionError("a side has a role")

    def end_sessions(self, reason: str) -> None:
        """Ends all sessions. Idempotent."""
        raise AssertionError("a side has a role")

    @property
    def open_sessions(self) -> int:
        """The number of sessions whose copies and courier may not have ended."""
        raise AssertionError("a side has a role")

    def effect_failed(self, effect: Effect, message: str) -> None:
        """The session that it was for must end, and its requests with it."""
        raise AssertionError("a side has a role")

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        raise AssertionError("a side has a role")

    def begin_refused(self, name: Name, error: RequestError) -> None:
        """A prompt will not be begun, which a session may have asked for."""

    @property
    def latencies(self) -> Latencies:
        raise AssertionError("a side has a role")

    @property
    def lends(self) -> bool:
        """Whether it takes part in look-ups, if it is to. Below an engine's blocks a decode side caches in its host
        tier alone."""
        return self.role == "prefill" or not self.cache.limits.in_blocks or self.tiers.can_be_sent

    @property
    def fetch_tokens(self) -> int:
        """HeldReply.fetch_tokens."""
        return 0

    # -- its core ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ready_core(self) -> CoreT:
        assert self.core is not None, "no worker has come yet"
        return self.core

    @property
    def busy(self) -> int:
        """Requests that are neither over nor failed: somebody may still be answered."""
        core = self.core
        return 0 if core is None else core.running + core.waiting_requests - core.failed_requests

    @property
    def cache(self) -> Cache:
        return self.ready_core.cache

    @property
    def has_engine(self) -> bool:
        """Whether one is connected, and has its pool."""
        return self.tiers.has_pool.is_set() and bool(self.workers.here)

    def tick(self, late: float = 0.0) -> None:
        """Lets deadlines pass. `late`: seconds by which this comes later than it was to."""
        if self.core is not None:
            if late > LATE_SECONDS:
                self.core.stood_still(late, self.now())
            self.core.tick(self.now())
            self.flush()
            for worker in self.workers.here.values():
                if worker is worker.ranks.owner and (words := worker.ranks.words) is not None:
                    if late > LATE_SECONDS:
                        words.stood_still(late, self.now())
                    self._hear_ranks(worker.ranks, words.tick(self.now()))
            self.tiers.beat()

    # -- its tiers (tiers.TiersOwner) ----------------------------------------------------------------------------

    def new_cache(self, facts: NamespaceFacts, pages: int, host_pages: int, in_blocks: bool) -> Cache:
        limits = cache_limits(self.config, in_blocks)
        cache = Cache(pages, self.config.page_size, host_pages=host_pages, host_there=0, limits=limits)
        cache.clock.now = self.now()
        if self.event_sink is not None:
            cache.log_events(TokenChain.of(facts))
        return cache

    def tiers_made(self, cache: Cache) -> None:
        self.core = self.make_core(cache)
        if cache.host is not None:
            self.tasks.start(self.tiers.grow_host())

    # -- its workers (workers.WorkerEnds) ------------------------------------------------------------------------

    async def register(self, hello: wire.WorkerHello) -> tuple[Worker, wire.Welcome]:
        """Takes a worker in, making the pool for the first one. RequestError where it does not fit."""
        return await self._registering.register(hello)

    def hear(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        """Takes in what a worker says, of an engine's ranks what they say together. RequestError."""
        ranks = worker.ranks
        if ranks.words is None:
            self.handle(worker, kind, message)
        elif not ranks.leaving.is_set():
            self._hear_ranks(ranks, ranks.words.take(ranks.workers.index(worker), kind, message, self.now()))

    def _hear_ranks(self, ranks: Ranks, words: Sequence[Word]) -> None:
        for word in words:
            if isinstance(word, Pass):
                self.handle(ranks.owner, word.kind, word.message)
            elif isinstance(word, Refuse):
                self.begin_refused(name_of(word.name), word.error)
            else:
                ranks.workers[word.rank].tell(word.event)

    def worker_left(self, worker: Worker) -> None:
        self.traces.left(worker.number)
        if worker.ranks.words is not None:
            self._hear_ranks(worker.ranks, worker.ranks.words.end(unavailable("the prefill worker is gone")))
        if self._engine is not None and self._engine.is_owner(worker.number):
            self._engine.owner_leaves()

    def worker_lost(self, worker: Worker) -> None:
        self.ready_core.worker_lost(worker.number, self.now())
        self.flush()

    def worker_gone(self, worker: Worker) -> None:
        self.ready_core.worker_gone(worker.number, self.now())
        self.flush()
        if self._engine is not None and self._engine.is_owner(worker.number):
            self.tiers.has_pool.clear()
            self.tasks.start(self._engine.let_go())

    # -- the end of an engine's memory (engine_pool.PoolOwner) ---------------------------------------------------

    async def memory_released(self, worker: Worker, seconds: float) -> bool:
        """Waits until memory that this worker registered, if it did, is mapped no more."""
        if self._engine is None or not self._engine.is_owner(worker.ranks.owner.number):
            return True
        return await self._engine.released(seconds)

    def drop_requests(self) -> None:
        self.tiers.has_pool.clear()
        if self.core is not None:
            self.core.pool_leaves(self.now())
            self.flush()

    def in_use(self) -> str:
        if self.core is None:
            return ""
        counts = {
            "sessions": self.open_sessions,
            "requests": self.core.running + self.core.waiting_requests,
            "locks": self.cache.locks,
            "copies between the tiers": self.cache.copies.running,
            "clearing of pages": int(self._zeroing),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    # -- effects -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Carries out what the core left, in order, until it leaves nothing more or pages are to be cleared first. What
        an effect brings about on the spot may come back here: its effects go behind those that wait."""
        self._take_effects()
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._effects and not self._zeroing:
                effect = self._effects.popleft()
                if isinstance(effect, ZeroPages):
                    self._zeroing = True
                    self.tiers.memory.zero_pages(np.array(effect.pages, np.int64), self._zeroed)
                elif isinstance(effect, ToWorker):
                    self.tell(effect.worker, effect.event)
                elif isinstance(effect, StartCopy):
                    self.on_copy_starts(effect.started)
                    self.tiers.host.start(effect.started, self._copy_done)
                elif isinstance(effect, BindPages):
                    self.tiers.block_table.bind(effect.pages, effect.blocks)
                elif isinstance(effect, ForgetRows):
                    self.tiers.host.forget(effect.rows)
                else:
                    try:
                        self.perform(effect)
                    except (ValueError, SessionBroken) as error:
                        self.effect_failed(effect, str(error))
                self._take_effects()
            if self.event_sink is not None and self.core is not None and self.cache.events is not None:
                self.event_sink.publish(self.cache.events.take())
        finally:
            self._flushing = False

    def _zeroed(self, problem: str) -> None:
        if self._closed:
            return
        if problem:
            self._cannot_go_on(f"pages could not be cleared: {problem}")
            return
        self._zeroing = False
        self.flush()

    def _cannot_go_on(self, message: str) -> None:
        """Pages may hold another tenant's bytes: effects wait for ever, and the daemon ends."""
        self._zeroing = True
        report_invariant(AssertionError(message))

    def _take_effects(self) -> None:
        if self.core is not None:
            self._effects.extend(self.core.take_effects())

    def on_copy_starts(self, started: CopyStarted) -> None:
        """Tells traces of a copy that starts."""

    def _copy_done(self, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> None:
        self.traces.restore_ends(number, len(failed))
        self.ready_core.copy_ended(number, failed, mismatched, seconds, self.now())
        self.flush()

    def name_of(self, worker: Worker, message: common.RequestName) -> Name | None:
        """The request's name. One that cannot be is answered with Failed (None), as far as it can be named at all."""
        try:
            return name_of(message)
        except RequestError as error:
            if len(message.request_id) != REQUEST_ID_BYTES:
                raise
            self.fail(worker, Name(message.request_id, message.attempt), error)
            return None

    def check_quarantine(self) -> None:
        """RESOURCE_EXHAUSTED while too many pages wait for the word or the proof that their worker writes no more."""
        orphaned, bound = self.orphaned_pages, self.orphaned_bound
        if orphaned and orphaned >= bound:
            raise exhausted(
                f"{orphaned} pages of workers that are lost ({self.workers.lost}) or do not answer are orphaned until "
                f"these let go or are proven gone; the bound is {bound} (orphaned_share "
                f"{self.config.orphaned_share:g})"
            )

    @property
    def orphaned_pages(self) -> int:
        """The number of pages that workers may still write whose requests have ended without their word."""
        return self.cache.pool.counts().orphaned

    @property
    def orphaned_bound(self) -> int:
        """The number of orphaned pages at which no request is taken; 0: at the first one."""
        return int(self.config.orphaned_share * self.cache.pool.pages)

    def tell(self, number: int, event: wire.WorkerEvent) -> None:
        self.traces.hear(number, event)
        worker = self.workers.here.get(number)
        if worker is not None:
            for each in worker.ranks.workers:
                each.tell(event)

    def fail(self, worker: Worker, name: Name, error: RequestError) -> None:
        failed = wire.Failed(name=name.to_proto(), error=error.to_proto())
        self.tell(worker.number, wire.WorkerEvent(failed=failed))

    def deadline_of(self, milliseconds: int) -> float:
        """A request's deadline: its own if it names one, never past the configured transfer time."""
        most = self.config.transfer_seconds
        return self.now() + (min(milliseconds / 1000, most) if milliseconds else most)

    @property
    def saves(self) -> bool:
        """Whether what is cached on the device can be copied to a host tier that the next daemon finds again."""
        return self.core is not None and self.tiers.host_survives and self.tiers.has_pool.is_set()

    async def spill_all(self, deadline: float) -> None:
        """Copies what is cached on the device to the host tier's file, until `deadline`."""
        if not self.saves:
            return
        cache, copies = self.cache, self.cache.copies
        self.ready_core.pins.unpin(0)  # what an operator held is saved, too
        while not self._halted and self.now() < deadline and (cache.eviction.spill(SPILL_PAGES) or copies.running):
            self._effects.extend(tier_effects(cache))
            self.flush()
            await asyncio.sleep(0.002)
        log.info("%s: %d pages are in the host tier's file", self.role, cache.host_pages)

    def halt(self) -> None:
        """An invariant is broken: nothing more is saved, since the next daemon would hand it out."""
        self._halted = True
        self.tiers.halt()

    async def close(self) -> None:
        """Ends what this side owns; the sessions must have ended before."""
        self._closed = True
        async with contextlib.AsyncExitStack() as ends:  # each is reached, though another fails; the last first
            ends.push_async_callback(self.tiers.close)
            ends.callback(self.workers.close)
            ends.push_async_callback(self.tasks.close)


AnySide: TypeAlias = Side[Any]
