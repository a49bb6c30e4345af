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
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

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


def endpoint_of(given: str) -> str:
    """The endpoint of spans: what was given, else what OpenTelemetry's own variables name; empty: nowhere.
    TracingError."""
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
    """Sets tracing up, once, at a process's start. `service`: kvferry-front, kvferry-worker or kvferry-daemon; `given`:
    the collector's URL, for instance http://127.0.0.1:4318. TracingError where it cannot be, or is given without the
    extra installed.
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
    _tracing = _OpenTelemetry(provider, provider.get_tracer("kvferry"))
    log.info("traces go to %s", endpoint)


def shutdown() -> None:
    """Lets spans leave, for some seconds at most. Blocks."""
    global _tracing
    tracing, _tracing = _tracing, _OFF
    tracing.shutdown()


def on() -> bool:
    return _tracing is not _OFF


def checked(traceparent: str) -> str:
    """The traceparent that came from outside; empty where it is none."""
    return traceparent if len(traceparent) <= MAX_CHARS and _FORM.fullmatch(traceparent) else ""


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent of a gRPC call; empty where it has none."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            return checked(value)
    return ""


def metadata_of(traceparent: str) -> tuple[tuple[str, str], ...]:
    return ((HEADER, traceparent),) if traceparent else ()


class Span:
    """A context manager, too: it ends with its block, with the error that the block raised. This one goes nowhere."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent  # for spans under it

    def set(self, **attributes: Value) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def end(self, error: str = "") -> None:
        """Ends the span. Idempotent."""

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


class _SdkSpan(Span):
    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        place = span.get_span_context()
        super().__init__(f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}")
        self._span = span

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_attributes(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import INVALID_SPAN

        span, self._span = self._span, INVALID_SPAN
        _fail(span, error)
        span.end()


class _Off:
    """Passes traceparents on as they came."""

    def span(self, name: str, parent: str, kind: Kind, attributes: dict[str, Value]) -> Span:
        return Span(parent)

    def record(
        self, name: str, parent: str, begin: float, end: float, error: str, attributes: dict[str, Value]
    ) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _OpenTelemetry(_Off):
    def __init__(self, provider: TracerProvider, tracer: trace.Tracer) -> None:
        self._provider = provider
        self._tracer = tracer

    def span(self, name: str, parent: str, kind: Kind, attributes: dict[str, Value]) -> Span:
        return _SdkSpan(self._start(name, parent, kind, None, attributes))

    def record(
        self, name: str, parent: str, begin: float, end: float, error: str, attributes: dict[str, Value]
    ) -> None:
        offset = time.time() - time.monotonic()
        started = self._start(name, parent, "internal", int((begin + offset) * 1e9), attributes)
        _fail(started, error)
        started.end(int((end + offset) * 1e9))

    def shutdown(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _start(
        self, name: str, parent: str, kind: Kind, begin_ns: int | None, attributes: dict[str, Value]
    ) -> trace.Span:
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name,
            context=_context(parent),
            kind=SpanKind[kind.upper()],
            attributes=_attributes(attributes),
            start_time=begin_ns,
        )


_OFF = _Off()
_tracing = _OFF


def span(name: str, parent: str = "", kind: Kind = "internal", **attributes: Value) -> Span:
    """A span that begins now. `parent`: a traceparent; empty: it is the first of its trace."""
    return _tracing.span(name, parent, kind, attributes)


def record(name: str, parent: str, begin: float, end: float, error: str = "", **attributes: Value) -> None:
    """A span that is over; `begin` and `end` by the monotonic clock, in seconds."""
    _tracing.record(name, parent, begin, end, error, attributes)


def _attributes(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"kvferry.{name}": value for name, value in attributes.items()}


def _context(parent: str) -> Context:
    from opentelemetry import trace
    from opentelemetry.context import Context

    if (found := _FORM.fullmatch(parent)) is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    place = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(place), Context())


def _fail(span: trace.Span, error: str) -> None:
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error[:1024]))
