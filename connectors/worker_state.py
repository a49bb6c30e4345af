"""State of a connector's worker half: reports to the engine, counts, prompts that are pushed, leases."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.connectors import first_token
from kvferry.connectors.movers import Moment
from kvferry.connectors.orders import Begin, Fill, News, Save
from kvferry.threads import CallThread
from kvferry.waiting import slices

UNWANTED = "the engine needs it no more"  # why a request is aborted
_T = TypeVar("_T")


@dataclass(slots=True)
class Reports:
    """Reports that the engine is still to hear; taken on its thread, added to on ours."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # of these: with bad blocks
    sent: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    first: dict[str, int] = field(default_factory=dict)  # first tokens that are told with their prompts
    news: News | None = None

    def add_first(self, request: str, token: int) -> None:
        """Called before the request is received."""
        with self.lock:
            self.first[request] = token

    def add_received(self, request: str, bad: Sequence[int] = ()) -> None:
        with self.lock:
            self.bad_blocks.update(bad)
            self.received.add(request)
            if bad:
                self.failed.add(request)

    def add_sent(self, request: str) -> None:
        with self.lock:
            self.sent.add(request)

    def add_news(self, news: News) -> None:
        with self.lock:
            self.news = news if self.news is None else self.news.then(news)

    def found(self, request: str) -> int | None:
        """What the news that nobody has taken say of a prompt that waits; None: nothing."""
        news = self.news
        return None if news is None or request in news.failed else news.found.get(request)

    def take_news(self) -> News | None:
        if self.news is None:
            return None
        with self.lock:
            news, self.news = self.news, None
        return news

    def take(self) -> tuple[set[str], set[str]]:
        """(sent, received), whose first tokens are in the news from now on."""
        if not self.sent and not self.received:
            return set(), set()
        with self.lock:
            sent, self.sent = self.sent, set()
            received, self.received = self.received, set()
            bad, self.failed = self.failed, set()
            if (first := self._first_of(received)) or bad:
                news = News(first=first, bad=frozenset(bad))
                self.news = news if self.news is None else self.news.then(news)
        return sent, received

    def take_good(self) -> tuple[set[str], set[str], dict[str, int]] | None:
        """(sent, received, first tokens) of what went well, in the place of a later `take`; None: nothing did. What
        failed is told with its blocks, and news in their order."""
        if not self.sent and not self.received:
            return None
        with self.lock:
            sent, self.sent = self.sent, set()
            good = self.received - self.failed
            self.received -= good
            return (sent, good, self._first_of(good)) if sent or good else None

    def _first_of(self, requests: set[str]) -> dict[str, int]:
        return {request: self.first.pop(request) for request in requests & self.first.keys()}

    def take_bad(self) -> set[int]:
        if not self.bad_blocks:
            return set()
        with self.lock:
            bad, self.bad_blocks = self.bad_blocks, set()
        return bad


@dataclass(slots=True)
class Moved:
    """Bytes copied between pages and blocks, and how requests ended."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    loads: int = 0
    load_seconds: float = 0.0  # of these, from the order on
    failed: int = 0
    stored: int = 0
    pushed: int = 0
    resets: int = 0

    @property
    def ended(self) -> int:
        """It grows whenever a request has ended whose bytes are counted."""
        return self.loads + self.failed + self.stored + self.pushed + self.resets


@dataclass(slots=True, eq=False)
class EngineStep:
    """One of the engine's, for the orders that came with it."""

    number: int  # of those that came with orders
    begun: Moment  # what the engine had begun before it
    done: Moment = None  # its forward pass has been begun, to its end: it, and what was before it
    _over: bool = False
    _waited: asyncio.Event | None = None  # most steps need none

    def ended(self, done: Moment) -> None:
        self.done, self._over = done, True
        if self._waited is not None:
            self._waited.set()

    async def over(self) -> None:
        """Waits until its forward pass has been begun, to its end."""
        if not self._over:
            self._waited = self._waited or asyncio.Event()
            await self._waited.wait()


def hear_nothing() -> None:
    """Nobody hears of it at once."""


