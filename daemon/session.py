"""One session of two daemons after their Hello: a gRPC stream, a courier, and the sending or the receiving state
machine.

Both ends run the same steps: start the courier, say CourierUp, connect to the other's courier, say CourierConnected.
When both have said so the session is up; the receiver's first credits follow. A session ends once, for any reason;
its courier is then ended and reaped, and what copies still run are waited for before their pages are given back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvferry.daemon.copier import Copier
from kvferry.daemon.limits import MAX_METADATA_BYTES
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier_link import CourierConfig, CourierLink
from kvferry.transfer.courier_messages import (
    Connected,
    CourierDied,
    CourierEvent,
    Notification,
    PostDone,
    PostFailed,
)

log = logging.getLogger(__name__)

OUTGOING = 8192  # messages that may wait for the stream
START_SECONDS = 20.0  # for a courier to start or to connect


class SessionBroken(Exception):
    """The session is over; why, for the log and for the requests that lose by it."""


class Duplex(Protocol):
    """A gRPC stream from either end."""

    async def read(self) -> object: ...

    async def write(self, message: peer.PeerMessage) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionTimes:
    heartbeat: float
    lost: float


class Session:
    """What is common to both ends. Subclasses handle the messages of their direction."""

    def __init__(self, *, remote: str, courier: CourierConfig, copier: Copier, times: SessionTimes) -> None:
        self.remote = remote  # the other daemon's name
        self.up = False
        self.closed = False
        self._courier_config = courier
        self._copier = copier
        self._times = times
        self._link: CourierLink | None = None
        self._outgoing: asyncio.Queue[peer.PeerMessage] = asyncio.Queue(OUTGOING)
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._own_connected = False
        self._peer_connected = False
        self.remote_slots = 0
        self.remote_slot_bytes = 0
        self._copies = 0
        self._copies_done = asyncio.Event()

    # -- for subclasses ------------------------------------------------------------------------------------------

    def on_up(self) -> None:
        """Both couriers are connected."""

    def on_message(self, kind: str, message: peer.PeerMessage) -> None:
        """A message of this direction. SessionBroken ends the session."""
        raise SessionBroken(f"the peer sent {kind}, which this side does not take")

    def on_courier(self, event: PostDone | Notification) -> None:
        """The courier's progress."""

    def send(self, message: peer.PeerMessage) -> None:
        """Queues a message; a peer that reads too slowly loses the session."""
        if self.closed:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.break_off(f"{OUTGOING} messages wait for the peer")

    def break_off(self, reason: str) -> None:
        """Ends the session; `run` raises. Idempotent."""
        if not self._broken.done():
            self._broken.set_result(reason)

    def copy_begins(self) -> None:
        self._copies += 1

    def copy_ends(self) -> None:
        self._copies -= 1
        self._copies_done.set()

    @property
    def link(self) -> CourierLink:
        assert self._link is not None, "the courier is not up"
        return self._link

    # -- the life of a session -----------------------------------------------------------------------------------

    async def run(self, stream: Duplex) -> None:
        """Lives until the session breaks; always ends by SessionBroken. The courier is reaped before it raises."""
        tasks = [
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._beat()),
        ]
        try:
            await self._start_courier(tasks)
            await self._first(*tasks, self._broken)
            raise SessionBroken(self._reason(tasks))
        finally:
            self.closed, self.up = True, False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Copies read or write the slots, which go with the courier; their number is bounded and each is short.
            while self._copies:
                self._copies_done.clear()
                await self._copies_done.wait()
            if self._link is not None:
                await self._link.stop(10.0)

    async def _start_courier(self, tasks: list[asyncio.Task[None]]) -> None:
        start = asyncio.create_task(CourierLink.start(self._courier_config, self._on_courier, START_SECONDS))
        await self._first(start, *tasks, self._broken)
        if not start.done():
            # Broken meanwhile: the start has its own deadline, and what it started must be reaped.
            self.break_off(self._reason(tasks))
        try:
            self._link = await start
        except Exception as error:
            raise SessionBroken(f"the courier did not start: {error}") from error
        if self._broken.done():
            raise SessionBroken(self._broken.result())
        up = peer.CourierUp(
            metadata=self._link.metadata,
            receive_address=self._link.receive_address,
            receive_slots=self._courier_config.receive_slots,
            slot_bytes=self._courier_config.slot_bytes,
        )
        self.send(peer.PeerMessage(courier_up=up))
        self._connect_if_known()

    async def _first(self, *futures: asyncio.Future[Any]) -> None:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

    def _reason(self, tasks: list[asyncio.Task[None]]) -> str:
        if self._broken.done():
            return self._broken.result()
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return str(error)
        return "the stream ended"

    async def _write(self, stream: Duplex) -> None:
        while True:
            await stream.write(await self._outgoing.get())

    async def _beat(self) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(self._times.heartbeat)
            sequence += 1
            self.send(peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=sequence)))

    async def _read(self, stream: Duplex) -> None:
        while True:
            try:
                message = await asyncio.wait_for(stream.read(), self._times.lost)
            except asyncio.TimeoutError:
                raise SessionBroken(f"nothing was heard from {self.remote} for {self._times.lost} s") from None
            except grpc.aio.AioRpcError as error:
                raise SessionBroken(f"{error.code().name}: {error.details()}") from error
            if not isinstance(message, peer.PeerMessage):
                raise SessionBroken(f"{self.remote} closed the stream")
            self._dispatch(message)

    def _dispatch(self, message: peer.PeerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "heartbeat":
            return
        if kind == "courier_up":
            self._on_courier_up(message.courier_up)
        elif kind == "courier_connected":
            self._peer_connected = True
            self._check_up()
        elif kind is None:
            raise SessionBroken("the peer sent a message of no known kind")
        else:
            try:
                self.on_message(kind, message)
            except ValueError as error:
                raise SessionBroken(f"{kind}: {error}") from error

    # -- courier -------------------------------------------------------------------------------------------------

    def _on_courier_up(self, up: peer.CourierUp) -> None:
        if self.remote_slot_bytes:
            raise SessionBroken("the peer sent courier_up twice")
        for field, value, low, high in (
            ("metadata's length", len(up.metadata), 1, MAX_METADATA_BYTES),
            ("slot_bytes", up.slot_bytes, 4096, 1 << 30),
            ("receive_slots", up.receive_slots, 0, 1024),
        ):
            if not low <= value <= high:
                raise SessionBroken(f"courier_up: {field} is {value}; it must be {low} to {high}")
        self.remote_slots, self.remote_slot_bytes = up.receive_slots, up.slot_bytes
        self._remote_up = up
        self._connect_if_known()

    def _connect_if_known(self) -> None:
        if self._link is not None and self.remote_slot_bytes:
            up = self._remote_up
            self._link.connect(up.metadata, up.receive_address, up.receive_slots, up.slot_bytes)

    def _on_courier(self, event: CourierEvent) -> None:
        if self.closed:
            return
        if isinstance(event, Connected):
            self._own_connected = True
            self.send(peer.PeerMessage(courier_connected=peer.CourierConnected()))
            self._check_up()
        elif isinstance(event, CourierDied):
            self.break_off(f"the courier died: {event.message}")
        elif isinstance(event, PostFailed):
            # It proves nothing about the peer's memory; the session's end does, since both couriers are reaped.
            self.break_off(f"a write failed: {event.message}")
        else:
            try:
                self.on_courier(event)
            except ValueError as error:
                self.break_off(str(error))

    def _check_up(self) -> None:
        if self._own_connected and self._peer_connected and not self.up:
            self.up = True
            log.info("session with %s is up", self.remote)
            self.on_up()
