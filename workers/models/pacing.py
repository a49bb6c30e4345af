"""The waits of a synthetic engine: as long as its model would take, divided by the clock factor.

Time is kept as queues keep it: who was there when the one before ended starts at that end, so what this machine itself
spends in between is inside the modelled time, not on top of it. Where it spends more, the engine falls behind, and says
by how much.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.engine_model import EngineModel
from kvferry.workers.models.interface import SequenceCompute

GRACE_S = 0.1  # a batch goes on without a sequence that has not come for its next step
OPENING_S = 0.1  # a prompt that is not begun by then lets others compute

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Stepping(Protocol):
    async def step(self, context: int) -> None:
        """Returns when a step of this sequence, which has `context` tokens, would be over."""

    async def compute(self, sequence: SequenceCompute, token: int, position: int) -> int:
        """Computes the step by `sequence.step`: the next token."""


class Pace(Protocol):
    """The waits of one worker, on its event loop."""

    def turn(self) -> AbstractAsyncContextManager[Turn]:
        """A prompt's computation, from its beginning on."""

    async def prompt(self, start: int, end: int, since: float) -> None:
        """Returns when the prompt's tokens [start, end) would be computed; `since`: when it was first asked for."""

    async def arrived(self, delta_bytes: int, host_tokens: int) -> None:
        """Returns when a prompt's delta would have arrived and its pages in the host tier would be restored."""

    async def fetched(self, tokens: int) -> None:
        """Returns when so many of a prompt's tokens would have been fetched."""

    def decoding(self) -> AbstractAsyncContextManager[Stepping]:
        """A sequence from its first step to its last."""

    def close(self) -> None:
        """Ends all waits."""


