"""Requests at the daemon, over SGLang's own pages: the daemon copies straight from prefill's and into decode's.

A page that was named is the daemon's until it has said that the request has ended, or its own end is proven. So a
transfer has FAILED only when no copy names its pages any more: SGLang gives them to others in the same step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import Any, Protocol

from kvferry.client.client import ANSWER_SLACK_S, DaemonClient
from kvferry.client.requests import DaemonGone, NameInUse, NotOpened, RequestFailed, RequestName, Stowed
from kvferry.connectors.orders import PromptPages
from kvferry.connectors.sglang.digests import prompt_pages
from kvferry.connectors.worker_session import Sessions
from kvferry.connectors.worker_state import UNWANTED, run_whole
from kvferry.threads import CallThread
from kvferry.waiting import complete, is_done

_log = logging.getLogger(__name__)


class PollState(IntEnum):
    """The states that SGLang polls, by its numbers (KVPoll)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class GpuMoment(Protocol):
    """What an engine's GPU had been told at some time."""

    def synchronize(self) -> None:
        """Returns when it is done."""

    def query(self) -> bool:
        """Whether it is done."""


@dataclass(slots=True, eq=False)
class PageTransfer:
    """One request's, as the engine's thread and the requests' thread see it."""

    name: RequestName
    token_ids: Sequence[int]
    page_size: int
    seed: bytes
    state: PollState = PollState.BOOTSTRAPPING
    reason: str = ""  # of a failure

    @property
    def over(self) -> bool:
        return self.state in (PollState.FAILED, PollState.SUCCESS)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page_size)

    def fail(self, reason: str) -> None:
        """Nothing touches its pages any more."""
        self.reason = self.reason or reason
        self.state = PollState.FAILED

    def prompt(self) -> PromptPages:
        return prompt_pages(self.token_ids, self.page_size, self.seed)


@dataclass(slots=True, eq=False)
class FetchedPrompt:
    """A prompt of a decode engine: tokens from `start` on into `blocks`, then the prefill engine's row into `row`."""

    transfer: PageTransfer
    prefill: str  # name of the prefill daemon
    start: int
    blocks: Sequence[int]
    row: int
    after: Sequence[GpuMoment]  # what may still write its blocks


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The prompt's first `end` tokens are computed once `after` are done; `blocks` follow those named before."""

    end: int
    blocks: Sequence[int]
    after: Sequence[GpuMoment] = ()
    row: bytes | None = None  # with the last one


class PromptPlace(Enum):
    """The place of a prompt of a prefill engine until it is sent."""

    PAGES = "SGLang's pages"
    MOVES = "SGLang's pages, and the daemon is asked to take them"
    TIER = "the daemon's host tier"
    ASKED = "SGLang's pages: decode has asked for it, and it is sent from there"


AGAIN_SECONDS = 0.2  # before the daemon is asked once more that had no room in its host tier


@dataclass(slots=True, eq=False)
class SentPrompt:
    """A prompt of a prefill engine. Chunks are handed in and taken on the requests' thread."""

    transfer: PageTransfer
    born: float = field(default_factory=time.monotonic)
    computed: bool = False  # the daemon knows all of it, the metadata row too
    place: PromptPlace = PromptPlace.PAGES
    not_before: float = 0.0  # it may be asked to move
    gave_back: bool = False  # SGLang has its pages back
    chunks: deque[PromptChunk] = field(default_factory=deque)
    more: asyncio.Future[None] | None = None  # somebody waits

    def put(self, chunk: PromptChunk) -> None:
        self.chunks.append(chunk)
        if self.more is not None and not self.more.done():
            self.more.set_result(None)

    async def next(self, seconds: float) -> PromptChunk:
        """Waits at most so long. TimeoutError."""
        if not self.chunks:
            self.more = asyncio.get_running_loop().create_future()
            if not await is_done(self.more, seconds):
                raise TimeoutError(f"the next chunk of the prompt was not computed within {seconds:g} s")
        return self.chunks.popleft()


@dataclass(slots=True, eq=False)
class StoredPrompt:
    """A finished request's full pages, in `blocks`, to the host tier as far as that lacks them."""

    transfer: PageTransfer
    blocks: Sequence[int]
    after: Sequence[GpuMoment]


@dataclass(slots=True)
class _Lease:
    client: DaemonClient
    opened: bool = False


