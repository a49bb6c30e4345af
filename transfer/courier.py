"""The courier: a child process that owns one NIXL agent and maps one session's slots and nothing else of its daemon.

Started by `courier_link` as `python -m kvferry.transfer.courier SOCKET_FD MEMORY_FD`. NIXL has no abort, and whoever
reaches its UCX port can write all that its process maps; so it lives here, where ending the process is the proof that
nothing lands any more, and costs a session only.

One thread and one loop: it waits for orders or bytes for a moment, then polls. NIXL's own progress thread would spin
on a core; without it data arrive only while this loop polls. A post's handle is polled until it is done or has failed,
and released then, once: only the poll sends the notification, and a handle released earlier writes on.

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
from collections import deque
from typing import Any, Protocol, cast

from kvferry.transfer.courier_messages import (
    MAX_NOTIFICATION_BYTES,
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    Expect,
    MessageError,
    Notification,
    Post,
    PostDone,
    PostFailed,
    Setup,
    Started,
    check_range,
    decode_order,
    encode_event,
)

BUSY_SECONDS = 0.0003  # between polls while posts are in flight or parts are expected
IDLE_SECONDS = 0.005
ORDERS_PER_ROUND = 64
MAX_UNSENT = 4096  # events that may wait for a daemon that does not read
PR_SET_PDEATHSIG = 1
SELECT_LIMIT = 1024  # descriptors from here on cannot be given to select()

# The metapackage `nixl` may import torch, seconds long, to choose between these; for host memory either one does.
NIXL_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")


class Agent(Protocol):
    """What is used of nixl_agent. Failures raise."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None: ...

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object: ...

    def initialize_xfer(self, operation: str, local: object, remote: object, name: str, notif: bytes) -> object: ...

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
    raise ImportError("NIXL is not installed; install the package nixl")


class Courier:
    """The loop and what is in flight. `memory` is [receive slots][send slots] as in `setup`."""

    def __init__(self, orders: socket.socket, memory: mmap.mmap, setup: Setup, agent: Agent) -> None:
        self._orders = orders
        self._setup = setup
        self._agent = agent
        self._memory = memory  # mapped for as long as the process lives
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._remote: Connect | None = None
        self._remote_name = ""
        self._posts: dict[int, object] = {}  # post id -> handle, not yet done
        self._expected = 0
        self._unsent: deque[bytes] = deque()
        self._event_sets: list[int] = []

    def start(self) -> None:
        """Registers the slots. The metadata are taken between: they give the peer the receive slots only."""
        receive_bytes = self._setup.receive_slots * self._setup.slot_bytes
        send_bytes = self._setup.send_slots * self._setup.slot_bytes
        if receive_bytes:
            self._agent.register_memory([(self._address, receive_bytes, 0, "")], "DRAM")
        metadata = self._agent.get_agent_metadata()
        if send_bytes:
            self._agent.register_memory([(self._address + receive_bytes, send_bytes, 0, "")], "DRAM")
        self._event_sets = ucx_event_sets()
        self._send(Started(self._address, metadata))

    def run(self) -> None:
        """Returns never: raises OrdersEnded when the daemon is gone, anything else when the courier cannot go on."""
        while True:
            busy = self._posts or self._expected
            wait = BUSY_SECONDS if busy else IDLE_SECONDS
            watched: list[socket.socket | int] = [self._orders]
            if busy:
                watched += self._event_sets
            readable, _, _ = select.select(watched, [self._orders] if self._unsent else [], [], wait)
            if self._orders in readable:
                self._take_orders()
            self._poll_posts()
            self._poll_notifications()
            self._flush()

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
        self._send(Connected())

    def _post(self, post: Post) -> None:
        remote = self._remote
        if remote is None:
            raise MessageError("order", "a post before connect", "connect first")
        check_range("send_slot", post.send_slot, 0, self._setup.send_slots - 1)
        check_range("remote_slot", post.remote_slot, 0, remote.slots - 1)
        check_range("nbytes", post.nbytes, 1, min(self._setup.slot_bytes, remote.slot_bytes))
        assert post.post_id not in self._posts, post
        source = self._address + (self._setup.receive_slots + post.send_slot) * self._setup.slot_bytes
        target = remote.receive_address + post.remote_slot * remote.slot_bytes
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([(source, post.nbytes, 0)], "DRAM"),
                self._agent.get_xfer_descs([(target, post.nbytes, 0)], "DRAM"),
                self._remote_name,
                post.notification,
            )
        except Exception as error:  # NIXL's classes have no common base of their own
            self._send(PostFailed(post.post_id, describe(error)))
            return
        self._posts[post.post_id] = handle
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
        self._send(event)

    def _poll_notifications(self) -> None:
        for name, payloads in self._agent.get_new_notifs().items():
            if name != self._remote_name:
                print(f"{len(payloads)} notifications of an unknown agent dropped", file=sys.stderr, flush=True)
                continue
            for payload in payloads:
                check_range("the peer's notification's length", len(payload), 1, MAX_NOTIFICATION_BYTES)
                self._send(Notification(payload))

    def _send(self, event: Started | CourierEvent) -> None:
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


def serve(orders: socket.socket, memory_fd: int) -> None:
    """Never returns but by an exception, as `Courier.run`."""
    packet = orders.recv(MAX_PACKET_BYTES + 1)
    if not packet:
        raise OrdersEnded
    setup = decode_order(packet)
    if not isinstance(setup, Setup):
        raise MessageError("first order", type(setup).__name__, "Setup")
    die_with_parent(setup.parent)
    memory = mmap.mmap(memory_fd, (setup.receive_slots + setup.send_slots) * setup.slot_bytes)
    os.close(memory_fd)
    orders.setblocking(False)
    courier = Courier(orders, memory, setup, make_agent())
    courier.start()
    courier.run()


def main(arguments: list[str]) -> int:
    """The process. Ends by _exit: NIXL's destructors would wait for peers, and the process's end is the fence."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the daemon drains first and ends us then
    socket_fd, memory_fd = (int(text) for text in arguments)
    # A daemon has many descriptors, and select() takes only low ones: the copy gets the lowest that is free.
    orders = socket.socket(fileno=os.dup(socket_fd))
    os.close(socket_fd)
    status = 1
    try:
        serve(orders, memory_fd)
    except OrdersEnded:
        status = 0
    except BaseException as error:
        message = describe(error)
        print(f"courier: {message}", file=sys.stderr, flush=True)
        orders.setblocking(False)
        with contextlib.suppress(OSError):  # the daemon has the line above, or is gone
            orders.send(encode_event(CourierDied(message)))
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
