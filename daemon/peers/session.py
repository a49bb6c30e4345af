"""One session of two daemons after their Hello: a gRPC stream, a courier, and the directions in which pages travel: its
own, and where the Hellos agreed on it the way back.

Both ends run the same steps: start the courier, say CourierUp, connect to the other's courier, say CourierConnected.
When both have said so the session is up; the receiver's first credits follow. A session ends once, for any reason;
its courier is then ended and reaped, and what copies still run are waited for before their pages are given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.memory.interface import PartCopies, PoolMemory
from kvferry.daemon.peers.directions import Direction, open_all
from kvferry.daemon.peers.traces import NO_TRACES, Traces
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_METADATA_BYTES
from kvferry.transfer.courier.link import CourierConfig, CourierError, CourierLink, RemoteRank
from kvferry.transfer.courier.messages import (
    MAX_SLOT_BYTES,
    MAX_SLOTS,
    MIN_SLOT_BYTES,
    Connected,
    CourierDied,
    CourierEvent,
    PostFailed,
)
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.protocol.slots import SlotError, StaleCredit
from kvferry.waiting import awake, complete, is_done, unmoved

log = logging.getLogger(__name__)

OUTGOING = 8192  # messages that may wait for the stream
OUTGOING_BYTES = 32 << 20  # likewise
START_SECONDS = 20.0  # for both couriers to start and to connect
POST_SECONDS = 15.0  # for one write of a slot; UCX's own timeout is 3 s
STOP_SECONDS = 10.0  # for a killed courier to be reaped, and for a pool that is being opened


class SessionBroken(Exception):
    """The session is over; why, for the log and for the requests that lose by it. `code`: what the peer broke."""

    def __init__(self, message: str, code: common.ErrorCode = common.ERROR_UNSPECIFIED) -> None:
        super().__init__(message)
        self.code = code


def _code_of(error: ValueError) -> common.ErrorCode:
    if isinstance(error, StaleCredit):
        return common.ERROR_FAILED_PRECONDITION
    return common.ERROR_OUT_OF_RANGE if isinstance(error, SlotError) else common.ERROR_UNSPECIFIED


def report_invariant(error: BaseException) -> None:
    """Hands a broken invariant to the loop's exception handler, by which the daemon ends."""
    asyncio.get_running_loop().call_exception_handler({"message": "an invariant is broken", "exception": error})


class Duplex(Protocol):
    """A gRPC stream from either end."""

    async def read(self) -> object: ...

    async def write(self, message: peer.PeerMessage) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionTimes:
    heartbeat: float
    lost: float


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """The terms of a session: those of the two Hellos, and what it uses of its daemon."""

    remote: str  # the other daemon's name
    courier: CourierConfig
    memory: PoolMemory
    lanes: Sequence[Lane]
    remote_ranks: int
    checksums: bool  # with each part, as the Hellos agreed
    times: SessionTimes
    back_lanes: Sequence[Lane] = ()  # of the way back; none: there is none
    looks_up: bool = False  # the prefill daemon may look up what decode has cached


@dataclass(frozen=True, slots=True)
class SessionMeters:
    """The side's totals, stage times and spans, to which a session adds its own."""

    counters: TransferCounters
    latencies: Latencies
    traces: Traces = NO_TRACES


