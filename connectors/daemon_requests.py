"""Requests of a connector's worker half at the daemon: what each way of having them there shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from kvferry.client.client import ANSWER_SLACK_S, DaemonClient
from kvferry.client.requests import (
    Admitted,
    AdmitWords,
    Begun,
    DaemonGone,
    NameInUse,
    NotOpened,
    Patience,
    RequestFailed,
    RequestName,
)
from kvferry.connectors import first_token
from kvferry.connectors.blocks import BlockMap
from kvferry.connectors.movers import Moment, Mover
from kvferry.connectors.orders import Load, News, Restore, StorePages
from kvferry.connectors.settings import Settings
from kvferry.connectors.worker_session import Sessions
from kvferry.connectors.worker_state import EngineStep, Moved, Push, Reports
from kvferry.proto import worker_pb2
from kvferry.threads import CallThread
from kvferry.waiting import within

CHECK_SECONDS = 0.5  # between looks whether a prompt that has no blocks yet has failed

_T = TypeVar("_T")
Work: TypeAlias = Coroutine[Any, Any, _T] | asyncio.Future[_T]
"""A request's; a future has begun."""
GiveUp = Callable[[DaemonClient, RequestName], Awaitable[None]]
"""Ends a request that did not end well; its blocks are the engine's when it returns."""

_log = logging.getLogger(__name__)


class DaemonRequests(Protocol):
    """The requests, as orders make them; each may be cancelled. When one is over the engine has its blocks back."""

    awaits_computed: bool
    """Whether they wait until what the engine had begun is computed before the daemon hears of them."""

    def load(self, order: Load, step: EngineStep) -> Work[int]:
        """How many of its blocks are as they should be."""

    def restore(self, order: Restore, begun: Moment) -> Work[int]:
        """Likewise."""

    def store(self, order: StorePages, begun: Moment) -> Work[None]: ...

    def push(self, push: Push) -> asyncio.Future[bool]:
        """Begins it; in the end, whether all of it is in the daemon's hands."""

    async def take_away(self, push: Push, work: asyncio.Future[Any] | None) -> None:
        """Nothing is read any more from the blocks of a push that this work makes."""

    async def quiet(self, works: Sequence[asyncio.Future[Any]]) -> None:
        """Ends these works, as far as they use the session that is over: when this returns, it may be closed."""


