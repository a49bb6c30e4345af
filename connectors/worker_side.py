"""The worker's half of a connector: it carries the scheduler's orders out as requests at the daemon, on threads of its
own. The engine's thread only hands orders in and takes reports out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvferry.client.one_rank import TOGETHER_SECONDS, OneRank
from kvferry.client.requests import HandshakeFailed
from kvferry.connectors.block_requests import BlockRequests
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.daemon_requests import DaemonRequests, RequestTools, Work
from kvferry.connectors.movers import Moment, Mover
from kvferry.connectors.orders import (
    Begin,
    Cancel,
    Drop,
    Fill,
    FirstToken,
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
from kvferry.connectors.pool_requests import PoolRequests
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import DaemonRefused, OpenSession, Sessions
from kvferry.connectors.worker_state import EngineStep, Moved, Push, Reports, cancel_begun, end_all, wait_for
from kvferry.threads import CallThread, name_thread
from kvferry.waiting import have_ended

STOP_SECONDS = 10.0
PREEMPT_SECONDS = 30.0  # a copy that runs takes milliseconds

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _uses_blocks(order: Order) -> bool:
    """Whether what the engine had begun before may still use the blocks that the order gives away."""
    return isinstance(order, (Load, Restore, StorePages, Fill)) or (
        isinstance(order, Begin) and (order.waits or bool(order.blocks))
    )


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop: uvloop's where the engine has it, as vLLM does. A prompt of 9,248 tokens takes it 0.86 ms of CPU
    in the place of 1.06 in a prefill engine, 1.57 of 1.86 in a decode engine (medians of 16 rounds by turns)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


class WorkerSide:
    """The worker's half: `start`, then orders and reports; `close` ends it. `connect` opens a session with the daemon,
    `mover` moves bytes between its pages and `blocks`."""

    def __init__(
        self, settings: Settings, blocks: BlockMap, mover: Mover, connect: OpenSession, *, rank: OneRank | None = None
    ) -> None:
        self.reports = Reports()
        self._rank = 0 if rank is None else rank.rank
        self._open_seconds = settings.connect_seconds + (0.0 if rank is None else TOGETHER_SECONDS)
        self._settings = settings
        self._loop = new_loop()
        self._copier = CallThread("kvferry copies")
        self._thread = threading.Thread(target=self._run_loop, name="kvferry requests", daemon=True)
        self._settled = asyncio.Event()
        if not mover.records:
            self._settled.set()
        self._sessions = Sessions(connect, quiet=self._quiet, changed=self._session_changed, settled=self._settled)
        tools = self._tools = RequestTools(settings, blocks, mover, self._sessions, self._copier, self.reports)
        self._requests: DaemonRequests = BlockRequests(tools) if settings.pool == "engine" else PoolRequests(tools)
        self._works: dict[str, asyncio.Future[Any]] = {}
        self._pushes: dict[str, Push] = {}
        self._begun: dict[str, int] = {}  # prompts whose end was not ordered, by the step that began them
        self._pushing = False  # a push was ever handed in: decode engines have none, and wait for none
        self._loading = False  # blocks were ever given to a load or a store; then orders keep behind it
        self._steps = 0  # that came with orders
        self._saves: list[Save] = []  # of the step under way
        self._step: EngineStep | None = None  # it, where it came with other orders
        self.awaits_step = False
        """Whether `forward_done` has anything to do."""

    @property
    def moved(self) -> Moved:
        """Counts of what was copied."""
        return self._tools.moved

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the first session. Raises DaemonRefused when the daemon refuses this engine. Where no daemon answers in
        time it goes on without."""
        self._thread.start()
        try:
            opening = self._sessions.open(self._settings.connect_seconds)
            wait_for(opening, self._loop, self._open_seconds + STOP_SECONDS)
        except (HandshakeFailed, TimeoutError) as error:
            self.close()
            _log.error("this engine does not start: %s", error)  # found without reading the engine's traceback
            raise DaemonRefused(f"the session with the daemon: {error}") from error

    def take(self, orders: Orders) -> None:
        """Takes a step's orders in, before its forward pass."""
        if not self._settled.is_set():
            self._loop.call_soon_threadsafe(self._settled.set)
        if orders.preempted and self._pushing:  # their pushes may not have been taken in yet
            wait_for(self._preempt(orders.preempted), self._loop, PREEMPT_SECONDS)
        if not orders.orders:
            return
        self._steps += 1
        self._saves = [order for order in orders.orders if isinstance(order, Save)]
        now: list[Order] = [each for each in orders.orders if not (isinstance(each, Save) or self._is_told(each))]
        for order in now:
            if isinstance(order, Begin):
                self._pushing = True
                self._begun[order.request] = self._steps
            elif isinstance(order, (Drop, Cancel)):
                self._begun.pop(order.request, None)
        if now:
            step = EngineStep(self._steps, self._tools.mover.moment() if any(map(_uses_blocks, now)) else None)
            # Blocks that a request holds may be another's that are computed in this very step.
            self._step = step if any(isinstance(order, (Load, Fill)) and order.held_blocks for order in now) else None
            self._loading = self._loading or step.begun is not None
            if self._pushing or not self._loading:  # prompts that are begun wait for nothing
                self._loop.call_soon_threadsafe(self._begin, now, step)
            else:
                self._behind(step.begun, self._begin, now, step)
        self.awaits_step = self._step is not None or bool(self._saves)

    def _is_told(self, order: Order) -> bool:
        """Whether the other thread has been told all of this order, behind what it was told before."""
        if isinstance(order, FirstToken):
            self.tell(order)
            return True
        if not isinstance(order, Release):
            return False
        push, begun = self._pushes.get(order.request), self._begun.pop(order.request, None)
        if push is None or push.since != begun:  # the other thread has not come to it, or to the end of one of that id
            return False
        if not push.decided:
            self._loop.call_soon_threadsafe(push.decide, order.token)
        push.released = True
        return not push.over  # set before the other looks whether it was released: one of the two sees it

    def forward_done(self) -> None:
        """Called behind the step's forward pass: what it computes may be copied when it is there."""
        if not self.awaits_step:
            return
        self.awaits_step = False
        step, self._step = self._step, None
        saves, self._saves = self._saves, []
        done = self._tools.mover.moment()
        if step is not None:
            self._behind(done, step.ended, done)
        if saves:
            self._behind(done, self._save, saves, self._steps, done)

    def _behind(self, after: Moment, call: Callable[..., None], *args: Any) -> None:
        """Calls it on the loop. Where requests wait for what was begun before `after`, that is waited for first: the
        loop wakes once. What comes later waits behind it."""
        if not (self._requests.awaits_computed and self._tools.mover.records):
            self._loop.call_soon_threadsafe(call, *args)
        else:
            self._copier.submit(partial(self._when_computed, after, call, args))

    def _when_computed(self, after: Moment, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            if after is not None:
                self._tools.mover.computed(after)
        except Exception:  # the request finds it, too
            _log.debug("what was begun before an order", exc_info=True)
        self._loop.call_soon_threadsafe(call, *args)

    def _flush(self) -> None:
        """What `_behind` was given has been handed to the loop. Raises TimeoutError."""
        if not self._copier.flush(PREEMPT_SECONDS):
            raise TimeoutError(f"what the engine had begun is not computed within {PREEMPT_SECONDS:g} s")

    def tell(self, first: FirstToken) -> None:
        """Tells a push its reply's first token, which a later order says again."""
        self._loop.call_soon_threadsafe(self._decide, first)

    def give_up(self) -> None:
        """Ends everything that was ordered, reported as ever. When this returns nothing touches a block. Raises
        TimeoutError."""
        self._flush()
        wait_for(end_all(self._works.values()), self._loop, PREEMPT_SECONDS)

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):  # else the device is lost, and what was ordered never begins
                self._flush()
            try:
                wait_for(self._sessions.close(), self._loop, STOP_SECONDS)
            except TimeoutError:
                _log.warning("the session with the daemon did not end within %g s", STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            if have_ended([self._thread], STOP_SECONDS):
                self._loop.close()
        if not self._copier.close(STOP_SECONDS):
            _log.warning("a copy did not end within %g s", STOP_SECONDS)

    def _run_loop(self) -> None:
        name_thread("kvferry requests")
        self._loop.run_forever()

    # -- sessions --------------------------------------------------------------------------------------------------

    def _session_changed(self, there: bool) -> None:
        self.reports.add_news(News(sessions={self._rank: there}))

    async def _quiet(self) -> None:
        """Ends all that touches the daemon's memory."""
        await self._requests.quiet([*self._works.values(), *self._tools.behind])

    # -- orders ----------------------------------------------------------------------------------------------------

    def _begin(self, orders: Sequence[Order], step: EngineStep) -> None:
        for order in orders:
            if isinstance(order, Load):
                self._run(order.request, self._requests.load(order, step), partial(self._loaded, order))
            elif isinstance(order, Restore):
                self._run(order.request, self._requests.restore(order, step.begun), partial(self._loaded, order))
            elif isinstance(order, StorePages):
                self._run(order.request, self._requests.store(order, step.begun), partial(self._stored, order))
            elif isinstance(order, Begin):
                push = self._pushes[order.request] = Push(order, step.number, step.begun, received=not order.blocks)
                self._watch(order.request, self._requests.push(push), partial(self._pushed, push))
            elif isinstance(order, Fill):
                self._fill(order, step)
            elif isinstance(order, Release):
                self._release(order)
            elif isinstance(order, Drop):
                self._drop(order)
            elif isinstance(order, Forget):
                self.moved.resets += 1
                for request in self._works:
                    self._cancel(request)
            elif isinstance(order, Cancel):
                self._cancel(order.request)
                self._pushes.pop(order.request, None)  # that it was received is all that is to be reported

    def _run(self, request: str, work: Work[_T], report: Callable[[_T | None], None]) -> None:
        begun = work if isinstance(work, asyncio.Future) else self._loop.create_task(work, name=request)
        self._watch(request, begun, report)

    def _watch(self, request: str, work: asyncio.Future[_T], report: Callable[[_T | None], None]) -> None:
        """`report` is called once with the work's result, None where it was cancelled, maybe before it began."""
        self._works[request] = work

        def ended(done: asyncio.Future[_T]) -> None:
            if self._works.get(request) is done:
                del self._works[request]
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self.moved.failed += 1
                _log.error("request %s: %r", request, error, exc_info=error)
            report(None if done.cancelled() or error is not None else done.result())

        work.add_done_callback(ended)

    def _cancel(self, request: str) -> None:
        if (work := self._works.get(request)) is not None:
            cancel_begun(work)

    def _loaded(self, order: Load | Restore, good: int | None) -> None:
        """Reports a load: nothing writes into its blocks any more; the first `good` of them are as they should be."""
        self.reports.add_received(order.request, order.blocks[good or 0 :])

    def _save(self, saves: list[Save], step: int, done: Moment) -> None:
        for save in saves:
            push = self._pushes.get(save.request)
            if push is not None and push.since <= step and not push.over:  # else it is of one that had this id before
                push.computed(save, done)

    def _fill(self, order: Fill, step: EngineStep) -> None:
        push = self._pushes.get(order.request)
        if push is None or push.over:
            self.reports.add_received(order.request, order.blocks)
            return
        push.fill, push.filling, push.begun, push.received = order, step, step.begun, False
        push.changed()

    def _decide(self, order: FirstToken) -> None:
        if (push := self._pushes.get(order.request)) is not None:
            push.decide(order.token)

    def _drop(self, order: Drop) -> None:
        push = self._pushes.get(order.request)
        if push is None or not push.handed or order.token is None:  # else it is whole, whatever came after
            self._cancel(order.request)
        self._release(order)

    def _release(self, order: Release | Drop) -> None:
        if (push := self._pushes.get(order.request)) is not None:
            push.decide(order.token)
            push.released = True
            self._report_push(push)

    async def _preempt(self, requests: Sequence[str]) -> None:
        """Takes the requests' blocks away: nothing is read from them any more."""
        pushes = [(push, self._works.get(push.order.request)) for push in map(self._pushes.get, requests) if push]
        await asyncio.gather(*(self._requests.take_away(push, task) for push, task in pushes))

    def _stored(self, order: StorePages, _: None) -> None:
        self.reports.add_sent(order.request)

    def _pushed(self, push: Push, sent: bool | None) -> None:
        push.over = True
        if not sent:
            self.reports.add_news(News(frozenset({push.order.request})))
        if not push.received:
            push.received = True
            self.reports.add_received(push.order.request, push.load.blocks)
        self._report_push(push)

    def _report_push(self, push: Push) -> None:
        if push.over and push.released and self._pushes.get(push.order.request) is push:
            del self._pushes[push.order.request]
            self.reports.add_sent(push.order.request)
