"""The health service: each service's status changes at once, and a watcher is waited for by its own call alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2

from kvferry.daemon.services.health import HealthService

Reply = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING = Reply.SERVING, Reply.NOT_SERVING
WHY = ("stalled: copy worker for 12.0 s", "shared memory /dev/shm: 0 B free")


class Call:
    """A watcher's, which reads while `reads` is set."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.metadata: dict[str, bytes] = {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.metadata.update(metadata)

    async def write(self, reply: Reply) -> None:
        await self.reads.wait()
        self.told.append(reply.status)

    async def abort(self, code: Any, details: str) -> None:
        raise PermissionError(f"{code.name}: {details}")


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def status_of(service: HealthService, name: str) -> int:
    reply = await service.Check(health_pb2.HealthCheckRequest(service=name), cast(Any, Call()))
    return int(reply.status)


@asynccontextmanager
async def watched(service: HealthService, *names: str) -> AsyncIterator[list[Call]]:
    """A watcher of each name."""
    calls = [Call() for _ in names]
    asked = [health_pb2.HealthCheckRequest(service=name) for name in names]
    tasks = [asyncio.create_task(service.Watch(*each)) for each in zip(asked, cast(Any, calls), strict=True)]
    await turns()
    yield calls
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not service._changes


def test_a_watcher_hears_of_each_change_of_its_service_and_of_no_other() -> None:
    async def story() -> None:
        service = HealthService()
        async with watched(service, "", "engine", "other") as (daemon, engine, other):
            service.set("engine", ())
            service.set("engine", ())
            await turns()
            service.set("", WHY)
            await turns()
        assert daemon.told == [SERVING, NOT_SERVING]
        assert engine.told == [NOT_SERVING, SERVING]
        assert other.told == [Reply.SERVICE_UNKNOWN]

    asyncio.run(story())


def test_a_watcher_that_does_not_read_keeps_nothing_from_others() -> None:
    """Once it reads it hears what is so then, and not all that was."""

    async def story() -> None:
        service = HealthService()
        service.set("engine", ())
        async with watched(service, "", "", "engine") as (stuck, other, engine):
            stuck.reads.clear()
            for serving in (False, True, False):
                service.set("", () if serving else WHY)
                assert await status_of(service, "") == (SERVING if serving else NOT_SERVING)
                await turns()
            service.drain()
            assert [await status_of(service, name) for name in ("", "engine")] == [NOT_SERVING] * 2
            await turns()
            assert other.told == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
            assert engine.told == [SERVING, NOT_SERVING]
            stuck.reads.set()
            await turns()
            assert stuck.told == [SERVING, NOT_SERVING]

    asyncio.run(story())


def test_nothing_serves_again_once_it_drains() -> None:
    async def story() -> None:
        service = HealthService()
        service.drain()
        for name in ("", "engine"):
            service.set(name, ())
            assert await status_of(service, name) == NOT_SERVING

    asyncio.run(story())


def test_a_service_that_there_is_not_is_named() -> None:
    async def story() -> None:
        with pytest.raises(PermissionError, match="NOT_FOUND: services are '', 'engine'"):
            await status_of(HealthService(), "other")

    asyncio.run(story())


def test_an_answer_says_why() -> None:
    async def story() -> None:
        service, told = HealthService(), []
        for change in (lambda: None, lambda: service.set("", WHY), lambda: service.set("", WHY[:1]), service.drain):
            change()
            call = Call()
            await service.Check(health_pb2.HealthCheckRequest(), cast(Any, call))
            told.append(call.metadata.get("kvferry-why-bin", b"").decode())
        assert told == ["", "; ".join(WHY), WHY[0], "it drains"]

    asyncio.run(story())
