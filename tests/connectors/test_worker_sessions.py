"""The worker's half without a daemon: it goes on trying, whatever a try ends with."""

from __future__ import annotations

import threading
from typing import cast

from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import HostMover
from kvferry.connectors.orders import Begin, Orders, Prompt
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import RETRY_SECONDS
from kvferry.connectors.worker_side import WorkerSide
from kvferry.workers.client import DaemonClient
from kvferry.workers.requests import DaemonAbsent, RequestName


def test_a_try_that_fails_unexpectedly_is_not_the_last_and_pushes_fail_meanwhile() -> None:
    tries: list[float] = []
    third = threading.Event()

    async def connect(*, deadline_s: float) -> DaemonClient:
        tries.append(deadline_s)
        if len(tries) == 2:
            raise RuntimeError("nobody thought of this")
        if len(tries) == 3:
            third.set()
        raise DaemonAbsent("no daemon")

    blocks = cast(BlockMap, None)
    side = WorkerSide(Settings("/nowhere", connect_seconds=0.1), blocks, HostMover(blocks), connect)
    side.start()
    try:
        begin = Begin("a", RequestName(bytes(16), 1), Prompt(bytes(32), 24, bytes(32)), 0, 24, (3, 4, 5))
        side.take(Orders([begin], ()))
        side.forward_done()
        assert third.wait(10)
        assert side.reports.take() == (set(), {"a"})
        assert side.reports.take_bad() == {3, 4, 5}
    finally:
        side.close()


class Recording(HostMover):
    records = True


def test_an_engine_that_may_record_what_its_gpu_does_is_left_alone_until_its_first_step() -> None:
    tries: list[float] = []
    again = threading.Event()

    async def connect(*, deadline_s: float) -> DaemonClient:
        tries.append(deadline_s)
        if len(tries) == 2:
            again.set()
        raise DaemonAbsent("no daemon")

    blocks = cast(BlockMap, None)
    side = WorkerSide(Settings("/nowhere", connect_seconds=0.1), blocks, Recording(blocks), connect)
    side.start()
    try:
        assert not again.wait(3 * RETRY_SECONDS)
        assert len(tries) == 1
        side.take(Orders())
        assert again.wait(10)
    finally:
        side.close()
