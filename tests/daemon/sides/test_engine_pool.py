"""The end of an engine's memory: it is unmapped once nothing uses it, and only then is it the next one's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.sides import engine_pool
from kvferry.daemon.sides.engine_pool import EnginePool


class Side:
    """A side that uses the memory until it is told not to; it notes what becomes of that."""

    def __init__(self) -> None:
        self.uses = "1 sessions"
        self.ended = 0  # times that its sessions were
        self.did: list[str] = []
        self.may_unmap = asyncio.Event()

    def end_sessions(self, reason: str) -> None:
        self.ended += 1

    def drop_requests(self) -> None:
        self.did.append("dropped")

    def in_use(self) -> str:
        return self.uses

    async def unmap(self) -> None:
        self.did.append("unmapping")
        await self.may_unmap.wait()
        self.did.append("unmapped")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "LOOK_SECONDS", 0.001)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


async def owned(side: Side) -> EnginePool:
    pool = EnginePool("decode", side, side.unmap)
    await pool.claim("first")
    pool.own(1)
    return pool


def test_memory_is_unmapped_once_nothing_uses_it_and_then_it_is_the_next_ones_turn() -> None:
    async def story() -> None:
        side = Side()
        pool = await owned(side)
        letting_go = asyncio.create_task(pool.let_go())
        second = asyncio.create_task(pool.claim("second"))
        await until(lambda: side.ended >= 4)  # sessions that come meanwhile are ended as well
        assert side.did == ["dropped"]
        side.uses = ""
        await until(lambda: len(side.did) > 1)
        await settle()
        assert side.did == ["dropped", "unmapping"] and not second.done() and pool.is_owner(1)
        side.may_unmap.set()
        await letting_go
        await second
        assert side.did[-1] == "unmapped" and not pool.is_owner(1)

    run(story())


def test_the_memory_of_one_that_is_here_is_nobody_elses() -> None:
    async def story() -> None:
        pool = await owned(Side())
        with pytest.raises(RequestError, match="is the memory of worker 'first', which is here"):
            await pool.claim("second")

    run(story())


def test_of_two_that_wait_for_the_memorys_end_one_gets_its_place() -> None:
    async def story() -> None:
        side = Side()
        pool = await owned(side)
        pool.owner_leaves()
        both = [asyncio.create_task(pool.claim(name)) for name in ("second", "third")]
        await settle()
        side.uses = ""
        side.may_unmap.set()
        await pool.let_go()
        await asyncio.wait(both)
        (error,) = [error for task in both if (error := task.exception()) is not None]
        assert "registered its memory first; try again" in str(error)

    run(story())
