"""Spans of one side's requests and transfers, seen from what the shell does. Where tracing is off the shell tells the
same to `Traces`, which makes none.

A request's span is from Admit or Begin until it is ended; under it `admission` (until its worker has pages), `lookup`,
`restore` and its transfers. A transfer's span has one span a stage (gather, write, scatter) over all of its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvferry import tracing
from kvferry.daemon.core.limits import Name, name_of
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire

Key = tuple[int, Name]  # worker and request


@dataclass(slots=True)
class _Stage:
    begin: float
    end: float
    busy: float = 0.0
    parts: int = 0


@dataclass(slots=True)
class _Transfer:
    span: tracing.Span
    of: Key | None
    stages: dict[str, _Stage] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    span: tracing.Span
    begin: float
    last: str = "ended"
    pending: bool = True  # its worker has no pages yet
    again: bool = False  # its name was used once more: the Failed that follows is of that
    transfers: set[Hashable] = field(default_factory=set)


class Traces:
    """The listener to what the shell tells; here nobody listens. Transfers are keys: decode's numbers, prefill's
    (session, number)."""

    def opened(self, worker: int, name: Name, traceparent: str, tokens: int, last: str = "ended") -> None:
        """A request has come. `last`: the event that its worker is told last, where all goes well."""

    def looked_up(self, worker: int, name: Name, begin: float) -> None:
        """The cache was searched for the request since `begin`."""

    def hear(self, worker: int, event: wire.WorkerEvent) -> None:
        """A worker is told this."""

    def left(self, worker: int) -> None:
        """Ends all of a worker's requests."""

    def asked(self, ask: peer.Ask) -> str:
        """Decode: by one of its requests. The traceparent for this Ask; empty: none."""
        return ""

    def asked_for(self, session: int, transfer: int, traceparent: str, pages: int) -> None:
        """Prefill: a transfer for a decode daemon."""

    def part(self, transfer: Hashable, stage: str, begin: float, end: float) -> None:
        """A part of the transfer has gone through this stage."""

    def transfer_ended(self, transfer: Hashable, error: str = "") -> None:
        """Ends the transfer's span. Idempotent."""

    def session_ended(self, session: int) -> None:
        """Ends all of the session's transfers."""

    def restore_begins(self, copy: int, pages: int, owner: Callable[[], Key | None]) -> None:
        """A copy from the host tier. `owner` looks for the request that it is for."""

    def restore_ends(self, copy: int, failed: int) -> None:
        """`failed`: pages that came back wrong."""


NO_TRACES = Traces()


def traces_of(what: str) -> Traces:
    """The traces of one side. `what`: "decode" or "prefill"."""
    return RequestTraces(what) if tracing.on() else NO_TRACES


class RequestTraces(Traces):
    """Makes spans of one side. Of a worker that left, `left` ends everything; so does each request's end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._requests: dict[Key, _Request] = {}
        self._transfers: dict[Hashable, _Transfer] = {}
        self._restores: dict[int, tuple[str, float, int]] = {}

    # -- requests ------------------------------------------------------------------------------------------------

    def opened(self, worker: int, name: Name, traceparent: str, tokens: int, last: str = "ended") -> None:
        if (running := self._requests.get((worker, name))) is not None:
            running.again = True  # of a name that is in use: the one that runs goes on
            return
        request = str(name)
        span = tracing.span(f"{self._what} request", tracing.checked(traceparent), request=request, tokens=tokens)
        self._requests[worker, name] = _Request(span, time.monotonic(), last)

    def looked_up(self, worker: int, name: Name, begin: float) -> None:
        if (found := self._requests.get((worker, name))) is not None:
            tracing.record("lookup", found.span.traceparent, begin, time.monotonic())

    def hear(self, worker: int, event: wire.WorkerEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind not in ("admitted", "begun", "ready", "failed", "ended", "retract"):
            return
        told = getattr(event, kind)
        key = (worker, Name(told.name.request_id, told.name.attempt))
        request = self._requests.get(key)
        if request is None:
            return
        if kind == "failed" and request.again:
            request.again = False
        elif kind in ("admitted", "begun"):
            request.pending = False
            tracing.record("admission", request.span.traceparent, request.begin, time.monotonic())
            request.span.set(matched_tokens=told.matched_tokens)
        elif kind in ("ready", "retract"):
            request.span.event(kind)
            if kind == request.last:
                self._end(key, "")
        else:
            self._end(key, told.error.message if kind == "failed" else "")

    def left(self, worker: int) -> None:
        for key in [key for key in self._requests if key[0] == worker]:
            self._end(key, "its worker left")

    def _end(self, key: Key, error: str) -> None:
        request = self._requests.pop(key)
        for transfer in list(request.transfers):
            self.transfer_ended(transfer, error)
        request.span.end(error)

    # -- transfers -----------------------------------------------------------------------------------------------

    def asked(self, ask: peer.Ask) -> str:
        name, transfer = name_of(ask.name), ask.transfer
        key = next((key for key in self._requests if key[1] == name), None)
        if key is None:
            return ""
        request = self._requests[key]
        request.transfers.add(transfer)
        span = tracing.span("transfer", request.span.traceparent, "client", pages=ask.pages)
        self._transfers[transfer] = _Transfer(span, key)
        return span.traceparent

    def asked_for(self, session: int, transfer: int, traceparent: str, pages: int) -> None:
        span = tracing.span("send", tracing.checked(traceparent), "server", pages=pages)
        self._transfers[session, transfer] = _Transfer(span, None)

    def part(self, transfer: Hashable, stage: str, begin: float, end: float) -> None:
        if (found := self._transfers.get(transfer)) is not None:
            whole = found.stages.setdefault(stage, _Stage(begin, end))
            whole.begin, whole.end = min(whole.begin, begin), max(whole.end, end)
            whole.busy += end - begin
            whole.parts += 1

    def transfer_ended(self, transfer: Hashable, error: str = "") -> None:
        if (found := self._transfers.pop(transfer, None)) is None:
            return
        if found.of in self._requests:
            self._requests[found.of].transfers.discard(transfer)
        for name, stage in found.stages.items():
            parent = found.span.traceparent
            tracing.record(name, parent, stage.begin, stage.end, parts=stage.parts, busy_seconds=stage.busy)
        found.span.end(error)

    def session_ended(self, session: int) -> None:
        for transfer in [key for key in self._transfers if isinstance(key, tuple) and key[0] == session]:
            self.transfer_ended(transfer, "the session ended")

    # -- the host tier -------------------------------------------------------------------------------------------

    def restore_begins(self, copy: int, pages: int, owner: Callable[[], Key | None]) -> None:
        if (key := owner()) is not None and (found := self._requests.get(key)) is not None:
            self._restores[copy] = (found.span.traceparent, time.monotonic(), pages)

    def restore_ends(self, copy: int, failed: int) -> None:
        if (found := self._restores.pop(copy, None)) is not None:
            parent, begin, pages = found
            error = f"{failed} pages came back wrong" if failed else ""
            tracing.record("restore", parent, begin, time.monotonic(), error, pages=pages)
