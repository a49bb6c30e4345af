"""The workers' sessions as frames on a Unix socket: the service of `worker.py` on connections in the place of gRPC's
streams. Shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvferry.daemon.core.errors import RequestError, invalid
from kvferry.daemon.peers.session import report_invariant
from kvferry.frames import FrameStream
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import ENDED_IN_ORDER, MAX_MESSAGE_BYTES
from kvferry.waiting import is_done, within

log = logging.getLogger(__name__)

MOST_WAITING = 64  # messages of a worker that are not taken yet: the rest stays in its socket
REFUSED_SECONDS = 1.0  # for the first word of one worker too many
CLOSE_SECONDS = 5.0  # for a worker to take the last of what it was told and hang up


class _Aborted(Exception):
    """A session's abort, by which its handler ends."""


class FrameTalk:
    """One connection, as a session sees it: see `kvferry.daemon.services.worker.Talk`."""

    def __init__(self, serve: Callable[[FrameTalk], Coroutine[Any, Any, None]], gone: Callable[[FrameTalk], None]):
        self._incoming: deque[bytes] = deque()
        self._held = False
        self._eof = False
        self._heard = self._answered = False
        self._arrived = asyncio.Event()
        self._gone = gone
        self.stream = FrameStream(MAX_MESSAGE_BYTES, self._take, self._over)
        self.handler = asyncio.get_running_loop().create_task(self._serve(serve))

    async def read(self) -> object:
        """The next message; None where the worker says nothing more."""
        while not self._incoming:
            if self._eof:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        data = self._incoming.popleft()
        if self._held and len(self._incoming) <= MOST_WAITING // 2:
            self._held = False
            self.stream.go_on()
        try:
            self._heard = True
            return wire.WorkerMessage.FromString(data)
        except DecodeError:
            raise invalid(f"a message of {len(data)} bytes is no WorkerMessage") from None

    async def write(self, events: Sequence[wire.WorkerEvent]) -> None:
        self._answered = True
        self.stream.send(*(event.SerializeToString() for event in events))
        await self.stream.has_room()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> NoReturn:
        self._say_end(code, details, daemon_ended=trailing == ENDED_IN_ORDER)
        raise _Aborted

    async def _serve(self, serve: Callable[[FrameTalk], Coroutine[Any, Any, None]]) -> None:
        try:
            await self.stream.connected.wait()
            await serve(self)
            self._say_end(grpc.StatusCode.OK, "")
        except _Aborted:
            pass
        except Exception as error:
            log.exception("a worker's session ended unexpectedly")
            self._say_end(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:1000])
            if isinstance(error, AssertionError):
                report_invariant(error)
        finally:
            try:
                await self.stream.finish(CLOSE_SECONDS)
            finally:
                self._gone(self)

    def _say_end(self, code: grpc.StatusCode, details: str, *, daemon_ended: bool = False) -> None:
        end = wire.SessionEnd(code=code.value[0], details=details, daemon_ended=daemon_ended)
        self.stream.send(wire.WorkerEvent(end=end).SerializeToString())

    def _take(self, data: bytes) -> None:
        self._incoming.append(data)
        self._arrived.set()
        if len(self._incoming) >= MOST_WAITING and not self._held:
            self._held = True
            self.stream.hold()

    def _over(self, why: str) -> None:
        self._eof = True
        self._arrived.set()
        if why:  # not that it has said its last: nothing that follows could be understood
            log.info("a worker's connection is over: %s", why)
            self._say_end(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        if why or (self._heard and not self._answered):  # as where it is killed while it waits for its engine's ranks
            self.handler.cancel()


class FramedWorkers:
    """The socket; `start` listens, `stop` ends what runs."""

    def __init__(self, serve: Callable[[FrameTalk], Coroutine[Any, Any, None]], most: int) -> None:
        """`most`: connections at a time; one more is told so."""
        self._serve = serve
        self._most = most
        self._talks: set[FrameTalk] = set()
        self._refused: set[FrameTalk] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: str) -> None:
        """Binds it, for this user alone. OSError where that is not possible."""
        listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listening.bind(path)
        except BaseException:
            listening.close()
            raise
        finally:
            os.umask(before)
        self._server = await asyncio.get_running_loop().create_unix_server(
            self._connected, sock=listening, backlog=self._most
        )

    async def stop(self, grace: float) -> None:
        """`grace`: seconds for the sessions that run."""
        if self._server is not None:
            self._server.close()
        running = [talk.handler for talk in self._talks | self._refused]
        if running and not await is_done(asyncio.ensure_future(asyncio.wait(running)), grace):
            for handler in running:
                handler.cancel()
            await asyncio.wait(running)

    def _connected(self) -> asyncio.BaseProtocol:
        free = len(self._talks) < self._most
        talks = self._talks if free else self._refused
        talk = FrameTalk(self._serve if free else self._refuse, talks.discard)
        talks.add(talk)
        return talk.stream

    async def _refuse(self, talk: FrameTalk) -> None:
        with contextlib.suppress(asyncio.TimeoutError, RequestError):
            await within(REFUSED_SECONDS, talk.read())  # who writes before it reads would not hear the reason
        await talk.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most} workers' connections are open")
