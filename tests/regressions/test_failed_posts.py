"""One failed write of several: it proves nothing, so the session ends, and until its courier is reaped nothing of it is
given back: no slot is filled again, and no page is unlocked, whatever the other writes report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.core.effects import EndSend, OpenSend
from kvferry.daemon.memory.interface import PoolMemory
from kvferry.daemon.peers import session as sessions
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters, SessionSetup, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.config import CourierConfig
from kvferry.transfer.courier.messages import Connected, CourierEvent, PostDone, PostFailed
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.rank_lanes import lanes_of
from kvferry.transfer.protocol.slots import HEADER_BYTES
from tests.regressions.request_cores import Prefill, name

GEOMETRY = KVGeometry(layers=8, kv_heads=1, head_dim=64, dtype="float32", page_size=4)
SLOT_BYTES = HEADER_BYTES + GEOMETRY.page_bytes  # a page fills a slot
LANES = lanes_of(GEOMETRY, 1, 1)
SLOTS, PAGES = 3, 5


class Courier:
    """A link whose writes end when the test says so, and whose process is reaped when the test lets it."""

    metadata, receive_address, receive_ranks, pid = b"agent", 4096, (), 1
    oldest_post = None

    def __init__(self) -> None:
        self.posts: list[tuple[int, int]] = []  # post id, send slot
        self.may_be_reaped = asyncio.Event()
        self.stopping = asyncio.Event()

    def connect(self, *_: object) -> None:
        self.hear(Connected())

    def hear(self, event: CourierEvent) -> None:
        raise AssertionError("set by start")

    def post(self, post_id: int, send_slot: int, *_: object) -> None:
        self.posts.append((post_id, send_slot))

    def expect(self, active: int) -> None:
        pass

    async def stop(self, _: float) -> None:
        self.stopping.set()
        await self.may_be_reaped.wait()


class Parts:
    """Copies that are over at once."""

    gathers_at_once = 64

    def gather(self, _: object, done: Any) -> None:
        asyncio.get_running_loop().call_soon(done, "")

    def close(self) -> None:
        pass


class Memory:
    def sending(self, *_: object) -> Parts:
        return Parts()


class Stream:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[peer.PeerMessage] = asyncio.Queue()

    async def read(self) -> object:
        return await self.heard.get()

    async def write(self, message: peer.PeerMessage) -> None:
        pass


class Owner(Prefill):
    """Of the pages: a prefill core and its one session, as the prefill side wires them."""

    def __init__(self) -> None:
        super().__init__()
        self.completed = self.ended = 0
        self.session: SendingSession

    def carry_out(self) -> None:
        self.take()
        for effect in self.seen:
            if isinstance(effect, OpenSend):
                self.session.sending.open(effect)
            elif isinstance(effect, EndSend):
                self.session.sending.end(effect.transfer)

    def on_send_completed(self, _: object, transfer: int) -> None:
        self.completed += 1
        self.core.send_completed(1, transfer, 0.0)
        self.carry_out()

    def on_send_ended(self, _: object, transfer: int) -> None:
        self.ended += 1
        self.core.send_ended(1, transfer, 0.0)
        self.carry_out()


async def until(done: Any) -> None:
    async def look() -> None:
        while not done():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 5)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def session_of(owner: Owner) -> SendingSession:
    setup = SessionSetup(
        remote="d",
        courier=CourierConfig(slot_bytes=SLOT_BYTES, receive_slots=0, send_slots=SLOTS),
        memory=cast(PoolMemory, Memory()),
        lanes=LANES,
        remote_ranks=1,
        checksums=False,
        times=SessionTimes(60.0, 60.0),
    )
    meters = SessionMeters(TransferCounters(), Latencies())
    return SendingSession(setup, meters, number=1, send_slots=SLOTS, remote_epoch=7, events=cast(Any, owner))


async def send_pages(owner: Owner, courier: Courier, stream: Stream) -> None:
    """Until a write stands in each slot."""
    for message in (
        peer.PeerMessage(courier_up=peer.CourierUp(metadata=b"x", slot_bytes=SLOT_BYTES, receive_slots=PAGES)),
        peer.PeerMessage(courier_connected=peer.CourierConnected()),
    ):
        stream.heard.put_nowait(message)
    await until(lambda: owner.session.up)
    credits = [peer.Credit(slot=slot, generation=1) for slot in range(PAGES)]
    owner.session._dispatch(peer.PeerMessage(credits=peer.Credits(credits=credits)))

    owner.begin(name(1), "x", PAGES)
    owner.compute(name(1), PAGES)
    owner.ask(name(1), 1, "x", PAGES)
    (send,) = owner.of(OpenSend)
    owner.session.sending.open(send)
    await until(lambda: len(courier.posts) == SLOTS)
    assert sorted(slot for _, slot in courier.posts) == list(range(SLOTS))


async def one_fails(owner: Owner, courier: Courier, failing: int, late: bool, running: asyncio.Task[None]) -> None:
    """Nothing is given back, whatever the other writes report."""
    failed, *others = [courier.posts[(failing + i) % SLOTS][0] for i in range(SLOTS)]
    if not late:  # one of those that go on
        courier.hear(PostDone(others.pop()))
        await until(lambda: len(courier.posts) == SLOTS + 1)
    posted = list(courier.posts)
    slot_of = dict(posted)[failed]
    courier.hear(PostFailed(failed, "the peer is gone"))
    if late:
        for post in others:
            courier.hear(PostDone(post))
    await settle()
    filled_again = [slot for _, slot in courier.posts[len(posted) :]]
    assert slot_of not in filled_again, "the slot of the write that failed was filled again"
    for post in [post for post, _ in courier.posts if post != failed]:
        courier.hear(PostDone(post))  # too late: the session is over
    await settle()
    assert courier.stopping.is_set() and not running.done(), "the session ends, and waits for its courier"
    assert owner.completed == owner.ended == 0 and owner.cache.locks == 1 and owner.core.entries
    owner.session.sending.progress(1, PAGES)
    await settle()
    assert len(courier.posts) == len(posted) + len(filled_again), "a session that is over posts nothing"


@pytest.mark.parametrize("failing", range(SLOTS))
@pytest.mark.parametrize("late", [False, True])
def test_one_failed_post_of_three_gives_nothing_back_before_the_courier_is_reaped(
    monkeypatch: pytest.MonkeyPatch, failing: int, late: bool
) -> None:
    """`late`: the other writes are reported after the failed one, before the session's task has run."""

    async def story() -> None:
        courier, owner, stream = Courier(), Owner(), Stream()

        async def start(_: CourierConfig, on_event: Any, *__: object) -> Courier:
            courier.hear = on_event  # type: ignore[method-assign]
            return courier

        monkeypatch.setattr(sessions.CourierLink, "start", start)
        owner.session = session_of(owner)
        running = asyncio.create_task(owner.session.run(stream))
        try:
            await send_pages(owner, courier, stream)
            await one_fails(owner, courier, failing, late, running)
            courier.may_be_reaped.set()
            with pytest.raises(SessionBroken, match="a write failed: the peer is gone"):
                await running
            assert owner.completed == owner.ended == 0 and owner.cache.locks == 1
            owner.core.session_down(1, 0.0)
            owner.core.abort(1, name(1), 0.0)
            owner.carry_out()
            assert owner.ended and owner.cache.locks == 0 and not owner.core.entries
        finally:
            courier.may_be_reaped.set()  # else a failed test waits for it

    run(story())
