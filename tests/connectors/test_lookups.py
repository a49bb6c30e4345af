"""Look-ups at a daemon that comes back as another."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc

from kvferry.connectors.lookups import PinLookup, PinLookups
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2

SECONDS = 10.0


class Daemon(cache_pb2_grpc.CacheServicer):
    """Its first answer waits for `gate`; those behind it have another name."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = 0

    def Stats(self, request: cache_pb2.StatsRequest, context: grpc.ServicerContext) -> cache_pb2.StatsReply:
        self.asked += 1
        name = "old" if self.asked == 1 else "new"
        if name == "old":
            self.gate.wait(SECONDS)
        side = cache_pb2.SideStats(role=common_pb2.ROLE_PREFILL, pool=cache_pb2.PoolStats(pages=8))
        return cache_pb2.StatsReply(daemon=name, sides=[side])


class Owner:
    def __init__(self) -> None:
        self.let_go: list[int] = []

    def unpin(self, pin: int) -> None:
        self.let_go.append(pin)


def test_a_pin_is_let_go_once_whether_it_came_before_or_after_nobody_wanted_it() -> None:
    owner = Owner()
    early, late = (PinLookup(cast(Any, owner)) for _ in range(2))
    early.answered(7, 64)
    assert (early.tokens, owner.let_go) == (64, [])
    for _ in range(2):
        early.release()
    assert owner.let_go == [7]
    late.release()
    late.answered(8, 64)
    assert owner.let_go == [7, 8], "at once: nobody asks again"
    late.release()
    assert owner.let_go == [7, 8]


def test_an_answer_that_was_under_way_does_not_hold_once_the_session_is_new(tmp_path: Path) -> None:
    daemon = Daemon()
    server = grpc.server(ThreadPoolExecutor(2))
    cache_pb2_grpc.add_CacheServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{tmp_path}/d.sock")
    server.start()
    lookups = PinLookups(f"{tmp_path}/d.sock", common_pb2.ROLE_PREFILL, bytes(32), timeout_s=SECONDS)
    try:
        deadline = time.monotonic() + SECONDS
        while daemon.asked == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        lookups.ask_again()
        daemon.gate.set()
        while lookups.daemon != "new" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lookups.daemon == "new"
        assert daemon.asked == 2
        lookups.ask_again()
        while daemon.asked < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert daemon.asked == 3, "a new session asks though the facts are fresh"
    finally:
        lookups.close()
        server.stop(None).wait()
