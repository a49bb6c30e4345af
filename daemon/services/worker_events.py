"""What a worker is told, and when: at once, or as the worker has asked (`WorkerHello.late_ms`) together with what comes
next, where it does not wait for it. Each word of its own would wake the worker, which on its side costs more than the
word. Shell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from kvferry.proto import worker_pb2 as wire

MAX_LATE_MS = 1000
MOST_LATE = 256  # events that wait together


class Telling:
    """Tells one worker its events, in order, until `run` is cancelled."""

    def __init__(
        self,
        events: asyncio.Queue[wire.WorkerEvent],
        late_seconds: float,
        write: Callable[[Sequence[wire.WorkerEvent]], Awaitable[None]],
    ) -> None:
        self._events = events
        self._late_seconds = late_seconds
        self._write = write
        self._waits: set[bytes] = set()  # ids of requests whose Admitted the worker waits for

    def admits(self, admit: wire.Admit) -> None:
        """Notes an Admit, before it is answered."""
        if self._late_seconds and admit.held_tokens:
            self._waits.add(admit.name.request_id)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            telling = [await self._events.get()]
            until = loop.time() + self._late_seconds
            while not self._is_urgent(telling[-1]) and len(telling) < MOST_LATE:
                following = await self._next_until(until)
                if following is None:
                    break
                telling.append(following)
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

    def _is_urgent(self, event: wire.WorkerEvent) -> bool:
        if not self._late_seconds:
            return True
        kind = event.WhichOneof("kind")
        if kind == "admitted":
            request: bytes = event.admitted.name.request_id
            if request not in self._waits:
                return False
            self._waits.discard(request)
            return True
        if kind in ("ended", "failed"):
            self._waits.discard(getattr(event, kind).name.request_id)
        return bool(kind != "ended")
