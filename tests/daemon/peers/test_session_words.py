"""What a session believes of its peer and its courier, and what still runs when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.core.effects import OpenSend
from kvferry.daemon.memory.interface import CopyEnd, ScatterEnd
from kvferry.daemon.peers import sending as sending_module
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import Sending, SendingSession
from kvferry.daemon.peers.session import SessionBroken
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.messages import Connected, Notification, PostFailed
from kvferry.transfer.protocol.receiver import Receiver, Scatter
from kvferry.transfer.protocol.sender import Gather
from kvferry.transfer.protocol.slots import PartHeader, PartNotice
from tests.daemon.peers.played_sessions import EPOCH, LANES, SLOT_BYTES, Events, Link, Parts, Stream, common, met

PAGE_BYTES = 16  # of the one lane


class Owner(Events):
    """It notes what it hears, and says nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def on_session_up(self) -> None:
        self.heard.append("up")

    def on_broken(self, transfer: int, message: str) -> None:
        self.heard.append(f"broken: {message}")

    def on_drained(self, transfer: int) -> None:
        self.heard.append("drained")

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None:
        sending.open(OpenSend(sending.number, ask.transfer, 0, (0, 1), 1))


class Copies(Parts):
    """Copies that end when the test says so."""

    now: Copies
    running: list[Callable[..., None]]  # what ends each of them, with a problem or without

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        Copies.now = self
        self.sums = self.closed = False

    def begin_sums(self) -> None:
        self.sums = True

    def gather(self, gather: Gather, done: CopyEnd) -> None:
        self.running.append(lambda problem="": done(problem))

    def scatter(self, scatter: Scatter, done: ScatterEnd) -> None:
        self.running.append(lambda problem="": done(problem, None))

    def close(self) -> None:
        self.closed = True


class Memory:
    def parts(self, link: object, lanes: object) -> Copies:
        nothing = cast(Any, None)
        return Copies(nothing, [], [], nothing)

    sending = receiving = parts


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    Copies.running = []
    monkeypatch.setattr(session_module, "CourierLink", Link)


def words(receive_slots: int, send_slots: int, owner: Owner, **setup: Any) -> dict[str, Any]:
    made = common(receive_slots, send_slots, owner)
    return {**made, "setup": replace(made["setup"], memory=Memory(), **setup)}


def sending(owner: Owner, **setup: Any) -> SendingSession:
    return SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **words(0, 2, owner, **setup))


def receiving(owner: Owner, **setup: Any) -> ReceivingSession:
    receiver = Receiver(epoch=EPOCH, lanes=LANES, slot_bytes=SLOT_BYTES, slots=2, counts=TransferCounters())
    return ReceivingSession(receiver=receiver, pages=cast(Any, owner), **words(2, 0, owner, **setup))