class Session:
    """One end of a session. Its directions join it before it runs."""

    def __init__(self, setup: SessionSetup) -> None:
        self.remote = setup.remote
        self.lanes = setup.lanes
        self.back_lanes = setup.back_lanes
        self.checksums = setup.checksums
        self.looks_up = setup.looks_up
        self.up = False
        self.closed = False
        self._courier_config = setup.courier
        self._memory = setup.memory
        self._directions: list[Direction] = []
        self._expected: dict[int, int] = {}  # by direction, what its courier is to be awake for
        self._opening: asyncio.Future[list[PartCopies]] | None = None  # in a thread
        self._parts: list[PartCopies] = []  # of each direction, once they are opened
        self._remote_ranks = setup.remote_ranks
        self._times = setup.times
        self._link: CourierLink | None = None
        self._outgoing: asyncio.Queue[peer.PeerMessage] = asyncio.Queue(OUTGOING)
        self._outgoing_bytes = 0
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._own_connected = False
        self._peer_connected = False
        self.remote_slots = 0  # over all ranks
        self.remote_slot_bytes = 0
        self._heard = 0  # messages of the peer
        self._copies = 0
        self._copies_done = asyncio.Event()

    # -- for its directions --------------------------------------------------------------------------------------

    def join(self, direction: Direction) -> int:
        """Takes in a direction. Its number, for `parts` and `expect`."""
        self._directions.append(direction)
        return len(self._directions) - 1

    @property
    def moved_bytes(self) -> int:
        """Bytes of pages that its directions have moved."""
        return sum(direction.moved_bytes for direction in self._directions)

    @property
    def own_slot_bytes(self) -> int:
        return self._courier_config.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of either side, header included."""
        return min(self._courier_config.slot_bytes, self.remote_slot_bytes)

    @property
    def remote_rank_slots(self) -> int:
        """Receive slots of each of the peer's ranks."""
        return self.remote_slots // self._remote_ranks

    @property
    def memory(self) -> PoolMemory:
        return self._memory

    def expect(self, direction: int, active: int) -> None:
        """Parts are under way in this direction, so many: the courier looks for what ends or comes."""
        self._expected[direction] = active
        if not self.closed and self._link is not None:
            self._link.expect(sum(self._expected.values()))

    def send(self, message: peer.PeerMessage) -> None:
        """Queues a message; a peer that reads too slowly loses the session."""
        if self.closed:
            return
        size = message.ByteSize()
        if self._outgoing.full() or self._outgoing_bytes + size > OUTGOING_BYTES:
            self.break_off(f"{self._outgoing.qsize()} messages of {self._outgoing_bytes} bytes wait for the peer")
            return
        self._outgoing_bytes += size
        self._outgoing.put_nowait(message)

    def break_off(self, reason: str) -> None:
        """Ends the session; `run` raises. Idempotent."""
        if not self._broken.done():
            self._broken.set_result(reason)

    def parts(self, direction: int) -> PartCopies:
        assert self._parts, "the session is not up"
        return self._parts[direction]

    def copy_begins(self) -> None:
        self._copies += 1

    def copy_ends(self) -> None:
        self._copies -= 1
        self._copies_done.set()

    @property
    def courier_pid(self) -> int | None:
        """The courier's process; None before it is up and once the session ends."""
        return self._link.pid if self._link is not None and not self.closed else None

    @property
    def link(self) -> CourierLink:
        assert self._link is not None, "the courier is not up"
        return self._link

    # -- the life of a session -----------------------------------------------------------------------------------

    async def run(self, stream: Duplex) -> None:
        """Lives until the session breaks; ends by SessionBroken, or by cancellation. Whichever it is: no copy runs and
        the courier is reaped before it returns."""
        tasks = [
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._watch_peer()),
            asyncio.create_task(self._watch_posts()),
            asyncio.create_task(self._beat()),
        ]
        start = asyncio.create_task(CourierLink.start(self._courier_config, self._on_courier, START_SECONDS))
        try:
            await self._serve(tasks, start)
        finally:
            await self._finish(asyncio.create_task(self._tear_down(tasks, start)))

    async def _serve(self, tasks: list[asyncio.Task[None]], start: asyncio.Task[CourierLink]) -> None:
        deadline = asyncio.create_task(awake(START_SECONDS))
        try:
            await self._first(start, *tasks, self._broken)
            if start.done() and not self._broken.done():
                await self._open(await start, deadline, *tasks)
                await self._first(self._up, deadline, *tasks, self._broken)
                if deadline.done() and not self.up:
                    late = "the pool was not opened" if self._link is None else "the couriers were not connected"
                    self.break_off(f"{late} within {START_SECONDS} s")
                await self._first(*tasks, self._broken)
        except (CourierError, ValueError) as error:
            raise SessionBroken(f"the courier did not start: {error}") from error
        finally:
            deadline.cancel()
        raise self._reason(tasks)

    async def _open(self, link: CourierLink, *ends: asyncio.Future[Any]) -> None:
        """Opens the parts, before the peer is told that the courier is up: so none is asked for or comes earlier."""

        opened = partial(open_all, self._directions, link, self.checksums)
        self._opening = asyncio.get_running_loop().run_in_executor(None, opened)
        await self._first(self._opening, *ends, self._broken)
        if self._opening.done() and not self._broken.done():
            try:
                self._parts = await self._opening
            except (OSError, ValueError, MemoryError) as error:
                raise SessionBroken(f"the pool could not be opened: {error}") from error
            self._courier_is_up(link)

    async def _finish(self, teardown: asyncio.Task[None]) -> None:
        """Waits for the teardown, also where this very task is cancelled meanwhile."""
        try:
            await complete(teardown)
        finally:
            teardown.result()  # its own error goes before a cancellation

    async def _tear_down(self, tasks: list[asyncio.Task[None]], start: asyncio.Task[CourierLink]) -> None:
        self.closed, self.up = True, False
        for task in tasks:
            task.cancel()
        start.cancel()  # what it has started it ends and reaps
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and isinstance(error := task.exception(), AssertionError):
                report_invariant(error)
        # Copies read or write the slots, which go with the courier; their number is bounded and each is short.
        while self._copies:
            self._copies_done.clear()
            await self._copies_done.wait()
        await self._close_parts()
        await asyncio.wait([start])
        if start.cancelled():
            return
        try:
            link = start.result()  # also where it came up in the very moment of its cancellation
        except (CourierError, OSError, ValueError):
            return
        try:
            await link.stop(STOP_SECONDS)
        except CourierError as error:
            report_invariant(error)  # a courier that cannot be reaped may still write: nothing may be given back

    async def _close_parts(self) -> None:
        """Closes the copies of parts, also those that are being opened: a thread cannot be cancelled, and would find
        the pool's memory gone."""
        if self._opening is not None:
            if not await is_done(self._opening, STOP_SECONDS):
                log.error("the end of the session with %s waits for the pool's devices", self.remote)
                await asyncio.wait([self._opening])
            if self._opening.exception() is None:
                for parts in self._opening.result():
                    parts.close()

    def _courier_is_up(self, link: CourierLink) -> None:
        self._link = link
        up = peer.CourierUp(
            metadata=link.metadata,
            receive_address=link.receive_address,
            receive_slots=self._courier_config.receive_slots,
            slot_bytes=self._courier_config.slot_bytes,
            ranks=[peer.CourierRank(receive_address=rank.address, device=rank.device) for rank in link.receive_ranks],
        )
        self.send(peer.PeerMessage(courier_up=up))
        self._connect_if_known()

    async def _first(self, *futures: asyncio.Future[Any]) -> None:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

    def _reason(self, tasks: list[asyncio.Task[None]]) -> SessionBroken:
        if self._broken.done():
            return SessionBroken(self._broken.result())
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                if isinstance(error, grpc.aio.AioRpcError):  # its text is of many lines
                    return SessionBroken(f"the stream ended: {error.code().name}: {error.details()}")
                return error if isinstance(error, SessionBroken) else SessionBroken(str(error))
        return SessionBroken("the stream ended")

    async def _write(self, stream: Duplex) -> None:
        while True:
            message = await self._outgoing.get()
            self._outgoing_bytes -= message.ByteSize()
            await stream.write(message)

    async def _beat(self) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(self._times.heartbeat)
            sequence += 1
            self.send(peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=sequence)))

    async def _watch_posts(self) -> None:
        """Ends the session when a write takes too long: a stopped courier says nothing, and its writes neither arrive
        nor fail."""
        await unmoved(lambda: self._link.oldest_post if self._link is not None else None, POST_SECONDS)
        raise SessionBroken(f"a write to {self.remote} has not ended for {POST_SECONDS} s")

    async def _watch_peer(self) -> None:
        """Ends the session when the peer says nothing for too long; a deadline for each read would cost every message
        a task and a timer."""
        await unmoved(lambda: self._heard, self._times.lost)
        raise SessionBroken(f"nothing was heard from {self.remote} for {self._times.lost} s")

    async def _read(self, stream: Duplex) -> None:
        while True:
            try:
                message = await stream.read()
            except grpc.aio.AioRpcError as error:
                raise SessionBroken(f"{error.code().name}: {error.details()}") from error
            if not isinstance(message, peer.PeerMessage):
                raise SessionBroken(f"{self.remote} closed the stream")
            self._heard += 1
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
                self._direction_of(kind).on_message(kind, message)
            except ValueError as error:
                raise SessionBroken(f"{kind}: {error}", _code_of(error)) from error

    def _direction_of(self, kind: str) -> Direction:
        for direction in self._directions:
            if kind in direction.KINDS:
                return direction
        raise SessionBroken(f"the peer sent {kind}, which this side does not take")

    # -- courier -------------------------------------------------------------------------------------------------

    def _on_courier_up(self, up: peer.CourierUp) -> None:
        if self.remote_slot_bytes:
            raise SessionBroken("the peer sent courier_up twice")
        for field, value, low, high in (
            ("metadata's length", len(up.metadata), 1, MAX_METADATA_BYTES),
            ("slot_bytes", up.slot_bytes, MIN_SLOT_BYTES, MAX_SLOT_BYTES),
            ("receive_slots", up.receive_slots, 0, MAX_SLOTS),
        ):
            if not low <= value <= high:
                raise SessionBroken(f"courier_up: {field} is {value}; it must be {low} to {high}")
        if len(up.ranks) not in (0, self._remote_ranks):
            raise SessionBroken(
                f"courier_up: ranks has {len(up.ranks)} entries; it must have {self._remote_ranks}, "
                "or none for slots in host memory"
            )
        if up.receive_slots % self._remote_ranks:
            raise SessionBroken(
                f"courier_up: receive_slots is {up.receive_slots}; "
                f"it must be a multiple of its {self._remote_ranks} ranks"
            )
        self.remote_slots, self.remote_slot_bytes = up.receive_slots, up.slot_bytes
        self._remote_up = up
        self._connect_if_known()

    def _connect_if_known(self) -> None:
        if self._link is not None and self.remote_slot_bytes:
            up = self._remote_up
            ranks = [RemoteRank(rank.receive_address, rank.device) for rank in up.ranks]
            self._link.connect(up.metadata, up.receive_address, up.receive_slots, up.slot_bytes, ranks)

    def _on_courier(self, event: CourierEvent) -> None:
        if self.closed:
            return
        try:
            self._hear_courier(event)
        except (SessionBroken, ValueError, OSError) as error:  # OSError: a header's
            self.break_off(str(error))

    def _hear_courier(self, event: CourierEvent) -> None:
        if isinstance(event, Connected):
            self._own_connected = True
            self.send(peer.PeerMessage(courier_connected=peer.CourierConnected()))
            self._check_up()
        elif isinstance(event, CourierDied):
            self.break_off(f"the courier died: {event.message}")
        elif isinstance(event, PostFailed):
            # It proves nothing about the peer's memory; the session's end does, since both couriers are reaped.
            self.break_off(f"a write failed: {event.message}")
        elif not self.up:
            raise SessionBroken("the courier was notified of a part before the session was up")
        elif not any(direction.on_courier(event) for direction in self._directions):
            raise SessionBroken(f"the courier told of a {type(event).__name__}, which this side has none of")

    def _check_up(self) -> None:
        if self._own_connected and self._peer_connected and not self.up:
            self.up = True
            log.info("session with %s is up", self.remote)
            for direction in self._directions:
                direction.on_up()
            self._up.set_result(None)
