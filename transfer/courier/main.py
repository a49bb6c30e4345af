"""The courier: a child process that owns one NIXL agent and maps one session's slots and nothing else of its daemon.

Started by `process` as `python -m kvferry.transfer.courier.main SOCKET_FD [MEMORY_FD]`: the slots are in that memory
file, or on GPUs, where it allocates them. NIXL has no abort, and whoever reaches its UCX port can write all that its
process maps; so it lives here, where ending the process ends its writes and costs a session only.

One thread and one loop: it waits for orders or bytes for a moment, then polls, and on GPUs reads the headers of parts
that came. NIXL's own progress thread would spin on a core; without it data arrive only while this loop polls. Between
GPUs a write takes less than a wait: there the loop spins as long as writes end or arrive. A post's handle is polled
until it is done or has failed, and released then, once: only the poll sends the notification, and a handle released
earlier writes on.

It imports little, since each session waits for its start.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, NoReturn, Protocol, cast

from kvferry.transfer.courier.gpu_slots import OwnSlots
from kvferry.transfer.courier.messages import (
    MAX_NOTIFICATION_BYTES,
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    CourierSetup,
    CourierStarted,
    Expect,
    MessageError,
    Notification,
    Post,
    PostDone,
    PostFailed,
    check_range,
    decode_order,
    encode_event,
)
from kvferry.transfer.courier.posts import PostAgent, Posts, SlotPlaces

BUSY_SECONDS = 0.0003  # between polls while posts are in flight or parts are expected
IDLE_SECONDS = 0.005
SPIN_SECONDS = 0.002  # without a wait after the last post or progress, with slots on GPUs
REST_SECONDS = 0.2  # between sleeps, however much there is to do: the daemon sees by them that the loop moves
ORDERS_PER_ROUND = 64
NOTIFICATIONS_PER_ROUND = 64  # a header is read for each of those on GPUs
MAX_UNSENT = 4096  # events that may wait for a daemon that does not read
MAX_UNHEARD = 4096  # notifications that came at a time; a peer has one a slot under way
PR_SET_PDEATHSIG = 1
SELECT_LIMIT = 1024  # descriptors from here on cannot be given to select()

# kvferry's own package of it first. The metapackage `nixl` may import torch, seconds long, to choose between the rest;
# for host memory either one does.
NIXL_MODULES = ("kvferry_nixl.nixl_cu13._api", "nixl_cu13._api", "nixl_cu12._api", "nixl._api")


class Agent(PostAgent, Protocol):
    """The part of nixl_agent that is used here. Failures raise."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def transfer(self, handle: object) -> str: ...

    def check_xfer_state(self, handle: object) -> str: ...

    def release_xfer_handle(self, handle: object) -> None: ...

    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


class OrdersEnded(Exception):
    """The daemon closed the socketpair, or died."""


