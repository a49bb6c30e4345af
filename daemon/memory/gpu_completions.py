"""The ends of GPU copies, told to the event loop.

Copies within a GPU take some 50 us, and a thread that sleeps takes longer than that to wake. So while copies run, and
for a moment after, the loop does not sleep but looks at them in every turn; what takes longer is left to a thread that
waits. Copies of one stream end in the order in which they were issued: a turn looks at none behind one that runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from kvferry._core import GpuCopy, GpuError, GpuWaiter
from kvferry.daemon.memory.interface import CopyEnd

AWAKE_SECONDS = 0.001  # since a copy was added or ended: the next one is near
LOOK_SECONDS = 1.0  # between the thread's looks at whether it is to end
MAX_COPIES = 1 << 14


class _Waited(NamedTuple):
    copy: GpuCopy
    done: CopyEnd
    stream: Hashable


class CopyEnds:
    """The ends of copies, told to the event loop. All methods but the thread's own and `close` are called on the event
    loop's thread."""

    def __init__(self) -> None:
        self._waiter = GpuWaiter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, _Waited] = {}  # by id of the copy, which is held here; in the order of issue
        self._given: set[int] = set()  # of these, what the thread waits for
        self._awake_until = 0.0
        self._turning = False
        self._closing = False
        self._oldest: tuple[GpuCopy | None, float] = (None, 0.0)  # at the last look, and since when it is
        self._thread = threading.Thread(target=self._run, name="kvferry-copy-ends", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Copies that run."""
        return len(self._waiting)

    def oldest(self, now: float) -> float:
        """Seconds for which the copy that was added first has been the first, as those who ask saw it; 0: none runs."""
        first = next(iter(self._waiting.values())).copy if self._waiting else None
        if first is None or first is not self._oldest[0]:
            self._oldest = (first, now)
        return now - self._oldest[1]

    def issue(self, begin: Callable[[], GpuCopy], done: CopyEnd, stream: Hashable = None) -> None:
        """Begins a copy, whose end is told to `done`; `stream` names the one on which it runs, and no other of this
        process. ValueError where too many are waited for, and what `begin` raises: then no copy runs, and `done` is not
        called."""
        if len(self._waiting) >= MAX_COPIES:
            raise ValueError(f"copies that run are {len(self._waiting)}; they must be {MAX_COPIES} at most")
        self._loop = asyncio.get_running_loop()
        copy = begin()
        self._waiting[id(copy)] = _Waited(copy, done, stream)
        self._stay_awake()

    def stop(self) -> None:
        """Tells nobody of an end any more. Idempotent."""
        self._closing = True
        self._waiter.wake()

    def close(self) -> None:
        """Waits for the copies that run; behind `stop` from any thread."""
        self.stop()
        self._thread.join()
        for waited in self._waiting.values():
            try:
                waited.copy.wait()
            except GpuError:
                continue  # it has ended all the same
        self._waiting.clear()
        self._oldest = (None, 0.0)

    def _stay_awake(self) -> None:
        assert self._loop is not None
        self._awake_until = time.monotonic() + AWAKE_SECONDS
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One look, in every turn of the loop while it is awake."""
        if self._closing:
            return
        assert self._loop is not None
        self._tell(self._ended())
        if time.monotonic() < self._awake_until:
            self._loop.call_soon(self._turn)
            return
        self._turning = False
        for key, waited in self._waiting.items():
            if key not in self._given:
                self._given.add(key)
                self._waiter.add(waited.copy)

    def _ended(self) -> list[GpuCopy]:
        """Those that have ended, but for what the thread waits for."""
        ended: list[GpuCopy] = []
        running: set[Hashable] = set()  # streams whose first copy runs
        for key, (copy, _, stream) in self._waiting.items():
            if key in self._given or stream in running:
                continue
            if _has_ended(copy):
                ended.append(copy)
            elif stream is not None:
                running.add(stream)
        return ended

    def _run(self) -> None:
        while not self._closing:
            ended = self._waiter.wait(LOOK_SECONDS)
            if ended and not self._closing:
                assert self._loop is not None, "a copy came from a loop"
                try:
                    self._loop.call_soon_threadsafe(self._tell, ended)
                except RuntimeError:  # the loop is closed: who asked is gone
                    return

    def _tell(self, ended: list[GpuCopy]) -> None:
        for copy in ended:
            if self._closing:
                return
            found = self._waiting.pop(id(copy), None)
            self._given.discard(id(copy))
            if found is None:
                continue
            problem = ""
            try:
                copy.done()
            except GpuError as error:
                problem = f"GpuError: {error}"
            self._stay_awake()
            try:
                found.done(problem)
            except Exception as error:  # those that ended with it, and all that come later, are told even so
                self._report(error)

    def _report(self, error: Exception) -> None:
        """An invariant that it breaks ends the daemon."""
        assert self._loop is not None
        context = {"message": "the end of a copy could not be dealt with", "exception": error}
        self._loop.call_exception_handler(context)


def _has_ended(copy: GpuCopy) -> bool:
    try:
        return copy.done()
    except GpuError:
        return True
