"""The daemon's end of a courier: starts the process, gives orders, hears events, ends and reaps it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.transfer.courier_messages import (
    MAX_MESSAGE,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    Expect,
    MessageError,
    Notification,
    Order,
    Post,
    PostDone,
    PostFailed,
    Up,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

SOCKET_BUFFER = 1 << 20
MAX_UNSENT = 8192  # orders that wait for a courier that does not read
EVENTS_A_TURN = 256  # read at once before the event loop has its turn
_SIOCGIFADDR = 0x8915


class CourierError(RuntimeError):
    """The courier did not start; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class CourierConfig:
    slot_bytes: int  # header included
    receive_slots: int
    send_slots: int
    bind_host: str = "127.0.0.1"
    port_range: tuple[int, int] = (21000, 21063)
    tls: str = "tcp"
    tcp_user_timeout_s: float = 3.0  # unacknowledged data breaks the connection

    def __post_init__(self) -> None:
        if self.receive_slots < 0 or self.send_slots < 0 or self.receive_slots + self.send_slots < 1:
            raise ValueError(
                f"receive_slots {self.receive_slots} and send_slots {self.send_slots}: one must be positive"
            )
        if self.slot_bytes < 128:
            raise ValueError(f"slot_bytes is {self.slot_bytes}; it must be at least 128")


