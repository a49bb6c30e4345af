"""A session ends once its peer has said nothing for the time that it may, and not before."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import Session, SessionBroken, SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.protocol.receiver import Receiver
from tests.daemon.peers.played_sessions import EPOCH, LANES, SLOT_BYTES, Link, common, met

LOST_SECONDS = 0.5
BEAT = peer.PeerMessage(heartbeat=peer.Heartbeat(sequence=1))


class Quiet:
    """The events of a session of which nothing is wanted."""

    def on_session_up(self) -> None:
        pass


class Peer:
    """Says what it has to, a beat every `pause` seconds so many times, and then nothing."""

    def __init__(self, words: list[peer.PeerMessage], beats: int, pause: float) -> None:
        self._words, self._beats, self._pause = words, beats, pause
        self.last = 0.0  # when it said something

    async def read(self) -> object:
        if not self._words:
            if not self._beats:
                await asyncio.Event().wait()
            self._beats -= 1
            await asyncio.sleep(self._pause)
            self._words.append(BEAT)
        await asyncio.sleep(0.001)
        self.last = time.monotonic()
        return self._words.pop(0)

    async def write(self, message: peer.PeerMessage) -> None:
        pass


def sending() -> Session:
    return SendingSession(number=1, send_slots=2, remote_epoch=EPOCH, **words(0, 2))


def receiving() -> Session:
    receiver = Receiver(epoch=EPOCH, lanes=LANES, slot_bytes=SLOT_BYTES, slots=2, counts=TransferCounters())
    return ReceivingSession(receiver=receiver, pages=cast(Any, Quiet()), **words(2, 0))


def words(receive_slots: int, send_slots: int) -> dict[str, Any]:
    times = SessionTimes(heartbeat=60.0, lost=LOST_SECONDS)
    return common(receive_slots, send_slots, cast(Any, Quiet()), times)


@pytest.mark.parametrize(("make", "slots"), [(sending, 2), (receiving, 0)])
@pytest.mark.parametrize("beats", [0, 4])
def test_a_silent_peer_ends_the_session(monkeypatch: pytest.MonkeyPatch, make: Any, slots: int, beats: int) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def story() -> None:
        session, other = make(), Peer(met(slots), beats, 0.6 * LOST_SECONDS)
        began = time.monotonic()
        with pytest.raises(SessionBroken, match=f"nothing was heard from other for {LOST_SECONDS} s"):
            await asyncio.wait_for(session.run(other), 20)
        ended = time.monotonic()
        assert other.last - began >= beats * 0.6 * LOST_SECONDS, "each beat is more time"
        assert ended - other.last >= LOST_SECONDS
        assert Link.now.stopped

    asyncio.run(story())


def test_what_came_while_the_process_stood_still_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CourierLink", Link)

    async def story() -> None:
        session, other = sending(), Peer(met(2), 3, 0.2 * LOST_SECONDS)
        loop = asyncio.get_running_loop()
        loop.call_later(0.1 * LOST_SECONDS, time.sleep, 2 * LOST_SECONDS)
        with pytest.raises(SessionBroken, match="nothing was heard"):
            await asyncio.wait_for(session.run(other), 20)
        assert not other._beats, "it was heard to its last beat"

    asyncio.run(story())
