"""The end of a request, for who hears of it without waiting in a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.daemon_end import DaemonEnd
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.proto import common_pb2, worker_pb2
from tests.client.requests import FACTS, GEOMETRY, name
from tests.support.fake_daemon import FakeDaemon

Heard = list[BaseException | None]


def begun(folder: Path, scenario: Callable[[FakeDaemon, DaemonClient, RequestName], Awaitable[None]]) -> None:
    """A prefill worker's request, which the daemon has begun."""

    async def run() -> None:
        async with FakeDaemon(folder, GEOMETRY) as daemon:
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_PREFILL, FACTS, "w", deadline_s=10)
            request = name()
            client.begin(request, digests=bytes(64), tokens=9, tail_digest=bytes(32), deadline_s=5)
            await client.begun(request)
            try:
                await scenario(daemon, client, request)
            finally:
                await client.close()

    asyncio.run(run())


async def there(heard: Heard) -> None:
    async with asyncio.timeout(10):
        while not heard:
            await asyncio.sleep(0.01)


def test_an_end_is_told_once_and_then_forgotten(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient, request: RequestName) -> None:
        heard: Heard = []
        client.when_ended(request, heard.append)
        assert not heard
        ended = worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto()))
        for _ in range(2):
            daemon.events.put_nowait(ended)
        await there(heard)
        client.forget(request)
        await asyncio.sleep(0.05)
        assert heard == [None] and not client.open_requests

    begun(tmp_path, scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_is_told_whenever_it_is_asked_for(tmp_path: Path, late: bool) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient, request: RequestName) -> None:
        heard: Heard = []
        if not late:
            client.when_ended(request, heard.append)
        daemon.fail(request.to_proto(), common_pb2.ERROR_ABORTED, "it is so")
        with pytest.raises(RequestFailed):
            await client.ended(request, 10)
        if late:
            client.when_ended(request, heard.append)
        assert [str(error) for error in heard] == ["it is so"] and client.open_requests
        await client.abort(request, "it failed")

    begun(tmp_path, scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_session_that_is_over_is_told_too(tmp_path: Path, late: bool) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient, request: RequestName) -> None:
        heard: Heard = []
        if not late:
            client.when_ended(request, heard.append)
        daemon.events.put_nowait(None)
        await asyncio.wait_for(asyncio.shield(client.gone), 10)
        if late:
            client.when_ended(request, heard.append)
        assert [type(error) for error in heard] == [DaemonGone]

    begun(tmp_path, scenario)


def alone(
    folder: Path, scenario: Callable[[FakeDaemon, DaemonClient], Awaitable[None]], *, takes: bool = True, ranks: int = 1
) -> None:
    """A decode worker, one rank of so many, and a daemon that answers no Admit by itself."""

    async def run() -> None:
        async with FakeDaemon(folder, GEOMETRY) as daemon:
            hello = daemon._on_hello

            def welcome(message: worker_pb2.WorkerMessage) -> list[worker_pb2.WorkerEvent]:
                events = hello(message)
                events[0].welcome.ends_itself = takes
                return events

            daemon.override |= {"hello": welcome, "admit": lambda message: []}
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)
            client._rank = None if ranks == 1 else OneRank(0, ranks, "e", common_pb2.ROLE_DECODE)
            try:
                await scenario(daemon, client)
            finally:
                await client.close()

    asyncio.run(run())


def admit_alone(client: DaemonClient, request: RequestName, prefill: str = "p") -> None:
    client.admit_alone(
        request, digests=bytes(64), tokens=9, tail_digest=bytes(32), prefill=prefill, max_new_tokens=1, deadline_s=5
    )


def test_a_request_that_ends_itself_is_over_when_its_prompt_is_there(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        assert client.takes_alone
        request, heard = name(), Heard()
        admit_alone(client, request)
        client.when_ended(request, heard.append)
        assert (await daemon.wait_for("admit")).admit.ends_itself
        assert client.arrived(request) == (None, None) and not heard
        ready = worker_pb2.Ready(name=request.to_proto(), aux=b"7", delta_bytes=3)
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ready=ready))
        await there(heard)
        assert heard == [None]
        admitted, arrived = client.arrived(request)
        assert admitted is None and arrived is not None and (arrived.aux, arrived.delta_bytes) == (b"7", 3)
        await asyncio.wait_for(client._requests[request].released, 10)  # as who gives it up meanwhile waits for
        client.forget(request)
        assert "finish" not in daemon.kinds() and not client.open_requests

    alone(tmp_path, scenario)


def test_what_is_handed_in_ends_with_ended_alone(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request, heard = name(), Heard()
        admit_alone(client, request, prefill="")
        client.when_ended(request, heard.append)
        await daemon.wait_for("admit")
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto())))
        await there(heard)
        assert heard == [None] and client.arrived(request) == (None, None)

    alone(tmp_path, scenario)


@pytest.mark.parametrize("prefill", ["p", ""])
def test_what_is_aborted_is_let_go_of_by_ended_alone(tmp_path: Path, prefill: str) -> None:
    """The daemon may have been ready before it heard of that, and reads what is handed in when it is ready."""

    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        daemon.override["abort"] = lambda message: []
        client.end = cast(DaemonEnd, SimpleNamespace(prove=lambda: None))  # as of one that has registered blocks
        request = name()
        client.admit_alone(
            request,
            digests=bytes(64),
            tokens=9,
            tail_digest=bytes(32),
            prefill=prefill,
            max_new_tokens=1,
            deadline_s=5,
            held_tokens=0 if prefill else 9,
        )
        if not prefill:
            daemon.events.put_nowait(worker_pb2.WorkerEvent(ready=worker_pb2.Ready(name=request.to_proto())))
            while not client._requests[request].ready.done():
                await asyncio.sleep(0.01)
            assert not client._requests[request].released.done()
        releasing = asyncio.create_task(client.release(request, "wanted no more"))
        await daemon.wait_for("abort")
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ready=worker_pb2.Ready(name=request.to_proto())))
        done, _ = await asyncio.wait([releasing], timeout=0.1)
        assert not done
        daemon.events.put_nowait(worker_pb2.WorkerEvent(ended=worker_pb2.Ended(name=request.to_proto())))
        await asyncio.wait_for(releasing, 10)
        assert not client.open_requests

    alone(tmp_path, scenario)


@pytest.mark.parametrize(("takes", "ranks"), [(False, 1), (True, 2)])
def test_of_an_older_daemon_and_of_several_ranks_requests_are_finished(tmp_path: Path, takes: bool, ranks: int) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        assert not client.takes_alone

    alone(tmp_path, scenario, takes=takes, ranks=ranks)
