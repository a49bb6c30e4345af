"""One request's two halves: the prefill and the decode call, sent at once and ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import grpc.aio

from kvferry import tracing
from kvferry.front.edge.exchange import HEADER
from kvferry.front.edge.metrics import FrontMetrics
from kvferry.front.engines import DecodeCall, EngineLink, Metadata
from kvferry.front.errors import ApiError, internal, timed_out
from kvferry.proto import common_pb2, engine_pb2
from kvferry.waiting import slices

ANSWER_SLACK_S = 2.0  # the servers keep the deadlines themselves; their word is awaited this much longer
ATTEMPTS = 3  # at a prefill server, at another one, by the decode server alone
_MAY_BE_OF_PREFILL = (503,)  # of a decode server that does not say whose failure it was
_PREFILL_MAY_DIFFER = (429, 500, 503)  # another server may have room, or be well
_AWAY = (503,)  # a prefill server that is full stays the one to compute: decode would be, too

_log = logging.getLogger(__name__)


class LegStarted(NamedTuple):
    matched_tokens: int
    delta_pages: int
    delta_bytes: int
    admit_to_ready_us: int
    host_tokens: int = 0  # of the matched ones, those that came back from the host tier


class Generated(NamedTuple):
    tokens: list[int]


class LegPaused(NamedTuple):
    """The decode server's daemon has taken the request's pages back; it goes on once it has pages again."""


class LegEnded(NamedTuple):
    reason: str  # "stop" or "length"


LegEvent = LegStarted | Generated | LegPaused | LegEnded


@dataclass(frozen=True, slots=True)
class LegsRequest:
    request_id: bytes  # 16
    tokens: list[int]
    sampling: engine_pb2.Sampling
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    first_token_s: float  # until the first token
    next_token_s: (
        float  # from one word of the decode server to the next, after it; behind LegPaused at least first_token_s
    )
    priority: int = 0  # smaller goes first
    warmup: bool = False  # it never enters the cache
    traceparent: str = ""  # of the request's span
    client_id: str = ""  # x-request-id
    metrics: FrontMetrics = field(default_factory=FrontMetrics)

    def metadata(self, span: tracing.Span) -> Metadata:
        """What a call of a server carries beside the request."""
        named = ((HEADER, self.client_id),) if self.client_id else ()
        return (*tracing.metadata_of(span.traceparent), *named)


class PrefillFailed(Exception):
    """The prefill call failed while something was still wanted of it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


class Others(Protocol):
    """What else may compute a prompt whose prefill failed."""

    def elsewhere(self, failed: EngineLink) -> EngineLink | None:
        """Another prefill server than this one, if there is one."""

    def alone(self) -> None:
        """Told that the decode server is to compute it."""


async def run_legs(
    request: LegsRequest, decode: EngineLink, prefill: EngineLink | None, others: Others, *, other_decode: bool = False
) -> AsyncGenerator[LegEvent, None]:
    """The request's events: LegStarted, Generated or LegPaused..., LegEnded. Raises ApiError.

    Without a prefill server the decode server computes what it lacks. A prefill that fails before the prompt is ready
    is tried once elsewhere, as attempt 2: what has arrived stays with the decode server's daemon and is not sent again.
    Where there is no other server, or it fails, too, and prefill is away (503), decode is asked alone; else so does the
    request. With `other_decode` a decode server that is away is not asked again: the caller has another one. Closing
    the iterator before its end cancels both calls.
    """
    deadline = asyncio.get_running_loop().time() + request.first_token_s
    for attempt in range(1, ATTEMPTS + 1):
        ready = False
        try:
            async with aclosing(_attempt(request, attempt, deadline, decode, prefill)) as events:
                async for event in events:
                    ready = True
                    yield event
            return
        except (ApiError, PrefillFailed) as failure:
            error = failure.error if isinstance(failure, PrefillFailed) else failure
            of_prefill = isinstance(failure, PrefillFailed) or error.of_prefill
            tell = _PREFILL_MAY_DIFFER if of_prefill else _MAY_BE_OF_PREFILL
            if prefill is None or ready or error.status not in tell or (other_decode and not of_prefill):
                raise error from failure
            other = others.elsewhere(prefill) if attempt < ATTEMPTS - 1 else None
            if other is None:
                if error.status not in _AWAY:
                    raise error from failure
                others.alone()
            _log.info(
                "request %s is tried again%s: %s",
                *(request.request_id.hex(), f" at {other.label}" if other else ", by decode alone", error),
            )
            prefill = other


