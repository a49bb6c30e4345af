"""Tracing in one process: off it costs nothing and passes on what came; on, spans end up at a collector."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvferry import tracing
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.cache import Cache
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.limits import Name
from kvferry.daemon.core.prefill import PrefillCore
from kvferry.daemon.core.prefill_entries import PrefillLimits
from kvferry.daemon.peers.traces import RequestTraces
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.proto.limits import MAX_PRIORITY
from tests.support.otlp_receiver import OtlpReceiver, SpanSeen

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAME = Name(b"n" * 16, 1)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def collector(no_environment: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        tracing.configure("kvferry-daemon", receiver.url, **{"service.instance.id": "d"})
        yield receiver
        tracing.shutdown()


def collected(receiver: OtlpReceiver) -> dict[str, SpanSeen]:
    tracing.shutdown()
    return {span.name: span for span in receiver.spans}


def test_off_a_traceparent_is_passed_on() -> None:
    assert not tracing.on()
    with tracing.span("anything", PARENT, tokens=1) as span:
        span.set(more=2)
        span.event("ready")
    assert span.traceparent == PARENT
    tracing.record("stage", PARENT, 0.0, 1.0)
    tracing.shutdown()
    assert tracing.metadata_of(span.traceparent) == (("traceparent", PARENT),)
    assert tracing.metadata_of("") == ()


@pytest.mark.parametrize("wrong", ["", "00-1-2-3", PARENT + "0", "01" + PARENT[2:], "00-" + "A" * 52, "x" * 10_000])
def test_what_is_no_traceparent_is_none(wrong: str) -> None:
    assert tracing.checked(wrong) == ""
    assert tracing.from_metadata([("other", PARENT), ("traceparent", wrong)]) == ""
    assert tracing.from_metadata([("traceparent", PARENT)]) == PARENT
    assert tracing.from_metadata(None) == ""


def test_where_spans_go(no_environment: pytest.MonkeyPatch) -> None:
    assert tracing.endpoint_of("") == ""
    assert tracing.endpoint_of("http://c:4318/") == "http://c:4318/v1/traces"
    assert tracing.endpoint_of("https://c/v1/traces") == "https://c/v1/traces"
    for wrong in ("c:4318", "grpc://c:4317", "http://"):
        with pytest.raises(tracing.TracingError, match=r"--otel is .*; it must be the http:// or https:// URL"):
            tracing.endpoint_of(wrong)
    no_environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://base:4318")
    assert tracing.endpoint_of("") == "http://base:4318/v1/traces"
    no_environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4318/as/is")
    assert tracing.endpoint_of("") == "http://traces:4318/as/is"
    no_environment.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.endpoint_of("") == tracing.endpoint_of("http://c:4318") == ""


def test_without_the_extra(no_environment: pytest.MonkeyPatch) -> None:
    """Asked for by our own flag it is an error; by a variable that a whole cluster may have, a warning."""
    no_environment.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(tracing.TracingError, match=r"pip install 'kvferry\[otel\]'"):
        tracing.configure("kvferry-daemon", "http://127.0.0.1:4318")
    no_environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    tracing.configure("kvferry-daemon")
    assert not tracing.on()


def test_a_decode_request_with_its_transfer_and_restore(collector: OtlpReceiver) -> None:
    traces = RequestTraces("decode")
    traces.opened(1, NAME, PARENT, tokens=100)
    traces.opened(1, NAME, "", tokens=100)  # a name in use
    now = time.monotonic()
    traces.looked_up(1, NAME, now)
    traces.hear(1, wire.WorkerEvent(admitted=wire.Admitted(name=NAME.to_proto(), matched_tokens=64)))
    traces.restore_begins(7, 4, lambda: (1, NAME))
    ask = traces.asked(peer.Ask(transfer=5, name=NAME.to_proto(), pages=3))
    for part in range(3):
        traces.part(5, "scatter", now + part, now + part + 0.5)
    traces.part(99, "scatter", now, now)  # nobody's
    traces.restore_ends(7, 1)
    traces.restore_ends(7, 0)
    traces.hear(1, wire.WorkerEvent(ready=wire.Ready(name=NAME.to_proto())))
    traces.hear(1, wire.WorkerEvent(ended=wire.Ended(name=NAME.to_proto())))
    traces.transfer_ended(5)
    spans = collected(collector)
    assert set(spans) == {"decode request", "lookup", "admission", "restore", "transfer", "scatter"}
    whole = spans["decode request"]
    assert (whole.parent_id, whole.trace_id) == (PARENT[36:52], PARENT[3:35])
    assert whole.attributes == {
        "kvferry.request": str(NAME),
        "kvferry.tokens": 100,
        "kvferry.matched_tokens": 64,
    }
    for name in ("lookup", "admission", "restore", "transfer"):
        assert spans[name].parent_id == whole.span_id
    assert ask == f"00-{whole.trace_id}-{spans['transfer'].span_id}-01"
    scatter = spans["scatter"]
    assert scatter.parent_id == spans["transfer"].span_id
    assert scatter.end - scatter.begin == pytest.approx(2.5, abs=0.01)
    assert scatter.attributes == {"kvferry.parts": 3, "kvferry.busy_seconds": pytest.approx(1.5)}
    assert spans["restore"].error == "1 pages came back wrong"


def test_a_request_that_ends_itself_is_over_when_it_is_ready(collector: OtlpReceiver) -> None:
    traces = RequestTraces("decode")
    traces.opened(1, NAME, "", 10, "ready")
    traces.hear(1, wire.WorkerEvent(ready=wire.Ready(name=NAME.to_proto())))
    traces.hear(1, wire.WorkerEvent(ended=wire.Ended(name=NAME.to_proto())))  # an Abort that has crossed it
    assert not traces._requests
    assert set(collected(collector)) == {"decode request"}


def test_what_fails_says_so_and_nothing_is_left(collector: OtlpReceiver) -> None:
    traces = RequestTraces("prefill")
    traces.opened(1, NAME, "", tokens=10)
    traces.asked_for(3, 8, PARENT, 2)
    traces.session_ended(3)
    error = common.Error(code=common.ERROR_UNAVAILABLE, message="gone")
    traces.hear(1, wire.WorkerEvent(failed=wire.Failed(name=NAME.to_proto(), error=error)))
    traces.hear(1, wire.WorkerEvent(ended=wire.Ended(name=NAME.to_proto())))
    traces.opened(2, NAME, "", tokens=10)
    traces.left(2)
    tracing.shutdown()
    assert [(span.name, span.error) for span in collector.spans] == [
        ("send", "the session ended"),
        ("prefill request", "gone"),
        ("prefill request", "its worker left"),
    ]
    assert not traces._requests and not traces._transfers


async def used_again(role: str, incarnation: bytes) -> None:
    """A request that runs; its name is used once more, for what is refused before the core sees it."""
    config = DaemonConfig.model_validate({"role": role, "peers": {"p": "127.0.0.1:1"} if role == "decode" else {}})
    side: Any = (DecodeSide if role == "decode" else PrefillSide)(config, incarnation, time.monotonic)
    cache = Cache(8, config.page_size)
    if role == "decode":
        side.core = DecodeCore(cache, DecodeLimits(config.max_tokens, 64, 30.0, 8))
    else:
        side.core = PrefillCore(cache, PrefillLimits(table=64))
    worker = Worker(1, "w", bytes(32), cast(Any, None), asyncio.Queue(64))
    side.workers.enter(worker)
    kind = "admit" if role == "decode" else "begin"
    message = wire.WorkerMessage()
    request = getattr(message, kind)
    request.name.CopyFrom(NAME.to_proto())
    request.tokens, request.tail_digest = 3, bytes(32)
    if role == "decode":
        request.max_new_tokens = 4
    side.handle(worker, kind, message)
    running = side.traces._requests[1, NAME]
    request.priority = MAX_PRIORITY + 1
    side.handle(worker, kind, message)
    told = [worker.events.get_nowait().WhichOneof("kind") for _ in range(worker.events.qsize())]
    assert told[-1] == "failed"
    assert side.traces._requests.get((1, NAME)) is running, "the span of the request that runs has ended"
    assert not running.again
    request.name.attempt = 2
    side.handle(worker, kind, message)
    assert set(side.traces._requests) == {(1, NAME)}, "what was refused is left"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_name_that_is_used_again_ends_nothing(collector: OtlpReceiver, role: str) -> None:
    asyncio.run(used_again(role, bytes(16)))
    tracing.shutdown()
    (span,) = (span for span in collector.spans if span.name == f"{role} request")
    assert "priority is 1001" in span.error and span.attributes["kvferry.request"].endswith("#2")


def test_a_block_that_raises(collector: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="bad"), tracing.span("one"):
        raise ValueError("bad")
    with pytest.raises(GeneratorExit), tracing.span("two"):
        raise GeneratorExit
    spans = collected(collector)
    assert spans["one"].error == "bad"
    assert spans["two"].error == ""
