"""Sessions of either direction over stand-ins: a courier with slots on a GPU that answers no more, and its owner."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.core.effects import OpenSend
from kvferry.daemon.memory.gpu import GpuPartCopies
from kvferry.daemon.memory.interface import CopyEnd, PoolMemory
from kvferry.daemon.peers.sending import Sending
from kvferry.daemon.peers.session import SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.courier.messages import Connected, Notification
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import PartNotice

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=1, dtype="float16", page_size=4)
LANES = lanes_of(GEOMETRY, 1, 1)
SLOT_BYTES, EPOCH = 4096, 7
TIMES = SessionTimes(heartbeat=60.0, lost=60.0)


class Link:
    """The link to a courier whose slots are on a GPU that answers no more."""

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
    """Parts whose gathers fail."""

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
    """The owner of a session of either direction: it sends pages as soon as they are asked for, and announces a part
    at once."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header
        self.arrived: list[tuple[int, list[int]]] = []
        self.complete: list[int] = []
        self.failing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def on_send_failed(self, sending: Sending, transfer: int, message: str) -> None:
        self.failing.set_result((transfer, message))

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None:
        sending.open(OpenSend(sending.number, ask.transfer, 0, (0,), 1))

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
