"""When a daemon counts as gone: not when it is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from kvferry.connectors.lookups import PinLookups
from kvferry.proto import admin_pb2, admin_pb2_grpc, common_pb2


class Slow(admin_pb2_grpc.AdminServicer):
    def Pin(self, request: admin_pb2.PinRequest, context: grpc.ServicerContext) -> admin_pb2.PinReply:
        time.sleep(0.6)
        return admin_pb2.PinReply()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_slow_daemon_is_up_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    socket = str(tmp_path / "d.sock")
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(Slow(), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    lookups = PinLookups(socket, common_pb2.ROLE_PREFILL, b"n", timeout_s=0.3)
    try:
        slow = lookups.start(bytes(32))
        until(lambda: slow.tokens == 0)
        assert lookups.up
        server.stop(None).wait()
        gone = lookups.start(bytes(32))
        until(lambda: gone.tokens == 0)
        assert not lookups.up
    finally:
        server.stop(None).wait()
        lookups.close()
