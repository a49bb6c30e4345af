"""What a receiving session tells the sender."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kvferry.daemon.counters import Latencies, TransferCounters
from kvferry.daemon.receiving import ReceivingSession
from kvferry.daemon.session import SessionTimes
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.lanes import Heads, Lane
from kvferry.transfer.receiver import Receiver
from kvferry.transfer.slots import Credit


def test_credits_of_one_turn_go_in_one_message() -> None:
    async def sent() -> list[peer.PeerMessage]:
        lanes = [Lane(0, 0, Heads(0, 1), 0, 0, 64)]
        nothing = cast(Any, None)  # neither a courier nor memory is used here
        session = ReceivingSession(
            remote="prefill",
            courier=nothing,
            memory=nothing,
            lanes=lanes,
            remote_ranks=1,
            checksums=False,
            times=SessionTimes(1.0, 5.0),
            receiver=Receiver(epoch=1, lanes=lanes, slot_bytes=4096, slots=2),
            events=nothing,
            counters=TransferCounters(),
            latencies=Latencies(),
        )
        session._grant([Credit(0, 1)])
        session._grant([Credit(1, 7)])
        assert session._outgoing.empty()
        await asyncio.sleep(0)
        session._grant([Credit(0, 2)])
        await asyncio.sleep(0)
        return [session._outgoing.get_nowait() for _ in range(session._outgoing.qsize())]

    messages = asyncio.run(sent())
    assert [[(c.slot, c.generation) for c in message.credits.credits] for message in messages] == [
        [(0, 1), (1, 7)],
        [(0, 2)],
    ]
