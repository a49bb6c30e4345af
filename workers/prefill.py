"""The prefill worker's way of one request: begin, compute chunk by chunk, hand over the first token."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from kvferry.client.client import ANSWER_SLACK_S, DaemonClient
from kvferry.client.requests import Begun, DaemonGone, RequestFailed, RequestName
from kvferry.proto import common_pb2
from kvferry.waiting import complete
from kvferry.workers.ending import aborted_on_error
from kvferry.workers.handoff import pack_first_token
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import Compute
from kvferry.workers.models.pacing import NoPace, Pace, Turn
from kvferry.workers.orders import PrefillOrder
from kvferry.workers.record import Record

HANDOVER_DEADLINE_S = 120.0  # from the first token until the daemon needs the pages no more

_log = logging.getLogger(__name__)


class Prefilled(NamedTuple):
    matched_tokens: int
    chunk_ends: tuple[int, ...]


class PrefillWorker:
    """Computes prompts in chunks of `chunk_tokens` from the matched length on."""

    def __init__(
        self,
        client: DaemonClient,
        compute: Compute,
        thread: ComputeThread,
        *,
        chunk_tokens: int,
        pace: Pace | None = None,
        record: Record | None = None,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
        self._client = client
        self._compute = compute
        self._thread = thread
        self._chunk_tokens = chunk_tokens
        self._pace = pace or NoPace(thread)
        self._record = record
        self._handing_over: set[asyncio.Task[None]] = set()
        self._handed_over: set[RequestName] = set()  # names of theirs

    async def prefill(self, order: PrefillOrder) -> Prefilled:
        """Returns when the first token and all pages are with the daemon. Raises RequestFailed, DaemonGone; whatever it
        raises, what it opened is over at the daemon and nothing of this worker touches its pages."""
        async with aborted_on_error(self._client, order.name):
            prefilled, token = await self._compute_prompt(order)
            self._client.aux(order.name, pack_first_token(token))
        task = asyncio.create_task(self._hand_over(order), name=f"hand over {order.name}")
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)
        return prefilled

    async def rehearse(self, order: PrefillOrder) -> None:
        """Computes a prompt that no decode worker asks for, and gives it up. Raises as `prefill`."""
        try:
            await self._compute_prompt(order)
        finally:
            await complete(self._client.abort(order.name, "a rehearsal"))

    async def give_up(self, name: RequestName) -> None:
        """Gives up a prompt that was handed over: nobody will ask for it. Does nothing for any other name."""
        if name in self._handed_over:
            await self._client.abort(name, "the request's other half failed")

    async def close(self) -> None:
        """Waits no longer for the end of answered requests: the daemon needs nothing of this worker for that."""
        self._pace.close()
        for task in self._handing_over:
            task.cancel()
        await asyncio.gather(*self._handing_over, return_exceptions=True)

    async def _compute_prompt(self, order: PrefillOrder) -> tuple[Prefilled, int]:
        """Computes the prompt and the first token."""
        async with self._pace.turn() as turn:
            return await self._compute_in_turn(order, turn)

    async def _compute_in_turn(self, order: PrefillOrder, turn: Turn) -> tuple[Prefilled, int]:
        client, name, prompt = self._client, order.name, order.prompt
        deadline = time.monotonic() + order.deadline_s
        tokens = len(prompt.tokens)
        client.begin(
            name,
            digests=prompt.digests,
            tokens=tokens,
            tail_digest=prompt.tail_digest,
            deadline_s=order.deadline_s,
            priority=order.priority,
            warmup=order.warmup,
            traceparent=order.traceparent,
        )
        begun = await turn.opening(self._begun(name))
        matched = begun.matched_tokens
        if not 0 <= matched < tokens:
            raise RequestFailed(
                common_pb2.ERROR_INTERNAL, f"Begun.matched_tokens is {matched}; the prompt has {tokens}"
            )
        sequence = self._compute.sequence(prompt, begun.pages, order.sampling, shared_tokens=matched)
        await self._thread.run(sequence.resume, matched)
        chunk_ends: list[int] = []
        for start in range(matched, tokens, self._chunk_tokens):
            end = min(start + self._chunk_tokens, tokens)
            if time.monotonic() >= deadline:
                raise RequestFailed(
                    common_pb2.ERROR_DEADLINE_EXCEEDED,
                    f"{start} of {tokens} prompt tokens were ready after {order.deadline_s:g} s",
                )
            client.check(name)
            await self._pace.prompt(start, end, turn.since)
            await self._thread.run(sequence.prompt, start, end)
            client.progress(name, end)
            chunk_ends.append(end)
        token = await self._thread.run(sequence.first_token)
        if self._record is not None:
            await self._thread.run(self._record.prefilled, name, prompt, begun.pages, matched, list(chunk_ends))
        return Prefilled(matched, tuple(chunk_ends)), token

    async def _begun(self, name: RequestName) -> Begun:
        begun = await self._client.begun(name)
        await self._pace.fetched(begun.fetched_tokens)
        return begun

    async def _hand_over(self, order: PrefillOrder) -> None:
        deadline_s = max(HANDOVER_DEADLINE_S, order.deadline_s + ANSWER_SLACK_S)
        self._handed_over.add(order.name)
        try:
            await self._client.ended(order.name, deadline_s)
        except RequestFailed as error:
            _log.info("request %s ended unfinished: %s", order.name, error)
            await self._client.abort(order.name, error.message)
        except DaemonGone:
            pass
        finally:
            self._handed_over.discard(order.name)
