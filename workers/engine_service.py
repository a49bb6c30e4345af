"""The gRPC service by which a front end uses a worker (proto/engine.proto)."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from kvferry import tracing
from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.proto import common_pb2, engine_pb2, engine_pb2_grpc
from kvferry.proto.limits import ERROR_METADATA
from kvferry.radix.prompt_cache import PromptCache
from kvferry.workers.decode import DecodePaused, DecodeStarted, DecodeWorker, Ending, Reply
from kvferry.workers.jobs import Jobs
from kvferry.workers.orders import Bounds, DecodeOrder, PrefillOrder, decode_order, prefill_order
from kvferry.workers.prefill import PrefillWorker

MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # 1 Mi tokens are at most 5 MiB

MAX_DETAILS_BYTES = 2000  # percent-encoded they are three times as long, and gRPC's peers take 8 KiB of metadata

_FAILURES = frozenset(common_pb2.ErrorCode.values()) - {common_pb2.ERROR_UNSPECIFIED}
_STATUS = {code.value[0]: code for code in grpc.StatusCode if code.value[0] in _FAILURES}
_T = TypeVar("_T")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_log = logging.getLogger(__name__)

PrefillContext = grpc.aio.ServicerContext[engine_pb2.PrefillRequest, engine_pb2.PrefillReply]
DecodeContext = grpc.aio.ServicerContext[engine_pb2.DecodeRequest, engine_pb2.DecodeReply]
AbortContext = grpc.aio.ServicerContext[engine_pb2.AbortRequest, engine_pb2.AbortReply]
DescribeContext = grpc.aio.ServicerContext[engine_pb2.DescribeRequest, engine_pb2.DescribeReply]


class EngineService(engine_pb2_grpc.EngineServicer):
    """Serves one worker: a prefill one or a decode one; the other's call is UNIMPLEMENTED."""

    def __init__(
        self,
        description: engine_pb2.DescribeReply,
        bounds: Bounds,
        worker: PrefillWorker | DecodeWorker,
        jobs: Jobs,
        *,
        stream_interval: int = 1,
    ) -> None:
        self._description = description
        self._bounds = bounds
        self._prompts = PromptCache(page_size=bounds.page_size)
        self._worker = worker
        self._jobs = jobs
        self._stream_interval = stream_interval

    async def Describe(self, request: engine_pb2.DescribeRequest, context: DescribeContext) -> engine_pb2.DescribeReply:
        return self._description

    async def Prefill(self, request: engine_pb2.PrefillRequest, context: PrefillContext) -> engine_pb2.PrefillReply:
        if not isinstance(self._worker, PrefillWorker):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a decode worker")
        try:
            self._jobs.check()
            order = prefill_order(request, self._bounds, self._prompts)
            with _span("prefill", context, order) as span:
                job = self._jobs.start(order.name, self._worker.prefill(order._replace(traceparent=span.traceparent)))
                prefilled = await _outcome(job)
                span.set(matched_tokens=prefilled.matched_tokens)
        except Exception as error:
            await _abort(context, error)
        return engine_pb2.PrefillReply(matched_tokens=prefilled.matched_tokens, chunk_ends=prefilled.chunk_ends)

    async def Abort(self, request: engine_pb2.AbortRequest, context: AbortContext) -> engine_pb2.AbortReply:
        if not isinstance(self._worker, PrefillWorker):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a decode worker: cancel the call")
        try:
            name = RequestName.from_proto(request.name)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _bounded(str(error)))
        await self._worker.give_up(name)
        return engine_pb2.AbortReply()

    async def Decode(self, request: engine_pb2.DecodeRequest, context: DecodeContext) -> None:
        if not isinstance(self._worker, DecodeWorker):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a prefill worker")
        # holds at most max_new_tokens replies: a slow reader does not keep the pool's pages longer
        replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        try:
            self._jobs.check()
            order = decode_order(request, self._bounds, self._prompts)
            with _span("decode", context, order) as span:
                order = order._replace(traceparent=span.traceparent)
                job = self._jobs.start(order.name, self._worker.decode(order, replies.put_nowait))
                job.add_done_callback(lambda _: replies.put_nowait(None))
                try:
                    await _forward(replies, context, self._stream_interval)
                except BaseException:
                    job.cancel()  # the reader has left
                    raise
                await _outcome(job)
        except Exception as error:
            await _abort(context, error)


