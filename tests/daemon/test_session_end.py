"""The end of a session whose courier is still starting: nobody waits for the start."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvferry.daemon import session as session_module
from kvferry.daemon.session import Session, SessionBroken, SessionTimes


class Closed:
    """A stream that the peer has closed."""

    async def read(self) -> object:
        return None

    async def write(self, message: object) -> None:
        pass


class Link:
    def __init__(self) -> None:
        self.stops = 0

    async def stop(self, deadline_s: float) -> None:
        self.stops += 1


class Starting:
    """In place of `CourierLink`: never up, but maybe in the moment in which it is cancelled."""

    def __init__(self, link: Link | None) -> None:
        self.link = link
        self.cancelled = False

    async def start(self, *_: object) -> Link:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            if self.link is None:
                raise
        assert self.link is not None
        return self.link


async def end_of_a_session(monkeypatch: pytest.MonkeyPatch, starting: Starting) -> None:
    monkeypatch.setattr(session_module, "CourierLink", starting)
    unused = cast(Any, None)
    session = Session(
        remote="peer",
        courier=unused,
        memory=unused,
        lanes=(),
        remote_ranks=1,
        checksums=False,
        times=SessionTimes(1.0, 5.0),
    )
    with pytest.raises(SessionBroken, match="peer closed the stream"):
        await asyncio.wait_for(session.run(cast(Any, Closed())), 10)


def test_a_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(None)
    asyncio.run(end_of_a_session(monkeypatch, starting))
    assert starting.cancelled


def test_a_courier_that_came_up_all_the_same_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    asyncio.run(end_of_a_session(monkeypatch, Starting(link)))
    assert link.stops == 1
