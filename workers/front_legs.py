"""One request's two halves: the prefill and the decode call, sent at once and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

import grpc.aio

from kvferry.proto import common_pb2, engine_pb2
from kvferry.workers.front_engines import DecodeCall, EngineLink
from kvferry.workers.front_errors import internal, timed_out

ANSWER_SLACK_S = 2.0  # the servers keep the deadlines themselves; their word is awaited this much longer


class Started(NamedTuple):
    matched_tokens: int
    delta_pages: int
    delta_bytes: int
    admit_to_ready_us: int
    host_tokens: int = 0  # of the matched ones, those that came back from the host tier


class Generated(NamedTuple):
    tokens: list[int]


class Paused(NamedTuple):
    """The decode server's daemon has taken the request's pages back; it goes on once it has pages again."""


class Ended(NamedTuple):
    reason: str  # "stop" or "length"


LegEvent = Started | Generated | Paused | Ended


@dataclass(frozen=True, slots=True)
class LegsRequest:
    request_id: bytes  # 16
    tokens: list[int]
    sampling: engine_pb2.Sampling
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    first_token_s: float  # until the first token
    next_token_s: (
        float  # from one word of the decode server to the next, after it; behind Paused at least first_token_s
    )
    priority: int = 0  # smaller goes first
    warmup: bool = False  # it never enters the cache


async def run_legs(
    request: LegsRequest, decode: EngineLink, prefill: EngineLink | None
) -> AsyncGenerator[LegEvent, None]:
    """The request's events: Started, Generated or Paused..., Ended. Raises ApiError.

    Without a prefill server the decode server computes what it lacks. A prefill that fails before the first token fails
    the request with its error. Closing the iterator before its end cancels both calls.
    """
    name = common_pb2.RequestName(request_id=request.request_id, attempt=1)
    deadline_ms = max(1, round(request.first_token_s * 1000))
    prefilling = None
    if prefill is not None:
        prefill_request = engine_pb2.PrefillRequest(
            name=name,
            tokens=request.tokens,
            sampling=request.sampling,
            deadline_ms=deadline_ms,
            priority=request.priority,
            warmup=request.warmup,
        )
        prefilling = _start_prefill(prefill, prefill_request, deadline_s=request.first_token_s + ANSWER_SLACK_S)
    decode_request = engine_pb2.DecodeRequest(
        name=name,
        tokens=request.tokens,
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        stop_tokens=request.stop_tokens,
        prefill="" if prefill is None else _daemon(prefill),
        deadline_ms=deadline_ms,
        priority=request.priority,
        warmup=request.warmup,
    )
    call = decode.decode(decode_request)
    decode.outstanding += 1
    decode.assigned += 1
    ended = False
    try:
        async for event in _events(request, decode, call, prefilling):
            ended = isinstance(event, Ended)
            yield event
    finally:
        decode.outstanding -= 1
        call.cancel()  # nothing happens to a call that is over
        if prefilling is not None and not ended:
            prefilling.cancel()


def _daemon(prefill: EngineLink) -> str:
    assert prefill.facts is not None, f"{prefill.label} is used before it was described"
    return prefill.facts.daemon


def _start_prefill(link: EngineLink, request: engine_pb2.PrefillRequest, *, deadline_s: float) -> asyncio.Task[None]:
    """The server counts this as outstanding until it ends, which may be after the request's own end."""
    link.outstanding += 1
    link.assigned += 1

    def ended(task: asyncio.Task[None]) -> None:
        link.outstanding -= 1
        if not task.cancelled():
            task.exception()  # after the first token nobody asks for it

    task = asyncio.create_task(_prefill(link, request, deadline_s))
    task.add_done_callback(ended)
    return task


async def _prefill(link: EngineLink, request: engine_pb2.PrefillRequest, deadline_s: float) -> None:
    """Raises ApiError."""
    call = link.prefill(request, deadline_s=deadline_s)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise link.failed(error) from error
    finally:
        call.cancel()


async def _events(
    request: LegsRequest, decode: EngineLink, call: DecodeCall, prefilling: asyncio.Task[None] | None
) -> AsyncGenerator[LegEvent, None]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + request.first_token_s + ANSWER_SLACK_S
    awaited = "first token"
    while True:
        reply = await _read(decode, call, prefilling, deadline, awaited)
        match reply.WhichOneof("kind"):
            case "started":
                started = reply.started
                yield Started(
                    started.matched_tokens,
                    started.delta_pages,
                    started.delta_bytes,
                    started.admit_to_ready_us,
                    started.host_tokens,
                )
            case "generated":
                prefilling = None
                deadline, awaited = loop.time() + request.next_token_s, "next token"
                yield Generated(list(reply.generated.tokens))
            case "paused":
                deadline = loop.time() + max(request.first_token_s + ANSWER_SLACK_S, request.next_token_s)
                yield Paused()
            case "ending":
                yield Ended(reply.ending.reason)
                return
            case other:
                raise internal(f"{decode.label}: a DecodeReply of kind {other}")


async def _read(
    decode: EngineLink, call: DecodeCall, prefilling: asyncio.Task[None] | None, deadline: float, awaited: str
) -> engine_pb2.DecodeReply:
    """The decode server's next word. Raises ApiError: its own failure, the prefill's, or a deadline that passed."""
    loop = asyncio.get_running_loop()
    reading = asyncio.create_task(_read_decode(decode, call))
    try:
        while True:
            waits: set[asyncio.Task[engine_pb2.DecodeReply] | asyncio.Task[None]] = {reading}
            if prefilling is not None and not (prefilling.done() and prefilling.exception() is None):
                waits.add(prefilling)
            left = deadline - loop.time()
            done, _ = await asyncio.wait(waits, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            if prefilling is not None and prefilling in done:
                prefilling.result()
            if reading in done:
                return reading.result()
            if left <= 0:
                raise timed_out(f"{decode.label}: the {awaited} did not come in time")
    finally:
        reading.cancel()


async def _read_decode(decode: EngineLink, call: DecodeCall) -> engine_pb2.DecodeReply:
    try:
        reply = await call.read()
    except grpc.aio.AioRpcError as error:
        raise decode.failed(error) from error
    if not isinstance(reply, engine_pb2.DecodeReply):  # the end of the stream
        raise internal(f"{decode.label}: the reply ended without an Ending")
    return reply
