"""Sessions that come up and end over a pool on GPUs, over the fake driver: what they need on the devices is made in a
thread, once, and the event loop's thread waits for no device."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.memory.gpu import GpuPoolMemory
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import Sending, SendingSession
from kvferry.daemon.peers.session import Session, SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.messages import Connected
from kvferry.transfer.geometry.kv_geometry import KVGeometry, StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape
from kvferry.transfer.geometry.rank_lanes import Lane, lanes_of
from kvferry.transfer.protocol.receiver import Receiver, Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import Credit, PartHeader
from tests.csrc.gpu_orders import Orders
from tests.csrc.gpu_pool import RANKS, SLOT_BYTES, SLOTS, Pool

FOUR_HEADS = KVGeometry(layers=2, kv_heads=4, head_dim=8, dtype="float16", page_size=16)


class Link:
    """In place of a courier's: at once up, and connected."""

    metadata, receive_address, receive_ranks, oldest_post, pid = b"own", 1, (), None, 1

    def __init__(self, pool: Pool, on_event: Callable[[object], None]) -> None:
        self.gpu_slots = pool.slots
        self._on_event = on_event
        self.stopped = False

    def connect(self, *_: object) -> None:
        asyncio.get_running_loop().call_soon(self._on_event, Connected())

    def expect(self, active: int) -> None:
        pass

    async def stop(self, deadline_s: float) -> None:
        self.stopped = True


class Stream:
    """Of a peer, whose courier comes up at once and is connected."""

    def __init__(self) -> None:
        up = peer.CourierUp(metadata=b"peer", receive_address=1, receive_slots=RANKS * SLOTS, slot_bytes=SLOT_BYTES)
        self.says: asyncio.Queue[peer.PeerMessage | None] = asyncio.Queue()
        self.says.put_nowait(peer.PeerMessage(courier_up=up))
        self.heard: list[str | None] = []

    async def read(self) -> object:
        return await self.says.get()

    async def write(self, message: peer.PeerMessage) -> None:
        self.heard.append(message.WhichOneof("kind"))
        if self.heard[-1] == "courier_up":
            self.says.put_nowait(peer.PeerMessage(courier_connected=peer.CourierConnected()))


class WithWayBack(ReceivingSession):
    """Such a one, which also sends."""


def session_of(pool: Pool, kind: type[Session], lanes: Sequence[Lane]) -> Session:
    setup = SessionSetup(
        remote="peer",
        courier=cast(Any, SimpleNamespace(receive_slots=RANKS * SLOTS, slot_bytes=SLOT_BYTES)),
        memory=pool.memory,
        lanes=lanes,
        remote_ranks=RANKS,
        checksums=True,
        times=SessionTimes(1.0, 30.0),
    )
    meters = SessionMeters(TransferCounters(), Latencies())
    events = cast(Any, SimpleNamespace(on_session_up=lambda: None))
    if kind is SendingSession:
        return SendingSession(setup, meters, number=1, send_slots=SLOTS, remote_epoch=1, events=events)
    receiver = Receiver(epoch=1, lanes=lanes, slot_bytes=SLOT_BYTES, slots=SLOTS, counts=TransferCounters())
    session = ReceivingSession(setup, meters, receiver=receiver, events=events, pages=events)
    if kind is WithWayBack:
        slots = {"send_slots": SLOTS, "remote_epoch": 1}
        session.returning = Sending(session, meters, number=1, events=events, lanes=lanes, **slots)
    return session


