"""The carrier's transfers end whatever happens to its session."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.connectors.sglang.carrier import Carrier
from kvferry.connectors.sglang.settings import BackendSettings
from kvferry.connectors.sglang.transfers import PageTransfer, PollState, StoredPrompt


async def never(*, deadline_s: float) -> DaemonClient:
    raise AssertionError("no session is wanted")


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_what_is_handed_in_as_the_session_ends_has_ended_too(turns: int) -> None:
    """In whatever turn of the loop it comes."""
    carrier = Carrier(BackendSettings("/s"), never, lambda row, blob: None, lambda *told: None)
    transfer = PageTransfer(RequestName(bytes(16), 1), range(8), 4, b"", PollState.TRANSFERRING)

    async def run() -> None:
        carrier._begin(transfer, lambda order: asyncio.sleep(60), StoredPrompt(transfer, [0, 1], ()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await carrier._quiet()
        for _ in range(5):
            await asyncio.sleep(0)

    carrier._loop.run_until_complete(run())
    carrier.close()
    assert transfer.state is PollState.FAILED and transfer.reason == "the session with the daemon is over"
    assert not carrier._tasks
