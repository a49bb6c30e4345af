"""A prefill leg that never comes ties nobody but its own request, whatever prefix it shares with others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.proto import common_pb2, engine_pb2
from kvferry.proto.engine_pb2_grpc import EngineStub
from tests.support.engines import OPTIONS, Engines, settled, stats, wait_until
from tests.support.stacks import SmallSystem

PAGE = 16
PROMPT = list(range(1, 10 * PAGE + 6))
pytestmark = pytest.mark.timeout(120)


@contextmanager
def half_a_request(decode: Replica, prefill: Replica) -> Iterator[grpc.Future]:
    """Its decode leg, of PROMPT: its pages are on their way in the tree, and nobody computes them."""
    name = common_pb2.RequestName(request_id=os.urandom(16), attempt=1)
    request = engine_pb2.DecodeRequest(
        name=name, tokens=PROMPT, max_new_tokens=4, prefill=prefill.name, deadline_ms=60_000
    )
    with grpc.insecure_channel(decode.worker_address, OPTIONS) as channel:
        call = EngineStub(channel).Decode(request, timeout=90)
        try:
            wait_until(lambda: stats(decode).pool.arriving == 10)
            yield call
        finally:
            call.cancel()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "same_daemon",
    [pytest.param(False, id="another daemon"), pytest.param(True, id="the same daemon", marks=pytest.mark.nightly)],
)
def test_who_shares_the_prefix_is_served_by_its_own_prefill_leg(stack: Stack, same_daemon: bool) -> None:
    """The one with a longer prompt, that with the same, and one that comes later; the other one still waits then."""
    (silent, other), (decode,) = start_replicas(stack, SmallSystem(page_size=PAGE, prefills=2))
    with half_a_request(decode, silent) as half, Engines(silent if same_daemon else other, decode) as engines:
        for prompt in ([*PROMPT, *range(100)], PROMPT, PROMPT[: 6 * PAGE]):
            turn = engines.turn(prompt, 4, deadline_s=30.0)
            assert turn.error is None and len(turn.output) == 4
        assert half.is_active(), "it was served before the other one's end"
        assert stats(decode).transfers.asked_again >= 1
    settled(decode)
