"""A courier with slots on GPUs tells a part's header with its notification. Agent and GPU are stand-ins;
tests/transfer/courier/test_gpu.py has real ones."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.transfer.courier.gpu_slots import OwnSlots
from kvferry.transfer.courier.main import IDLE_SECONDS, MAX_UNHEARD, NOTIFICATIONS_PER_ROUND, Courier, OrdersEnded
from kvferry.transfer.courier.messages import (
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    CourierDied,
    CourierEvent,
    CourierSetup,
    CourierStarted,
    MessageError,
    Notification,
    decode_event,
    encode_event,
    encode_order,
)
from kvferry.transfer.protocol.slots import HEADER_BYTES, PartNotice
from tests.transfer.courier.fake_gpus import Gpu

SLOT = 1 << 16
SETUP = CourierSetup(SLOT, 2, 0, 1, (0,))


class Agent:
    """Hands out what a peer is to have sent."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def register_memory(self, *what: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"peer"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        heard, self.heard = self.heard, []
        return {"peer": heard} if heard else {}


class BrokenGpu(Gpu):
    """Whose reads fail after the first."""

    def read(self, address: int, nbytes: int) -> bytes:
        if self.reads:
            raise RuntimeError("read: not done in 10 s")
        return super().read(address, nbytes)


class On:
    """A courier that is connected, its agent, its GPU and its daemon's end."""

    def __init__(self, gpu: Gpu) -> None:
        self.daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.daemon.settimeout(10)
        self.gpu, self.agent = gpu, Agent()
        self.slots = OwnSlots(SETUP, lambda _: gpu)
        agent: Any = self.agent
        self.courier = Courier(theirs, self.slots, SETUP, agent)
        self.courier.start()
        assert isinstance(self.event(), CourierStarted)
        self.daemon.send(encode_order(Connect(b"metadata", 0, 0, 0)))
        self.courier._take_orders()
        assert self.event() == Connected()

    def event(self) -> CourierStarted | CourierEvent:
        return decode_event(self.daemon.recv(MAX_PACKET_BYTES))

    def round(self) -> None:
        self.courier._poll_notifications()
        self.courier._flush()


@pytest.fixture
def on() -> Iterator[On]:
    made = On(Gpu(0))
    with made.daemon, made.courier._orders:
        yield made


def notice(slot: int) -> bytes:
    return PartNotice(epoch=1, transfer=2, slot=slot, generation=3).pack()


def test_the_header_of_the_slot_comes_with_the_notification(on: On) -> None:
    first = on.slots.ranks[0].receive_address
    on.gpu.bytes = {first: b"0" * SLOT, first + SLOT: b"1" * SLOT}
    on.agent.heard = [notice(1), notice(0), b"another", notice(2)]
    on.round()
    assert [on.event() for _ in range(4)] == [
        Notification(notice(1), b"1" * HEADER_BYTES),
        Notification(notice(0), b"0" * HEADER_BYTES),
        Notification(b"another"),
        Notification(notice(2)),
    ]


def test_of_many_notifications_a_round_takes_some(on: On) -> None:
    many = [b"%d" % number for number in range(NOTIFICATIONS_PER_ROUND + 5)]
    on.agent.heard = many
    on.round()
    assert on.courier._wait_seconds() == 0.0
    assert [on.event() for _ in range(NOTIFICATIONS_PER_ROUND)] == [Notification(each) for each in many[:-5]]
    on.daemon.setblocking(False)
    with pytest.raises(BlockingIOError):
        on.event()
    on.round()
    assert [on.event() for _ in range(5)] == [Notification(each) for each in many[-5:]]
    assert on.courier._wait_seconds() > 0


def test_the_loop_takes_all_of_them_without_a_wait(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def select(watched: object, writing: object, failing: object, wait: float) -> tuple[list[object], ...]:
        waits.append(wait)
        return ([on.courier._orders] if len(waits) == 5 else [], [], [])

    monkeypatch.setattr("kvferry.transfer.courier.main.select.select", select)
    on.agent.heard = [b"%d" % number for number in range(2 * NOTIFICATIONS_PER_ROUND + 5)]
    many = list(on.agent.heard)
    on.daemon.shutdown(socket.SHUT_WR)  # orders end, in the fifth round
    with pytest.raises(OrdersEnded):
        on.courier.run()
    assert waits == [IDLE_SECONDS, 0.0, 0.0, IDLE_SECONDS, IDLE_SECONDS]
    assert [on.event() for _ in many] == [Notification(each) for each in many]


def test_too_many_notifications_end_the_courier(on: On) -> None:
    on.agent.heard = [b"x"] * (MAX_UNHEARD + 1)
    with pytest.raises(MessageError, match=f"at a time is {MAX_UNHEARD + 1}, must be in 0..{MAX_UNHEARD}"):
        on.round()


def test_a_header_that_cannot_be_read_ends_the_courier() -> None:
    on = On(BrokenGpu(0))
    with on.daemon, on.courier._orders:
        on.agent.heard = [notice(0)]
        with pytest.raises(RuntimeError, match="read: not done in 10 s"):
            on.round()


ENDING = """
import socket, sys
from kvferry.transfer.courier import main as courier

class Held:
    def __del__(self):
        print("freed", flush=True)

def serve(orders, memory_fd):
    held = Held()
    raise {error}

courier.serve = serve
courier.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("error", "status", "last"),
    [
        ("courier.OrdersEnded", 0, b""),
        ("RuntimeError('read: failed')", 1, encode_event(CourierDied("RuntimeError: read: failed"))),
        ("SystemExit(5)", 1, encode_event(CourierDied("SystemExit: 5"))),
    ],
)
def test_nothing_is_freed_before_the_process_ends(error: str, status: int, last: bytes) -> None:
    """Slots on GPUs are mapped by others, who may be writing them."""
    daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with daemon, theirs:
        words = [sys.executable, "-c", ENDING.format(error=error), str(theirs.fileno())]
        done = subprocess.run(words, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
        theirs.close()
        daemon.settimeout(10)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert daemon.recv(MAX_PACKET_BYTES) == last
