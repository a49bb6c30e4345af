"""One request of a session: all that the daemon has said, and is still to say, about it. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.client.requests import Admitted, Begun, Ready, RequestFailed, Retracted, Stowed
from kvferry.proto import worker_pb2

_T = TypeVar("_T")


@dataclass(slots=True)
class OpenRequest:
    """The futures that a request's waiters wait for; the daemon's events resolve them."""

    tokens: int
    deadline_s: float
    page_size: int
    pool_pages: int
    in_blocks: bool  # its pages are blocks that the worker names: the daemon names none
    admitted: asyncio.Future[Admitted] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: asyncio.Future[Begun] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ready: asyncio.Future[Ready] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    released: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The daemon touches its pages no more; unlike `ended` that is awaited of a request that has failed, too."""
    grown: asyncio.Future[tuple[int, ...]] | None = None
    stowed: Callable[[Stowed], None] | None = None  # hears the answer to Stow
    pages: int = 0
    failure: RequestFailed | None = None
    retracted: bool = False
    proceed: Callable[[int], None] | None = None  # called with Proceed's fetch_tokens

    def take(self, kind: str, event: worker_pb2.WorkerEvent) -> None:
        """Raises ValueError when the daemon gives pages that the request cannot have."""
        if kind == "admitted":
            told = event.admitted
            pages = self._new_pages(told.pages, -(-self.tokens // self.page_size), "Admitted.pages")
            _resolve(self.admitted, Admitted(told.matched_tokens, pages, told.local_tokens, told.host_tokens))
        elif kind == "begun":
            pages = self._new_pages(event.begun.pages, -(-self.tokens // self.page_size), "Begun.pages")
            _resolve(self.begun, Begun(event.begun.matched_tokens, pages))
        elif kind == "proceed":
            if self.proceed is not None:
                self.proceed(event.proceed.fetch_tokens)
        elif kind == "ready":
            ready = event.ready
            wanted = ready.page_tokens_from if ready.HasField("page_tokens_from") else None
            _resolve(self.ready, Ready(ready.aux, ready.delta_pages, ready.delta_bytes, ready.elapsed_us, wanted))
        elif kind == "grown":
            if event.grown.first_page != self.pages:
                raise ValueError(f"Grown.first_page is {event.grown.first_page}; the request has {self.pages} pages")
            pages = self._new_pages(event.grown.pages, len(event.grown.pages), "Grown.pages")
            if self.grown is not None:
                _resolve(self.grown, pages)
        elif kind == "retract":
            self.retracted = True
            if self.grown is not None:
                _refuse(self.grown, Retracted())
        elif kind == "stowed":
            stowed, self.stowed = self.stowed, None
            if stowed is not None:
                stowed(Stowed(event.stowed.stored, event.stowed.asked))
        elif kind == "ended":
            _resolve(self.ended, None)
            _resolve(self.released, None)
        elif kind == "failed":
            error = event.failed.error
            if self.failure is None:  # else the daemon answers what crossed it
                self.failure = RequestFailed(error.code, error.message, error.of_prefill)
                self.fail(self.failure)

    def lose(self, error: Exception) -> None:
        """Nothing more comes of it."""
        self.fail(error)
        _refuse(self.released, error)

    def fail(self, error: Exception) -> None:
        for future in (self.admitted, self.begun, self.ready, self.ended, self.grown):
            if future is not None:
                _refuse(future, error)

    def _new_pages(self, pages: Sequence[int], count: int, field_name: str) -> tuple[int, ...]:
        """Takes new pages, checked here because a wrong id would overwrite another request's memory."""
        if self.in_blocks:
            count = 0
        if len(pages) != count:
            raise ValueError(f"{field_name} has {len(pages)} ids; the request needs {count}")
        for page in pages:
            if page >= self.pool_pages:
                raise ValueError(f"{field_name} names page {page}; the pool has {self.pool_pages}")
        self.pages += count
        return tuple(pages)


def _resolve(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marked as seen: whoever does not wait for it need not hear of it
