"""A courier that does not say which header it read on a GPU costs the session, which ends; a GPU that fails while a
part and its header are gathered costs the transfer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.core.effects import OpenSend
from kvferry.daemon.memory.gpu import GpuPartCopies
from kvferry.daemon.memory.interface import CopyEnd, PoolMemory, ScatterEnd
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.courier.messages import Connected, Notification
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.receiver import Receiver, Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import PartHeader, PartNotice

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=1, dtype="float16", page_size=4)
LANES = lanes_of(GEOMETRY, 1, 1)
SLOT_BYTES, EPOCH = 4096, 7
TIMES = SessionTimes(heartbeat=60.0, lost=60.0)


class Link:
    """Of a courier whose slots are on a GPU that answers no more."""

    pid, metadata, receive_address = 1, b"metadata", 1 << 20
    receive_ranks, oldest_post = (), None
    now: Link

    def __init__(self, on_event: Any) -> None:
        self.on_event, self.stopped = on_event, False
        Link.now = self

    @staticmethod
    async def start(config: object, on_event: Any, seconds: float) -> Link:
        return Link(on_event)

    def connect(self, *words: object) -> None:
        asyncio.get_running_loop().call_soon(self.on_event, Connected())

    def expect(self, active: int) -> None:
        pass

    async def stop(self, seconds: float) -> None:
        self.stopped = True


class Parts(GpuPartCopies):
    """Whose gathers fail."""

    gathers_at_once = 4  # type: ignore[assignment]

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        asyncio.get_running_loop().call_soon(done, "GpuError: copy: LAUNCH_FAILED")


class Memory:
    def parts(self, link: Any, lanes: object) -> Parts:
        return Parts(cast(Any, None), [], [], cast(Any, None))

    sending = receiving = parts


class Stream:
    def __init__(self, messages: list[peer.PeerMessage]) -> None:
        self._messages = messages

    async def read(self) -> object:
        if not self._messages:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)  # as from a network: what happens here at once is before it
        return self._messages.pop(0)

    async def write(self, message: peer.PeerMessage) -> None:
        pass


class Events:
    """Of either direction: pages are sent as soon as they are asked for, and a part is announced at once."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header
        self.arrived: list[tuple[int, list[int]]] = []
        self.complete: list[int] = []
        self.failing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def on_send_failed(self, session: SendingSession, transfer: int, message: str) -> None:
        self.failing.set_result((transfer, message))

    def on_ask(self, session: SendingSession, ask: peer.Ask) -> None:
        session.open(OpenSend(session.number, ask.transfer, 0, (0,), 1))

    def on_session_up(self) -> None:
        notice = PartNotice(epoch=EPOCH, transfer=1, slot=0, generation=1)
        asyncio.get_running_loop().call_soon(Link.now.on_event, Notification(notice.pack(), self._header))

    def on_pages(self, transfer: int, pages: list[int]) -> None:
        self.arrived.append((transfer, pages))

    def on_complete(self, transfer: int) -> None:
        self.complete.append(transfer)


def met(receive_slots: int) -> list[peer.PeerMessage]:
    up = peer.CourierUp(metadata=b"m", receive_address=1, receive_slots=receive_slots, slot_bytes=SLOT_BYTES)
    return [peer.PeerMessage(courier_up=up), peer.PeerMessage(courier_connected=peer.CourierConnected())]


def header(generation: int) -> bytes:
    told = PartHeader(
        epoch=EPOCH, transfer=1, slot=0, generation=generation, lane=0, first_page=0, byte_offset=0, nbytes=16
    )
    return told.pack()


def common(receive_slots: int, send_slots: int, events: Events, times: SessionTimes = TIMES) -> dict[str, Any]:
    setup = SessionSetup(
        remote="other",
        courier=CourierConfig(slot_bytes=SLOT_BYTES, receive_slots=receive_slots, send_slots=send_slots),
        memory=cast(PoolMemory, Memory()),
        lanes=LANES,
        remote_ranks=1,
        checksums=False,
        times=times,
    )
    meters = SessionMeters(TransferCounters(), Latencies())
    return {"setup": setup, "meters": meters, "events": cast(Any, events)}


def test_a_part_that_cannot_be_gathered_fails_its_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def story() -> None:
        events = Events()
        session = SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **common(0, 2, events))
        granted = peer.Credits(credits=[peer.Credit(slot=0, generation=1)])
        words = [*met(2), peer.PeerMessage(credits=granted), peer.PeerMessage(ask=peer.Ask(transfer=1, pages=1))]
        running = asyncio.create_task(session.run(Stream(words)))
        await asyncio.wait({running, events.failing}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done() and events.failing.result() == (1, "GpuError: copy: LAUNCH_FAILED")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
        assert Link.now.stopped

    asyncio.run(story())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (b"", "the header of receive slot 0: it did not come with the notification"),
        (header(2), "part.generation is 2, must be 1 as in the notification of slot 0"),
        (header(1)[:-1], "part.length is 63 bytes, must be at least 64"),
        (bytes(64), "part.magic is 0x00000000"),
    ],
)
def test_a_header_that_did_not_come_or_is_another_ends_the_session(
    monkeypatch: pytest.MonkeyPatch, told: bytes, said: str
) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def story() -> None:
        receiver = Receiver(epoch=EPOCH, lanes=LANES, slot_bytes=SLOT_BYTES, slots=2, counts=TransferCounters())
        events = Events(told)
        session = ReceivingSession(receiver=receiver, pages=cast(Any, events), **common(2, 0, events))
        with pytest.raises(SessionBroken, match=said):
            await asyncio.wait_for(session.run(Stream(met(0))), 20)
        assert Link.now.stopped
        assert (receiver.busy_slots, receiver.withheld_slots) == (0, 1)
        receiver.check()

    asyncio.run(story())


def test_a_part_whose_header_came_with_its_notification_is_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def story() -> None:
        receiver = Receiver(epoch=EPOCH, lanes=LANES, slot_bytes=SLOT_BYTES, slots=2, counts=TransferCounters())
        receiver.open(1, first_page=0, pages=1, page_ids=[0])
        events = Events(header(1))
        session = ReceivingSession(receiver=receiver, pages=cast(Any, events), **common(2, 0, events))
        copied: asyncio.Future[tuple[Scatter, ScatterEnd]] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(Parts, "scatter", lambda self, scatter, done: copied.set_result((scatter, done)))
        running = asyncio.create_task(session.run(Stream(met(0))))
        await asyncio.wait({copied, running}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert copied.done(), running
        scatter, done = copied.result()
        assert (scatter.slot, scatter.transfer, scatter.nbytes) == (0, 1, 16)
        assert (receiver.busy_slots, receiver.scatters_running) == (1, 1)
        done("", None)
        assert (receiver.busy_slots, receiver.scatters_running) == (0, 0)
        assert (events.arrived, events.complete) == ([(1, [0])], [1])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
        assert Link.now.stopped

    asyncio.run(story())