@dataclass(slots=True, eq=False)
class Push:
    """A prompt on its way to the daemon."""

    order: Begin
    since: int  # number of the step that it came with
    begun: Moment  # what the engine had begun before it
    fill: Fill | None = None
    filling: EngineStep | None = None  # that the fill came with
    save: Save | None = None  # the newest
    saved: Moment = None  # behind the step that computes what it names
    copying: bool = False  # a copy from its blocks runs
    told: bool = False  # the scheduler's half was told what the daemon has of it, or can fetch
    offered: bool = False  # the daemon fetches it once the engine has named blocks, or said that it needs none
    received: bool = True  # nothing is to be loaded for it, or it was reported
    released: bool = False  # its blocks are wanted back
    handed: bool = False  # all of it is the daemon's, but the token
    over: bool = False  # nothing touches its blocks any more
    token: int | None = None  # the first of its reply
    decided: bool = False  # it is known, or that there is none
    _waited: asyncio.Event | None = None  # most need none
    hear: Callable[[], None] = hear_nothing
    """Called when more of it is computed, or its token is decided: at once, where a waiting task takes another turn of
    the loop."""

    @property
    def load(self) -> Begin | Fill:
        """What says which blocks are loaded into first."""
        return self.order if self.fill is None else self.fill

    def decide(self, token: int | None) -> None:
        """Says with which token the reply begins; None: with none. Only the first word counts."""
        if not self.decided:
            self.token, self.decided = token, True
            self.changed()

    def computed(self, save: Save, after: Moment) -> None:
        """Says how much of it is computed, behind `after`."""
        self.save, self.saved = save, after
        self.changed()

    def changed(self) -> None:
        """Has those look at it who wait for something of it."""
        self.hear()
        if self._waited is not None:
            self._waited.set()

    async def until(self, so: Callable[[], bool]) -> None:
        """Waits until it is so; each change of it is looked at."""
        while not so():
            self._waited = self._waited or asyncio.Event()
            self._waited.clear()
            await self._waited.wait()

    async def aux(self) -> bytes:
        """Waits for the token: the blob that names it to decode."""
        self.handed = True
        await self.until(lambda: self.decided)
        return first_token.blob_of(self.token)

    def more(self, saved: int, page_size: int) -> tuple[Save, Moment, int] | None:
        """Whether more of it than the first `saved` tokens is computed, or will be: the newest word of it, behind what
        it is, and how many tokens there are then: whole pages, or all of them."""
        save, total = self.save, self.order.prompt.tokens
        if save is None:
            return None
        end = total if save.tokens >= total else save.tokens // page_size * page_size
        return (save, self.saved, end) if end > saved else None

    async def next(self, saved: int, page_size: int) -> tuple[Save, Moment, int]:
        """Waits for `more`."""
        await self.until(lambda: self.more(saved, page_size) is not None)
        more = self.more(saved, page_size)
        assert more is not None
        return more


def wait_for(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop, seconds: float) -> _T:
    """Runs it on another thread's loop. Raises TimeoutError."""
    running = asyncio.run_coroutine_threadsafe(work, loop)
    for part in slices(seconds):
        if concurrent.futures.wait([running], part).done:
            return running.result()
    raise TimeoutError(f"not over within {seconds:g} s")


def cancel_begun(work: asyncio.Future[Any]) -> None:
    """Cancels it, once it has begun: other ranks of the engine may wait for its word."""
    coroutine = work.get_coro() if isinstance(work, asyncio.Task) else None
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        work.get_loop().call_soon(work.cancel)
    else:
        work.cancel()


async def end_all(works: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels those that there are when it begins; they are over when this is."""
    ending = list(works)
    for work in ending:
        cancel_begun(work)
    await asyncio.gather(*ending, return_exceptions=True)


async def run_whole(thread: CallThread, work: Callable[[], object]) -> None:
    """Runs it there; however often the waiting task is cancelled, it is over when this is."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        loop.call_soon_threadsafe(over.set)

    thread.submit(run)
    cancelled: asyncio.CancelledError | None = None
    while not over.is_set():
        try:
            await over.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    if failed:
        raise failed[0]