class Turn:
    """A prompt's turn at the device; with no lock it always has it."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        self._lock = lock
        self._held = False
        self.since = time.monotonic()

    async def take(self) -> None:
        if self._lock is not None:
            await self._lock.acquire()
            self._held = True

    def give_up(self) -> None:
        if self._lock is not None and self._held:
            self._lock.release()
            self._held = False

    async def opening(self, begin: Awaitable[_T]) -> _T:
        """Awaits `begin`, the daemon's answer that the prompt may be computed, with what it matches then. It may wait
        for pages: the turn is not kept for that long."""
        if self._lock is None:
            return await begin
        task = asyncio.ensure_future(begin)
        try:
            done, _ = await asyncio.wait({task}, timeout=OPENING_S)
            if not done:
                self.give_up()
                await asyncio.wait({task})
                self.since = time.monotonic()
                await self.take()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        return task.result()


class NoPace:
    """An engine that takes its own time, in `thread`."""

    def __init__(self, thread: ComputeThread) -> None:
        self._steps = _OwnTime(thread)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        yield Turn(None)

    async def prompt(self, start: int, end: int, since: float) -> None:
        pass

    async def arrived(self, delta_bytes: int, host_tokens: int) -> None:
        pass

    async def fetched(self, tokens: int) -> None:
        pass

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[Stepping]:
        yield self._steps

    def close(self) -> None:
        pass


class _OwnTime:
    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def step(self, context: int) -> None:
        pass

    async def compute(self, sequence: SequenceCompute, token: int, position: int) -> int:
        return await self._thread.run(sequence.step, token, position)


@dataclass(slots=True)
class Timeline:
    """A device or a link, which serves one after the other."""

    clock: float
    free_at: float = 0.0
    served: int = 0
    busy_s: float = 0.0  # the model's
    behind_s: float = 0.0  # this machine's, beyond the modelled time

    async def serve(self, seconds: float, since: float) -> None:
        """Waits until one has been served for so long. `since`: from when on it waits, by time.monotonic()."""
        end = max(self.free_at, since) + seconds / self.clock
        self.served += 1
        self.busy_s += seconds
        left = end - time.monotonic()
        if left < 0:
            self.behind_s -= left
            end -= left
        self.free_at = end
        if left > 0:
            await asyncio.sleep(left)


class ModelPace:
    """An engine that takes as long as `model` says. `token_bytes`: of a token in the scaled pool."""

    def __init__(self, model: EngineModel, *, clock: float, token_bytes: int) -> None:
        if not clock > 0:
            raise ValueError(f"clock must be > 0, got {clock:g}")
        self._model = model
        self._token_bytes = token_bytes
        self._device = Timeline(clock)
        self._link = Timeline(clock)
        self._host = Timeline(clock)
        self._turns = asyncio.Lock()
        self._batch = Batch(model, self._device)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        turn = Turn(self._turns)
        await turn.take()
        try:
            yield turn
        finally:
            turn.give_up()

    async def prompt(self, start: int, end: int, since: float) -> None:
        await self._device.serve(self._model.prompt_s(start, end), since)

    async def arrived(self, delta_bytes: int, host_tokens: int) -> None:
        now = time.monotonic()
        moved, restored = self._model.transfer_s(delta_bytes // self._token_bytes), self._model.restore_s(host_tokens)
        if restored:
            await self._host.serve(restored, now)
        if moved:
            await self._link.serve(moved, now)

    async def fetched(self, tokens: int) -> None:
        if tokens:
            await self._link.serve(self._model.transfer_s(tokens), time.monotonic())

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[Stepping]:
        self._batch.join()
        try:
            yield self._batch
        finally:
            self._batch.leave()

    def close(self) -> None:
        self._batch.close()
        for name, timeline in (("device", self._device), ("link", self._link), ("host tier", self._host)):
            if timeline.served:
                _log.info(
                    "%s: %d waits, %.1f s of the model's time, %.1f s behind",
                    name,
                    timeline.served,
                    timeline.busy_s,
                    timeline.behind_s * timeline.clock,
                )
        if self._batch.steps:
            _log.info("batch: %d steps, mean %.1f", self._batch.steps, self._batch.mean)


class Batch:
    """Sequences that step together: a step begins when all of them wait for it, or GRACE_S after the last one."""

    def __init__(self, model: EngineModel, device: Timeline) -> None:
        self._model = model
        self._device = device
        self._members = 0
        self._waiting: list[tuple[asyncio.Future[None], int]] = []
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self.steps = 0
        self._sequences = 0  # over all steps

    @property
    def mean(self) -> float:
        return self._sequences / max(1, self.steps)

    def join(self) -> None:
        self._members += 1
        if self._running is None:
            self._start()

    def _start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="decode batch")
        self._running.add_done_callback(self._ended)

    def leave(self) -> None:
        self._members -= 1
        self._look()

    def _look(self) -> None:
        if len(self._waiting) >= self._members:
            self._changed.set()

    async def step(self, context: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, context))
        self._look()
        await future

    async def compute(self, sequence: SequenceCompute, token: int, position: int) -> int:
        """Computes here and now: a synthetic step takes less than its way to another thread."""
        return sequence.step(token, position)

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        since = time.monotonic()
        while self._members:
            if not await self._complete():
                continue
            batch, self._waiting = self._waiting, []
            batch = [(future, context) for future, context in batch if not future.cancelled()]
            if not batch:
                continue
            self.steps += 1
            self._sequences += len(batch)
            seconds = self._model.step_s(len(batch), sum(context for _, context in batch))
            try:
                await self._device.serve(seconds, since)
            except asyncio.CancelledError:
                for future, _ in batch:
                    future.cancel()
                raise
            since = self._device.free_at
            for future, _ in batch:
                if not future.done():
                    future.set_result(None)

    async def _complete(self) -> bool:
        """Waits until all members do, or GRACE_S long; whether any waits."""
        if len(self._waiting) < self._members:
            self._changed.clear()
            # not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event
            waiting = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiting}, timeout=GRACE_S)
            finally:
                waiting.cancel()
        return bool(self._waiting)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if task.cancelled():
            for future, _ in self._waiting:
                future.cancel()
            return
        task.result()
        if self._members:  # joined between its last look and its end
            self._start()
