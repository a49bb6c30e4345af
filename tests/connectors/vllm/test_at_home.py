"""What operators of a vLLM pair see of kvferry: lines in vLLM's log, and the daemons' spans below a client's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.bench.scripts import imported
from tests.connectors.vllm.test_version_pairs import OLDEST, newest, python_of
from tests.support.otlp_receiver import OtlpReceiver

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UP_SECONDS = 60.0
CONNECTED = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[worker_session\.py:\d+\] {}connected to kvferry's daemon '{}': namespace "
CONNECTED += r"[0-9a-f]{{12}}, pages of 32 tokens, by way of its pool; while it is away prompts are computed here"
ABSENT = r"WARNING \d\d-\d\d .*\[worker_session\.py:\d+\] .*decode\.sock.*; until it comes prompts are computed here"
GONE = r"WARNING \d\d-\d\d .*\[worker_session\.py:\d+\] the daemon is gone \(.*\); meanwhile prompts are computed here"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    with imported("vllm", ("chat", "cluster")) as modules:
        yield modules


def lines_of(engine: Any, pattern: str) -> list[str]:
    return re.findall(pattern, engine.log.read_text(errors="replace"))


def comes(what: Callable[[], object]) -> bool:
    end = time.monotonic() + UP_SECONDS
    while not what() and time.monotonic() < end:
        time.sleep(0.2)
    return bool(what())


def ask(bench: SimpleNamespace, url: str, number: int) -> None:
    asked = {**bench.chat.body([{"role": "user", "content": bench.chat.user_text(number, 0, 80)}], 4), "stream": False}
    del asked["stream_options"]
    headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01"} if number else {}
    httpx.post(url + bench.chat.CHAT, json=asked, headers=headers, trust_env=False, timeout=240).raise_for_status()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [lambda: OLDEST, newest], ids=["oldest", "newest"])
def test_a_pair_tells_of_its_daemons_and_traces_into_them(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, which: Callable[[], str]
) -> None:
    """Decode's engine starts before its daemon does."""
    python = python_of(which())
    with OtlpReceiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = (*bench.cluster.SMALL, "--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        spec = bench.cluster.Spec(python=python, decode_python=python, flags=flags)
        with bench.cluster.Cluster(spec) as cluster:
            start = cluster.start_daemons

            def without_decodes() -> None:
                start()
                cluster.kill_daemon("decode")

            monkeypatch.setattr(cluster, "start_daemons", without_decodes)
            cluster.kvferry()
            prefill, decode = (cluster.engines[name] for name in ("prefill", "decode"))
            again = CONNECTED.format("again ", "decode")
            assert len(lines_of(prefill, CONNECTED.format("", "prefill"))) == 1
            assert len(lines_of(decode, ABSENT)) == 1 and not lines_of(decode, again)
            ask(bench, cluster.front, 0)  # is answered all the same
            cluster.start_daemon("decode")
            assert comes(lambda: lines_of(decode, again))
            # Before the daemons' couriers have met, a prompt is computed in decode's engine alone.
            assert comes(lambda: [peer.state for peer in cluster.stats("decode").peers] == ["up"])

            ask(bench, cluster.front, 1)
            wanted = {"prefill leg", "decode leg", "prefill request", "decode request", "transfer", "send"}

            def named(spans: list[Any]) -> dict[str, Any]:
                return {span.name: span for span in spans if span.trace_id == TRACE}

            spans = named(collector.wait(lambda spans: named(spans).keys() >= wanted))
            for role in ("prefill", "decode"):
                span = spans[f"{role} request"]
                assert (span.service, span.parent_id) == ("kvferry-daemon", spans[f"{role} leg"].span_id)
            assert spans["transfer"].parent_id == spans["decode request"].span_id

            cluster.kill_daemon("decode")
            assert comes(lambda: lines_of(decode, GONE))
            ask(bench, cluster.front, 2)
            assert len(lines_of(decode, again)) == len(lines_of(decode, GONE)) == 1
