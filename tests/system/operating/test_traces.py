"""One request's spans from all processes of a system, as a collector gets them."""

from __future__ import annotations

import random

import httpx
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import start_system
from tests.support.otlp_receiver import OtlpReceiver, SpanSeen
from tests.support.stacks import SmallSystem

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

# span: (service, the role that its instance names, the span that it is under)
TREE = {
    "request": ("kvferry-front", "", ""),
    "route": ("kvferry-front", "", "request"),
    "prefill leg": ("kvferry-front", "", "request"),
    "decode leg": ("kvferry-front", "", "request"),
    "prefill worker": ("kvferry-worker", "prefill", "prefill leg"),
    "decode worker": ("kvferry-worker", "decode", "decode leg"),
    "prefill request": ("kvferry-daemon", "prefill", "prefill worker"),
    "decode request": ("kvferry-daemon", "decode", "decode worker"),
    "transfer": ("kvferry-daemon", "decode", "decode request"),
    "scatter": ("kvferry-daemon", "decode", "transfer"),
    "send": ("kvferry-daemon", "prefill", "transfer"),
    "gather": ("kvferry-daemon", "prefill", "send"),
    "write": ("kvferry-daemon", "prefill", "send"),
}


def by_name(spans: list[SpanSeen], trace: str) -> dict[str, SpanSeen]:
    """Of one trace; `admission` and `lookup`, which both daemons have, with their roles."""
    named = {}
    for span in spans:
        if span.trace_id == trace:
            role = span.instance.partition("-")[0]
            name = f"{span.name} ({role})" if span.name in ("admission", "lookup") else span.name
            assert name not in named, f"{name} is there twice"
            named[name] = span
    return named


@pytest.mark.nightly
def test_one_request_is_one_trace(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that has a trace of its own; then one whose pages come back from the host tier."""
    with OtlpReceiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = ["--host-bytes", str(400 * PAGE_BYTES)]
        spec = SmallSystem(page_size=PAGE, decode_pool_bytes=30 * PAGE_BYTES, decode_flags=flags)
        system = start_system(stack, spec)
        rng = random.Random(3)
        prompt = [rng.randrange(32_000) for _ in range(200)]

        def ask(tokens: list[int], trace: str) -> None:
            body = {"model": "synthetic", "prompt": tokens, "max_tokens": 4}
            headers = {"traceparent": f"00-{trace}-{CLIENT_SPAN}-01"}
            with httpx.Client(trust_env=False, timeout=30) as client:
                client.post(f"{system.url}/v1/completions", json=body, headers=headers).raise_for_status()

        ask(prompt, TRACE)
        wanted = {*TREE, *(f"{n} ({role})" for n in ("admission", "lookup") for role in ("decode", "prefill"))}
        spans = by_name(collector.wait(lambda spans: by_name(spans, TRACE).keys() >= wanted), TRACE)
        assert spans.keys() == wanted
        for name, (service, role, parent) in TREE.items():
            span = spans[name]
            assert (span.service, span.error) == (service, ""), name
            assert span.instance.startswith(role), name
            assert span.parent_id == (spans[parent].span_id if parent else CLIENT_SPAN), name
            assert span.begin <= span.end
        for name in ("admission", "lookup"):
            for role in ("decode", "prefill"):
                assert spans[f"{name} ({role})"].parent_id == spans[f"{role} request"].span_id
        assert spans["transfer"].attributes["kvferry.pages"] == 13
        assert spans["scatter"].attributes["kvferry.parts"] == spans["write"].attributes["kvferry.parts"]
        assert (
            spans["prefill worker"].attributes["kvferry.request"]
            == spans["decode worker"].attributes["kvferry.request"]
        )
        # Others push its pages to the host; asked again, they come back.
        for number in range(3):
            ask([rng.randrange(32_000) for _ in range(200)], f"{number + 1:032x}")
        again = "f" * 32
        ask([*prompt, 1, 2, 3], again)
        wanted |= {"restore"}
        spans = by_name(collector.wait(lambda spans: by_name(spans, again).keys() >= wanted), again)
        assert spans["restore"].parent_id == spans["decode request"].span_id
        assert spans["restore"].attributes["kvferry.pages"] == 12
        assert spans["decode request"].attributes["kvferry.matched_tokens"] == 192
