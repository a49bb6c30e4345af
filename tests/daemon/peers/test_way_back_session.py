"""A session that has a way back: who agrees on it, and whose each message and each word of the courier is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.counters import Latencies, TransferCounters
from kvferry.daemon.core.effects import StartTransfer
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.directions import open_all
from kvferry.daemon.peers.handshake import WAY_BACK, back_lanes, has_way_back, hello_of, no_way_back
from kvferry.daemon.peers.receiving import Receiving
from kvferry.daemon.peers.sending import Sending, SendingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.messages import Notification, PostDone
from kvferry.transfer.protocol.receiver import Receiver
from kvferry.transfer.protocol.slots import PartNotice
from tests.daemon.peers.played_sessions import EPOCH, LANES, SLOT_BYTES, Link, met
from tests.daemon.peers.played_sessions import common as common_words
from tests.daemon.peers.test_link_session import NAME, Session, decode
from tests.daemon.peers.test_session_words import Copies, Memory, Stream, run, settle, until
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimPrefill
from tests.simulation.faults import Faults


class Owner:
    """It notes what either direction tells it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_session_up(self) -> None:
        self.heard.append(("up", 0))

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None:
        self.heard.append(("ask", ask.transfer))

    def on_ask_failed(self, transfer: int, error: RequestError) -> None:
        self.heard.append(("failed", transfer))

    def on_drained(self, transfer: int) -> None:
        self.heard.append(("drained", transfer))


class Awake(Link):
    """The link to a courier; it notes for how much it is to be awake."""

    expected: list[int]

    def expect(self, active: int) -> None:
        Awake.expected.append(active)

    @staticmethod
    async def start(config: object, on_event: Any, seconds: float) -> Link:
        return Awake(on_event)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    Copies.running, Awake.expected = [], []
    monkeypatch.setattr(session_module, "CourierLink", Awake)


def two_ways(owner: Owner) -> SendingSession:
    words = common_words(2, 2, cast(Any, owner))
    words["setup"] = replace(words["setup"], memory=cast(Any, Memory()), back_lanes=LANES)
    session = SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **words)
    receiver = Receiver(epoch=EPOCH, lanes=LANES, slot_bytes=SLOT_BYTES, slots=2, counts=TransferCounters())
    meters, told = SessionMeters(TransferCounters(), Latencies()), cast(Any, owner)
    session.fetching = Receiving(session, meters, receiver=receiver, events=told, pages=told, lanes=LANES)
    return session


async def coming_up(session: SendingSession) -> asyncio.Task[None]:
    running = asyncio.create_task(session.run(Stream(met(2))))
    await until(lambda: session.up)
    return running


async def over(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait([running])


def test_each_message_is_for_its_direction() -> None:
    async def story() -> None:
        owner = Owner()
        session = two_ways(owner)
        running = await coming_up(session)
        assert session.fetching is not None and session.sending.sender is not None
        error = common.Error(code=common.ERROR_UNAVAILABLE, message="no")
        session._dispatch(peer.PeerMessage(ask=peer.Ask(transfer=3)))
        session._dispatch(peer.PeerMessage(ask_failed=peer.AskFailed(transfer=4, error=error)))
        session._dispatch(peer.PeerMessage(credits=peer.Credits(credits=[peer.Credit(slot=1, generation=1)])))
        assert owner.heard == [("up", 0), ("ask", 3), ("failed", 4)]
        assert session.sending.sender.free_credits == 1 and session.fetching.receiver.free_credits == 2
        await over(running)

    run(story())


def test_without_a_way_back_nothing_of_it_is_taken() -> None:
    async def story() -> None:
        words = common_words(0, 2, cast(Any, Owner()))
        session = SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **words)
        for kind in ("ask_failed", "ask_ended", "aux"):
            with pytest.raises(SessionBroken, match=f"the peer sent {kind}, which this side does not take"):
                session._dispatch(peer.PeerMessage(**{kind: {}}))
        session.up = True
        session._on_courier(Notification(PartNotice(EPOCH, 1, 0, 1).pack(), b""))
        assert "has none of" in session._broken.result()

    run(story())


def test_the_couriers_words_are_for_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        session = two_ways(Owner())
        running = await coming_up(session)
        assert session.fetching is not None
        heard: list[object] = []
        monkeypatch.setattr(session.sending, "_posted", {5: (0.0, 1)})
        monkeypatch.setattr(session.sending.sender, "posted_done", heard.append)
        monkeypatch.setattr(session.fetching.receiver, "notification", lambda payload, header: heard.append(payload))
        with pytest.raises(TypeError):  # what the receiver says is no list here
            session._hear_courier(Notification(b"payload", b""))
        session._hear_courier(PostDone(5))
        assert heard == [b"payload", 5]
        await over(running)

    run(story())