def _span(what: str, context: PrefillContext | DecodeContext, order: PrefillOrder | DecodeOrder) -> tracing.Span:
    return tracing.span(
        f"{what} worker",
        tracing.from_metadata(context.invocation_metadata()),
        "server",
        request=str(order.name),
        tokens=len(order.prompt.tokens),
    )


async def _outcome(job: asyncio.Task[_T]) -> _T:
    """The job's result. A caller that is cancelled cancels it; a job that the worker cancelled is UNAVAILABLE."""
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        if job.cancelled():
            raise RequestFailed(common_pb2.ERROR_UNAVAILABLE, "the worker is shutting down") from None
        job.cancel()
        raise


async def _forward(replies: asyncio.Queue[Reply | None], context: DecodeContext, interval: int) -> None:
    """Sends replies until None; tokens that wait together travel together, and behind the first one `interval` of
    them."""
    ended = False
    sent = 0
    while not ended:
        batch = [await replies.get()]
        while not replies.empty() or (sent and isinstance(batch[-1], int) and len(batch) < interval):
            batch.append(await replies.get())
        sent += sum(isinstance(reply, int) for reply in batch)
        tokens: list[int] = []
        for reply in batch:
            if isinstance(reply, int):
                tokens.append(reply)
                continue
            if tokens:
                await context.write(engine_pb2.DecodeReply(generated=engine_pb2.Generated(tokens=tokens)))
                tokens = []
            if reply is None:
                ended = True
            elif isinstance(reply, DecodeStarted):
                await context.write(engine_pb2.DecodeReply(started=_started(reply)))
            elif isinstance(reply, DecodePaused):
                await context.write(engine_pb2.DecodeReply(paused=engine_pb2.Paused()))
            else:
                await context.write(engine_pb2.DecodeReply(ending=_ending(reply)))
        if tokens:
            await context.write(engine_pb2.DecodeReply(generated=engine_pb2.Generated(tokens=tokens)))


def _started(reply: DecodeStarted) -> engine_pb2.Started:
    return engine_pb2.Started(
        matched_tokens=reply.matched_tokens,
        delta_pages=reply.ready.delta_pages,
        delta_bytes=reply.ready.delta_bytes,
        admit_to_ready_us=reply.ready.elapsed_us,
        host_tokens=reply.host_tokens,
    )


def _ending(reply: Ending) -> engine_pb2.Ending:
    return engine_pb2.Ending(reason=reply.reason, output_tokens=reply.output_tokens)


async def _abort(context: grpc.aio.ServicerContext[_Request, _Reply], error: Exception) -> NoReturn:
    if isinstance(error, RequestFailed):
        typed = common_pb2.Error(code=error.code, of_prefill=error.of_prefill)
        # never OK, whatever number the daemon sent
        status = _STATUS.get(int(error.code), grpc.StatusCode.INTERNAL)
        await context.abort(status, _bounded(error.message), ((ERROR_METADATA, typed.SerializeToString()),))
    if isinstance(error, DaemonGone):
        await context.abort(grpc.StatusCode.UNAVAILABLE, _bounded(str(error)))
    if isinstance(error, grpc.aio.BaseError):
        raise error
    _log.exception("a request failed unexpectedly")
    await context.abort(grpc.StatusCode.INTERNAL, _bounded(f"{type(error).__name__}: {error}"))


def _bounded(text: str) -> str:
    return text.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")
