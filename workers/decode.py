"""The decode worker's way of one request: admit, ready, one token after the other, finish.

The daemon may retract a ready request. It then finishes early, as at its end, and is admitted again with prompt +
output so far as the prompt; what is missing of that is computed here. So a request is one *stay* with the daemon, or
several, each of at least one token, and its tokens are those of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from kvferry.client.client import DaemonClient
from kvferry.client.requests import PageTokens, Ready, RequestFailed, Retracted
from kvferry.proto import common_pb2
from kvferry.waiting import complete
from kvferry.workers.ending import aborted_on_error
from kvferry.workers.handoff import unpack_first_token
from kvferry.workers.models.compute_thread import ComputeThread
from kvferry.workers.models.interface import Compute, Prompt, SequenceCompute
from kvferry.workers.models.pacing import NoPace, Pace
from kvferry.workers.orders import DecodeOrder
from kvferry.workers.places import Places
from kvferry.workers.record import Record
from kvferry.workers.room import Room

_log = logging.getLogger(__name__)


class DecodeStarted(NamedTuple):
    matched_tokens: int
    host_tokens: int  # of the matched ones
    ready: Ready


class DecodePaused(NamedTuple):
    """The request was retracted and waits for pages again."""


class Ending(NamedTuple):
    reason: str  # "stop" or "length"
    output_tokens: int


Reply = DecodeStarted | int | DecodePaused | Ending  # int: an output token
Emit = Callable[[Reply], None]


class DecodeWorker:
    """Decodes requests, which step as `pace` has them: together or by turns. Without a prefill daemon a prompt's
    missing part is computed here, in chunks of `chunk_tokens`. At most `max_running` (0: any number) are with the
    daemon at a time; the others wait in order."""

    def __init__(
        self,
        client: DaemonClient,
        compute: Compute,
        thread: ComputeThread,
        *,
        chunk_tokens: int,
        max_running: int = 0,
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
        self._places = Places(max_running)

    async def close(self) -> None:
        """Ends all waits for a modelled engine."""
        self._pace.close()

    async def decode(self, order: DecodeOrder, emit: Emit) -> None:
        """Emits DecodeStarted, the output tokens (a stop token too), DecodePaused where it was retracted, and Ending.
        Raises RequestFailed, DaemonGone; whatever it raises, what it opened is over at the daemon and nothing of this
        worker touches its pages. Cancelled once the prompt is readable, it leaves what it computed with the daemon, as
        at a reply's end."""
        async with self._places.take(order.deadline_s) as left_s:
            await self._run(order._replace(deadline_s=left_s), emit)

    async def _run(self, order: DecodeOrder, emit: Emit) -> None:
        async with aborted_on_error(self._client, order.name):
            ending = await self._decode(order, emit)
        emit(ending)

    async def _decode(self, order: DecodeOrder, emit: Emit) -> Ending:
        stay, generated = order, 0
        while True:
            output = await self._stay(stay, order.prompt, emit)
            generated += len(output)
            if output[-1] in order.stop_tokens:
                return Ending("stop", generated)
            if generated == order.max_new_tokens:
                return Ending("length", generated)
            _log.info("request %s was retracted after %d tokens of output", order.name, generated)
            emit(DecodePaused())
            stay = stay._replace(
                prompt=stay.prompt.extended(output, self._client.geometry.page_size),
                max_new_tokens=order.max_new_tokens - generated,
                prefill="",
            )

    async def _stay(self, order: DecodeOrder, asked: Prompt, emit: Emit) -> list[int]:
        """Serves the request from Admit to Ended: the tokens of this stay, at least one. `asked`: the prompt as it
        came, the first stay's. Fewer than `order.max_new_tokens` that end with no stop token: retracted."""
        client, prompt = self._client, order.prompt
        prompt_tokens = len(prompt.tokens)
        admitted = await client.admit(
            order.name,
            digests=prompt.digests,
            tokens=prompt_tokens,
            tail_digest=prompt.tail_digest,
            prefill=order.prefill,
            max_new_tokens=order.max_new_tokens,
            deadline_s=order.deadline_s,
            priority=order.priority,
            warmup=order.warmup,
            traceparent=order.traceparent,
        )
        ready = await client.ready(order.name)
        await self._pace.arrived(ready.delta_bytes, admitted.host_tokens)
        full = _full(prompt_tokens, client.geometry.page_size)
        if order.prefill and ready.page_tokens_from is not None and ready.page_tokens_from < full:
            client.page_tokens(
                order.name, ready.page_tokens_from, prompt.tokens[ready.page_tokens_from : full].tolist()
            )
        readable = prompt_tokens if order.prefill else admitted.local_tokens
        # the prompt's full pages that are readable are in the tree: others may read them too
        shared = readable - readable % client.geometry.page_size
        sequence = self._compute.sequence(prompt, admitted.pages, order.sampling, shared_tokens=shared, asked=asked)
        output: list[int] = []
        try:
            await self._thread.run(sequence.resume, readable)
            if prompt is asked:
                emit(DecodeStarted(admitted.matched_tokens, admitted.host_tokens, ready))
            token = await self._first_token(order, sequence, ready, readable)
            room = Room(client, order, sequence, len(admitted.pages))
            with contextlib.suppress(Retracted):
                await self._generate(order, sequence, room, token, output, emit)
        except asyncio.CancelledError:
            # Who asked has enough or is gone; what is computed serves the next turn. Only a prompt that is computed
            # here and not yet whole in the pool cannot be finished.
            if order.prefill or output:
                await complete(self._finish(order, sequence, output, ready))
            raise
        if self._record is not None and order.prefill:
            moved = (order.name, prompt, admitted.pages, admitted.matched_tokens, list(output))
            await self._thread.run(self._record.decoded, *moved)
        retracted = output[-1] not in order.stop_tokens and len(output) < order.max_new_tokens
        await complete(self._finish(order, sequence, output, ready, continues=retracted))
        return output

    async def _first_token(self, order: DecodeOrder, sequence: SequenceCompute, ready: Ready, readable: int) -> int:
        if not order.prefill:
            return await self._compute_prompt(order, sequence, readable)
        try:
            token = unpack_first_token(ready.aux, self._compute.vocabulary)
        except ValueError as error:
            raise RequestFailed(common_pb2.ERROR_INTERNAL, str(error)) from None
        await self._thread.run(sequence.check_first_token, token)
        return token

    async def _generate(
        self,
        order: DecodeOrder,
        sequence: SequenceCompute,
        room: Room,
        token: int,
        output: list[int],
        emit: Emit,
    ) -> None:
        """Emits the first token and all behind it. However this ends, the KV of all of `output` but its last token is
        in the pool. A retraction that came before the first token takes effect behind it: that costs no page, and a
        request that is retracted again and again still moves on."""
        output.append(token)
        emit(token)
        try:
            async with self._pace.decoding() as engine:
                while token not in order.stop_tokens and len(output) < order.max_new_tokens:
                    position = len(order.prompt.tokens) + len(output) - 1
                    await room.for_token(position)
                    await engine.step(position + 1)
                    self._client.check_kept(order.name)
                    token = await engine.compute(sequence, token, position)
                    output.append(token)
                    emit(token)
        finally:
            await room.close()

    async def _finish(
        self, order: DecodeOrder, sequence: SequenceCompute, output: list[int], ready: Ready, continues: bool = False
    ) -> None:
        await self._thread.run(sequence.finish)
        kept = output[:-1]  # the last token's KV is not computed
        behind = order.prompt.chain(self._client.geometry.page_size)
        behind.extend(kept)
        tokens = len(order.prompt.tokens) + len(kept)
        told = None
        if ready.page_tokens_from is not None:
            page_size = self._client.geometry.page_size
            first = _full(len(order.prompt.tokens), page_size) if order.prefill else ready.page_tokens_from
            told = PageTokens(first, [*order.prompt.tokens[first:].tolist(), *kept][: _full(tokens, page_size) - first])
        await self._client.finish(
            order.name, tokens=tokens, digests=behind.digests, continues=continues, page_tokens=told
        )

    async def _compute_prompt(self, order: DecodeOrder, sequence: SequenceCompute, start: int) -> int:
        tokens = len(order.prompt.tokens)
        if not 0 <= start < tokens:
            raise RequestFailed(
                common_pb2.ERROR_INTERNAL, f"Admitted.local_tokens is {start}; it must be below the prompt's {tokens}"
            )
        for first in range(start, tokens, self._chunk_tokens):
            self._client.check(order.name)
            end = min(first + self._chunk_tokens, tokens)
            await self._pace.prompt(first, end, time.monotonic())
            await self._thread.run(sequence.prompt, first, end)
        return await self._thread.run(sequence.first_token)


def _full(tokens: int, page_size: int) -> int:
    """The number of those tokens that are in full pages."""
    return tokens - tokens % page_size
