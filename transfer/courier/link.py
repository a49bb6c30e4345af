"""The daemon's side of a courier: its process, its slots, its orders and events.

Owned by one asyncio loop; every method is to be called on that loop's thread. The link believes nothing of the
courier but what its own records allow, since a peer that reaches the courier's ports may have taken it over: an event
that cannot be ends the courier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from kvferry.transfer.courier.config import (
    CourierConfig,
    CourierError,
    bind_address,
    check_free_port,
    courier_environment,
    make_slot_memory,
)
from kvferry.transfer.courier.gpu_slots import GpuOf, MappedSlots, gpu
from kvferry.transfer.courier.host_slots import HostSlots
from kvferry.transfer.courier.messages import (
    MAX_EXPECTED,
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    CourierSetup,
    CourierStarted,
    Expect,
    MessageError,
    Order,
    Post,
    PostDone,
    PostFailed,
    RemoteRank,
    check_range,
    decode_event,
    encode_order,
)
from kvferry.transfer.courier.process import CourierProcess
from kvferry.waiting import is_done, within

__all__ = ["CourierConfig", "CourierError", "CourierLink", "RemoteRank"]

log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 1 << 20
EVENTS_PER_ROUND = 64
UNSENT_BESIDE_POSTS = 64  # orders that may wait, beside one post a send slot
OWN_EXIT_SECONDS = 1.0  # for one that closed its socket to end by itself, so that its status can be told
REAP_SECONDS = 10.0  # for the end of a process after SIGKILL, where no deadline was given


class CourierLink:
    """A running courier. Made by `start`, ended by `stop`."""

    def __init__(self, config: CourierConfig, on_event: Callable[[CourierEvent], None], gpu_of: GpuOf) -> None:
        """Use `start`."""
        self._gpu_of = gpu_of
        self._slots: HostSlots | MappedSlots | None = None
        self._config = config
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[CourierStarted] = self._loop.create_future()
        self._process: CourierProcess | None = None
        self._end: asyncio.Task[None] | None = None
        self._unmapping: asyncio.Task[None] | None = None  # of slots that came too late
        self._orders: socket.socket | None = None  # None: the courier is gone or going
        self._unsent: deque[bytes] = deque()
        self._stopped = False
        self._remote: Connect | None = None
        self._connected = False
        self._posts: dict[int, int] = {}  # post id -> send slot; in flight, oldest first
        self._busy_slots: set[int] = set()
        self._expecting = False  # what the courier was told last
        self.metadata = b""  # for the peer's `connect`, as the next
        self.receive_address = 0  # of the receive slots, in the courier's process; on GPUs the next in its place
        self.receive_ranks: tuple[RemoteRank, ...] = ()

    @classmethod
    async def start(
        cls,
        config: CourierConfig,
        on_event: Callable[[CourierEvent], None],
        deadline_s: float,
        gpu_of: GpuOf = gpu,
    ) -> CourierLink:
        """Starts a courier and waits, `deadline_s` at most, until its agent is up and slots on GPUs are mapped here, by
        `gpu_of`'s engines.

        `on_event` is called on this loop's thread, never after `stop` was called. Raises InterfaceError for a
        `bind_host` that no interface owns, CourierError where the courier does not start; nothing of it is left then.
        """
        link = cls(config, on_event, gpu_of)
        try:
            started = await within(deadline_s, link._start())
        except BaseException as error:
            await link.stop(REAP_SECONDS)
            if isinstance(error, asyncio.TimeoutError):
                raise CourierError(
                    f"the courier did not start within {deadline_s} s (ports {config.port_range[0]} to"
                    f" {config.port_range[1]} may all be taken){link._process.said() if link._process else ''}"
                ) from error
            raise
        link.metadata, link.receive_address = started.metadata, started.receive_address
        devices = config.devices if config.receive_slots else ()
        ranks = zip(started.ranks, devices, strict=False)
        link.receive_ranks = tuple(RemoteRank(rank.receive_address, device) for rank, device in ranks)
        return link

    async def _start(self) -> CourierStarted:
        bind = await bind_address(self._config.bind_host)
        check_free_port(bind, self._config.port_range)
        environment = courier_environment(self._config, bind, os.environ)
        if self._config.devices:
            await self._spawn(environment)
            started = await self._started
            await self._map(started)
            return started
        memory_fd = await self._make_memory()
        try:
            self._slots = HostSlots(self._config, memory_fd)
            await self._spawn(environment, memory_fd)
        finally:
            os.close(memory_fd)
        return await self._started

    async def _map(self, started: CourierStarted) -> None:
        """Maps the courier's slots; off the loop, since a device's first use takes a second."""
        config = self._config

        def map_slots() -> MappedSlots:
            counts = (config.receive_slots, config.send_slots)
            return MappedSlots(config.devices, started.ranks, counts, config.slot_bytes, self._gpu_of)

        mapping = asyncio.create_task(asyncio.to_thread(map_slots))
        try:
            self._slots = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            self._unmapping = asyncio.create_task(_unmapped(mapping))
            raise
        except (RuntimeError, ValueError) as error:
            raise CourierError(f"the courier's slots cannot be mapped: {error}") from error

    async def _make_memory(self) -> int:
        making = asyncio.create_task(asyncio.to_thread(make_slot_memory, self._config.memory_bytes))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_made)
            raise

    async def _spawn(self, environment: dict[str, str], *memory_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders = ours
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            self._process = await CourierProcess.start((theirs.fileno(), *memory_fd), environment)
        self._loop.add_reader(ours, self._read_events)
        config = self._config
        self._order(
            CourierSetup(config.slot_bytes, config.receive_slots, config.send_slots, os.getpid(), config.devices)
        )

    # -- slots ---------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None, "the courier was not started"
        return self._process.pid

    def _any_slots(self) -> HostSlots | MappedSlots:
        if self._slots is None:
            raise CourierError("the courier was stopped, and its slots with it")
        return self._slots

    @property
    def host_slots(self) -> HostSlots:
        """The slots in host memory: not to be used after `stop`, and a send slot not to be written while a post of it
        is in flight. CourierError where they are on GPUs, or the courier was stopped."""
        slots = self._any_slots()
        if isinstance(slots, MappedSlots):
            raise CourierError("its slots are on GPUs")
        return slots

    @property
    def gpu_slots(self) -> MappedSlots:
        """The slots on GPUs, where this process maps them: no copy may use one once `stop` was called, and what is
        written to a send slot must have ended before it is posted. CourierError as for `host_slots`."""
        slots = self._any_slots()
        if isinstance(slots, HostSlots):
            raise CourierError("its slots are in host memory")
        return slots

    # -- orders: after the courier's death they go nowhere, since CourierDied says what became of them --------------

    def connect(
        self,
        metadata: bytes,
        receive_address: int,
        slots: int,
        slot_bytes: int,
        ranks: Sequence[RemoteRank] = (),
    ) -> None:
        """Names the other courier, once: its link's `metadata`, `receive_address` and `receive_ranks`, and its receive
        slots. `Connected` answers; metadata that NIXL does not take end the courier. Raises MessageError."""
        if self._remote is not None:
            raise MessageError("connect", "repeated", "called once")
        connect = Connect(bytes(metadata), receive_address, slots, slot_bytes, tuple(ranks))
        packet = encode_order(connect)
        self._remote = connect
        self._send(packet)

    def post(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        """Writes the first `nbytes` of the send slot to the start of the remote slot and notifies; PostDone or
        PostFailed answers. Ids in flight are distinct, and a slot has one post in flight. Raises MessageError."""
        remote = self._remote
        if remote is None or not self._connected:
            raise MessageError("post", "early", "after Connected")
        check_range("post_id", post_id, 0, (1 << 64) - 1)
        check_range("send_slot", send_slot, 0, self._config.send_slots - 1)
        check_range("remote_slot", remote_slot, 0, remote.slots - 1)
        check_range("nbytes", nbytes, 1, min(self._config.slot_bytes, remote.slot_bytes))
        if post_id in self._posts:
            raise MessageError("post_id", post_id, "of no post in flight")
        if send_slot in self._busy_slots:
            raise MessageError("send_slot", send_slot, "of no post in flight")
        packet = encode_order(Post(post_id, send_slot, remote_slot, nbytes, bytes(notification)))
        self._posts[post_id] = send_slot
        self._busy_slots.add(send_slot)
        self._send(packet)

    def expect(self, active: int) -> None:
        """Says how many transfers may bring parts now. Above 0 the courier polls fast; 0 costs latency, never a
        part."""
        check_range("active", active, 0, MAX_EXPECTED)
        # Only a change is an order: a burst of transfers would fill the queue.
        if (active > 0) != self._expecting:
            self._expecting = active > 0
            self._order(Expect(active))

    @property
    def oldest_post(self) -> int | None:
        """The id of the oldest unanswered post. One that stays tells of a courier that is stopped or stuck, of which no
        event does."""
        return next(iter(self._posts), None)

    def _order(self, order: Order) -> None:
        self._send(encode_order(order))

    def _send(self, packet: bytes) -> None:
        if self._orders is None:
            return
        if not self._unsent:
            try:
                self._orders.send(packet)
                return
            except BlockingIOError:
                self._loop.add_writer(self._orders, self._send_unsent)
            except ConnectionError:
                return  # the reader finds the end
        self._unsent.append(packet)
        if len(self._unsent) > self._config.send_slots + UNSENT_BESIDE_POSTS:
            self._fail(f"it does not take orders: {len(self._unsent)} wait")

    def _send_unsent(self) -> None:
        assert self._orders is not None, "writer of a closed socket"
        while self._unsent:
            try:
                self._orders.send(self._unsent[0])
            except BlockingIOError:
                return
            except ConnectionError:
                break
            self._unsent.popleft()
        self._loop.remove_writer(self._orders)

    # -- events --------------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        for _ in range(EVENTS_PER_ROUND):
            if self._orders is None:  # a handler ended the link
                return
            try:
                packet = self._orders.recv(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self._fail("", OWN_EXIT_SECONDS)
                return
            try:
                self._take(decode_event(packet))
            except MessageError as error:
                self._fail(f"it sent what cannot be: {error}")

    def _take(self, event: CourierStarted | CourierEvent) -> None:
        """Records and hands on an event. Raises MessageError for one that cannot be."""
        if isinstance(event, CourierDied):
            self._fail(event.message, OWN_EXIT_SECONDS)
            return
        if isinstance(event, CourierStarted):
            if self._started.done():
                raise MessageError("event", "Started", "any other after the first")
            self._started.set_result(event)
            return
        if isinstance(event, PostDone | PostFailed):
            slot = self._posts.pop(event.post_id, None)
            if slot is None:
                raise MessageError("post_id", event.post_id, "of a post in flight")
            self._busy_slots.discard(slot)
        elif isinstance(event, Connected):
            if self._remote is None or self._connected:
                raise MessageError("event", "Connected", "the answer to connect")
            self._connected = True
        elif not self._connected:
            raise MessageError("event", "Notification", "none before Connected")
        elif event.header and not self._config.devices:
            raise MessageError("header's length", len(event.header), "0 for slots in host memory")
        self._deliver(event)

    def _deliver(self, event: CourierEvent) -> None:
        if self._stopped:
            return
        try:
            self._on_event(event)
        except MessageError:  # of the handler's own calls: not the courier's fault
            log.exception("courier %d: the handler of its event failed", self.pid)

    # -- the end -------------------------------------------------------------------------------------------------

    def _fail(self, message: str, grace_s: float = 0.0) -> None:
        """The courier ended, or must: reap it, then say so."""
        self._close_orders()
        if self._end is None:
            self._end = asyncio.create_task(self._end_process(message, grace_s))

    async def _end_process(self, message: str, grace_s: float) -> None:
        assert self._process is not None
        if grace_s:
            await self._process.wait(grace_s)
        try:
            status = await self._process.reap(REAP_SECONDS)
        except CourierError as error:
            status = str(error)
        text = f"{message or 'its socket was closed'} ({status}){self._process.said()}"
        if not self._started.done():
            self._started.set_exception(CourierError(f"the courier did not start: {text}"))
            self._started.exception()  # may have no reader any more
            return
        self._deliver(CourierDied(text))

    async def stop(self, deadline_s: float) -> None:
        """Ends the courier: SIGKILL, reaped within `deadline_s` (CourierError if not), its slots unmapped. After it
        nothing of it lands any more, nor anything in slots in host memory. No event is delivered once this was called.
        Idempotent."""
        self._stopped = True
        self._close_orders()
        if self._process is not None:
            await self._process.reap(deadline_s)
        if self._end is not None:
            await self._end
        if self._unmapping is not None and not await is_done(self._unmapping, deadline_s):
            raise CourierError(f"the courier's slots cannot be unmapped within {deadline_s} s: they are being mapped")
        slots, self._slots = self._slots, None
        if isinstance(slots, MappedSlots):
            await asyncio.to_thread(slots.close)  # may wait for the device
        elif slots is not None:
            slots.close()

    def _close_orders(self) -> None:
        orders, self._orders = self._orders, None
        if orders is not None:
            self._loop.remove_reader(orders)
            self._loop.remove_writer(orders)
            orders.close()
        self._unsent.clear()


async def _unmapped(mapping: asyncio.Task[MappedSlots]) -> None:
    """Unmaps slots that nobody will have."""
    with contextlib.suppress(RuntimeError, ValueError):  # there are none
        await asyncio.to_thread((await mapping).close)


def _close_made(making: asyncio.Task[int]) -> None:
    if not making.cancelled() and making.exception() is None:
        os.close(making.result())
