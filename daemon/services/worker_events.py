"""What a worker is told, and when: at once, or as the worker has asked (`WorkerHello.late_ms`) together with what comes
next, where it does not wait for it. Each word of its own would wake the worker, which on its side costs more than the
word. Shell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from kvferry.daemon.core.limits import hands_in
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire

MAX_LATE_MS = 1000
MOST_LATE = 256  # events that wait together
UNAWAITED_SECONDS = 0.5  # the same, of what an engine with blocks of its own has no use for

_Name: TypeAlias = tuple[bytes, int]


class Telling:
    """Tells one worker its events, in order, until `run` is cancelled."""

    def __init__(
        self,
        events: asyncio.Queue[wire.WorkerEvent],
        late_seconds: float,
        write: Callable[[Sequence[wire.WorkerEvent]], Awaitable[None]],
        *,
        in_blocks: bool = False,
    ) -> None:
        """`in_blocks`: the worker names blocks of its own, and is given no pages."""
        self._events = events
        self._late_seconds = late_seconds
        self._write = write
        self._in_blocks = in_blocks
        self._waits: set[_Name] = set()  # requests whose Admitted the worker waits for
        self._unawaited: set[_Name] = set()  # and those whose Begun or Ended it has no use for
        self._unwanted: dict[_Name, tuple[str, ...]] = {}  # of those that end by themselves: what it is not told

    def hears(self, kind: str, message: wire.WorkerMessage) -> None:
        """Notes what the worker says, before it is answered."""
        if kind == "admit" and message.admit.ends_itself:
            if unwanted := _unwanted(message.admit):
                self._unwanted[_name(message.admit.name)] = unwanted
            return
        if not self._late_seconds:
            return
        if kind == "admit":
            admit = message.admit
            if admit.held_blocks or (admit.held_tokens and not self._in_blocks):
                self._waits.add(_name(admit.name))
            if self._in_blocks and admit.held_tokens < admit.tokens:  # else its end gives blocks back
                self._unawaited.add(_name(admit.name))
        elif kind == "begin" and self._in_blocks and message.begin.patience == wire.PATIENCE_NONE:
            self._unawaited.add(_name(message.begin.name))
        elif kind == "abort":
            self._unawaited.discard(_name(message.abort.name))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            telling = [await self._events.get()]
            if not self._is_wanted(telling[0]):
                continue
            late = self._late(telling[0])
            until = loop.time() + late
            while late and len(telling) < MOST_LATE:
                following = await self._next_until(until)
                if following is None:
                    break
                if not self._is_wanted(following):
                    continue
                telling.append(following)
                late = self._late(following)
                until = min(until, loop.time() + late)
            await self._write(telling)

    async def _next_until(self, end: float) -> wire.WorkerEvent | None:
        """The next event; None where none comes before that time of the loop's clock."""
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._events.get_nowait()
        loop = asyncio.get_running_loop()
        getting = loop.create_task(self._events.get())
        try:
            await asyncio.wait((getting,), timeout=max(0.0, end - loop.time()))
            return getting.result() if getting.done() else None
        finally:
            getting.cancel()  # nothing is lost: a get that is not done has taken nothing

    def _is_wanted(self, event: wire.WorkerEvent) -> bool:
        """Whether the worker is told it."""
        if not self._unwanted:
            return True
        kind = event.WhichOneof("kind")
        if kind not in ("admitted", "ready", "ended", "failed"):
            return True
        name = _name(getattr(event, kind).name)
        unwanted = self._unwanted.get(name, ())
        if kind in ("ended", "failed") or (kind == "ready" and kind not in unwanted):
            self._unwanted.pop(name, None)
        return kind not in unwanted

    def _late(self, event: wire.WorkerEvent) -> float:
        """Seconds that it may wait for others."""
        if not self._late_seconds:
            return 0.0
        kind = event.WhichOneof("kind")
        if kind == "admitted":
            request = _name(event.admitted.name)
            waits = request in self._waits
            self._waits.discard(request)
            return 0.0 if waits else UNAWAITED_SECONDS if self._in_blocks else self._late_seconds
        if kind == "begun":
            request = _name(event.begun.name)
            unawaited = request in self._unawaited
            self._unawaited.discard(request)  # its Ended gives blocks back
            return UNAWAITED_SECONDS if unawaited else 0.0
        if kind in ("ended", "failed"):
            request = _name(getattr(event, kind).name)
            unawaited = request in self._unawaited
            self._waits.discard(request)
            self._unawaited.discard(request)
            if kind == "ended":
                return UNAWAITED_SECONDS if unawaited else self._late_seconds
        return 0.0


def _unwanted(admit: wire.Admit) -> tuple[str, ...]:
    """The events that are not told of a request that ends by itself, aborted or not."""
    if hands_in(admit):
        return "admitted", "ready"
    return ("admitted",) if admit.prefill else ()


def _name(message: common.RequestName) -> _Name:
    return message.request_id, message.attempt
