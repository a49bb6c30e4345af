"""The workers' service on the Unix socket, of gRPC's streams and of frames (`worker_frames.py`). Shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import grpc

from kvferry.daemon.core.errors import RequestError, invalid, precondition
from kvferry.daemon.peers.session import report_invariant
from kvferry.daemon.services.cache import NAMESPACE_BYTES
from kvferry.daemon.services.worker_events import MAX_LATE_MS, Telling
from kvferry.daemon.sides.side import AnySide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire
from kvferry.proto import worker_pb2_grpc
from kvferry.proto.limits import ENDED_IN_ORDER, MAX_NAME_CHARS
from kvferry.waiting import within

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
ROLES: dict[int, str] = {common.ROLE_DECODE: "decode", common.ROLE_PREFILL: "prefill"}
RELEASE_SECONDS = 60.0  # that a worker which has left waits for the end of its memory's mapping

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def status_of(error: RequestError) -> grpc.StatusCode:
    """The wire's error codes carry gRPC's numbers."""
    return next((code for code in grpc.StatusCode if code.value[0] == int(error.code)), grpc.StatusCode.INTERNAL)


class Talk(Protocol):
    """A stream of messages with a worker: gRPC's, or one of frames (`worker_frames.py`)."""

    def read(self) -> Awaitable[object]:
        """The next message; anything else where there will be none."""

    def write(self, events: Sequence[wire.WorkerEvent], /) -> Awaitable[None]: ...

    def abort(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ..., /
    ) -> Awaitable[NoReturn]:
        """Ends it, by an exception that is the caller's end, too."""


class _Stream:
    """gRPC's, as a `Talk`."""

    def __init__(self, context: Context) -> None:
        self.read = context.read
        self.abort = context.abort
        self._context = context

    async def write(self, events: Sequence[wire.WorkerEvent]) -> None:
        for event in events:
            await self._context.write(event)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, sides: dict[str, AnySide], peer_address: str) -> None:
        self._sides = sides
        self._peer_address = peer_address
        self._ended = asyncio.Event()

    def end_sessions(self) -> None:
        """The daemon ends in order: workers are told so before their streams break."""
        self._ended.set()

    async def Session(self, request_iterator: object, context: Context) -> None:
        del request_iterator  # context.read() it is, for its deadline
        await self.serve(_Stream(context))

    async def serve(self, context: Talk) -> None:
        """A worker's session, whatever it comes by."""
        who = "a worker"
        try:
            hello = await self._hello(context)
            who = f"{ROLES.get(hello.role, 'a')} worker {hello.worker[:MAX_NAME_CHARS]!r}"
            side, worker = await self._take_in(hello)
        except RequestError as error:
            log.warning("%s is refused: %s: %s", who, status_of(error).name, error.message)
            await context.abort(status_of(error), error.message)
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS} s")
        except OSError as error:  # behind TimeoutError, which is one from Python 3.11 on
            log.warning("%s cannot be taken in: %s", who, error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the daemon cannot take the worker in: {error}")
        log.info("%s worker %s is here", side.role, worker.name)
        in_blocks = hello.pool.block_tokens > 0
        telling = Telling(worker.events, hello.late_ms / 1000, context.write, in_blocks=in_blocks)
        tasks = [
            asyncio.create_task(self._read(side, worker, telling, context)),
            asyncio.create_task(telling.run()),
            asyncio.create_task(worker.overflown.wait()),
            asyncio.create_task(self._ended.wait()),
            leaving := asyncio.create_task(side.workers.other_rank_left(worker)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(problem := task.exception(), AssertionError):
                    report_invariant(problem)
                elif isinstance(problem, RequestError):
                    await context.abort(status_of(problem), problem.message)
                elif problem is not None:
                    await context.abort(grpc.StatusCode.INTERNAL, f"{type(problem).__name__}: {problem}"[:1000])
            if worker.overflown.is_set():
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the worker does not read its events")
            if self._ended.is_set() and not worker.quiesced:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon has ended", ENDED_IN_ORDER)
            if leaving.done() and not worker.quiesced:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "another rank of this engine has left")
        finally:
            for task in tasks:
                task.cancel()
            side.workers.leave(worker)
            log.info("%s worker %s has %s", side.role, worker.name, "left" if worker.quiesced else "broken off")
        if worker.quiesced and not await side.memory_released(worker, RELEASE_SECONDS):
            log.error("%s worker %s is left alone with memory that is still mapped", side.role, worker.name)
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the pool is still mapped after {RELEASE_SECONDS:g} s: keep its memory to the end of the process",
            )

    async def Held(self, request: wire.HeldRequest, context: Context) -> wire.HeldReply:
        """Tells an engine's scheduler where it reads what this side holds."""
        try:
            side = self._side_of(request.role, "the engine")
            if len(request.namespace_id) != NAMESPACE_BYTES:
                raise invalid(f"namespace_id has {len(request.namespace_id)} bytes; it must have {NAMESPACE_BYTES}")
        except RequestError as error:
            await context.abort(status_of(error), error.message)
        reply = wire.HeldReply(daemon=side.config.name)
        if side.tiers.has_pool.is_set():
            cache = side.cache
            namespace = cache.namespaces.get(request.namespace_id)
            reply.pages = cache.most(namespace) if namespace is not None else cache.pool.pages
            reply.fetch_tokens = side.fetch_tokens
            reply.drops = side.tiers.keeps_nothing
        if (held := side.tiers.held) is not None:
            reply.file, reply.nbytes = held.path, held.nbytes
        return reply

    def _side_of(self, number: int, who: str) -> AnySide:
        role = ROLES.get(number, "")
        side = self._sides.get(role)
        if side is None:
            have = ", ".join(sorted(self._sides))
            raise precondition(f"role: {who} is {role or 'of none'}, this daemon {have}")
        return side

    async def _hello(self, context: Talk) -> wire.WorkerHello:
        message = await within(HELLO_SECONDS, context.read())
        if not isinstance(message, wire.WorkerMessage) or message.WhichOneof("kind") != "hello":
            raise RequestError(common.ERROR_INVALID_ARGUMENT, "the first message must be hello")
        return message.hello

    async def _take_in(self, hello: wire.WorkerHello) -> tuple[AnySide, Worker]:
        side = self._side_of(hello.role, "the worker")
        if side.draining:
            raise RequestError(common.ERROR_UNAVAILABLE, "the daemon is shutting down")
        if hello.late_ms > MAX_LATE_MS:
            raise invalid(f"late_ms is {hello.late_ms}; it may be {MAX_LATE_MS} at most")
        worker, welcome = await side.register(hello)
        welcome.peer_address = self._peer_address
        worker.events.put_nowait(wire.WorkerEvent(welcome=welcome))
        return side, worker

    async def _read(self, side: AnySide, worker: Worker, telling: Telling, context: Talk) -> None:
        while True:
            message = await context.read()
            if not isinstance(message, wire.WorkerMessage):
                return  # the worker closed its half
            kind = message.WhichOneof("kind")
            if kind == "attached":
                side.workers.attach(worker)
            elif kind == "quiesced":
                worker.quiesced = True
                return
            elif kind is None or kind == "hello":
                raise RequestError(common.ERROR_INVALID_ARGUMENT, f"a message of kind {kind} cannot be here")
            elif not worker.attached:
                raise RequestError(common.ERROR_FAILED_PRECONDITION, f"{kind} before attached")
            else:
                telling.hears(kind, message)
                side.hear(worker, kind, message)
