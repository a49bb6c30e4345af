"""Decode steps of several requests computed together: a model then reads its weights once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvferry.waiting import complete
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import BatchCompute, SequenceCompute, Step
from kvferry.workers.models.pacing import NoPace, Stepping

GRACE_S = 0.002  # a batch goes without a request that has not come for its next step


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    step: Step
    token: asyncio.Future[int]


class StepBatches(NoPace):
    """A `Pace` of an engine that takes its own time and steps at most `most` requests together. What does not fit waits
    for the next batch, before those that were in this one."""

    def __init__(self, thread: ComputeThread, compute: BatchCompute, most: int) -> None:
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1")
        super().__init__(thread)
        self._thread = thread
        self._compute = compute
        self._most = most
        self._members = 0
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[Stepping]:
        self._members += 1
        try:
            yield self
        finally:
            self._members -= 1
            self._changed.set()

    async def step(self, context: int) -> None:
        """Nothing is modelled."""

    async def compute(self, sequence: SequenceCompute, token: int, position: int) -> int:
        """Computes a step in a batch. However this ends, cancelled too, the step is over or never starts."""
        waiting = _Waiting(Step(sequence, token, position), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed.set()
        if self._running is None:
            self._start()
        try:
            return await asyncio.shield(waiting.token)
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                waiting.token.cancel()
                self._changed.set()
            else:
                await complete(asyncio.wait([waiting.token]))
                waiting.token.exception()  # marked as seen
            raise

    def _start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="decode batches")
        self._running.add_done_callback(self._ended)

    async def _run(self) -> None:
        while self._waiting:
            await self._gather()
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if not batch:
                continue
            try:
                tokens = await self._thread.run(self._compute.steps, [waiting.step for waiting in batch])
            except Exception as error:  # whatever it is, it is each request's
                for waiting in batch:
                    waiting.token.set_exception(error)
            else:
                for waiting, token in zip(batch, tokens, strict=True):
                    waiting.token.set_result(token)
            await asyncio.sleep(0)  # those that go on come back before the next batch is made up
            await asyncio.sleep(0)

    async def _gather(self) -> None:
        """Waits until a batch is full or nobody else steps, GRACE_S at most."""
        loop = asyncio.get_running_loop()
        end = loop.time() + GRACE_S
        while len(self._waiting) < min(self._members, self._most) and (left := end - loop.time()) > 0:
            self._changed.clear()
            # not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({changed}, timeout=left)
            finally:
                changed.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if task.cancelled():
            return
        if self._waiting:  # came between its last look and its end
            self._start()
        task.result()
