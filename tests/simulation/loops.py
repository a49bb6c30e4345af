"""Processes of the simulation: each has an event loop of its own on the clock's virtual time, stands still, dies.

The product's coroutines run on these loops as on asyncio's own. What threads do is done at once, a moment later. A
process that stands still runs nothing; as it goes on, the clock has gone on: timers that have expired come first, then
what others sent meanwhile. A dead one runs nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tests.simulation.clock import Clock, Violation

WAKING = 0.02  # seconds at most until a process that stood still reads what came meanwhile


class Handle:
    """A call that is due: as asyncio.TimerHandle."""

    __slots__ = ("_args", "_call", "_cancelled", "_context", "_loop", "_sent", "_when")

    def __init__(
        self,
        loop: ProcessLoop,
        when: float,
        call: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        sent: bool = False,
    ) -> None:
        self._loop, self._when, self._call, self._args = loop, when, call, args
        self._context = context
        self._cancelled = False
        self._sent = sent  # by another process

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        """It is due."""
        if not (self._loop.unread if self._sent else self._loop.undone).has(self):
            self.make()

    def make(self) -> None:
        loop = self._loop
        if self._cancelled or loop.ended:
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(loop)
        try:
            if self._context is None:
                self._call(*self._args)
            else:
                self._context.run(self._call, *self._args)
        finally:
            asyncio._set_running_loop(before)


class Backlog:
    """Calls that were due while a process stood still: made when it goes on, in the order in which they were due."""

    def __init__(self, clock: Clock, until: Callable[[], float]) -> None:
        self._clock, self._until = clock, until
        self._handles: deque[Handle] = deque()

    def has(self, handle: Handle) -> bool:
        """Takes the call in, if it is not to be made now."""
        if self._until() <= self._clock.now and not self._handles:
            return False
        if not self._handles:
            self._clock.at(max(self._until(), self._clock.now), self._go_on)
        self._handles.append(handle)
        return True

    def _go_on(self) -> None:
        while self._handles:
            if self._until() > self._clock.now:  # it stands still once more
                self._clock.at(self._until(), self._go_on)
                return
            self._handles.popleft().make()


class ProcessLoop(asyncio.AbstractEventLoop):
    """A process, as asyncio sees it."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.ended = False
        self.awake_at = 0.0  # until then it stands still
        self.reads_at = 0.0  # likewise, for what others sent
        self.undone = Backlog(clock, lambda: self.awake_at)
        self.unread = Backlog(clock, lambda: self.reads_at)
        self.tasks: dict[int, asyncio.Task[Any]] = {}  # that have not ended, in the order in which they began
        self._next_task = 0

    # -- for others ------------------------------------------------------------------------------------------------

    def stand_still(self, seconds: float) -> None:
        clock = self.clock
        self.awake_at = max(self.awake_at, clock.now + seconds)
        self.reads_at = max(self.reads_at, self.awake_at + clock.between(0.0, WAKING))

    def die(self) -> None:
        self.ended = True

    def deliver(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """A call that comes from outside of the process."""
        self.clock.at(when, Handle(self, when, call, args, None, sent=True).run)

    def here(self, call: Callable[..., object], *args: Any) -> object:
        """The result of a call that this process makes now."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            return call(*args)
        finally:
            asyncio._set_running_loop(before)

    def forget(self) -> None:
        """Ends coroutines that nobody runs any more: their frames are let go."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they begin at their ends is not awaited
            for task in self.tasks.values():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):  # they await something there
                    task.get_coro().close()  # type: ignore[union-attr]

    # -- asyncio.AbstractEventLoop ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:  # type: ignore[override]
        return self.call_at(self.clock.now, callback, *args, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:  # type: ignore[override]
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:  # type: ignore[override]
        handle = Handle(self, when, callback, args, context)
        self.clock.at(max(when, self.clock.now), handle.run)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, name=name)
        number = self._next_task = self._next_task + 1
        self.tasks[number] = task
        task.add_done_callback(partial(self._ended, number))
        return task

    def _ended(self, number: int, task: asyncio.Task[Any]) -> None:
        del self.tasks[number]
        if not task.cancelled() and isinstance(error := task.exception(), AssertionError):
            raise Violation(f"{self.name}: a task ended by {error!r}") from error

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A moment later, at once: a thread of a process stands still with it."""
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(result)

        self.call_later(self.clock.between(0.00005, 0.005), work)
        return future  # type: ignore[return-value]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A broken invariant, or an error that nobody caught."""
        error = context.get("exception")
        if error is not None and not self.ended:
            raise Violation(f"{self.name}: {context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False
