"""The stream of frames under a worker's session: opening it, and the daemon's first and last word."""

from __future__ import annotations

import asyncio
import errno
import os
import socket as unix
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import TOGETHER_SECONDS, OneRank
from kvferry.client.requests import DaemonAbsent, DaemonEnded, DaemonGone, HandshakeFailed
from kvferry.frames import SUFFIX, FrameStream
from kvferry.proto import common_pb2, worker_pb2
from kvferry.proto.limits import MAX_MESSAGE_BYTES
from kvferry.proto.versions import WORKER_PROTOCOL
from kvferry.waiting import is_done

MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES
MAX_RECEIVED_MESSAGE_BYTES = 64 * 1024 * 1024
AGAIN_SECONDS = 0.1  # until a daemon that is not there is tried again

Listener: TypeAlias = "Callable[[str | None, worker_pb2.WorkerEvent], None]"
"""Has an event, and which kind of one it is; None: of a newer protocol."""

_ABSENT = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why nothing comes any more. `code`: of gRPC's statuses, 0: the daemon ended the stream in order, INTERNAL: it
    broke the protocol; None: it has said nothing."""

    code: int | None
    details: str
    daemon_ended: bool = False

    def __str__(self) -> str:
        names = {status.value[0]: status.name for status in grpc.StatusCode}
        return self.details if self.code is None else f"{names.get(self.code, self.code)}: {self.details}"

    @property
    def reason(self) -> DaemonGone:
        """It, for those who use the session."""
        if self.daemon_ended:
            return DaemonEnded(f"{self.details}: the worker ends, too")
        if self.code == 0:
            return DaemonGone(f"the daemon ended the session: {self.details or 'no reason given'}")
        return DaemonGone(f"the session with the daemon broke: {self}")


class Stream:
    """Messages to and from a daemon. `listen` says who has those that come behind the first."""

    def __init__(self, socket: str) -> None:
        loop = asyncio.get_running_loop()
        self._socket = socket
        self.over: asyncio.Future[StreamEnd] = loop.create_future()
        self.frames = FrameStream(MAX_RECEIVED_MESSAGE_BYTES, self._take, self._ends)
        self._first: asyncio.Future[worker_pb2.WorkerEvent | None] = loop.create_future()
        self._early: list[worker_pb2.WorkerEvent] = []  # behind it, before anybody listens
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Events come from now on; a ValueError of the listener's breaks the stream."""
        self._listener = listener
        for event in self._early:
            self._hear(listener, event.WhichOneof("kind"), event)
        self._early.clear()
        self.frames.go_on()

    def send(self, message: worker_pb2.WorkerMessage | bytes) -> bool:
        """Whether the daemon takes its messages; else this one, which may be bytes already, is not sent."""
        if self.frames.unsent > MAX_UNSENT_BYTES:
            return False
        self.frames.send(message if isinstance(message, bytes) else message.SerializeToString())
        return True

    async def welcome(self, deadline_s: float, rank: OneRank | None = None) -> worker_pb2.Welcome:
        """Raises HandshakeFailed when the daemon's first word is anything else, DaemonAbsent when there is none within
        the deadline; TOGETHER_SECONDS later where it is to wait for other ranks."""
        if not await is_done(self._first, deadline_s if rank is None else deadline_s + TOGETHER_SECONDS):
            why = f"the daemon on {self._socket} did not welcome this worker within {round(deadline_s, 1):g} s"
            if rank is not None:
                why += f", nor {TOGETHER_SECONDS:g} s later: it waits for all {rank.ranks} ranks of the engine"
            raise DaemonAbsent(why)
        event = self._first.result()
        if event is None:
            end = self.over.result()
            kind = DaemonAbsent if end.code in (None, grpc.StatusCode.UNAVAILABLE.value[0]) else HandshakeFailed
            raise kind(f"the daemon refused the worker: {end}")
        if event.WhichOneof("kind") != "welcome":
            raise HandshakeFailed(f"the daemon's first word is {event.WhichOneof('kind')}; it must be welcome")
        if event.welcome.protocol != WORKER_PROTOCOL:
            raise HandshakeFailed(
                f"protocol: the daemon chose {event.welcome.protocol}, this worker speaks {WORKER_PROTOCOL}; "
                "upgrade the older one"
            )
        return event.welcome

    def _take(self, data: bytes) -> None:
        if self.over.done():
            return
        try:
            event = worker_pb2.WorkerEvent.FromString(data)
        except DecodeError as error:
            self._breaks(error)
            return
        kind = event.WhichOneof("kind")
        if kind == "end":
            self._ends_by(StreamEnd(event.end.code, event.end.details, event.end.daemon_ended))
            self.frames.close()  # the daemon waits for that
        elif self._listener is not None:
            self._hear(self._listener, kind, event)
        elif not self._first.done():
            self._first.set_result(event)
            self.frames.hold()  # but for what has come with it
        else:
            self._early.append(event)

    def _hear(self, listener: Listener, kind: str | None, event: worker_pb2.WorkerEvent) -> None:
        if self.over.done():
            return
        try:
            listener(kind, event)
        except ValueError as error:
            self._breaks(error)

    def _breaks(self, error: Exception) -> None:
        self._ends_by(StreamEnd(grpc.StatusCode.INTERNAL.value[0], f"the daemon broke the protocol: {error}"))
        self.frames.abort()

    def _ends(self, why: str) -> None:
        if not self.over.done():
            self._ends_by(StreamEnd(None, why or "the daemon closed the connection"))
            self.frames.abort()

    def _ends_by(self, end: StreamEnd) -> None:
        self.over.set_result(end)
        if not self._first.done():
            self._first.set_result(None)


def new_hello(
    role: common_pb2.Role,
    facts: common_pb2.NamespaceFacts,
    worker: str,
    late_ms: int,
    own: EnginePools | None,
    rank: OneRank | None,
) -> worker_pb2.WorkerHello:
    """A worker's first word; see `DaemonClient.connect`."""
    hello = worker_pb2.WorkerHello(protocol=WORKER_PROTOCOL, role=role, worker=worker, facts=facts, late_ms=late_ms)
    if own is not None:
        hello.pool.CopyFrom(own.message)
        hello.facts.geometry.page_size = own.pools.geometry.page_size
    if rank is not None:
        hello.rank.CopyFrom(rank.to_proto())
    return hello


async def open_stream(socket: str, deadline_s: float) -> Stream:
    """Connects to the daemon whose Unix socket is `socket`, waiting until it is there. DaemonAbsent where it is not
    within the deadline."""
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline_s
    stream = Stream(socket)
    while (connection := _connected(socket + SUFFIX)) is None:
        if loop.time() >= until:
            raise _absent(socket, deadline_s)
        await asyncio.sleep(AGAIN_SECONDS)
    await loop.create_unix_connection(lambda: stream.frames, sock=connection)
    return stream


def _absent(socket: str, deadline_s: float) -> DaemonAbsent:
    why = f"no daemon answered on {socket + SUFFIX} within {deadline_s:g} s"
    if os.path.exists(socket):
        why += f"; {socket} is there, of a daemon older than this worker or just starting"
    return DaemonAbsent(why)


def _connected(path: str) -> unix.socket | None:
    """A socket that is connected to the one at `path`; None where nobody takes it. asyncio's own connecting takes the
    refusal of a listener whose queue is full, as a stopped daemon's, for a beginning."""
    connection = unix.socket(unix.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(path)
        return connection
    except OSError as error:
        connection.close()
        if error.errno in _ABSENT:
            return None
        raise HandshakeFailed(f"cannot connect to {path}: {error}") from error
