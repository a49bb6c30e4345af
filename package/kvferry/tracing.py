"""Spans of one request over all its processes, by OpenTelemetry (the extra `otel`): a tiny interface, that costs
nothing where it is off.

A span's place in the trace travels as a W3C traceparent, a string: in an HTTP header, in gRPC metadata, in the messages
of the streams. With tracing off it is passed on as it came.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as SdkSpan
    from opentelemetry.trace import Tracer

HEADER = "traceparent"
FLAG_HELP = "the OTLP/HTTP collector that traces go to (default: $OTEL_EXPORTER_OTLP_ENDPOINT, or none)"
MAX_CHARS = 64  # of a traceparent; what is longer is none
TRACES_PATH = "/v1/traces"
FLUSH_MS = 3000  # for spans to leave at the end
EXPORT_SECONDS = 2.0  # of one try, where OTEL_EXPORTER_OTLP_TIMEOUT says nothing else
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

Kind: TypeAlias = Literal["internal", "server", "client"]
Value: TypeAlias = "str | int | float | bool"

log = logging.getLogger(__name__)


class TracingError(ValueError):
    """The settings cannot be followed."""


@dataclass(frozen=True, slots=True)
class _Tracing:
    provider: TracerProvider
    tracer: Tracer


_tracing: _Tracing | None = None


def endpoint_of(given: str) -> str:
    """Where spans go: what was given, else what OpenTelemetry's own variables name; empty: nowhere. TracingError."""
    if given and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", given):
        raise TracingError(f"--otel is {given!r}; it must be the http:// or https:// URL of an OTLP collector")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if given:
        return given.rstrip("/") + ("" if given.rstrip("/").endswith(TRACES_PATH) else TRACES_PATH)
    if traces := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""):
        return traces
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return base.rstrip("/") + TRACES_PATH if base else ""


def configure(service: str, given: str = "", **attributes: Value) -> None:
    """Once, at a process's start. `service`: kvferry-front, kvferry-worker or kvferry-daemon; `given`: the collector's
    URL, for instance http://127.0.0.1:4318. TracingError where it cannot be, or is given without the extra installed.
    """
    global _tracing
    endpoint = endpoint_of(given)
    if not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        if given:
            raise TracingError(f"--otel needs pip install 'kvferry[otel]': {error}") from error
        log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, but the extra `otel` is not installed")
        return
    timeout = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_SECONDS
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name, **attributes}), shutdown_on_exit=False)
    # Its queue is bounded; where the collector is slow or away, spans are dropped and nobody waits.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=timeout)))
    _tracing = _Tracing(provider, provider.get_tracer("kvferry"))
    log.info("traces go to %s", endpoint)


def shutdown() -> None:
    """Lets spans leave, for some seconds at most. Blocks."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.provider.force_flush(FLUSH_MS)
        tracing.provider.shutdown()


def on() -> bool:
    return _tracing is not None


def checked(traceparent: str) -> str:
    """As it came from outside: empty where it is none."""
    return traceparent if len(traceparent) <= MAX_CHARS and _FORM.fullmatch(traceparent) else ""


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Of a gRPC call."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            return checked(value)
    return ""


def metadata_of(traceparent: str) -> tuple[tuple[str, str], ...]:
    return ((HEADER, traceparent),) if traceparent else ()


class Span:
    """A context manager, too: it ends with its block, with the error that the block raised."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str, span: SdkSpan | None) -> None:
        self.traceparent = traceparent  # for spans under it
        self._span = span

    def set(self, **attributes: Value) -> None:
        if self._span is not None:
            self._span.set_attributes({f"kvferry.{name}": value for name, value in attributes.items()})

    def event(self, name: str) -> None:
        if self._span is not None:
            self._span.add_event(name)

    def end(self, error: str = "") -> None:
        """Idempotent."""
        span, self._span = self._span, None
        if span is not None:
            _fail(span, error)
            span.end()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.event("cancelled")
            self.end()
        else:
            self.end("" if error is None else str(error) or type(error).__name__)


def span(name: str, parent: str = "", kind: Kind = "internal", **attributes: Value) -> Span:
    """Begins now. `parent`: a traceparent; empty: it is the first of its trace."""
    tracing = _tracing
    if tracing is None:
        return Span(parent, None)
    started = _start(tracing, name, parent, kind, None, attributes)
    return Span(_traceparent(started), started)


def record(name: str, parent: str, begin: float, end: float, error: str = "", **attributes: Value) -> None:
    """A span that is over; `begin` and `end` by the monotonic clock, in seconds."""
    tracing = _tracing
    if tracing is None:
        return
    offset = time.time() - time.monotonic()
    started = _start(tracing, name, parent, "internal", int((begin + offset) * 1e9), attributes)
    _fail(started, error)
    started.end(int((end + offset) * 1e9))


def _start(
    tracing: _Tracing, name: str, parent: str, kind: Kind, start: int | None, attributes: dict[str, Value]
) -> SdkSpan:
    from opentelemetry.trace import SpanKind

    return tracing.tracer.start_span(
        name,
        context=_context(parent),
        kind=SpanKind[kind.upper()],
        attributes={f"kvferry.{name}": value for name, value in attributes.items()},
        start_time=start,
    )


def _context(parent: str) -> Context:
    from opentelemetry import trace
    from opentelemetry.context import Context

    if (found := _FORM.fullmatch(parent)) is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    place = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(place), Context())


def _traceparent(span: SdkSpan) -> str:
    place = span.get_span_context()
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"


def _fail(span: SdkSpan, error: str) -> None:
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error[:1024]))