async def until(true: Callable[[], object]) -> None:
    for _ in range(4000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in 20 s")


async def first_summed_part(session: Session, direction: int = 0, *, sends: bool) -> None:
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    nbytes = session.lanes[0].row_bytes
    if sends:
        gather = Gather(0, 0, Credit(0, 0), [1], 0, 0, nbytes, PartHeader(0, 0, 0, 0, 0, 0, 0, nbytes))
        session.parts(direction).gather(gather, end.set_result)
    else:
        scatter = Scatter(0, 0, [1], 0, 0, nbytes)
        session.parts(direction).scatter(scatter, lambda problem, _: end.set_result(problem))
    assert await asyncio.wait_for(end, 20) == ""


@pytest.fixture
def links(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    """Of the sessions that begin."""
    made: list[Link] = []

    async def start(config: object, on_event: Callable[[object], None], seconds: float) -> Link:
        made.append(Link(pool, on_event))
        return made[-1]

    monkeypatch.setattr(session_module, "CourierLink", SimpleNamespace(start=start))
    return made


@pytest.mark.parametrize("kind", [SendingSession, ReceivingSession, WithWayBack])
def test_a_session_comes_up_and_ends(pool: Pool, links: list[Link], kind: type[Session]) -> None:
    """With its first part of each direction, whose sum has a place by then. What has come is sent back once its copy
    has ended."""

    async def story() -> None:
        session, stream = session_of(pool, kind, pool.lanes), Stream()
        running = asyncio.ensure_future(session.run(cast(Any, stream)))
        await until(lambda: session.up)
        await first_summed_part(session, sends=kind is SendingSession)
        if kind is WithWayBack:
            await first_summed_part(session, 1, sends=True)
        stream.says.put_nowait(None)
        with pytest.raises(SessionBroken, match="closed the stream"):
            await running
        assert links[0].stopped

    gc.collect()
    with pool.orders.thread_waits_for_nothing():
        asyncio.run(story())
        gc.collect()
    pool.orders.check()


@pytest.mark.parametrize("kind", [SendingSession, ReceivingSession])
def test_a_session_ends_while_the_pool_is_opened(
    pool: Pool, links: list[Link], kind: type[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the thread, which would else find the pool's memory gone; the loop turns meanwhile."""
    began, go_on = threading.Event(), threading.Event()
    direction = "sending" if kind is SendingSession else "receiving"
    opened: list[Any] = []
    original = getattr(pool.memory, direction)

    def slow(*words: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        opened.append(original(*words))
        return opened[0]

    monkeypatch.setattr(pool.memory, direction, slow)

    async def story() -> None:
        session, stream = session_of(pool, kind, pool.lanes), Stream()
        running = asyncio.ensure_future(session.run(cast(Any, stream)))
        await until(began.is_set)
        session.break_off("enough")
        await asyncio.sleep(0.2)
        assert not running.done() and not session.up
        assert "courier_up" not in stream.heard, "the peer could ask already"
        go_on.set()
        with pytest.raises(SessionBroken, match="enough"):
            await running
        assert links[0].stopped
        assert opened[0]._lanes == []

    asyncio.run(story())


def test_a_session_whose_tables_cannot_be_made_says_so(fake: ctypes.CDLL, pool: Pool, links: list[Link]) -> None:
    async def story() -> None:
        lanes = pool.lanes
        pool.memory._ranks[0]._tables.clear()
        fake.fake_answer(b"mem_alloc", 2)
        with pytest.raises(SessionBroken, match="the pool could not be opened: tables of pages: memory of the device"):
            await session_of(pool, SendingSession, lanes).run(cast(Any, Stream()))
        fake.fake_answer(b"mem_alloc", 0)
        assert links[0].stopped

    asyncio.run(story())


# -- tables of pages --------------------------------------------------------------------------------------------------


def a_pool_of_four_heads() -> GpuPoolMemory:
    return GpuPoolMemory.create(PoolShape(FOUR_HEADS, 1, StorageOrder.LAYER_MAJOR, 8), [0])


def test_a_table_is_made_once_and_kept(fake: ctypes.CDLL, on_the_fake: None) -> None:
    """For each range of heads that lanes share, whatever the number of sessions."""
    link: Any = SimpleNamespace(gpu_slots=SimpleNamespace(send_slot=None, receive_slot=None))
    memory = a_pool_of_four_heads()
    made = []
    for ranks in (1, 2, 4, 2, 1, 4, 64):
        before = fake.fake_calls(b"mem_alloc")
        for _ in range(3):
            sending = memory.sending(link, lanes_of(FOUR_HEADS, 1, ranks))
            receiving = memory.receiving(link, lanes_of(FOUR_HEADS, ranks, 1))
            freed = fake.fake_calls(b"mem_free")
            sending.close()
            receiving.close()
            del sending, receiving
            assert fake.fake_calls(b"mem_free") == freed, "the end of a session"
        made.append(fake.fake_calls(b"mem_alloc") - before)
    assert made == [0, 2, 4, 0, 0, 0, 0], "the whole rows are the host tier's already"
    tables = len(memory._ranks[0]._tables)
    freed = fake.fake_calls(b"mem_free")
    memory.close()
    assert fake.fake_calls(b"mem_free") - freed == tables + 1


def test_a_table_is_behind_no_spill(orders: Orders, fake: ctypes.CDLL, on_the_fake: None) -> None:
    memory = a_pool_of_four_heads()
    rows = memoryview(mmap.mmap(-1, 4 * memory.shape.row_bytes))
    memory.attach_rows(rows)
    pinned = memory.pinner().pin(rows)
    orders.hold()
    spilled = threading.Event()

    def spill() -> None:
        memory.spill(np.array([1]), np.array([0]))
        spilled.set()

    spilling = threading.Thread(target=spill)
    spilling.start()
    time.sleep(0.2)
    link: Any = SimpleNamespace(gpu_slots=SimpleNamespace(send_slot=None))
    memory.sending(link, lanes_of(FOUR_HEADS, 1, 2))
    assert not spilled.wait(0.3), "the host would have seen the spill's end, too"
    orders.release()
    spilling.join(20)
    del pinned
    memory.close()