def test_the_courier_is_awake_for_both_directions() -> None:
    async def story() -> None:
        session = two_ways(Owner())
        running = await coming_up(session)
        assert session.fetching is not None
        session.fetching.ask(peer.Ask(transfer=1, pages=1), [0])
        session.sending._pump()
        assert Awake.expected[-2:] == [1, 1], "nothing to be sent, and a transfer that comes back"
        await over(running)

    run(story())


def test_a_stopped_fetch_is_told_of_its_last_copy() -> None:
    async def story() -> None:
        owner = Owner()
        session = two_ways(owner)
        running = await coming_up(session)
        assert session.fetching is not None
        session.fetching.ask(peer.Ask(transfer=1, pages=1), [0])
        assert session.fetching.stop(1, "enough"), "no copy runs"
        session.fetching.stop(1, "enough")
        await settle()
        assert owner.heard == [("up", 0)]
        await over(running)

    run(story())


def test_copies_are_opened_for_all_directions_or_none() -> None:
    made: list[Copies] = []

    class Opening:
        def open_parts(self, link: object) -> Copies:
            if made:
                raise OSError("no room")
            made.append(Memory().parts(link, []))
            return made[-1]

    opening = cast(Any, Opening())
    with pytest.raises(OSError, match="no room"):
        open_all([opening, opening], cast(Any, None), False)
    assert made[0].closed
    made.clear()
    (parts,) = open_all([opening], cast(Any, None), True)
    assert isinstance(parts, Copies) and parts.sums and not parts.closed


# -- who has one ---------------------------------------------------------------------------------------------------


def hello(*capabilities: str) -> peer.PeerHello:
    return peer.PeerHello(capabilities=capabilities)


@pytest.mark.parametrize(("own", "theirs"), [(True, True), (True, False), (False, True), (False, False)])
def test_both_must_have_the_capability(own: bool, theirs: bool) -> None:
    one, other = (hello("aux", *([WAY_BACK] if has else [])) for has in (own, theirs))
    assert bool(back_lanes(one, other, lambda: LANES)) is (own and theirs)
    assert bool(back_lanes(other, one, lambda: LANES)) is (own and theirs)


def config(**settings: Any) -> DaemonConfig:
    return DaemonConfig(role="prefill", name="p", page_size=4, **settings)


def test_what_has_none_says_why() -> None:
    assert no_way_back(config(way_back="auto", reuse="off")) == "nothing is kept (reuse is off)"
    assert not has_way_back(config(way_back="always", reuse="off"))


@pytest.mark.parametrize("settings", [{"pool": "engine", "ranks": 2}, {"device": "cuda:0"}])
def test_every_pool_that_is_kept_has_one(settings: dict[str, Any]) -> None:
    assert has_way_back(config(way_back="auto", **settings))


def test_the_hello_says_it_where_it_is_set() -> None:
    for setting, says in (("off", False), ("auto", True), ("always", True)):
        side = SimPrefill(Clock(1), config(way_back=setting), PLAIN, Faults())
        side.tiers.has_pool.set()
        assert (WAY_BACK in hello_of(side).capabilities) is says


@pytest.mark.parametrize("back", [False, True])
def test_what_is_held_is_said_where_it_can_be_asked_back(back: bool) -> None:
    Session.made = []
    session = Session()
    session.returning = cast(Any, object() if back else None)
    link = decode().links["p0"]
    link.session = cast(Any, session)
    effect = StartTransfer("p0", peer.Ask(transfer=1, name=NAME.to_proto(), pages=1, held_tokens=8), (1,))
    link.start_transfer(effect)
    assert effect.ask.held_tokens == (8 if back else 0)


def test_a_decode_daemon_is_not_told_that_something_is_done() -> None:
    with pytest.raises(SessionBroken, match="the peer sent done"):
        decode().returns.on_done(cast(Any, None), peer.Done())


def test_a_prefill_daemon_is_not_given_aux() -> None:
    async def story() -> None:
        side = SimPrefill(Clock(1), config(way_back="always"), PLAIN, Faults())
        words = common_words(2, 2, cast(Any, side))
        words["setup"] = replace(words["setup"], back_lanes=LANES)
        session = SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **words)
        side.fetches.join(session)
        with pytest.raises(SessionBroken, match="the peer sent aux"):
            session._dispatch(peer.PeerMessage(aux=peer.PeerAux(name=NAME.to_proto())))

    run(story())
