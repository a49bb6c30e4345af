"""The worker's half of a connector: its requests at the daemon, and the copies between its pages and the engine's
blocks, on threads of its own. The engine's thread only hands orders in and takes reports out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvferry.client.client import ANSWER_SLACK_S, DaemonClient
from kvferry.client.requests import DaemonGone, HandshakeFailed, NotOpened, RequestFailed, RequestName
from kvferry.connectors.blocks import BlockMap, BlockPlaces, PoolPages, Tail
from kvferry.connectors.movers import Moment, Mover
from kvferry.connectors.orders import (
    Begin,
    Cancel,
    Drop,
    Forget,
    Load,
    News,
    Order,
    Orders,
    Release,
    Restore,
    Save,
    StorePages,
)
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import DaemonRefused, OpenSession, Sessions, pool_of
from kvferry.connectors.worker_state import (
    DaemonRequest,
    EngineStep,
    Moved,
    Push,
    Reports,
    end_all,
    run_whole,
    wait_for,
)
from kvferry.threads import name_thread
from kvferry.waiting import have_ended

STOP_SECONDS = 10.0
PREEMPT_SECONDS = 30.0  # a copy that runs takes milliseconds

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class WorkerSide:
    """The worker's half: `start`, then orders and reports; `close` ends it. `connect` opens a session with the daemon,
    `mover` moves bytes between its pages and `blocks`."""

    def __init__(self, settings: Settings, blocks: BlockMap, mover: Mover, connect: OpenSession) -> None:
        self.reports = Reports()
        self.moved = Moved()
        self._settings = settings
        self._blocks = blocks
        self._mover = mover
        self._loop = asyncio.new_event_loop()
        self._copier = ThreadPoolExecutor(1, "kvferry copies", initializer=name_thread, initargs=("kvferry copies",))
        self._thread = threading.Thread(target=self._run_loop, name="kvferry requests", daemon=True)
        self._settled = asyncio.Event()
        if not mover.records:
            self._settled.set()
        self._sessions = Sessions(connect, quiet=self._quiet, changed=self._session_changed, settled=self._settled)
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._pushes: dict[str, Push] = {}
        self._pushing = False  # a push was ever handed in: decode engines have none, and wait for none
        self._behind: set[asyncio.Task[None]] = set()  # what the engine does not wait for
        self._saves: list[Save] = []  # of the step under way
        self._step: EngineStep | None = None  # it, where it came with other orders

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the first session. Raises DaemonRefused when the daemon refuses this engine. Where no daemon answers in
        time it goes on without."""
        self._thread.start()
        try:
            seconds = self._settings.connect_seconds
            wait_for(self._sessions.open(seconds), self._loop, seconds + STOP_SECONDS)
        except (HandshakeFailed, TimeoutError) as error:
            self.close()
            raise DaemonRefused(f"the session with the daemon: {error}") from error

    def take(self, orders: Orders) -> None:
        """Takes a step's orders in, before its forward pass."""
        if not self._settled.is_set():
            self._loop.call_soon_threadsafe(self._settled.set)
        if orders.preempted and self._pushing:  # their pushes may not have been taken in yet
            wait_for(self._preempt(orders.preempted), self._loop, PREEMPT_SECONDS)
        if not orders.orders:
            return
        self._saves = [order for order in orders.orders if isinstance(order, Save)]
        now: list[Order] = [each for each in orders.orders if not (isinstance(each, Save) or self._is_released(each))]
        self._pushing = self._pushing or any(isinstance(order, Begin) for order in now)
        if now:
            step = EngineStep(self._mover.moment())
            # Blocks that a request holds may be another's that are computed in this very step.
            self._step = step if any(isinstance(order, Load) and order.held_blocks for order in now) else None
            self._loop.call_soon_threadsafe(self._begin, now, step)

    def _is_released(self, order: Order) -> bool:
        """Whether that was the order, and need not wake the other thread: it sees it when the push is over."""
        push = self._pushes.get(order.request) if isinstance(order, Release) else None
        if push is None:
            return False
        push.released = True
        return not push.over  # set before the other looks whether it was released: one of the two sees it

    @property
    def awaits_step(self) -> bool:
        """Whether `forward_done` has anything to do."""
        return self._step is not None or bool(self._saves)

    def forward_done(self) -> None:
        """Called behind the step's forward pass: what it computes may be copied when it is there."""
        if not self.awaits_step:
            return
        step, self._step = self._step, None
        saves, self._saves = self._saves, []
        done = self._mover.moment()
        if step is not None:
            self._loop.call_soon_threadsafe(step.ended, done)
        if saves:
            self._loop.call_soon_threadsafe(self._save, saves, done)

    def give_up(self) -> None:
        """Ends everything that was ordered, reported as ever. When this returns nothing touches a block."""
        wait_for(end_all(self._tasks.values()), self._loop, PREEMPT_SECONDS)

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                wait_for(self._sessions.close(), self._loop, STOP_SECONDS)
            except TimeoutError:
                _log.warning("the session with the daemon did not end within %g s", STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            have_ended([self._thread], STOP_SECONDS)
        self._copier.shutdown(wait=True)

    def _run_loop(self) -> None:
        name_thread("kvferry requests")
        self._loop.run_forever()

    # -- sessions --------------------------------------------------------------------------------------------------

    def _session_changed(self, there: bool) -> None:
        self.reports.add_news(News(session=there))

    async def _quiet(self) -> None:
        """Ends all that touches the daemon's memory."""
        await end_all([*self._tasks.values(), *self._behind])

    # -- orders ----------------------------------------------------------------------------------------------------

    def _begin(self, orders: Sequence[Order], step: EngineStep) -> None:
        for order in orders:
            if isinstance(order, Load):
                self._run(order.request, self._load(order, step), partial(self._loaded, order))
            elif isinstance(order, Restore):
                self._run(order.request, self._restore(order, step.begun), partial(self._loaded, order))
            elif isinstance(order, StorePages):
                self._run(order.request, self._store(order, step.begun), partial(self._stored, order))
            elif isinstance(order, Begin):
                push = self._pushes[order.request] = Push(order, step.begun, received=not order.blocks)
                push.copying.set()
                self._run(order.request, self._push(push), partial(self._pushed, push))
            elif isinstance(order, Release):
                self._release(order.request)
            elif isinstance(order, Drop):
                self._cancel(order.request)
                self._release(order.request)
            elif isinstance(order, Forget):
                self.moved.resets += 1
                for task in self._tasks.values():
                    task.cancel()
            elif isinstance(order, Cancel):
                self._cancel(order.request)
                self._pushes.pop(order.request, None)  # that it was received is all that is to be reported

    def _run(self, request: str, work: Coroutine[Any, Any, _T], report: Callable[[_T | None], None]) -> None:
        """`report` is called once with what `work` returned, None where it was cancelled, maybe before it began."""
        task = self._loop.create_task(work, name=request)
        self._tasks[request] = task

        def ended(done: asyncio.Task[_T]) -> None:
            if self._tasks.get(request) is done:
                del self._tasks[request]
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self.moved.failed += 1
                _log.error("request %s: %r", request, error, exc_info=error)
            report(None if done.cancelled() or error is not None else done.result())

        task.add_done_callback(ended)

    def _cancel(self, request: str) -> None:
        if (task := self._tasks.get(request)) is not None:
            task.cancel()

    def _loaded(self, order: Load | Restore, good: int | None) -> None:
        """Reports a load: nothing writes into its blocks any more; the first `good` of them are as they should be."""
        self.reports.add_received(order.request, order.blocks[good or 0 :])

    def _save(self, saves: list[Save], done: Moment) -> None:
        for save in saves:
            if (push := self._pushes.get(save.request)) is not None and not push.over:
                push.save, push.saved = save, done
                push.wake.set()

    def _release(self, request: str) -> None:
        if (push := self._pushes.get(request)) is not None:
            push.released = True
            self._report_push(push)

    async def _preempt(self, requests: Sequence[str]) -> None:
        """Takes the requests' blocks away: nothing is read from them any more."""
        for request in requests:
            if (push := self._pushes.get(request)) is not None:
                push.save = None
                await push.copying.wait()

    # -- copies ----------------------------------------------------------------------------------------------------

    async def _copy(self, work: Callable[[], None]) -> None:
        """Copies on the copying thread. However often the caller is cancelled, the copy is over when this is."""
        await run_whole(self._copier, work)

    async def _to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        """Copies pages to blocks, which what the engine had begun before `after` may still use."""
        await self._copy(partial(self._mover.to_blocks, pool, places, after))
        self.moved.loaded_bytes += len(places.blocks) * self._blocks.row_bytes

    async def _to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        """Copies blocks to pages, behind what the engine had begun before `after`, which computes them."""
        await self._copy(partial(self._mover.to_pages, pool, places, after, tail))
        self.moved.saved_bytes += len(places.blocks) * self._blocks.row_bytes

    # -- decode ----------------------------------------------------------------------------------------------------

    async def _load(self, order: Load, step: EngineStep) -> int:
        began = time.monotonic()
        held = len(order.held_blocks) * self._blocks.block_tokens
        async with self._lease(order.request, order.name) as lease:
            client = lease.client
            admitted = await client.admit(
                order.name,
                **order.prompt.words,
                prefill=order.prefill,
                max_new_tokens=1,
                deadline_s=self._settings.deadline_seconds,
                held_tokens=held,
                traceparent=order.traceparent,
            )
            matched = admitted.matched_tokens
            if matched < held:
                own = order.held_blocks[matched // self._blocks.block_tokens :]
                await step.over.wait()
                client.check(order.name)  # the pages are still ours
                pool = pool_of(client)
                places = self._blocks.places(pool, admitted.pages, own, matched, held)
                await self._to_pages(pool, places, step.done)
                client.progress(order.name, held)
            await client.ready(order.name)
            pool, tokens = pool_of(client), order.prompt.tokens
            places = self._blocks.places(pool, admitted.pages, order.blocks, order.start, tokens)
            await self._to_blocks(pool, places, step.begun)
            client.check(order.name)  # the pages were ours until now
            lease.then(self._finish(client, order.name, tokens))
            self._count_load(began)
            return len(order.blocks)
        return 0

    async def _restore(self, order: Restore, begun: Moment) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            client, tokens = lease.client, order.prompt.tokens
            admitted = await client.admit(
                order.name,
                **order.prompt.words,
                prefill="",
                max_new_tokens=1,
                deadline_s=self._settings.deadline_seconds,
                traceparent=order.traceparent,
            )
            await client.ready(order.name)
            end = min(admitted.local_tokens, tokens - 1)
            if end <= order.start:
                return 0
            pool = pool_of(client)
            places = self._blocks.places(pool, admitted.pages, order.blocks, order.start, end)
            await self._to_blocks(pool, places, begun)
            client.check(order.name)
            if end == tokens - 1:  # else it has pages that nobody filled: it is aborted
                lease.then(self._finish(client, order.name, tokens))
            self._count_load(began)
            return (end - order.start) // self._blocks.block_tokens
        return 0

    def _count_load(self, began: float) -> None:
        self.moved.loads += 1
        self.moved.load_seconds += time.monotonic() - began

    async def _store(self, order: StorePages, begun: Moment) -> None:
        async with self._lease(order.request, order.name) as lease:
            client, tokens = lease.client, order.prompt.tokens
            admitted = await client.admit(
                order.name,
                **order.prompt.words,
                prefill="",
                max_new_tokens=1,
                deadline_s=self._settings.store_seconds,
                held_tokens=tokens,
            )
            await client.ready(order.name)
            pool, matched = pool_of(client), admitted.matched_tokens
            own = order.blocks[matched // self._blocks.block_tokens :]
            await self._to_pages(pool, self._blocks.places(pool, admitted.pages, own, matched, tokens), begun)
            lease.then(self._finish(client, order.name, tokens))
            self.moved.stored += 1

    async def _finish(self, client: DaemonClient, name: RequestName, tokens: int) -> None:
        try:
            await client.finish(name, tokens=tokens, digests=b"")
        except RequestFailed as error:
            await client.abort(name, str(error))
        except DaemonGone:
            pass

    # -- prefill ---------------------------------------------------------------------------------------------------

    async def _push(self, push: Push) -> bool:
        """Whether all of it is in the daemon's hands."""
        order, name = push.order, push.order.name
        async with self._lease(order.request, name) as lease:
            client = lease.client
            begun = await client.begin(
                name,
                **order.prompt.words,
                deadline_s=self._settings.deadline_seconds,
                traceparent=order.traceparent,
            )
            if not push.received:
                await self._load_first(client, push, begun.matched_tokens, begun.pages)
            await self._push_chunks(client, push, begun.matched_tokens, begun.pages)
            client.aux(name, b"")  # decode computes the last token again, and samples from that
            lease.then(self._hand_over(client, name))
            self.moved.pushed += 1
            return True
        return False

    def _stored(self, order: StorePages, _: None) -> None:
        self.reports.add_sent(order.request)

    def _pushed(self, push: Push, sent: bool | None) -> None:
        push.over = True
        if not sent:
            self.reports.add_news(News(frozenset({push.order.request})))
        if not push.received:
            push.received = True
            self.reports.add_received(push.order.request, push.order.blocks)
        self._report_push(push)

    async def _load_first(self, client: DaemonClient, push: Push, matched: int, pages: Sequence[int]) -> None:
        order = push.order
        end = min(matched, order.end)
        good = 0
        if end > order.start:
            pool = pool_of(client)
            places = self._blocks.places(pool, pages, order.blocks, order.start, end)
            await self._to_blocks(pool, places, push.begun)
            client.check(order.name)
            good = (end - order.start) // self._blocks.block_tokens
        push.received = True
        self.reports.add_received(order.request, order.blocks[good:])

    async def _push_chunks(self, client: DaemonClient, push: Push, matched: int, pages: Sequence[int]) -> None:
        total, page = push.order.prompt.tokens, self._blocks.page_size
        saved = matched
        while saved < total:
            if push.save is None or push.save.tokens <= saved:
                push.wake.clear()
                await push.wake.wait()
                continue
            save, computed = push.save, push.saved
            end = total if save.tokens >= total else save.tokens // page * page
            if end <= saved:
                push.save = None
                continue
            own = save.blocks[saved // self._blocks.block_tokens :]
            pool = pool_of(client)
            places = self._blocks.places(pool, pages, own, saved, end)
            push.copying.clear()
            try:
                await self._to_pages(pool, places, computed, self._blocks.tail(pages, end) if end == total else None)
            finally:
                push.copying.set()
            client.progress(push.order.name, end)
            saved = end

    async def _hand_over(self, client: DaemonClient, name: RequestName) -> None:
        try:
            await client.ended(name, self._settings.deadline_seconds + ANSWER_SLACK_S)
        except RequestFailed as error:
            _log.info("request %s ended unfinished: %s", name, error)
            await client.abort(name, error.message)
        except DaemonGone:
            pass

    def _report_push(self, push: Push) -> None:
        if push.over and push.released and self._pushes.get(push.order.request) is push:
            del self._pushes[push.order.request]
            self.reports.add_sent(push.order.request)

    # -- leases ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _lease(self, request: str, name: RequestName) -> AsyncIterator[DaemonRequest]:
        """One request at the daemon: its failure is logged and ends the block; what did not end well is aborted."""
        lease = DaemonRequest(self._sessions.client)
        opened = True
        try:
            yield lease
        except (NotOpened, RequestFailed, DaemonGone) as error:
            opened = not isinstance(error, NotOpened)  # its name may be that of a request that runs
            self._failed(request, error)
        finally:
            if lease.ending is not None:
                self._later(lease.ending)
            elif opened and lease.used is not None:
                self._later(lease.used.abort(name, "the engine needs it no more"))

    def _failed(self, request: str, error: Exception) -> None:
        self.moved.failed += 1
        _log.warning("request %s: the engine goes on alone: %s", request, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that the engine need not wait for."""
        task = self._loop.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)
