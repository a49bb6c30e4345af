"""The front end's metrics for Prometheus.

Labels are of fixed words, but for `server`: a server as it was named at the start, whatever addresses its name has.
Several processes of one front end write theirs into files of a folder that they share, and whichever is asked gives the
sum of all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Literal, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the library's; in it the processes' files are
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

Role = Literal["prefill", "decode"]
LegResult = Literal["ok", "failed", "refused", "cancelled"]
AloneReason = Literal["whole", "short", "no_prefill", "no_daemon", "prefill_failed"]
BrokenBy = Literal["client", "server"]
FirstTokenEnd = Literal["met", "gone_on", "unlike", "lost", "whole"]


class FrontMetrics:
    """What one process counts."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = own = CollectorRegistry()
        self.requests = Counter("kvferry_front_requests", "Requests that are over", ["route", "code"], registry=own)
        self.running = Gauge(
            "kvferry_front_requests_running",
            "Requests that are not over",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.first_token = Histogram(
            "kvferry_front_first_token_seconds",
            "From a request's arrival to the first bytes of its streamed reply",
            ["route"],
            buckets=FIRST_TOKEN_SECONDS,
            registry=own,
        )
        self.duration = Histogram(
            "kvferry_front_request_seconds",
            "From a request's arrival to the end of its reply",
            ["route"],
            buckets=REQUEST_SECONDS,
            registry=own,
        )
        self.broken = Counter(
            "kvferry_front_broken_replies", "Replies that ended before their end", ["by"], registry=own
        )
        self.legs = Counter(
            "kvferry_front_legs", "Calls of servers for requests", ["role", "server", "result"], registry=own
        )
        self.decode_alone = Counter(
            "kvferry_front_decode_alone", "Prompts that a decode server computed", ["reason"], registry=own
        )
        for reason in get_args(AloneReason):
            self.decode_alone.labels(reason)
        for by in ("client", "server"):
            self.broken.labels(by)
        self._first_tokens = Counter(
            "kvferry_front_prefill_first_tokens",
            "Replies that a prefill server's answer began, by what became of it",
            ["result"],
            registry=own,
        )
        for result in get_args(FirstTokenEnd):
            self._first_tokens.labels(result)

    def leg(self, role: Role, server: str) -> CountedLeg:
        """A call that begins; it is counted when it is over."""
        return CountedLeg(self, role, server)

    def alone(self, reason: AloneReason) -> None:
        """Counts a prompt that goes to a decode server only: it cannot be split, is short, or prefill will not do."""
        self.decode_alone.labels(reason).inc()

    def first_token_ended(self, result: FirstTokenEnd) -> None:
        """Counts a reply that began with prefill's answer: decode's had the token, too; another one; it broke before;
        or the answer was all of the reply."""
        self._first_tokens.labels(result).inc()

    def text(self) -> bytes:
        """All processes' metrics, in Prometheus's text format."""
        if not shared():
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class CountedLeg:
    """A call of a server for a request: cancelled, where nobody has said anything else by its end."""

    __slots__ = ("_metrics", "_role", "_server", "result")

    def __init__(self, metrics: FrontMetrics, role: Role, server: str) -> None:
        self._metrics, self._role, self._server = metrics, role, server
        self.result: LegResult = "cancelled"

    def answered(self, status: int) -> None:
        """Notes the HTTP status of an answer that is whole."""
        self.result = "ok" if status < 400 else "refused" if status < 500 else "failed"

    def failed(self) -> None:
        self.result = "failed"

    def __enter__(self) -> CountedLeg:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.legs.labels(self._role, self._server, self.result).inc()


def shared() -> bool:
    return FOLDER_VARIABLE in os.environ


@contextlib.contextmanager
def shared_by_children() -> Iterator[None]:
    """Has the processes that are forked meanwhile count together. Around the life of all of them."""
    with tempfile.TemporaryDirectory(prefix="kvferry-front-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]


def begin_in_child() -> None:
    """Has the metrics that this process makes from now on be counted with its siblings'."""
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]


def forget(pid: int) -> None:
    """What a process that has ended had running runs no more."""
    if shared():
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