def make_agent() -> Agent:
    """An agent without threads, under a name that no other incarnation ever has. UCX takes the rest from UCX_*."""
    nixl = _import_nixl()
    config = nixl.nixl_agent_config(
        enable_prog_thread=False,
        num_threads=0,
        backends=[],
        sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    agent = cast(Agent, nixl.nixl_agent(f"courier-{os.getpid()}-{os.urandom(16).hex()}", config))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return agent


def _import_nixl() -> Any:  # NIXL has no types
    for name in NIXL_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ImportError("NIXL is not installed; install the package kvferry-nixl, or nixl")


class Courier:
    """The loop and what is in flight. `memory`: the slots of `setup`, in host memory [receive slots][send slots]."""

    def __init__(self, orders: socket.socket, memory: mmap.mmap | OwnSlots, setup: CourierSetup, agent: Agent) -> None:
        self._orders = orders
        self._setup = setup
        self._agent = agent
        self._memory = memory  # held for as long as the process lives
        self._sources = SlotPlaces("DRAM", ())  # the send slots
        self._remote: Connect | None = None
        self._remote_name = ""
        self._writes: Posts | None = None
        self._posts: dict[int, object] = {}  # post id -> handle, not yet done
        self._expected = 0
        self._unheard: deque[bytes] = deque()  # the peer's notifications that the daemon was not told
        self._unsent: deque[bytes] = deque()
        self._event_sets: list[int] = []
        self._spin_until = 0.0

    def start(self) -> None:
        """Registers the slots. The metadata are taken between: they give the peer the receive slots only."""
        memory = self._memory
        started = self._start_on_gpus(memory) if isinstance(memory, OwnSlots) else self._start_on_host(memory)
        self._event_sets = ucx_event_sets()
        self._send(started)

    def _start_on_host(self, memory: mmap.mmap) -> CourierStarted:
        setup = self._setup
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        receive_bytes, send_bytes = setup.receive_slots * setup.slot_bytes, setup.send_slots * setup.slot_bytes
        if receive_bytes:
            self._agent.register_memory([(address, receive_bytes, 0, "")], "DRAM")
        metadata = self._agent.get_agent_metadata()
        if send_bytes:
            self._agent.register_memory([(address + receive_bytes, send_bytes, 0, "")], "DRAM")
        self._sources = SlotPlaces.on_host(address + receive_bytes, setup.send_slots, setup.slot_bytes)
        return CourierStarted(address, metadata)

    def _start_on_gpus(self, own: OwnSlots) -> CourierStarted:
        setup, ranks = self._setup, own.ranks
        receiving = [(rank.receive_address, device) for rank, device in zip(ranks, setup.devices, strict=True)]
        sending = [(rank.send_address, device) for rank, device in zip(ranks, setup.devices, strict=True)]
        receive_bytes = setup.receive_slots // len(ranks) * setup.slot_bytes
        send_bytes = setup.send_slots // len(ranks) * setup.slot_bytes
        if receive_bytes:
            self._agent.register_memory([(address, receive_bytes, device, "") for address, device in receiving], "VRAM")
        metadata = self._agent.get_agent_metadata()
        if send_bytes:
            self._agent.register_memory([(address, send_bytes, device, "") for address, device in sending], "VRAM")
        self._sources = SlotPlaces.on_gpus(sending, setup.send_slots, setup.slot_bytes)
        return CourierStarted(0, metadata, ranks)

    def run(self) -> NoReturn:
        """Returns never: raises OrdersEnded when the daemon is gone, anything else when the courier cannot go on."""
        rest_at = 0.0
        while True:
            if (now := time.monotonic()) >= rest_at:
                rest_at = now + REST_SECONDS
                time.sleep(BUSY_SECONDS)  # a select() that finds something at once is no wait
            wait = self._wait_seconds()
            watched: list[socket.socket | int] = [self._orders]
            if 0 < wait < IDLE_SECONDS:
                watched += self._event_sets
            readable, _, _ = select.select(watched, [self._orders] if self._unsent else [], [], wait)
            if self._orders in readable:
                self._take_orders()
            self._poll_posts()
            self._poll_notifications()
            self._flush()

    def _wait_seconds(self) -> float:
        if self._unheard:
            return 0.0
        if not self._posts and not self._expected:
            return IDLE_SECONDS
        return 0.0 if self._spin_until > time.monotonic() else BUSY_SECONDS

    def _progress(self) -> None:
        """Something was posted, ended or arrived: with slots on GPUs the next such thing is near."""
        if self._setup.devices:
            self._spin_until = time.monotonic() + SPIN_SECONDS

    def _take_orders(self) -> None:
        for _ in range(ORDERS_PER_ROUND):
            try:
                packet = self._orders.recv(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionError:
                raise OrdersEnded from None
            if not packet:
                raise OrdersEnded
            order = decode_order(packet)
            if isinstance(order, Post):
                self._post(order)
            elif isinstance(order, Expect):
                self._expected = order.active
                self._progress()
            elif isinstance(order, Connect):
                self._connect(order)
            else:
                raise MessageError("order", "a second setup", "any other")

    def _connect(self, connect: Connect) -> None:
        if self._remote is not None:
            # An agent that removes or changes a peer and lives on leaks sockets, and old writes still land.
            raise MessageError("order", "a second connect", "any other")
        self._remote_name = self._agent.add_remote_agent(connect.metadata).decode()
        self._remote = connect
        if connect.ranks:
            ranks = [(rank.address, rank.device) for rank in connect.ranks]
            targets = SlotPlaces.on_gpus(ranks, connect.slots, connect.slot_bytes)
        else:
            targets = SlotPlaces.on_host(connect.receive_address, connect.slots, connect.slot_bytes)
        self._writes = Posts(self._agent, self._remote_name, self._sources, targets)
        self._send(Connected())

    def _post(self, post: Post) -> None:
        remote, writes = self._remote, self._writes
        if remote is None or writes is None:
            raise MessageError("order", "a post before connect", "connect first")
        check_range("send_slot", post.send_slot, 0, self._setup.send_slots - 1)
        check_range("remote_slot", post.remote_slot, 0, remote.slots - 1)
        check_range("nbytes", post.nbytes, 1, min(self._setup.slot_bytes, remote.slot_bytes))
        assert post.post_id not in self._posts, post
        try:
            handle = writes.make(post.send_slot, post.remote_slot, post.nbytes, post.notification)
        except Exception as error:  # NIXL's classes have no common base of their own
            self._send(PostFailed(post.post_id, describe(error)))
            return
        self._posts[post.post_id] = handle
        self._progress()
        self._advance(post.post_id, self._agent.transfer)

    def _poll_posts(self) -> None:
        for post_id in list(self._posts):
            self._advance(post_id, self._agent.check_xfer_state)

    def _advance(self, post_id: int, step: _Step) -> None:
        """One call on the post's handle, which is released when that says that the post is over."""
        handle = self._posts[post_id]
        event: CourierEvent
        try:
            state = step(handle)
            if state == "PROC":
                return
            event = PostDone(post_id) if state == "DONE" else PostFailed(post_id, f"NIXL says {state}")
        except Exception as error:
            event = PostFailed(post_id, describe(error))
        del self._posts[post_id]
        self._agent.release_xfer_handle(handle)
        self._progress()
        self._send(event)

    def _poll_notifications(self) -> None:
        for name, payloads in self._agent.get_new_notifs().items():
            if name != self._remote_name:
                print(f"{len(payloads)} notifications of an unknown agent dropped", file=sys.stderr, flush=True)
                continue
            self._progress()
            for payload in payloads:
                check_range("the peer's notification's length", len(payload), 1, MAX_NOTIFICATION_BYTES)
            self._unheard += payloads
            check_range("the peer's notifications at a time", len(self._unheard), 0, MAX_UNHEARD)
        for _ in range(min(len(self._unheard), NOTIFICATIONS_PER_ROUND)):
            payload = self._unheard.popleft()
            header = self._memory.header_named_by(payload) if isinstance(self._memory, OwnSlots) else b""
            self._send(Notification(payload, header))

    def _send(self, event: CourierStarted | CourierEvent) -> None:
        if len(self._unsent) >= MAX_UNSENT:
            raise MessageError("events that the daemon has not read", MAX_UNSENT + 1, f"at most {MAX_UNSENT}")
        self._unsent.append(encode_event(event))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._orders.send(self._unsent[0])
            except BlockingIOError:
                return
            except ConnectionError:
                raise OrdersEnded from None
            self._unsent.popleft()


def ucx_event_sets() -> list[int]:
    """Descriptors that are readable when UCX's TCP sockets have bytes: its epoll sets, which another of its sets
    watches.

    They end a wait before its time, several times for each part. NIXL does not name them: where none looks like that
    (another transport, another UCX), the polls alone do it.
    """
    sets: set[int] = set()
    watched: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                    sets.add(int(name))
                    with open(f"/proc/self/fdinfo/{name}") as info:
                        watched |= {int(line.split()[1]) for line in info if line.startswith("tfd:")}
    return sorted(fd for fd in sets & watched if fd < SELECT_LIMIT)


class _Step(Protocol):
    def __call__(self, handle: object) -> str: ...


def describe(error: BaseException) -> str:
    """An error in one line: its class and its text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent's thread ends, also where code of NIXL never returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before
        raise OrdersEnded


def serve(orders: socket.socket, memory_fd: int | None) -> NoReturn:
    """Runs a courier; never returns but by an exception, as `Courier.run`."""
    packet = orders.recv(MAX_PACKET_BYTES + 1)
    if not packet:
        raise OrdersEnded
    setup = decode_order(packet)
    if not isinstance(setup, CourierSetup):
        raise MessageError("first order", type(setup).__name__, "Setup")
    die_with_parent(setup.parent)
    if (memory_fd is None) != bool(setup.devices):
        raise MessageError("devices", setup.devices, "given where no memory file is, and only there")
    memory: mmap.mmap | OwnSlots
    if memory_fd is None:
        from kvferry._core import gpu_spare_stacks  # couriers of slots in host memory go without it

        gpu_spare_stacks()
        memory = OwnSlots(setup)
    else:
        memory = mmap.mmap(memory_fd, (setup.receive_slots + setup.send_slots) * setup.slot_bytes)
        os.close(memory_fd)
    orders.setblocking(False)
    courier = Courier(orders, memory, setup, make_agent())
    courier.start()
    courier.run()


def main(arguments: list[str]) -> NoReturn:
    """The process. Ends by _exit, while what failed still holds the agent and the slots: NIXL's destructors would wait
    for peers, slots on GPUs must not be freed while others map them, and the process's end is the fence."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the daemon drains first and ends us then
    socket_fd, *rest = (int(text) for text in arguments)
    memory_fd = rest[0] if rest else None
    # A daemon has many descriptors, and select() takes only low ones: the copy gets the lowest that is free.
    orders = socket.socket(fileno=os.dup(socket_fd))
    os.close(socket_fd)
    try:
        serve(orders, memory_fd)
    except OrdersEnded:
        os._exit(0)
    except BaseException as error:
        try:
            message = describe(error)
            print(f"courier: {message}", file=sys.stderr, flush=True)
            orders.setblocking(False)
            orders.send(encode_event(CourierDied(message)))  # where it fails the daemon has the line above, or is gone
        finally:
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
