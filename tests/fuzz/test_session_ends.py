"""The end that a prefill daemon makes of a decode daemon's session whose credits cannot be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvferry.daemon.services.peer import PeerService
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from tests.fuzz.peer_prefill import couriers, hello
from tests.fuzz.stage import SLOTS, Call, Honest, Prefill, Refused, Stage, run


def credits(slot: int, generation: int) -> peer.PeerMessage:
    return peer.PeerMessage(credits=peer.Credits(credits=[peer.Credit(slot=slot, generation=generation)]))


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ([credits(0, 0)], "FAILED_PRECONDITION: credits: credit.generation is 0, must be greater than 0 for slot 0"),
        ([credits(0, 2), credits(0, 2)], "FAILED_PRECONDITION: credits: credit.generation is 2"),
        ([credits(0, 1), credits(0, 2)], "FAILED_PRECONDITION: credits: credit.slot is 0, must be a slot whose former"),
        ([credits(SLOTS, 1)], f"OUT_OF_RANGE: credits: credit.slot is {SLOTS}, must be in 0..{SLOTS - 1}"),
    ],
)
def test_a_credit_that_cannot_be_ends_the_session_with_its_code(said: list[peer.PeerMessage], end: str) -> None:
    async def serve(stage: Stage) -> None:
        side = Prefill(stage.clock)
        stage.sides.append(side)
        honest = Honest(side)
        call = Call([hello(common.ROLE_DECODE), *couriers(SLOTS), *said], stage.findings, stage.turn)
        with pytest.raises(Refused) as refused:
            await PeerService(side).Session(None, cast(Any, call))
        honest.gone()
        assert str(refused.value).startswith(end)

    run(serve)
