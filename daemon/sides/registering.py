"""The way of a worker to a side: what it says is judged, the tiers are made for it or fit it, it is welcome. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import exhausted, invalid, precondition
from kvferry.daemon.memory.making import registration_of
from kvferry.daemon.sides.engine_pool import EnginePool
from kvferry.daemon.sides.gathering import Gathering, Welcomes, together
from kvferry.daemon.sides.tasks import SideTasks
from kvferry.daemon.sides.tiers import SideTiers
from kvferry.daemon.sides.workers import Ranks, SideWorkers, Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.proto.versions import WORKER_PROTOCOL
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.namespace import NamespaceFacts
from kvferry.transfer.geometry.registration import Registration


class Registering:
    """`engine`: whose memory the pool is, with --pool engine."""

    def __init__(
        self,
        config: DaemonConfig,
        incarnation: bytes,
        tiers: SideTiers,
        workers: SideWorkers,
        engine: EnginePool | None,
        tasks: SideTasks,
        *,
        sends_back: bool = False,
    ) -> None:
        """`sends_back`: what an engine's blocks hold may go back to prefill."""
        self._config = config
        self._incarnation = incarnation
        self._tiers = tiers
        self._workers = workers
        self._engine = engine
        self._tasks = tasks
        self._sends_back = sends_back
        self._coming = 0  # workers that were judged, and are not here yet
        self._gathering = Gathering(config.ranks, config.max_workers, workers, self._take_ranks_in, tasks)

    async def register(self, hello: wire.WorkerHello) -> tuple[Worker, wire.Welcome]:
        """Takes a worker in, making the pool for the first one; one of an engine's ranks with all of them. RequestError
        where it does not fit."""
        self._check(hello)
        if hello.HasField("rank"):
            return await self._gathering.join(hello)
        return (await self._take_in(hello, 1))[0]

    async def _take_ranks_in(self, hellos: Sequence[wire.WorkerHello]) -> Welcomes:
        return await self._take_in(together(hellos), len(hellos))

    async def _take_in(self, hello: wire.WorkerHello, processes: int) -> Welcomes:
        self._check_room()
        self._coming += 1  # making a pool takes long, and others come meanwhile
        try:
            return await self._fit_in(hello, processes)
        finally:
            self._coming -= 1

    async def _fit_in(self, hello: wire.WorkerHello, processes: int) -> Welcomes:
        registration = registration_of(self._config, hello)
        hello.facts.geometry.page_size = self._config.page_size
        try:
            facts = NamespaceFacts.from_proto(hello.facts)
        except ValueError as error:
            raise invalid(str(error)) from error
        # In a task of its own: a worker that leaves meanwhile must not leave half a pool.
        fitting = self._tiers.fit(facts) if registration is None else self._map(hello.worker, facts, registration)
        making = self._tasks.start(fitting)
        workers: list[Worker] = []
        try:
            await asyncio.shield(making)
            self._tiers.cache.namespace(facts.id)
            pools = self._tiers.memory.rank_pools()
            for _ in range(processes):
                workers.append(self._workers.make(hello.worker, facts.id, pools))
            welcomes = [(worker, self._welcome(worker, facts, pools)) for worker in workers]
        except BaseException:
            making.add_done_callback(self._abandoned)
            for worker in workers:
                worker.drop_lock()
            raise
        if processes > 1:
            Ranks.join(workers)
        if self._engine is not None:
            self._engine.own(workers[0].number)
        for worker in workers:
            self._workers.enter(worker)
        return welcomes

    def _check(self, hello: wire.WorkerHello) -> None:
        if hello.protocol != WORKER_PROTOCOL:
            raise precondition(
                f"protocol is {hello.protocol}; this daemon speaks {WORKER_PROTOCOL}: install the same kvferry on both"
            )
        if len(hello.worker) > MAX_NAME_CHARS:
            raise invalid(f"worker has {len(hello.worker)} characters; the bound is {MAX_NAME_CHARS}")
        page_size = hello.facts.geometry.page_size
        if page_size not in (0, self._config.page_size):
            raise precondition(
                f"page_size: the worker has {page_size}, the daemon {self._config.page_size}; "
                "give one of them the other's"
            )

    def _check_room(self) -> None:
        workers, most = self._workers, self._config.max_workers
        if workers.may_write + self._coming >= most:
            raise exhausted(
                f"{workers.may_write} workers are here, or left and are not proven gone, and {self._coming} are "
                f"coming; --max-workers is {most}"
            )

    async def _map(self, worker: str, facts: NamespaceFacts, registration: Registration) -> None:
        """Makes an engine's memory the pool. RequestError."""
        assert self._engine is not None
        await self._engine.claim(worker)
        try:
            await self._tiers.fit(facts, registration)
        except BaseException:
            self._engine.give_up()
            raise

    def _abandoned(self, making: asyncio.Task[None]) -> None:
        """The pool was made, or will not be, for a worker that has not come to be."""
        if self._engine is not None and not making.cancelled() and making.exception() is None:
            self._tasks.start(self._engine.let_go())

    def _welcome(self, worker: Worker, facts: NamespaceFacts, pools: list[wire.RankPool]) -> wire.Welcome:
        tiers, storage = self._tiers, self._tiers.memory.shape.order
        plain = len(pools) == 1 and storage is StorageOrder.PAGE_MAJOR
        return wire.Welcome(
            protocol=WORKER_PROTOCOL,
            daemon=self._config.name,
            incarnation=self._incarnation,
            namespace_id=facts.id,
            geometry=facts.geometry.to_proto(),
            epoch=tiers.epoch,
            pages=tiers.welcome_pages,
            block_tokens=tiers.block_tokens,
            segment=pools[0].segment if plain else "",
            session_file=worker.lock.path,
            max_tokens=self._config.max_tokens,
            rank_pools=pools,
            storage=common.Storage.Name(int(storage)),
            page_tokens=tiers.cache.events is not None,
            way_back=self._sends_back and tiers.block_tokens > 0,
            stows=tiers.stows,
            ends_itself=tiers.block_tokens > 0,
        )
