"""The decode daemon's pauses before it dials again. The loop's time jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import StartTransfer
from kvferry.daemon.peers.link import PeerLink
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.session import SessionBroken
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import peer_pb2 as peer


class _Skipping(selectors.DefaultSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped += timeout or 0.0
        return super().select(0 if timeout is not None else None)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped


def dials(
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[[PeerLink, int], Awaitable[None]],
    count: int,
    beside: Callable[[PeerLink], Awaitable[None]] | None = None,
) -> list[float]:
    """The times of the first `count` tries; `serve` is given the link and the try's number, from 0."""
    times: list[float] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        side = DecodeSide(DaemonConfig(role="decode", peers={"p0": "127.0.0.1:1"}), bytes(16), loop.time)
        side.tiers.has_pool.set()
        link = side.links["p0"]
        enough = asyncio.Event()

        async def connect() -> None:
            times.append(loop.time())
            if len(times) == count:
                enough.set()
            await serve(link, len(times) - 1)
            raise SessionBroken("it is over")

        monkeypatch.setattr(link, "_connect_and_serve", connect)
        tasks = [asyncio.create_task(link.run())]
        if beside is not None:
            tasks.append(asyncio.create_task(beside(link)))
        await asyncio.wait_for(enough.wait(), 1000)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await side.close()

    loop = _Loop()
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()
    return times


def waits(times: list[float]) -> list[float]:
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]


async def comes_up(link: PeerLink) -> None:
    link.session = cast(ReceivingSession, object())
    link.on_session_up()
    link.session = None


def test_a_session_that_breaks_at_once_is_dialled_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(link: PeerLink, number: int) -> None:
        await comes_up(link)

    assert waits(dials(monkeypatch, serve, 9)) == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_a_session_that_lived_is_dialled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than it had to wait for its turn; else the wait grows on."""
    lives = [0.0, 0.0, 0.41, 0.0, 0.2, 0.5, 0.0]

    async def serve(link: PeerLink, number: int) -> None:
        await comes_up(link)
        await asyncio.sleep(lives[number])

    times = dials(monkeypatch, serve, len(lives))
    pauses = [round(wait - life, 3) for wait, life in zip(waits(times), lives, strict=False)]
    assert pauses == [0.2, 0.4, 0.1, 0.2, 0.4, 0.1]


def test_asks_wait_for_the_floor_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(link: PeerLink, number: int) -> None: ...

    async def ask(link: PeerLink) -> None:
        for number in range(1000):
            link.start_transfer(StartTransfer("p0", peer.Ask(transfer=number), ()))
            await asyncio.sleep(0.01)

    assert set(waits(dials(monkeypatch, serve, 12, ask))) == {0.1}


def test_an_ask_ends_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(link: PeerLink, number: int) -> None: ...

    async def ask(link: PeerLink) -> None:
        await asyncio.sleep(10.0)  # the tries are at 0, 0.2, 0.6, 1.4, 3, 6.2 and 11.2
        link.start_transfer(StartTransfer("p0", peer.Ask(transfer=1), ()))

    assert [round(time, 3) for time in dials(monkeypatch, serve, 8, ask)] == [0.0, 0.2, 0.6, 1.4, 3.0, 6.2, 10.0, 15.0]
