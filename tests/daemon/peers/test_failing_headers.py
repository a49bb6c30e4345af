"""A courier that does not say which header it read on a GPU costs the session, which ends; a GPU that fails while a
part and its header are gathered costs the transfer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvferry.daemon.core.counters import TransferCounters
from kvferry.daemon.memory.interface import ScatterEnd
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import SessionBroken
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.protocol.receiver import Receiver, Scatter
from kvferry.transfer.protocol.slots import PartHeader
from tests.daemon.peers.played_sessions import EPOCH, LANES, SLOT_BYTES, Events, Link, Parts, Stream, common, met


def header(generation: int) -> bytes:
    told = PartHeader(
        epoch=EPOCH, transfer=1, slot=0, generation=generation, lane=0, first_page=0, byte_offset=0, nbytes=16
    )
    return told.pack()


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