@dataclass(slots=True)
class Transfers:
    """How each kind is carried out, on the loop that has the session."""

    sessions: Sessions
    deadline_seconds: float
    store_seconds: float
    copier: CallThread  # it waits for the engine's GPU
    write_row: Callable[[int, bytes], None]
    behind: set[asyncio.Task[None]] = field(default_factory=set)  # what the engine does not wait for

    async def receive(self, order: FetchedPrompt) -> None:
        transfer = order.transfer
        async with self._lease(transfer.name) as lease:
            client = lease.client
            await self._computed(order.after)
            prompt = transfer.prompt()
            lease.opened = True
            await client.admit(
                transfer.name,
                **prompt.words,
                prefill=order.prefill,
                max_new_tokens=1,
                deadline_s=self.deadline_seconds,
                held_tokens=order.start,
                blocks=order.blocks,
                blocks_from=order.start,
            )
            ready = await client.ready(transfer.name)
            client.check(transfer.name)
            self.write_row(order.row, ready.aux)
            self._later(self._finish(client, transfer))

    async def send(self, order: SentPrompt) -> None:
        transfer = order.transfer
        async with self._lease(transfer.name) as lease:
            client = lease.client
            lease.opened = True
            client.begin(transfer.name, **transfer.prompt().words, deadline_s=self.deadline_seconds)
            await client.begun(transfer.name)
            row: bytes | None = None
            while row is None:
                chunk = await order.next(self.deadline_seconds)
                await self._computed(chunk.after)
                client.progress(transfer.name, chunk.end, chunk.blocks)
                row = chunk.row
            client.aux(transfer.name, row)
            order.computed = True
            await client.ended(transfer.name, self.deadline_seconds + ANSWER_SLACK_S)

    def stow(self, order: SentPrompt) -> None:
        """Has the daemon take the pages of a computed prompt into its host tier. Its place says whether it has; of one
        that ends before nothing is heard."""
        if (client := self.sessions.client) is not None:
            with contextlib.suppress(DaemonGone):  # then it fails
                client.stow(order.transfer.name, partial(self._stowed, order))

    def _stowed(self, order: SentPrompt, answer: Stowed) -> None:
        order.not_before = time.monotonic() + AGAIN_SECONDS
        if answer.stored:
            order.place = PromptPlace.TIER
        else:
            order.place = PromptPlace.ASKED if answer.asked else PromptPlace.PAGES

    async def store(self, order: StoredPrompt) -> None:
        transfer = order.transfer
        async with self._lease(transfer.name) as lease:
            client = lease.client
            await self._computed(order.after)
            prompt = transfer.prompt()
            lease.opened = True
            await client.admit(
                transfer.name,
                **prompt.words,
                prefill="",
                max_new_tokens=1,
                deadline_s=self.store_seconds,
                held_tokens=transfer.tokens,
                blocks=order.blocks,
            )
            await client.ready(transfer.name)
            await client.finish(transfer.name, tokens=transfer.tokens, digests=b"")  # its copies have ended

    async def carry(self, transfer: PageTransfer, work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, and says in the transfer how it ended."""
        try:
            await work
            transfer.state = PollState.SUCCESS
        except asyncio.CancelledError:
            transfer.fail("it was aborted")
        except (RequestFailed, NotOpened, DaemonGone, TimeoutError, ValueError) as error:
            transfer.fail(str(error) or type(error).__name__)
        except Exception as error:
            _log.exception("request %s", transfer.name)
            transfer.fail(repr(error))

    @contextlib.asynccontextmanager
    async def _lease(self, name: RequestName) -> AsyncIterator[_Lease]:
        """One request at the daemon. What does not end well is over when nothing touches its pages any more."""
        client = self.sessions.client
        if client is None:
            self.sessions.decline(name)
            raise DaemonGone("there is no session with the daemon")
        lease = _Lease(client)
        try:
            yield lease
        except NameInUse:  # the name is that of a request that runs
            raise
        except BaseException as error:
            opened = lease.opened and not isinstance(error, NotOpened)
            if not opened or client.gone.done():  # the other ranks may open it in the next session
                self.sessions.decline(name)
            if opened:
                await complete(client.release(name, str(error) or UNWANTED))
            raise

    async def _computed(self, after: Sequence[GpuMoment]) -> None:
        for moment in after:
            if not moment.query():
                await run_whole(self.copier, moment.synchronize)

    async def _finish(self, client: DaemonClient, transfer: PageTransfer) -> None:
        try:
            await client.finish(transfer.name, tokens=transfer.tokens, digests=b"")
        except RequestFailed as error:
            await client.abort(transfer.name, str(error))
        except DaemonGone:
            pass

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.behind.add(task)
        task.add_done_callback(self.behind.discard)
