"""One request of a session: all that the daemon has said, and is still to say, about it. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvferry.client.requests import Admitted, Begun, Ready, RequestFailed, Retracted, Stowed
from kvferry.proto import worker_pb2

_T = TypeVar("_T")


class OpenRequest:
    """The futures that a request's waiters wait for; the daemon's events resolve them."""

    def __init__(self, tokens: int, deadline_s: float, page_size: int, pool_pages: int, in_blocks: bool) -> None:
        loop = asyncio.get_running_loop()
        self.tokens = tokens
        self.deadline_s = deadline_s
        self.page_size = page_size
        self.pool_pages = pool_pages
        self.in_blocks = in_blocks  # its pages are blocks that the worker names: the daemon names none
        self.pages = 0
        self.failure: RequestFailed | None = None
        self.retracted = False
        self.ends_when_ready = False  # then its daemon touches nothing of it any more
        self.admitted: asyncio.Future[Admitted] = loop.create_future()
        self.begun: asyncio.Future[Begun] = loop.create_future()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        """The daemon touches its pages no more; unlike `ended` that is awaited of a request that has failed, too."""
        self.grown: asyncio.Future[tuple[int, ...]] | None = None
        self.stowed: Callable[[Stowed], None] | None = None  # hears the answer to Stow
        self.proceed: Callable[[int], None] | None = None  # called with Proceed's fetch_tokens
        self._hear_end: Callable[[BaseException | None], None] | None = None

    def take(self, kind: str, event: worker_pb2.WorkerEvent) -> None:
        """Raises ValueError when the daemon gives pages that the request cannot have."""
        if kind == "admitted":
            told = event.admitted
            pages = self._new_pages(told.pages, -(-self.tokens // self.page_size), "Admitted.pages")
            _resolve(self.admitted, Admitted(told.matched_tokens, pages, told.local_tokens, told.host_tokens))
        elif kind == "begun":
            pages = self._new_pages(event.begun.pages, -(-self.tokens // self.page_size), "Begun.pages")
            _resolve(self.begun, Begun(event.begun.matched_tokens, pages, event.begun.fetched_tokens))
        elif kind == "proceed":
            if self.proceed is not None:
                self.proceed(event.proceed.fetch_tokens)
        elif kind == "ready":
            ready = event.ready
            wanted = ready.page_tokens_from if ready.HasField("page_tokens_from") else None
            _resolve(self.ready, Ready(ready.aux, ready.delta_pages, ready.delta_bytes, ready.elapsed_us, wanted))
            if self.ends_when_ready:
                self._end()
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
            self._end()
        elif kind == "failed":
            error = event.failed.error
            if self.failure is None:  # else the daemon answers what crossed it
                self.failure = RequestFailed(error.code, error.message, error.of_prefill)
                self.fail(self.failure)

    @property
    def answers(self) -> tuple[Admitted | None, Ready | None]:
        """Admitted and Ready, as far as they have come."""
        admitted = self.admitted.result() if self.admitted.done() else None
        return admitted, self.ready.result() if self.ready.done() else None

    def _end(self) -> None:
        _resolve(self.ended, None)
        _resolve(self.released, None)
        self._tell_end()

    def when_ended(self, hear: Callable[[BaseException | None], None]) -> None:
        """Has `hear` called once `ended` is done, with its exception."""
        self._hear_end = hear
        if self.ended.done():
            self._tell_end()

    def lose(self, error: Exception) -> None:
        """Nothing more comes of it."""
        self.fail(error)
        _refuse(self.released, error)

    def fail(self, error: Exception) -> None:
        for future in (self.admitted, self.begun, self.ready, self.ended, self.grown):
            if future is not None:
                _refuse(future, error)
        self._tell_end()

    def _tell_end(self) -> None:
        hear, self._hear_end = self._hear_end, None
        if hear is not None:
            hear(self.ended.exception())

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
