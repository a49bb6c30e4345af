"""Requests at the daemon that are followed without a task: what there is to be said of one is said at once, where a
task takes another turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.waiting import SLICES

_T = TypeVar("_T")


class Lasting:
    """Requests that were begun since the last look. Few live until the next, and so none needs a timer of its own."""

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._begun: set[Followed[Any]] = set()
        self.looking: asyncio.TimerHandle | None = None

    def add(self, request: Followed[Any]) -> None:
        self._begun.add(request)
        loop = asyncio.get_running_loop()
        end = loop.time() + min(self._tools.end_seconds, request.seconds) / SLICES
        if self.looking is None or end < self.looking.when():
            if self.looking is not None:
                self.looking.cancel()
            self.looking = loop.call_at(end, self.look)

    def remove(self, request: Followed[Any]) -> None:
        self._begun.discard(request)

    def look(self) -> None:
        lasting = [*self._begun]
        self._begun.clear()
        self.looking = None
        for request in lasting:
            request.last()


class Followed(asyncio.Future[_T]):
    """A request that is done when the daemon touches nothing of it any more: with what its kind returns, or where it is
    given up with `vain`. It has a task only where it lasts, or to be given up, as where it is cancelled."""

    def __init__(
        self, tools: RequestTools, name: RequestName, lease: DaemonRequest, vain: _T, lasting: Lasting
    ) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.lease = lease
        self._tools = tools
        self._name = name
        self._vain = vain
        self._lasting = lasting
        self.seconds = self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._over = False  # it has ended, or is given up

    def follow(self, seconds: float) -> None:
        """Hears its end from now on, for so long at most; the daemon has been told of it."""
        self.seconds, self._until = seconds, self.get_loop().time() + seconds
        self._lasting.add(self)
        self.lease.client.when_ended(self._name, self._ended)

    def last(self) -> None:
        """Has its end awaited: it lasts. What this process slept meanwhile is not all of its time."""
        seconds = max(self.seconds / SLICES, self._until - self.get_loop().time())
        self._task = self.get_loop().create_task(self._awaited(seconds))

    async def _awaited(self, seconds: float) -> None:
        try:
            await self.lease.client.ended(self._name, seconds)
        except (RequestFailed, DaemonGone) as error:
            self.fail(error)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        elif not self._over:
            try:
                result = self.ended_well()
            except Exception as unforeseen:
                self.fail(unforeseen)
                return
            self._hear_no_more()
            self.lease.client.forget(self._name)
            self.lease.ended()
            self.set_result(result)

    def ended_well(self) -> _T:
        """What it returns; the daemon's answers are still there."""
        raise NotImplementedError

    def cancel(self, msg: Any = None) -> bool:
        """Has it given up; it is cancelled then."""
        if self.done():
            return False
        self.fail(asyncio.CancelledError())
        return True

    def fail(self, error: BaseException) -> None:
        """Gives it up."""
        if not self._over:
            self._hear_no_more()
            self._task = self.get_loop().create_task(self._give_up(error))

    def _hear_no_more(self) -> None:
        self._over = True
        if self._task is not None:  # it would forget a new request of that name, too
            self._task.cancel()
        self._lasting.remove(self)

    async def _give_up(self, error: BaseException) -> None:
        try:
            async with self.lease:
                raise error
        except asyncio.CancelledError:
            super().cancel()
        except Exception as unforeseen:
            self.set_exception(unforeseen)
        else:
            self.set_result(self._vain)
