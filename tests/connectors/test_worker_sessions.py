"""The worker's half without a daemon: it goes on trying, whatever a try ends with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import DaemonAbsent, DaemonGone, RequestName
from kvferry.connectors import worker_session
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import HostMover
from kvferry.connectors.orders import Begin, Orders, PromptPages
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import RETRY_SECONDS
from kvferry.connectors.worker_side import WorkerSide
from kvferry.connectors.worker_state import UNWANTED, wait_for
from kvferry.proto import worker_pb2
from tests.support.standstill import run_with_standstill


class Recording(HostMover):
    records = True


class Tries:
    """Of connecting, in vain: `enough` is set with the last of `wanted`; the second ends with `error`."""

    def __init__(self, wanted: int, error: Exception | None = None) -> None:
        self.made = 0
        self.enough = threading.Event()
        self._wanted, self._error = wanted, error

    async def __call__(self, *, deadline_s: float) -> DaemonClient:
        self.made += 1
        if self.made == self._wanted:
            self.enough.set()
        if self.made == 2 and self._error is not None:
            raise self._error
        raise DaemonAbsent("no daemon")


@contextlib.contextmanager
def running(tries: Tries, mover: type[HostMover]) -> Iterator[WorkerSide]:
    blocks = cast(BlockMap, None)
    side = WorkerSide(Settings("/nowhere", connect_seconds=0.1), blocks, mover(blocks), tries)
    side.start()
    try:
        yield side
    finally:
        side.close()


def test_a_try_that_fails_unexpectedly_is_not_the_last_and_pushes_fail_meanwhile() -> None:
    tries = Tries(3, RuntimeError("nobody thought of this"))
    with running(tries, HostMover) as side:
        begin = Begin("a", RequestName(bytes(16), 1), PromptPages(bytes(32), 24, bytes(32)), 0, 24, (3, 4, 5))
        side.take(Orders([begin], ()))
        side.forward_done()
        assert tries.enough.wait(10)
        assert side.reports.take() == (set(), {"a"})
        assert side.reports.take_bad() == {3, 4, 5}


def test_an_engine_that_may_record_what_its_gpu_does_is_left_alone_until_its_first_step() -> None:
    tries = Tries(2)
    with running(tries, Recording) as side:
        assert not tries.enough.wait(3 * RETRY_SECONDS)
        assert tries.made == 1
        side.take(Orders())
        assert tries.enough.wait(10)


class Session:
    """A session with a daemon, as far as `Sessions` uses one."""

    end = None

    def __init__(self) -> None:
        self.declined: list[RequestName] = []
        self.gone = asyncio.get_running_loop().create_future()
        self.welcome = worker_pb2.Welcome(daemon="d")
        self.pools = SimpleNamespace(in_blocks=False)

    def decline(self, name: RequestName, reason: str) -> None:
        assert reason == UNWANTED
        self.declined.append(name)

    async def close(self) -> None: ...


def test_what_a_rank_missed_without_a_session_it_declines_once_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "MISSED_SECONDS", 0.2)
    monkeypatch.setattr(worker_session, "RETRY_SECONDS", 0.01)

    async def run() -> None:
        there, opened, settled = asyncio.Event(), list[Session](), asyncio.Event()

        async def connect(*, deadline_s: float) -> DaemonClient:
            if not there.is_set():
                raise DaemonAbsent("no daemon")
            opened.append(Session())
            return cast(DaemonClient, opened[-1])

        async def quiet() -> None: ...

        settled.set()
        sessions = worker_session.Sessions(connect, quiet=quiet, changed=lambda there: None, settled=settled)
        await sessions.open(0.1)
        old, new = RequestName(bytes(16), 1), RequestName(bytes(16), 2)
        sessions.decline(old)
        await asyncio.sleep(0.25)
        sessions.decline(new)
        there.set()
        while sessions.client is None:
            await asyncio.sleep(0.01)
        assert opened[0].declined == [new], "for the older one nobody waits any more"
        sessions.decline(old)
        assert opened[0].declined == [new, old], "at once"
        opened[0].gone.set_result(DaemonGone("it ended"))
        while len(opened) < 2:
            await asyncio.sleep(0.01)
        assert opened[1].declined == [], "once"
        await sessions.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_an_engine_does_while_its_daemon_is_not_ready_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is tried; with the session it is said of the next time."""
    monkeypatch.setattr(worker_session, "RETRY_SECONDS", 0.001)
    caplog.set_level(logging.INFO, "kvferry.connectors.worker_session")
    facts = worker_pb2.Welcome(daemon="d", namespace_id=bytes(32))
    facts.geometry.page_size = 16

    async def run() -> None:
        tries, settled = 0, asyncio.Event()

        async def connect(*, deadline_s: float) -> DaemonClient:
            nonlocal tries
            tries += 1
            if tries < 20:
                raise DaemonAbsent("no pool within 20 s at unix:/d.sock")
            session = Session()
            session.welcome = facts
            return cast(DaemonClient, session)

        async def quiet() -> None: ...

        settled.set()
        does = "hand-offs are computed here"
        sessions = worker_session.Sessions(
            connect, quiet=quiet, changed=lambda there: None, settled=settled, meanwhile=does
        )
        await sessions.open(0.1)
        while sessions.client is None:
            await asyncio.sleep(0.001)
        await sessions.close()

    asyncio.run(asyncio.wait_for(run(), 10))
    absent, there = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert absent == ("WARNING", "no pool within 20 s at unix:/d.sock; until it comes hand-offs are computed here")
    assert there[0] == "INFO" and there[1].startswith("again connected to kvferry's daemon 'd': ")
    assert there[1].endswith("; while it is away hand-offs are computed here")


def test_sessions_that_are_closed_as_soon_as_they_are_open_end() -> None:
    async def run() -> None:
        async def connect(*, deadline_s: float) -> DaemonClient:
            return cast(DaemonClient, Session())

        async def quiet() -> None: ...

        for turns in range(5):  # of the loop, in between
            settled = asyncio.Event()
            settled.set()
            sessions = worker_session.Sessions(connect, quiet=quiet, changed=lambda there: None, settled=settled)
            await sessions.open(0.1)
            for _ in range(turns):
                await asyncio.sleep(0)
            await sessions.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_an_engine_that_stood_still_has_waited_for_what_is_soon_over() -> None:
    program = """
        import asyncio, os, signal
        from kvferry.connectors.movers import HostMover
        from kvferry.connectors.settings import Settings
        from kvferry.connectors.worker_side import WorkerSide
        from kvferry.connectors.worker_state import wait_for

        async def work():
            os.kill(os.getpid(), signal.SIGSTOP)
            await asyncio.sleep(0.1)
            return "over"

        side = WorkerSide(Settings("/nowhere"), None, HostMover(None), None)
        side._thread.start()
        print(wait_for(work(), side._loop, 1.0))
        side.close()
    """
    assert run_with_standstill(program, 2.0).stdout == "over\n"


def test_what_is_not_over_is_not_waited_for_for_ever() -> None:
    side = WorkerSide(Settings("/nowhere"), cast(BlockMap, None), HostMover(cast(BlockMap, None)), Tries(1))
    side._thread.start()
    over = asyncio.Event()
    with pytest.raises(TimeoutError, match=r"not over within 0\.1 s"):
        wait_for(over.wait(), side._loop, 0.1)
    side._loop.call_soon_threadsafe(over.set)
    side.close()