class CourierLink:
    """`start` makes it, `stop` ends it. Events come on the event loop's thread, none after `stop` was called."""

    def __init__(
        self,
        config: CourierConfig,
        popen: subprocess.Popen[bytes],
        orders: socket.socket,
        memory: mmap.mmap,
        log_fd: int,
    ) -> None:
        self.metadata = b""
        self.receive_address = 0
        self._config = config
        self._popen = popen
        self._orders = orders
        self._memory = memory
        self._view = memoryview(memory)
        self._log_fd = log_fd
        self._on_event: Callable[[CourierEvent], None] | None = None
        self._unsent: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = self._loop.create_future()
        self._stopped = False

    @classmethod
    async def start(
        cls, config: CourierConfig, on_event: Callable[[CourierEvent], None], deadline_s: float
    ) -> CourierLink:
        """A courier that listens. CourierError when it does not within `deadline_s`; nothing of it is left then."""
        environment = _environment(config)
        nbytes = config.slot_bytes * (config.receive_slots + config.send_slots)
        memory_fd = os.memfd_create("kvferry-slots", os.MFD_CLOEXEC)
        # A file, not a pipe: what a courier says when it dies must not depend on somebody reading.
        log_fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.posix_fallocate(memory_fd, 0, nbytes)
            memory = mmap.mmap(memory_fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
            ours.setblocking(False)
            numbers = (theirs.fileno(), memory_fd, nbytes, config.slot_bytes, os.getpid())
            popen = subprocess.Popen(
                [sys.executable, "-m", "kvferry.transfer.courier", *map(str, numbers)],
                pass_fds=(theirs.fileno(), memory_fd),
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                env=environment,
            )
        except BaseException:
            ours.close()
            os.close(log_fd)
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
        link = cls(config, popen, ours, memory, log_fd)
        link._on_event = on_event
        link._loop.add_reader(ours.fileno(), link._read)
        try:
            await asyncio.wait_for(link._up, deadline_s)
        except BaseException as error:
            await link.stop(10.0)
            if isinstance(error, (asyncio.TimeoutError, CourierError)):
                raise CourierError(f"the courier did not start in {deadline_s} s: {error}") from None
            raise
        return link

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive_slot(self, slot: int) -> memoryview:
        """Writable, slot_bytes long."""
        assert 0 <= slot < self._config.receive_slots, f"receive slot {slot} of {self._config.receive_slots}"
        return self._slot(slot)

    def send_slot(self, slot: int) -> memoryview:
        """Writable, slot_bytes long."""
        assert 0 <= slot < self._config.send_slots, f"sending slot {slot} of {self._config.send_slots}"
        return self._slot(self._config.receive_slots + slot)

    def connect(self, metadata: bytes, receive_address: int, slots: int, slot_bytes: int) -> None:
        """Connected or PostFailed(0) follows."""
        self._order(Connect(receive_address, slots, slot_bytes, metadata))

    def post(self, post_id: int, send_slot: int, remote_slot: int, nbytes: int, notification: bytes) -> None:
        """Writes a sending slot's first `nbytes` into the remote slot. PostDone or PostFailed follows."""
        assert 0 <= send_slot < self._config.send_slots
        self._order(Post(post_id, self._config.receive_slots + send_slot, remote_slot, nbytes, notification))

    def expect(self, active: int) -> None:
        """How many transfers are on their way here: with any, the courier polls often."""
        self._order(Expect(active))

    async def stop(self, deadline_s: float) -> None:
        """Kills and reaps the process: after it nothing lands in the slots. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._loop.remove_reader(self._orders.fileno())
        self._loop.remove_writer(self._orders.fileno())
        self._popen.kill()
        await self._loop.run_in_executor(None, self._popen.wait, deadline_s)
        self._orders.close()
        os.close(self._log_fd)
        self._view.release()
        with contextlib.suppress(BufferError):  # somebody's view of a slot is alive: the memory goes with it
            self._memory.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _slot(self, index: int) -> memoryview:
        start = index * self._config.slot_bytes
        return self._view[start : start + self._config.slot_bytes]

    def _order(self, order: Order) -> None:
        if self._stopped:
            return
        data = pack(order)
        if not self._unsent and self._send(data):
            return
        if len(self._unsent) >= MAX_UNSENT:
            self._died(f"{MAX_UNSENT} orders wait for it")
            return
        if not self._unsent:
            self._loop.add_writer(self._orders.fileno(), self._send_waiting)
        self._unsent.append(data)

    def _send(self, data: bytes) -> bool:
        try:
            self._orders.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # it is dead; the reader finds its end
        return True

    def _send_waiting(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._orders.fileno())

    def _read(self) -> None:
        for _ in range(EVENTS_A_TURN):
            if self._stopped:
                return
            try:
                data = self._orders.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._died(str(error))
                return
            if not data:
                self._died("it ended")
                return
            try:
                message = unpack(data)
            except MessageError as error:
                self._died(str(error))
                return
            if isinstance(message, Up):
                self.metadata, self.receive_address = message.metadata, message.address
                if not self._up.done():
                    self._up.set_result(None)
            elif isinstance(message, (Connected, PostDone, PostFailed, Notification)):
                self._tell(message)

    def _tell(self, event: CourierEvent) -> None:
        if self._on_event is not None and not self._stopped:
            self._on_event(event)

    def _died(self, why: str) -> None:
        self._loop.remove_reader(self._orders.fileno())
        self._loop.remove_writer(self._orders.fileno())
        message = f"courier {self._popen.pid}: {why}: {self._last_words()}"
        if not self._up.done():
            self._up.set_exception(CourierError(message))
        else:
            self._tell(CourierDied(message))

    def _last_words(self) -> str:
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, 2000, max(0, size - 2000)).decode(errors="replace").strip() or "it said nothing"


def _environment(config: CourierConfig) -> dict[str, str]:
    milliseconds = int(config.tcp_user_timeout_s * 1000)
    first, last = config.port_range
    environment = {
        **os.environ,
        "UCX_TLS": config.tls,
        "UCX_TCP_PORT_RANGE": f"{first}-{last}",
        "UCX_TCP_USER_TIMEOUT": f"{milliseconds}ms",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "PYTHONUNBUFFERED": "1",
    }
    interface = interface_of(config.bind_host)
    if interface:
        environment["UCX_NET_DEVICES"] = interface
    else:
        environment.pop("UCX_NET_DEVICES", None)
    home = environment.get("HOME", "")
    if not os.access(home or "/nonexistent", os.R_OK | os.X_OK):
        environment["HOME"] = tempfile.gettempdir()  # NIXL reads its configuration there and dies if it may not
    return environment


def interface_of(host: str) -> str:
    """The network interface that owns the address; "" for all of them. CourierError where none does."""
    address = socket.gethostbyname(host)
    if address == "0.0.0.0":
        return ""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise CourierError(f"no network interface has the address {address} of {host!r}")