@dataclass(slots=True)
class RequestTools:
    """The tools of these requests, on the loop that runs them."""

    settings: Settings
    blocks: BlockMap
    mover: Mover
    sessions: Sessions
    copier: CallThread
    reports: Reports
    moved: Moved = field(default_factory=Moved)
    behind: set[asyncio.Task[None]] = field(default_factory=set)  # what the engine does not wait for

    def load_words(
        self,
        order: Load | Restore,
        *,
        prefill: str = "",
        held_tokens: int = 0,
        blocks: Sequence[int] = (),
        blocks_from: int = 0,
        held_blocks: Sequence[int] = (),
    ) -> AdmitWords:
        """How pages to load from are asked for; see `DaemonClient.admit`."""
        return AdmitWords(
            digests=order.prompt.digests,
            tokens=order.prompt.tokens,
            tail_digest=order.prompt.tail_digest,
            prefill=prefill,
            max_new_tokens=1,
            deadline_s=self.settings.deadline_seconds,
            held_tokens=held_tokens,
            traceparent=order.traceparent,
            blocks=blocks,
            blocks_from=blocks_from,
            held_blocks=held_blocks,
        )

    async def admit_stored(self, client: DaemonClient, order: StorePages, blocks: Sequence[int] = ()) -> Admitted:
        """Hands a whole prompt in; it is the daemon's to keep once `ready`."""
        admitted = await client.admit(order.name, **self.store_words(order, blocks))
        await client.ready(order.name)
        return admitted

    def store_words(self, order: StorePages, blocks: Sequence[int]) -> AdmitWords:
        """How a whole prompt is handed in."""
        return AdmitWords(
            digests=order.prompt.digests,
            tokens=order.prompt.tokens,
            tail_digest=order.prompt.tail_digest,
            prefill="",
            max_new_tokens=1,
            deadline_s=self.settings.store_seconds,
            held_tokens=order.prompt.tokens,
            blocks=blocks,
        )

    def begin(self, client: DaemonClient, push: Push) -> None:
        """Has prefill's daemon expect the prompt."""
        order, prompt = push.order, push.order.prompt
        if order.waits:
            patience = Patience(worker_pb2.PATIENCE_FETCH, order.held, partial(self._proceed, push))
        else:
            patience = Patience(worker_pb2.PATIENCE_NONE, order.held)
        client.begin(
            order.name,
            digests=prompt.digests,
            tokens=prompt.tokens,
            tail_digest=prompt.tail_digest,
            deadline_s=self.settings.deadline_seconds,
            traceparent=order.traceparent,
            patience=patience,
        )

    async def begun(self, client: DaemonClient, push: Push) -> Begun:
        """The daemon's answer. Where the engine waits for that, it is told what the daemon has of the prompt, and this
        returns when the engine has blocks."""
        begun = await client.begun(push.order.name)
        if push.order.waits:
            self._found(push, begun.matched_tokens)
            await self.placed(client, push)
        return begun

    def _proceed(self, push: Push, tokens: int) -> None:
        push.offered = tokens > 0
        self._found(push, tokens)

    def _found(self, push: Push, tokens: int) -> None:
        """Has the scheduler's half told, once, what the daemon has of a prompt that waits, or can fetch."""
        if not push.told:
            push.told = True
            push.changed()
            self.reports.add_news(News(found={push.order.request: tokens}))

    async def placed(self, client: DaemonClient, push: Push) -> None:
        """Waits until the engine has blocks for the prompt: it says which are to be loaded into, or what it has
        computed. Raises RequestFailed, DaemonGone."""

        def placed() -> bool:
            return push.fill is not None or push.save is not None

        while not placed():
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await within(CHECK_SECONDS, push.until(placed))
            client.check(push.order.name)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that the engine need not wait for."""
        task = asyncio.get_running_loop().create_task(work)
        self.behind.add(task)
        task.add_done_callback(self.behind.discard)

    def failed(self, request: str, error: Exception) -> None:
        self.moved.failed += 1
        _log.warning("request %s: the engine goes on alone: %s", request, error)

    def loaded(self, seconds: float) -> None:
        """Counts a load that went well."""
        self.moved.loads += 1
        self.moved.load_seconds += seconds

    def first(self, request: str, aux: bytes) -> None:
        """Has the first token told that came with a load."""
        if (token := first_token.token_of(aux)) is not None:
            self.reports.add_first(request, token)

    async def finish(self, client: DaemonClient, name: RequestName, tokens: int) -> None:
        try:
            await client.finish(name, tokens=tokens, digests=b"")
        except RequestFailed as error:
            await client.abort(name, str(error))
        except DaemonGone:
            pass

    @property
    def end_seconds(self) -> float:
        """For which the end of a prompt that was begun is awaited. A decode daemon may ask for it as late as its
        deadline, and then has one of its own."""
        return 2 * self.settings.deadline_seconds + ANSWER_SLACK_S


class DaemonRequest:
    """A request of ours at the daemon, from its first word to what ends it, as an `async with`: its failure is logged
    and ends the block; what did not end well is given up.

    Not contextlib's: its generator, which the loop registers, too, is a tenth of what a prompt costs a connector.
    """

    def __init__(self, tools: RequestTools, request: str, name: RequestName, give_up: GiveUp) -> None:
        self._tools = tools
        self._request = request
        self._name = name
        self._give_up = give_up
        self._client = tools.sessions.client
        self._used: DaemonClient | None = None
        self._over = False
        self._ending: Coroutine[Any, Any, None] | None = None

    @property
    def client(self) -> DaemonClient:
        """DaemonGone where there is none."""
        if self._client is None:
            raise DaemonGone("no daemon answers")
        self._used = self._client
        return self._client

    def then(self, ending: Coroutine[Any, Any, None]) -> None:
        """Names what ends the request instead of an abort, behind the engine's back: it went well."""
        self._ending = ending

    def ended(self) -> None:
        """It went well, and the daemon has said so."""
        self._over = True

    async def __aenter__(self) -> DaemonRequest:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        failure = error if isinstance(error, (RequestFailed, DaemonGone)) else None
        over, self._over = self._over, True
        if failure is not None:
            self._tools.failed(self._request, failure)
        if self._ending is not None:
            self._tools.later(self._ending)
        elif over or isinstance(error, NameInUse):  # the name is that of a request that runs
            pass
        elif self._used is not None and not isinstance(error, NotOpened):
            if self._used.gone.done():  # the other ranks may open it in the next session; its end may be proven later
                self._tools.sessions.decline(self._name)
            await self._give_up(self._used, self._name)
        else:  # it was never opened
            self._tools.sessions.decline(self._name)
        return failure is not None
