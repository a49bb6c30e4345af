"""How a request of the worker's half ends at the daemon: aborted, declined to the other ranks, or left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonGone, Ready, RequestFailed, RequestName
from kvferry.connectors.block_requests import BlockRequests
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.connectors.sglang.transfers import FetchedPrompt, PageTransfer, PollState, Transfers
from kvferry.connectors.worker_state import end_all
from kvferry.proto import common_pb2
from tests.client.requests import admit, name
from tests.connectors.scripted_tools import tools_at
from tests.support.fake_daemon import FakeDaemon

TOO_MANY = 4_000_000  # tokens, whose digests no message takes


@dataclass
class Rank:
    """Rank 0 of two, and a daemon that notes what it says."""

    daemon: FakeDaemon
    client: DaemonClient
    tools: RequestTools
    given_up: list[RequestName] = field(default_factory=list)

    async def give_up(self, client: DaemonClient, request: RequestName) -> None:
        await asyncio.sleep(0)
        self.given_up.append(request)

    @property
    def missed(self) -> list[RequestName]:
        """Requests that are declined to the other ranks in the next session."""
        return [name for _, name in self.tools.sessions._missed]

    def request(self, request: RequestName) -> DaemonRequest:
        return DaemonRequest(self.tools, "r", request, self.give_up)

    async def said(self) -> list[str]:
        """What the daemon has heard of requests, behind all that was said until now."""
        known = name()
        await admit(self.client, known)
        return self.daemon.kinds()[2:-1]  # without Hello, Attached and this


def at_rank(folder: Path, scenario: Callable[[Rank], Awaitable[None]]) -> None:
    async def run() -> None:
        async with tools_at(folder, common_pb2.ROLE_DECODE) as (daemon, client, tools):
            client._rank = OneRank(0, 2, "e", common_pb2.ROLE_DECODE)
            await scenario(Rank(daemon, client, tools))

    asyncio.run(run())


def test_a_name_that_runs_is_left_alone(tmp_path: Path) -> None:
    async def scenario(rank: Rank) -> None:
        running = name()
        await admit(rank.client, running)
        async with rank.request(running) as request:
            await admit(request.client, running)
        assert rank.tools.moved.failed == 1 and not rank.given_up
        assert await rank.said() == ["admit"] and rank.client.open_requests == 2

    at_rank(tmp_path, scenario)


def test_what_was_never_opened_is_declined(tmp_path: Path) -> None:
    async def scenario(rank: Rank) -> None:
        async with rank.request(name()) as request:
            await admit(request.client, name(), tokens=TOO_MANY)
        assert rank.tools.moved.failed == 1
        with pytest.raises(asyncio.CancelledError):
            async with rank.request(name()):
                raise asyncio.CancelledError
        assert rank.tools.moved.failed == 1 and not rank.given_up
        assert await rank.said() == ["admit", "abort"] * 2

    at_rank(tmp_path, scenario)


@pytest.mark.parametrize(
    ("error", "handled"),
    [
        (RequestFailed(common_pb2.ERROR_ABORTED, "it failed"), True),
        (DaemonGone("it is gone"), True),
        (RuntimeError("the device is lost"), False),
        (asyncio.CancelledError(), False),
    ],
)
def test_what_did_not_end_well_is_given_up_and_only_its_failure_at_the_daemon_is_an_end(
    tmp_path: Path, error: BaseException, handled: bool
) -> None:
    async def scenario(rank: Rank) -> None:
        opened, raised = name(), False
        try:
            async with rank.request(opened) as request:
                await admit(request.client, opened)
                raise error
        except (RuntimeError, asyncio.CancelledError) as same:
            raised = same is error
        assert raised is not handled and rank.tools.moved.failed == handled
        assert rank.given_up == [opened] and not rank.missed, "the others hear of it in this session"

    at_rank(tmp_path, scenario)


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_was_opened_in_a_session_that_broke_is_declined_in_the_next(tmp_path: Path, cancelled: bool) -> None:
    """Another rank may come to the same order as late as in that one. Giving it up may last until the old one's end is
    proven: it is declined before."""

    async def scenario(rank: Rank) -> None:
        opened, ended = name(), name()

        async def give_up(client: DaemonClient, request: RequestName) -> None:
            assert rank.missed == [opened]
            await rank.give_up(client, request)

        async with DaemonRequest(rank.tools, "r", ended, give_up) as request:
            await admit(request.client, ended)
            request.ended()
        try:
            async with DaemonRequest(rank.tools, "r", opened, give_up) as request:
                await admit(request.client, opened)
                rank.daemon.events.put_nowait(None)
                await asyncio.wait_for(rank.client.gone, 10)
                if cancelled:
                    raise asyncio.CancelledError
                await request.client.ready(opened)
        except asyncio.CancelledError:
            assert cancelled
        assert rank.given_up == rank.missed == [opened]

    at_rank(tmp_path, scenario)


@pytest.mark.parametrize("there", [True, False])
def test_a_rank_of_sglang_declines_it_likewise_and_what_it_missed(
    tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(rank: Rank) -> None:
        async def release(client: DaemonClient, request: RequestName, reason: str) -> None:
            assert rank.missed == [request], "it is declined before its end is proven"
            await rank.give_up(client, request)

        async def ready(client: DaemonClient, request: RequestName) -> Ready:
            raise await client.gone

        monkeypatch.setattr(DaemonClient, "release", release)
        monkeypatch.setattr(DaemonClient, "ready", ready)
        transfers = Transfers(rank.tools.sessions, 5.0, 5.0, rank.tools.copier, lambda row, blob: None)
        transfer = PageTransfer(name(), range(9), rank.client.geometry.page_size, b"")
        if not there:
            rank.tools.sessions.client = None
        work = asyncio.create_task(
            transfers.carry(transfer, transfers.receive(FetchedPrompt(transfer, "p", 0, [], 0, ())))
        )
        if there:
            while "admit" not in rank.daemon.kinds():
                await asyncio.sleep(0.01)
            rank.daemon.events.put_nowait(None)
        await asyncio.wait_for(work, 10)
        assert transfer.state is PollState.FAILED and rank.missed == [transfer.name]
        assert rank.given_up == [transfer.name] * there

    at_rank(tmp_path, scenario)


@pytest.mark.parametrize("way", ["all works", "those of blocks"])
def test_a_work_that_is_ended_before_it_has_begun_is_declined(tmp_path: Path, way: str) -> None:
    async def scenario(rank: Rank) -> None:
        rank.tools.sessions.client = None
        early = name()

        async def work() -> None:
            async with rank.request(early) as request:
                await admit(request.client, early)

        task = asyncio.create_task(work())
        await (end_all([task]) if way == "all works" else BlockRequests(rank.tools).quiet([task]))
        await asyncio.gather(task, return_exceptions=True)
        assert rank.missed == [early] and not rank.given_up

    at_rank(tmp_path, scenario)


def test_what_went_well_is_not_given_up(tmp_path: Path) -> None:
    async def scenario(rank: Rank) -> None:
        first, second = name(), name()
        async with rank.request(first) as request:
            await admit(request.client, first)
            request.ended()
        async with rank.request(second) as request:
            await admit(request.client, second)
            request.then(rank.tools.finish(request.client, second, 9))
        await asyncio.gather(*rank.tools.behind)
        assert not rank.given_up and await rank.said() == ["admit", "admit", "finish"]

    at_rank(tmp_path, scenario)


def test_without_a_daemon_nothing_is_said(tmp_path: Path) -> None:
    async def scenario(rank: Rank) -> None:
        rank.tools.sessions.client = None
        async with rank.request(name()) as request:
            await admit(request.client, name())
        assert rank.tools.moved.failed == 1 and not rank.given_up

    at_rank(tmp_path, scenario)
