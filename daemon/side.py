"""One role of a daemon: its workers, its pool's memory, and the carrying out of its core's effects. Shell.

The pool is made when the first worker says what model it serves; later workers must fit it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from kvferry import tracing
from kvferry.daemon.config import STORAGES, DaemonConfig
from kvferry.daemon.counters import Latencies, RequestCounters, TransferCounters
from kvferry.daemon.effects import Effect, ForgetRows, StartCopy, ToWorker, ZeroPages, tier_effects
from kvferry.daemon.engine_pool import EnginePool
from kvferry.daemon.errors import RequestError, exhausted, invalid, precondition
from kvferry.daemon.host_tier import HostTier, open_tier, store_limits
from kvferry.daemon.kv_events import KvEvent, Medium
from kvferry.daemon.limits import Name, name_of
from kvferry.daemon.pins import Pins
from kvferry.daemon.pool_making import make_pool, map_pool, registration_of
from kvferry.daemon.pool_memory import PoolMemory
from kvferry.daemon.request_traces import RequestTraces
from kvferry.daemon.session import SessionBroken, report_invariant
from kvferry.daemon.store import Started, Store
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_NAME_CHARS, REQUEST_ID_BYTES
from kvferry.transfer.geometry import Layout, StorageOrder
from kvferry.transfer.namespace import NamespaceFacts, differences
from kvferry.transfer.pool_shape import PoolShape, page_bytes_of
from kvferry.transfer.registration import Registration
from kvferry.transfer.segment import FileLock

log = logging.getLogger(__name__)

PROTOCOL = 1
WORKER_QUEUE = 8192  # events that may wait for a worker's stream
SPILL_PAGES = 256  # of one step at the end
PROOF_SECONDS = 0.1  # between looks at a lost worker's lock


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    name: str
    namespace_id: bytes
    lock: FileLock
    events: asyncio.Queue[wire.WorkerEvent]
    attached: bool = False
    quiesced: bool = False
    overflown: asyncio.Event = field(default_factory=asyncio.Event)


class Core(Protocol):
    """What both roles' state machines have."""

    store: Store
    counters: RequestCounters
    pins: Pins

    @property
    def reserved(self) -> int: ...

    @property
    def transfer_counters(self) -> TransferCounters: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting_requests(self) -> int: ...

    @property
    def active_transfers(self) -> int: ...

    @property
    def draining_transfers(self) -> int: ...

    def take_effects(self) -> list[Effect]: ...

    def matched_tokens(self, namespace_id: bytes, digests: bytes) -> int: ...

    def worker_lost(self, worker: int, now: float) -> None: ...

    def worker_gone(self, worker: int, now: float) -> None: ...

    def pool_leaves(self, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def copy_ended(self, number: int, failed: Sequence[int], mismatched: int, seconds: float, now: float) -> None: ...


class EventSink(Protocol):
    """Who is told what enters and leaves the tiers."""

    endpoint: str
    replay: str
    blocks: Counter[tuple[str, Medium]]  # by event and medium
    batches: int
    queue_dropped: int
    subscriber_dropped: int

    @property
    def replays_cut_off(self) -> Counter[str]:
        """By reason: "stalled" or "gone"."""

    def publish(self, events: Sequence[KvEvent]) -> None: ...


CoreT = TypeVar("CoreT", bound=Core)


class Side(Generic[CoreT]):
    """Base of both roles."""

    role: str

    def __init__(self, config: DaemonConfig, incarnation: bytes, now: Callable[[], float]) -> None:
        self.config = config
        self.incarnation = incarnation
        self.now = now
        self.epoch = secrets.randbits(63)
        self.facts: NamespaceFacts | None = None
        self.workers: dict[int, Worker] = {}
        self.draining = False
        self.has_pool = asyncio.Event()
        self.event_sink: EventSink | None = None  # set before the first worker comes
        self.traces = RequestTraces(self.role) if tracing.on() else None
        self._memory: PoolMemory | None = None
        self._shape: PoolShape | None = None  # of the memory that is, or was last
        self._engine = EnginePool(self.role, self, self._forget_pool) if config.pool == "engine" else None
        self._tier: HostTier | None = None
        self._next_worker = 1
        self._lost: dict[int, Worker] = {}
        self.core: CoreT | None = None
        self._making = asyncio.Lock()
        self._effects: deque[Effect] = deque()
        self._flushing = False
        self._zeroing = False  # pages are being cleared: effects wait
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the roles differ in --------------------------------------------------------------------------------

    def make_core(self, store: Store) -> CoreT:
        raise AssertionError("a side has a role")

    def perform(self, effect: Effect) -> None:
        raise AssertionError("a side has a role")

    def end_sessions(self, reason: str) -> None:
        """All of them. Idempotent."""
        raise AssertionError("a side has a role")

    @property
    def open_sessions(self) -> int:
        """Those whose copies and courier may not have ended."""
        raise AssertionError("a side has a role")

    def effect_failed(self, effect: Effect, message: str) -> None:
        """The session that it was for must end, and its requests with it."""
        raise AssertionError("a side has a role")

    def handle(self, worker: Worker, kind: str, message: wire.WorkerMessage) -> None:
        raise AssertionError("a side has a role")

    @property
    def latencies(self) -> Latencies:
        raise AssertionError("a side has a role")

    # -- its core ------------------------------------------------------------------------------------------------

    @property
    def ready_core(self) -> CoreT:
        assert self.core is not None, "no worker has come yet"
        return self.core

    @property
    def busy(self) -> int:
        """Requests that are not over."""
        return self.core.running + self.core.waiting_requests if self.core is not None else 0

    @property
    def workers_here(self) -> int:
        """Those that are here, and lost ones that may still write."""
        return len(self.workers) + len(self._lost)

    @property
    def store(self) -> Store:
        return self.ready_core.store

    def worker_lost(self, worker: Worker) -> None:
        self.ready_core.worker_lost(worker.number, self.now())

    def worker_gone(self, worker: Worker) -> None:
        self.ready_core.worker_gone(worker.number, self.now())

    def tick(self) -> None:
        """Lets deadlines pass."""
        if self.core is not None:
            self.core.tick(self.now())
            self.flush()

    # -- workers -------------------------------------------------------------------------------------------------

    async def register(self, hello: wire.WorkerHello) -> tuple[Worker, wire.Welcome]:
        """Takes a worker in, making the pool for the first one. RequestError where it does not fit."""
        if hello.protocol != PROTOCOL:
            raise precondition(
                f"protocol is {hello.protocol}; this daemon speaks {PROTOCOL}: install the same kvferry on both"
            )
        if len(hello.worker) > MAX_NAME_CHARS:
            raise invalid(f"worker has {len(hello.worker)} characters; the bound is {MAX_NAME_CHARS}")
        if self.workers_here >= self.config.max_workers:
            raise exhausted(
                f"{len(self.workers)} workers are here and {len(self._lost)} lost ones not proven gone; "
                f"--max-workers is {self.config.max_workers}"
            )
        page_size = hello.facts.geometry.page_size
        if page_size not in (0, self.config.page_size):
            raise precondition(
                f"page_size: the worker has {page_size}, the daemon {self.config.page_size}; "
                "give one of them the other's"
            )
        registration = registration_of(self.config, hello)
        hello.facts.geometry.page_size = self.config.page_size
        try:
            facts = NamespaceFacts.from_proto(hello.facts)
        except ValueError as error:
            raise invalid(str(error)) from error
        # In a task of its own: a worker that leaves meanwhile must not leave half a pool.
        fitting = self._fit_once(facts) if registration is None else self._map(hello.worker, facts, registration)
        making = self._start(fitting)
        try:
            await asyncio.shield(making)
            self.store.namespace(facts.id)
        except BaseException:
            making.add_done_callback(self._abandoned)
            raise
        number = self._next_worker
        self._next_worker += 1
        path = os.path.join(self.config.shm_dir, f"kvferry-{self.incarnation.hex()}-{self.role}-worker-{number}")
        lock: FileLock | None = None
        try:
            lock = FileLock.create(path)
            worker = Worker(number, hello.worker, facts.id, lock, asyncio.Queue(WORKER_QUEUE))
            welcome = self._welcome(worker, facts)
        except BaseException as error:
            making.add_done_callback(self._abandoned)
            if lock is not None:
                lock.close()
                lock.unlink()
            if isinstance(error, OSError):
                raise exhausted(f"session file {path}: {error.strerror or error}") from error
            raise
        if self._engine is not None:
            self._engine.own(number)
        self.workers[number] = worker
        return worker, welcome

    def _welcome(self, worker: Worker, facts: NamespaceFacts) -> wire.Welcome:
        pools, storage = self.memory.rank_pools(), self.memory.shape.order
        plain = len(pools) == 1 and storage is StorageOrder.PAGE_MAJOR
        return wire.Welcome(
            protocol=PROTOCOL,
            daemon=self.config.name,
            incarnation=self.incarnation,
            namespace_id=facts.id,
            geometry=facts.geometry.to_proto(),
            epoch=self.epoch,
            pages=self.store.pool.pages,
            segment=pools[0].segment if plain else "",
            session_file=worker.lock.path,
            max_tokens=self.config.max_tokens,
            rank_pools=pools,
            storage=common.Storage.Name(int(storage)),
            page_tokens=self.event_sink is not None,
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            report_invariant(error)
        elif error is not None and not isinstance(error, RequestError):
            log.error("%s: %s: %s", self.role, type(error).__name__, error)

    async def _map(self, worker: str, facts: NamespaceFacts, registration: Registration) -> None:
        """Makes an engine's memory the pool. RequestError."""
        assert self._engine is not None
        await self._engine.claim(worker)
        try:
            async with self._making:
                await self._fit(facts, registration)
        except BaseException:
            self._engine.give_up()
            raise

    def _abandoned(self, making: asyncio.Task[None]) -> None:
        """The pool was made, or will not be, for a worker that has not come to be."""
        if self._engine is not None and not making.cancelled() and making.exception() is None:
            self._start(self._engine.let_go())

    async def _fit_once(self, facts: NamespaceFacts) -> None:
        async with self._making:
            await self._fit(facts)

    async def _fit(self, facts: NamespaceFacts, registration: Registration | None = None) -> None:
        if self.facts is not None:
            for difference in differences(self.facts, facts):
                if difference.field != "tenant_salt_digest":
                    raise precondition(f"this daemon serves another model: {difference}")
            if registration is not None:
                self._check_layout(facts, registration.order)
                await self._refit(self.facts, registration)
            return
        self._check_layout(facts, STORAGES[self.config.storage] if registration is None else registration.order)
        try:
            page_bytes, row_bytes = page_bytes_of(facts.geometry, self.config.ranks), facts.geometry.page_bytes
        except ValueError as error:
            raise precondition(f"this daemon cannot serve the model: {error}") from error
        pages = self.config.pool_bytes // page_bytes if registration is None else registration.pages
        if not 1 <= pages < 1 << 31:
            raise exhausted(
                f"--pool-bytes is {self.config.pool_bytes}, a page of this model {page_bytes}; "
                "the pool must hold 1 to 2^31 - 1 pages"
            )
        host_pages = self.config.host_bytes // row_bytes
        if self.config.host_bytes and not 1 <= host_pages < 1 << 31:
            raise exhausted(
                f"--host-bytes is {self.config.host_bytes}, a page of this model {row_bytes}; "
                "the host tier must hold 1 to 2^31 - 1 pages"
            )
        if registration is not None:
            memory = await map_pool(self.config, facts.geometry, registration)
        else:
            name = f"kvferry-{self.incarnation.hex()}-{self.role}-pool"
            memory = await make_pool(self.config, facts.geometry, pages, name)
        try:
            store = Store(pages, self.config.page_size, host_pages=host_pages, limits=store_limits(self.config))
            store.clock.now = self.now()
            if self.event_sink is not None:
                store.log_events()
            if host_pages:
                self._tier = await asyncio.to_thread(
                    open_tier, self.config, self.role, self.incarnation, facts, memory, store
                )
        except (OSError, ValueError) as error:
            memory.close()
            message = f"host tier of {host_pages * row_bytes} bytes (--host-dir {self.config.host_dir!r}): {error}"
            log.warning("%s", message)
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG)
            raise (exhausted(message) if full else precondition(message)) from error
        self.facts = facts
        self._take(memory)
        self.core = self.make_core(store)
        self.has_pool.set()
        log.info(
            "%s pool: %d pages, host tier: %d pages, of %d bytes for %s on %d ranks",
            *(self.role, pages, host_pages, page_bytes, facts.model, self.config.ranks),
        )

    def _check_layout(self, facts: NamespaceFacts, storage: StorageOrder) -> None:
        if facts.geometry.layout is Layout.ENGINE and (self.config.ranks, storage) != (1, StorageOrder.PAGE_MAJOR):
            raise precondition(
                f"ranks is {self.config.ranks} and storage {storage.name}; a page in an engine's own layout "
                "cannot be taken apart: it takes --ranks 1 --storage page"
            )

    async def _refit(self, facts: NamespaceFacts, registration: Registration) -> None:
        """Another memory for a side whose engine has come again: of the tiers the host's has kept what it had."""
        memory = await map_pool(self.config, facts.geometry, registration)
        try:
            if self._tier is not None:
                await asyncio.to_thread(self._tier.attach, memory)
        except BaseException:
            memory.close()
            raise
        self.store.resize(registration.pages)
        self.epoch = secrets.randbits(63)
        self._take(memory)
        self.has_pool.set()
        log.info("%s pool: %d pages, registered again", self.role, registration.pages)

    def _take(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._shape = memory.shape

    def attach(self, worker: Worker) -> None:
        """The worker says that it holds its lock; it is looked at."""
        if worker.lock.try_acquire():
            worker.lock.release()
            raise precondition("attached: the session file is not locked; flock it before mapping the pool")
        worker.attached = True

    def leave(self, worker: Worker) -> None:
        """Its stream has ended."""
        del self.workers[worker.number]
        if self.traces is not None:
            self.traces.left(worker.number)
        if self._engine is not None and self._engine.is_owner(worker.number):
            self._engine.owner_leaves()
        if worker.quiesced or not worker.attached:
            self._proved(worker)
            return
        self.worker_lost(worker)
        self.flush()
        self._lost[worker.number] = worker
        self._start(self._await_proof(worker))

    async def _await_proof(self, worker: Worker) -> None:
        """Until the kernel has released the lost worker's lock it may still write."""
        while not worker.lock.try_acquire():
            await asyncio.sleep(PROOF_SECONDS)
        del self._lost[worker.number]
        self._proved(worker)

    def _proved(self, worker: Worker) -> None:
        worker.lock.close()
        worker.lock.unlink()
        self.worker_gone(worker)
        self.flush()
        if self._engine is not None and self._engine.is_owner(worker.number):
            self.has_pool.clear()
            self._start(self._engine.let_go())

    # -- the end of an engine's memory (engine_pool.Using) -------------------------------------------------------

    async def memory_released(self, worker: Worker, seconds: float) -> bool:
        """Waits until memory that this worker registered, if it did, is mapped no more."""
        if self._engine is None or not self._engine.is_owner(worker.number):
            return True
        return await self._engine.released(seconds)

    def drop_requests(self) -> None:
        self.has_pool.clear()
        if self.core is not None:
            self.core.pool_leaves(self.now())
            self.flush()

    def in_use(self) -> str:
        if self.core is None:
            return ""
        counts = {
            "sessions": self.open_sessions,
            "requests": self.core.running + self.core.waiting_requests,
            "locks": self.store.locks,
            "copies between the tiers": self.store.copies,
            "clearing of pages": int(self._zeroing),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    async def _forget_pool(self) -> None:
        """Nothing uses the memory."""
        memory, self._memory = self.memory, None
        forgotten = self.store.forget_device()
        self.flush()  # routers hear of it
        if self._tier is not None:
            await asyncio.to_thread(self._tier.detach)
        memory.close()
        log.info(
            "%s pool: the engine's memory is unmapped; %d pages are forgotten, %d are in the host tier",
            *(self.role, forgotten, self.store.host_pages),
        )

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
                    self.memory.zero_pages(np.array(effect.pages, np.int64), self._zeroed)
                elif isinstance(effect, ToWorker):
                    self.tell(effect.worker, effect.event)
                elif isinstance(effect, StartCopy):
                    self.on_copy_starts(effect.started)
                    self.tier.start(effect.started, self._copy_done)
                elif isinstance(effect, ForgetRows):
                    self.tier.forget(effect.rows)
                else:
                    try:
                        self.perform(effect)
                    except (ValueError, SessionBroken) as error:
                        self.effect_failed(effect, str(error))
                self._take_effects()
            if self.event_sink is not None and self.core is not None and self.store.events is not None:
                self.event_sink.publish(self.store.events.take())
        finally:
            self._flushing = False

    def _zeroed(self, problem: str) -> None:
        if self._closed:
            return
        if problem:  # they may hold another tenant's bytes, and effects that name them wait: nothing can go on
            report_invariant(RuntimeError(f"pages could not be cleared: {problem}"))
            return
        self._zeroing = False
        self.flush()

    def _take_effects(self) -> None:
        if self.core is not None:
            self._effects.extend(self.core.take_effects())

    def on_copy_starts(self, started: Started) -> None:
        """For traces."""

    def _copy_done(self, number: int, failed: Sequence[int], mismatched: int, seconds: float) -> None:
        if self.traces is not None:
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
        """RESOURCE_EXHAUSTED while too many pages wait for the proof that their worker writes no more."""
        orphaned, bound = self.store.pool.counts().orphaned, self.config.orphaned_share * self.store.pool.pages
        if orphaned > bound:
            raise exhausted(
                f"{orphaned} pages of {len(self._lost)} lost workers are orphaned until these are proven gone; "
                f"new requests are taken up to {int(bound)} (orphaned_share {self.config.orphaned_share:g})"
            )

    @property
    def lost_workers(self) -> int:
        """Whose stream broke, and whose end is not proven."""
        return len(self._lost)

    def tell(self, number: int, event: wire.WorkerEvent) -> None:
        if self.traces is not None:
            self.traces.hear(number, event)
        worker = self.workers.get(number)
        if worker is None:
            return
        try:
            worker.events.put_nowait(event)
        except asyncio.QueueFull:
            worker.overflown.set()  # its stream ends

    def fail(self, worker: Worker, name: Name, error: RequestError) -> None:
        failed = wire.Failed(name=name.to_proto(), error=error.to_proto())
        self.tell(worker.number, wire.WorkerEvent(failed=failed))

    @property
    def memory(self) -> PoolMemory:
        assert self._memory is not None
        return self._memory

    @property
    def tier(self) -> HostTier:
        assert self._tier is not None
        return self._tier

    def copy_workers(self) -> dict[str, Executor]:
        """By name; none before the pool is made."""
        workers = self._memory.workers if self._memory is not None else {}
        return workers | self._tier.workers if self._tier is not None else workers

    @property
    def unverified_pages(self) -> int:
        """Of the host tier: found in its file, and never read since."""
        return self._tier.unverified if self._tier is not None else 0

    @property
    def page_bytes(self) -> int:
        """Of a page over all ranks."""
        assert self._shape is not None
        return self._shape.page_bytes

    @property
    def row_bytes(self) -> int:
        """Of a page in the host tier."""
        assert self._shape is not None
        return self._shape.row_bytes

    def deadline_of(self, milliseconds: int) -> float:
        """A request's deadline: its own if it names one, never past the configured transfer time."""
        most = self.config.transfer_seconds
        return self.now() + (min(milliseconds / 1000, most) if milliseconds else most)

    async def spill_all(self, deadline: float) -> None:
        """Copies what is cached on the device to the host tier's file, until `deadline`."""
        if self.core is None or self._tier is None or not self._tier.survives or not self.has_pool.is_set():
            return
        store = self.store
        self.core.pins.unpin(0)  # what an operator held is saved, too
        while self.now() < deadline and (store.spill(SPILL_PAGES) or store.copies):
            self._effects.extend(tier_effects(store))
            self.flush()
            await asyncio.sleep(0.002)
        log.info("%s: %d pages are in the host tier's file", self.role, store.host_pages)

    async def close(self) -> None:
        """Ends what this side owns; the sessions must have ended before."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tier is not None:
            await self._tier.close()
        for worker in [*self.workers.values(), *self._lost.values()]:
            worker.lock.close()
            worker.lock.unlink()
        if self._memory is not None:
            self._memory.close()


AnySide: TypeAlias = Side[Any]