def run(story: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        try:
            await asyncio.wait_for(story, 20)
        finally:
            for end in Copies.running:  # else the session of a failed test waits for them
                end()

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


# -- its beginning -------------------------------------------------------------------------------------------------


def test_a_session_is_up_once_both_couriers_are_connected() -> None:
    async def story() -> None:
        owner = Owner()
        session, (_, connected) = receiving(owner), met(0)
        session._dispatch(connected)
        assert not owner.heard
        session._on_courier(Connected())
        assert owner.heard == ["up"]
        other, (up, connected) = sending(owner), met(2)
        other._dispatch(up)
        other._on_courier(Connected())
        assert not other.up
        other._dispatch(connected)
        assert other.up

    run(story())


def test_a_part_before_the_session_is_up_ends_it() -> None:
    """Nobody has a credit yet."""

    async def story() -> None:
        session = receiving(Owner())
        running = asyncio.create_task(session.run(Stream([])))
        session._on_courier(Notification(PartNotice(EPOCH, 1, 0, 1).pack(), b""))
        with pytest.raises(SessionBroken, match="notified of a part before the session was up"):
            await running

    run(story())


def test_slots_that_are_not_shared_out_among_the_ranks_end_the_session() -> None:
    async def story() -> None:
        with pytest.raises(SessionBroken, match="receive_slots is 3; it must be a multiple of its 2 ranks"):
            sending(Owner(), remote_ranks=2)._dispatch(met(3)[0])

    run(story())


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 2 * SLOT_BYTES])
def test_parts_are_cut_for_the_smaller_slots_and_of_the_peers_epoch(
    monkeypatch: pytest.MonkeyPatch, slot_bytes: int
) -> None:
    made: dict[str, Any] = {}

    async def story() -> None:
        monkeypatch.setattr(sending_module, "Sender", lambda **words: made.update(words))
        own = common(0, 2, Owner())["setup"].courier
        session = sending(Owner(), remote_ranks=2, courier=replace(own, slot_bytes=slot_bytes))
        up = peer.CourierUp(metadata=b"m", receive_address=1, receive_slots=4, slot_bytes=3 * SLOT_BYTES // 2)
        session._dispatch(peer.PeerMessage(courier_up=up))
        session.sending.on_up()

    run(story())
    assert made["slot_bytes"] == min(slot_bytes, 3 * SLOT_BYTES // 2)
    assert (made["epoch"], made["send_slots"], made["remote_slots"]) == (EPOCH, 2, 2)


@pytest.mark.parametrize("checksums", [False, True])
def test_sums_are_made_where_the_hellos_agreed_on_them(checksums: bool) -> None:
    async def story() -> None:
        owner = Owner()
        running = asyncio.create_task(receiving(owner, checksums=checksums).run(Stream(met(0))))
        await until(lambda: owner.heard)
        assert Copies.now.sums is checksums
        running.cancel()
        await asyncio.wait([running])

    run(story())


def test_a_write_that_failed_ends_the_session() -> None:
    """It may still land: its slot is the peer's again only behind the end of this courier."""

    async def story() -> None:
        session = sending(Owner())
        running = asyncio.create_task(session.run(Stream(met(2))))
        await until(lambda: session.up)
        session._on_courier(PostFailed(1, "REMOTE_DISCONNECT"))
        await is_over(running, "a write failed: REMOTE_DISCONNECT")

    run(story())


# -- its end -------------------------------------------------------------------------------------------------------


async def is_over(running: asyncio.Task[None], why: str) -> None:
    with pytest.raises(SessionBroken, match=why):
        await running
    assert Copies.now.closed and Link.now.stopped


def test_a_session_that_is_over_waits_for_its_gathers_and_posts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[object] = []
    monkeypatch.setattr(Link, "post", lambda link, *words: posted.append(words), raising=False)
    granted = peer.Credits(credits=[peer.Credit(slot=slot, generation=1) for slot in range(2)])
    asked = peer.Ask(transfer=1, pages=2)

    async def story() -> None:
        session = sending(Owner())
        said = [*met(2), peer.PeerMessage(credits=granted), peer.PeerMessage(ask=asked)]
        running = asyncio.create_task(session.run(Stream(said)))
        await until(lambda: session.up and Copies.running)
        session.break_off("enough")
        await settle()
        session.sending.progress(1, 2)
        assert len(Copies.running) == 1, "nothing more is gathered"
        assert not running.done() and not Copies.now.closed and not Link.now.stopped
        Copies.running.pop()()
        await is_over(running, "enough")
        assert not posted

    run(story())


def notified(session: ReceivingSession, nbytes: int = PAGE_BYTES) -> None:
    """Of a part in slot 0."""
    header = PartHeader(
        epoch=EPOCH, transfer=1, slot=0, generation=1, lane=0, first_page=0, byte_offset=0, nbytes=nbytes
    )
    session._on_courier(Notification(PartNotice(EPOCH, 1, 0, 1).pack(), header.pack()))


async def scattering(owner: Owner) -> tuple[ReceivingSession, asyncio.Task[None]]:
    """A session that copies transfer 1's only page out of its slot."""
    session = receiving(owner)
    running = asyncio.create_task(session.run(Stream(met(0))))
    await until(lambda: owner.heard)
    owner.heard.clear()
    session.receiving.ask(peer.Ask(transfer=1, pages=1), [5])
    notified(session)
    assert len(Copies.running) == 1
    return session, running


def test_a_session_that_is_over_waits_for_its_scatters_and_hears_no_courier() -> None:
    async def story() -> None:
        owner = Owner()
        session, running = await scattering(owner)
        session.break_off("enough")
        await settle()
        session._on_courier(Connected())
        assert not session.up and not owner.heard
        assert not running.done() and not Copies.now.closed and not Link.now.stopped
        Copies.running.pop()()
        await is_over(running, "enough")

    run(story())


def test_a_page_whose_copy_failed_has_not_arrived() -> None:
    async def story() -> None:
        owner = Owner()
        _, running = await scattering(owner)
        Copies.running.pop()("GpuError: copy: OTHER")
        assert owner.heard == ["broken: GpuError: copy: OTHER"] and not owner.arrived and not owner.complete
        running.cancel()
        await asyncio.wait([running])

    run(story())


def test_pages_of_a_stopped_transfer_are_free_once_its_copies_have_ended() -> None:
    async def story() -> None:
        owner = Owner()
        session, running = await scattering(owner)
        assert not session.receiving.stop(1, "enough")
        assert not owner.heard
        Copies.running.pop()()
        assert owner.heard == ["drained"] and not owner.arrived
        assert session.receiving.stop(1, "enough")
        running.cancel()
        await asyncio.wait([running])

    run(story())
