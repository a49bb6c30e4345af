"""A courier's loop over a stand-in for NIXL: what the peer is given and heard of, and a handle from post to release."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.transfer.courier import main as courier_main
from kvferry.transfer.courier.gpu_slots import OwnSlots
from kvferry.transfer.courier.main import MAX_UNSENT, Courier, OrdersEnded, die_with_parent
from kvferry.transfer.courier.messages import (
    MAX_PACKET_BYTES,
    Connect,
    Connected,
    CourierEvent,
    CourierSetup,
    CourierStarted,
    MessageError,
    Notification,
    Post,
    PostDone,
    PostFailed,
    decode_event,
    encode_order,
)
from tests.transfer.courier.fake_gpus import Gpu

SLOT = 4096
CONNECT = Connect(b"theirs", 1 << 20, 2, SLOT)


class Agent:
    """Its metadata name what is registered; a write's state is what the test says."""

    def __init__(self) -> None:
        self.registered: list[int] = []  # sizes
        self.heard: dict[str, list[bytes]] = {}
        self.states = ["PROC"]  # the next one first; the last one stays
        self.released: list[object] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [nbytes for _, nbytes, _, _ in regions]

    def get_agent_metadata(self) -> bytes:
        return repr(self.registered).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"peer"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        heard, self.heard = self.heard, {}
        return heard

    def get_xfer_descs(self, *what: object) -> object:
        return what

    def initialize_xfer(self, *what: object) -> object:
        return "handle"

    def transfer(self, handle: object) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    check_xfer_state = transfer

    def release_xfer_handle(self, handle: object) -> None:
        self.released.append(handle)


class On:
    """A courier of two receive slots and one send slot in host memory, and its daemon's end."""

    def __init__(self) -> None:
        self.daemon, self.orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.orders.setblocking(False)
        self.daemon.setblocking(False)
        self.agent = Agent()
        agent: Any = self.agent
        setup = CourierSetup(SLOT, 2, 1, 1)
        self.courier = Courier(self.orders, mmap.mmap(-1, 3 * SLOT), setup, agent)
        self.courier.start()
        started = self.said()[0]
        assert isinstance(started, CourierStarted)
        self.started = started
        self.courier._connect(CONNECT)
        assert self.said() == [Connected()]

    def said(self) -> list[CourierStarted | CourierEvent]:
        found = []
        while True:
            try:
                found.append(decode_event(self.daemon.recv(MAX_PACKET_BYTES)))
            except BlockingIOError:
                return found


@pytest.fixture
def on() -> Iterator[On]:
    made = On()
    with made.daemon, made.orders:
        yield made


def test_the_peer_is_given_the_receive_slots_and_no_others(on: On) -> None:
    assert on.agent.registered == [2 * SLOT, SLOT]
    assert on.started.metadata == b"[%d]" % (2 * SLOT)


def test_nor_is_it_on_gpus() -> None:
    setup = CourierSetup(SLOT, 2, 4, 1, (0, 1))
    own = OwnSlots(setup, Gpu)
    agent: Any = Agent()
    daemon, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with daemon, orders:
        Courier(orders, own, setup, agent).start()
        started = decode_event(daemon.recv(MAX_PACKET_BYTES))
    assert agent.registered == [SLOT, SLOT, 2 * SLOT, 2 * SLOT]
    assert isinstance(started, CourierStarted)
    assert started.metadata == b"[%d, %d]" % (SLOT, SLOT)


def test_only_the_peers_notifications_are_heard(on: On, capsys: pytest.CaptureFixture[str]) -> None:
    on.agent.heard = {"another": [b"made up", b"too"], "peer": [b"true"]}
    on.courier._poll_notifications()
    assert on.said() == [Notification(b"true")]
    assert "2 notifications of an unknown agent dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "event"), [("DONE", PostDone(7)), ("ERR", PostFailed(7, "NIXL says ERR"))], ids=["done", "failed"]
)
def test_a_handle_is_released_once_when_its_write_is_over(on: On, state: str, event: CourierEvent) -> None:
    on.agent.states = ["PROC", "PROC", state]
    on.courier._post(Post(7, 0, 1, 100, b"notice"))
    on.courier._poll_posts()
    assert (on.said(), on.agent.released) == ([], [])
    for _ in range(2):
        on.courier._poll_posts()
        assert on.agent.released == ["handle"]
    assert on.said() == [event]


def test_a_second_peer_is_refused(on: On) -> None:
    on.daemon.send(encode_order(CONNECT))
    with pytest.raises(MessageError, match="order is a second connect"):
        on.courier._take_orders()


@pytest.mark.parametrize(
    ("post", "field"),
    [
        (Post(1, 1, 0, 1, b"n"), "send_slot"),
        (Post(1, 0, 2, 1, b"n"), "remote_slot"),
        (Post(1, 0, 0, SLOT + 1, b"n"), "nbytes"),
    ],
)
def test_a_post_outside_the_slots_is_refused(on: On, post: Post, field: str) -> None:
    with pytest.raises(MessageError) as raised:
        on.courier._post(post)
    assert raised.value.field == field


def test_a_daemon_that_reads_nothing_loses_its_courier(on: On) -> None:
    on.courier._unsent.extend([b"event"] * MAX_UNSENT)
    with pytest.raises(MessageError, match=f"events that the daemon has not read is {MAX_UNSENT + 1}"):
        on.courier._send(PostDone(1))


def test_a_daemon_that_died_before_it_could_be_watched_has_no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def prctl(*words: int) -> int:
        asked.append(words)
        return 0

    libc = SimpleNamespace(prctl=prctl)
    monkeypatch.setattr(courier_main, "ctypes", SimpleNamespace(CDLL=lambda *_, **__: libc))
    die_with_parent(os.getppid())
    with pytest.raises(OrdersEnded):
        die_with_parent(os.getppid() + 1)
    assert asked == [(1, 9, 0, 0, 0)] * 2
