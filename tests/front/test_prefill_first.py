"""Prefill halves are sent before decode halves, and nobody waits for one that is not sent."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.front.upstream import legs
from kvferry.front.upstream.legs import PrefillFirst
from tests.front.test_vllm_front import CHAT, ask, until, world


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_waits_goes_on_once_all_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "HOLD_SECONDS", 60.0)

    async def run() -> None:
        first = PrefillFirst()
        await first.over()
        sent = [first.begins(), first.begins()]
        waiting = [asyncio.create_task(first.over()) for _ in range(2)]
        await turns()
        for _ in range(2):  # as where it was sent, and then failed
            sent[0]()
            await turns()
            assert not any(each.done() for each in waiting)
        sent[1]()
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        await first.over()

    asyncio.run(run())


def test_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "HOLD_SECONDS", 0.02)

    async def run() -> None:
        first = PrefillFirst()
        sent = first.begins()
        await asyncio.wait_for(first.over(), 10)
        sent()
        assert not first._waiting

    asyncio.run(run())


@pytest.mark.parametrize("all_sent", [False, True])
def test_one_whose_client_leaves_waits_no_more(all_sent: bool) -> None:
    async def run() -> None:
        first = PrefillFirst()
        sent = first.begins()
        waiting = asyncio.create_task(first.over())
        await turns()
        if all_sent:  # in the same turn of the loop
            sent()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not first._waiting

    asyncio.run(run())


def test_a_decode_half_is_sent_behind_all_prefill_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "HOLD_SECONDS", 60.0)

    async def run() -> None:
        async with world() as w:
            another = w.front.prefill_first.begins()
            asking = asyncio.create_task(w.client.post(CHAT, json=ask()))
            await until(lambda: bool(w.prefill.asked))
            await asyncio.sleep(0.1)
            assert not w.decode.asked
            another()
            assert (await asking).json()["from"] == "decode"

    asyncio.run(run())
