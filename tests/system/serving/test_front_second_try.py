"""A prefill daemon that is full: the decode daemon's word on it says so, and the front end turns to another one."""

from __future__ import annotations

import os

import grpc
import httpx
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import start_replicas
from kvferry.proto import common_pb2, engine_pb2
from kvferry.proto.engine_pb2_grpc import EngineStub
from kvferry.proto.limits import ERROR_METADATA
from tests.support.engines import OPTIONS, settled, stats
from tests.support.stacks import SmallSystem

PAGE = 16
QUEUE = 2
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def decode_half(prefill: str) -> engine_pb2.DecodeRequest:
    name = common_pb2.RequestName(request_id=os.urandom(16), attempt=1)
    return engine_pb2.DecodeRequest(
        name=name, tokens=range(3 * PAGE), max_new_tokens=2, prefill=prefill, deadline_ms=60_000
    )


@pytest.mark.nightly
def test_a_prefill_daemon_whose_table_is_full(stack: Stack) -> None:
    spec = SmallSystem(page_size=PAGE, prefills=2, prefill_flags=["--queue", str(QUEUE)])
    prefills, (decode,) = start_replicas(stack, spec)
    words = ["front", "--listen", "127.0.0.1:0", "--model-name", "synthetic", "--prefill"]
    words += [*(prefill.worker_address for prefill in prefills), "--decode", decode.worker_address]
    url = f"http://{stack.ready(stack.start('front', words))}"
    full, other = prefills
    with grpc.insecure_channel(decode.worker_address, OPTIONS) as channel:
        engine = EngineStub(channel)
        waiting = []
        for number in range(1, QUEUE + 1):  # their prefill halves never come
            waiting.append(engine.Decode(decode_half(full.name), timeout=60))
            while stats(full).requests.running < number:
                assert waiting[-1].is_active(), waiting[-1].details()
        call = engine.Decode(decode_half(full.name), timeout=60)
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "requests are in the rendezvous table; the bound is 2" in call.details()
        typed = common_pb2.Error.FromString(dict(call.trailing_metadata())[ERROR_METADATA])
        assert typed == common_pb2.Error(code=common_pb2.ERROR_RESOURCE_EXHAUSTED, of_prefill=True)

        for _ in range(4):
            response = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=30)
            assert response.status_code == 200, response.text
        assert httpx.get(f"{url}/kvferry/stats").json()["tried_again"] >= 1
        for each in waiting:
            each.cancel()
    for replica in (full, other, decode):
        settled(replica)
    assert stats(other).requests.finished == 4
