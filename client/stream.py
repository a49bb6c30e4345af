"""The gRPC stream under a worker's session: opening it, and the daemon's first word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc
import grpc.aio

from kvferry.client.requests import DaemonAbsent, HandshakeFailed
from kvferry.proto import worker_pb2
from kvferry.proto.limits import MAX_MESSAGE_BYTES

PROTOCOL = 1
MAX_UNSENT_MESSAGES = 8192
MAX_RECEIVED_MESSAGE_BYTES = 64 * 1024 * 1024

_SESSION_METHOD = "/kvferry.v1.Worker/Session"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVED_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # several clients of one process must not share a connection
)

Call = grpc.aio.StreamStreamCall[worker_pb2.WorkerMessage, worker_pb2.WorkerEvent]


class Stream(NamedTuple):
    channel: grpc.aio.Channel
    call: Call
    outgoing: asyncio.Queue[worker_pb2.WorkerMessage | None]  # None: nothing more is sent


def open_stream(socket: str) -> Stream:
    """Starts the stream on the Unix socket `socket`; it connects when the daemon is there."""
    channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
    session = channel.stream_stream(  # the generated stub does the same, without types
        _SESSION_METHOD,
        request_serializer=worker_pb2.WorkerMessage.SerializeToString,
        response_deserializer=worker_pb2.WorkerEvent.FromString,
    )
    outgoing: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue(MAX_UNSENT_MESSAGES)
    return Stream(channel, session(_drain(outgoing), wait_for_ready=True), outgoing)


async def read_welcome(call: Call) -> worker_pb2.Welcome:
    """Raises HandshakeFailed when the daemon's first word is anything else."""
    try:
        event = await call.read()
    except grpc.aio.AioRpcError as error:
        kind = DaemonAbsent if error.code() is grpc.StatusCode.UNAVAILABLE else HandshakeFailed
        raise kind(f"the daemon refused the worker: {error.code().name}: {error.details()}") from None
    if not isinstance(event, worker_pb2.WorkerEvent):
        raise HandshakeFailed(f"the daemon refused the worker: {(await call.code()).name}: {await call.details()}")
    if event.WhichOneof("kind") != "welcome":
        raise HandshakeFailed(f"the daemon's first word is {event.WhichOneof('kind')}; it must be welcome")
    if event.welcome.protocol != PROTOCOL:
        raise HandshakeFailed(
            f"protocol: the daemon chose {event.welcome.protocol}, this worker speaks {PROTOCOL}; upgrade the older one"
        )
    return event.welcome


async def _drain(
    outgoing: asyncio.Queue[worker_pb2.WorkerMessage | None],
) -> AsyncIterator[worker_pb2.WorkerMessage]:
    while (message := await outgoing.get()) is not None:
        yield message
