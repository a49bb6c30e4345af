"""A small OTLP/HTTP collector: it keeps the spans that processes send to it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class SpanSeen:
    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: the first of its trace
    begin: float  # seconds
    end: float
    error: str
    attributes: dict[str, object]


class OtlpReceiver:
    """A context; `url` is for --otel or OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                receiver.spans += list(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OtlpReceiver:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self, done: Callable[[list[SpanSeen]], bool], seconds: float = 15.0) -> list[SpanSeen]:
        deadline = time.monotonic() + seconds
        while not done(self.spans):
            if time.monotonic() > deadline:
                names = sorted((span.service, span.instance, span.name) for span in self.spans)
                raise AssertionError(f"after {seconds} s there are only {names}")
            time.sleep(0.05)
        return list(self.spans)


def _spans(request: ExportTraceServiceRequest) -> list[SpanSeen]:
    found = []
    for resource in request.resource_spans:
        told = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {
                    pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
                    for pair in span.attributes
                }
                found.append(
                    SpanSeen(
                        service=told["service.name"],
                        instance=told.get("service.instance.id", ""),
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        begin=span.start_time_unix_nano / 1e9,
                        end=span.end_time_unix_nano / 1e9,
                        error=span.status.message if span.status.code == 2 else "",
                        attributes=attributes,
                    )
                )
    return found