async def _attempt(
    request: LegsRequest, attempt: int, first_token_at: float, decode: EngineLink, prefill: EngineLink | None
) -> AsyncGenerator[LegEvent, None]:
    """Raises ApiError, PrefillFailed."""
    name = common_pb2.RequestName(request_id=request.request_id, attempt=attempt)
    left = max(0.001, first_token_at - asyncio.get_running_loop().time())
    deadline_ms = max(1, round(left * 1000))
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
        prefilling = _start_prefill(prefill, prefill_request, request, deadline_s=left + ANSWER_SLACK_S)
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
    span = tracing.span("decode leg", request.traceparent, "client", server=decode.address, attempt=attempt)
    call = decode.decode(decode_request, metadata=request.metadata(span))
    counted = request.metrics.leg("decode", decode.address)
    decode.outstanding += 1
    decode.assigned += 1
    ready = False
    try:
        with span, counted:
            try:
                async for event in _events(request, first_token_at, decode, call, prefilling):
                    if not ready:
                        span.event("ready")
                    ready = True
                    if isinstance(event, LegEnded):
                        counted.result = "ok"
                    yield event
                    if isinstance(event, LegEnded):
                        prefilling = None
            except ApiError:
                counted.failed()
                raise
    finally:
        decode.outstanding -= 1
        call.cancel()  # nothing happens to a call that is over
        over = prefilling is not None and not prefilling.cancel() and prefilling.exception() is None
        if over and prefill is not None and not ready:
            prefill.let_go(name)  # it has handed the prompt over, and nobody will ask for it


def _daemon(prefill: EngineLink) -> str:
    assert prefill.facts is not None, f"{prefill.label} is used before it was described"
    return prefill.facts.daemon


def _start_prefill(
    link: EngineLink, request: engine_pb2.PrefillRequest, of: LegsRequest, *, deadline_s: float
) -> asyncio.Task[None]:
    """The server counts this as outstanding until it ends, which may be after the request's own end."""
    link.outstanding += 1
    link.assigned += 1

    def ended(task: asyncio.Task[None]) -> None:
        link.outstanding -= 1
        if not task.cancelled():
            task.exception()  # once the prompt is ready nobody asks for it

    task = asyncio.create_task(_prefill(link, request, of, deadline_s))
    task.add_done_callback(ended)
    return task


async def _prefill(link: EngineLink, request: engine_pb2.PrefillRequest, of: LegsRequest, deadline_s: float) -> None:
    """Raises ApiError."""
    attempt = request.name.attempt
    with (
        of.metrics.leg("prefill", link.address) as counted,
        tracing.span("prefill leg", of.traceparent, "client", server=link.address, attempt=attempt) as span,
    ):
        call = link.prefill(request, deadline_s=deadline_s, metadata=of.metadata(span))
        try:
            await call
            counted.result = "ok"
        except grpc.aio.AioRpcError as error:
            counted.failed()
            raise link.failed(error) from error
        finally:
            call.cancel()


async def _events(
    request: LegsRequest,
    first_token_at: float,
    decode: EngineLink,
    call: DecodeCall,
    prefilling: asyncio.Task[None] | None,
) -> AsyncGenerator[LegEvent, None]:
    loop = asyncio.get_running_loop()
    deadline = first_token_at + ANSWER_SLACK_S
    awaited = "first token"
    while True:
        reply = await _read(decode, call, prefilling, deadline, awaited)
        kind = reply.WhichOneof("kind")
        if kind in ("started", "generated"):
            prefilling = None  # whatever becomes of it: nothing more is needed of it
        match kind:
            case "started":
                started = reply.started
                yield LegStarted(
                    started.matched_tokens,
                    started.delta_pages,
                    started.delta_bytes,
                    started.admit_to_ready_us,
                    started.host_tokens,
                )
            case "generated":
                deadline, awaited = loop.time() + request.next_token_s, "next token"
                yield Generated(list(reply.generated.tokens))
            case "paused":
                deadline = loop.time() + max(request.first_token_s + ANSWER_SLACK_S, request.next_token_s)
                yield LegPaused()
            case "ending":
                yield LegEnded(reply.ending.reason)
                return
            case other:
                raise internal(f"{decode.label}: a DecodeReply of kind {other}")


async def _read(
    decode: EngineLink, call: DecodeCall, prefilling: asyncio.Task[None] | None, deadline: float, awaited: str
) -> engine_pb2.DecodeReply:
    """The decode server's next word. Raises ApiError for its own failure or a deadline that passed, PrefillFailed."""
    parts = slices(max(0.0, deadline - asyncio.get_running_loop().time()))
    part = next(parts, None)
    reading = asyncio.create_task(_read_decode(decode, call))
    try:
        while part is not None:
            waits: set[asyncio.Task[engine_pb2.DecodeReply] | asyncio.Task[None]] = {reading}
            if prefilling is not None:
                waits.add(prefilling)
            done, _ = await asyncio.wait(waits, timeout=part, return_when=asyncio.FIRST_COMPLETED)
            if reading in done and reading.exception() is None:
                return reading.result()
            if prefilling is not None and prefilling in done:
                if isinstance(error := prefilling.exception(), ApiError):
                    raise PrefillFailed(error)
                prefilling = None  # nothing more is heard of it
            if reading in done:
                return reading.result()
            if not done:
                part = next(parts, None)
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
