"""A connector's requests over the daemon's own pool: pages that the daemon gives out, and copies between them and the
engine's blocks, on a thread of ours."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvferry.client.client import DaemonClient
from kvferry.client.requests import DaemonGone, RequestFailed, RequestName
from kvferry.connectors.blocks import BlockPlaces, PoolPages, Tail
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.connectors.movers import Moment
from kvferry.connectors.orders import Load, Restore, StorePages
from kvferry.connectors.worker_session import pool_of
from kvferry.connectors.worker_state import UNWANTED, EngineStep, Push, end_all, run_whole

_log = logging.getLogger(__name__)


class PoolRequests:
    """See `daemon_requests.DaemonRequests`. The mover moves bytes between the daemon's pages and the engine's
    blocks."""

    awaits_computed = False  # its copies are ordered behind what the engine computes

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._blocks = tools.blocks

    # -- copies ----------------------------------------------------------------------------------------------------

    async def _copy(self, work: Callable[[], None]) -> None:
        """Copies on the copying thread. However often the caller is cancelled, the copy is over when this is."""
        await run_whole(self._tools.copier, work)

    async def _to_blocks(self, pool: PoolPages, places: BlockPlaces, after: Moment) -> None:
        """Copies pages to blocks, which what the engine had begun before `after` may still use."""
        await self._copy(partial(self._tools.mover.to_blocks, pool, places, after))
        self._tools.moved.loaded_bytes += len(places.blocks) * self._blocks.row_bytes

    async def _to_pages(self, pool: PoolPages, places: BlockPlaces, after: Moment, tail: Tail | None = None) -> None:
        """Copies blocks to pages, behind what the engine had begun before `after`, which computes them."""
        await self._copy(partial(self._tools.mover.to_pages, pool, places, after, tail))
        self._tools.moved.saved_bytes += len(places.blocks) * self._blocks.row_bytes

    # -- decode ----------------------------------------------------------------------------------------------------

    async def load(self, order: Load, step: EngineStep) -> int:
        began = time.monotonic()
        held = len(order.held_blocks) * self._blocks.block_tokens
        async with self._lease(order.request, order.name) as lease:
            client = lease.client
            admitted = await client.admit(
                order.name, **self._tools.load_words(order, prefill=order.prefill, held_tokens=held)
            )
            matched = admitted.matched_tokens
            if matched < held:
                own = order.held_blocks[matched // self._blocks.block_tokens :]
                await step.over()
                client.check(order.name)  # the pages are still ours
                pool = pool_of(client)
                places = self._blocks.places(pool, admitted.pages, own, matched, held)
                await self._to_pages(pool, places, step.done)
                client.progress(order.name, held)
            ready = await client.ready(order.name)
            pool, tokens = pool_of(client), order.prompt.tokens
            places = self._blocks.places(pool, admitted.pages, order.blocks, order.start, tokens)
            await self._to_blocks(pool, places, step.begun)
            client.check(order.name)  # the pages were ours until now
            lease.then(self._tools.finish(client, order.name, tokens))
            self._tools.loaded(time.monotonic() - began)
            self._tools.first(order.request, ready.aux)
            return len(order.blocks)
        return 0

    async def restore(self, order: Restore, begun: Moment) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            client, tokens = lease.client, order.prompt.tokens
            admitted = await client.admit(order.name, **self._tools.load_words(order))
            await client.ready(order.name)
            end = min(admitted.local_tokens, tokens - 1)
            if end <= order.start:
                return 0
            pool = pool_of(client)
            places = self._blocks.places(pool, admitted.pages, order.blocks, order.start, end)
            await self._to_blocks(pool, places, begun)
            client.check(order.name)
            if end == tokens - 1:  # else it has pages that nobody filled: it is aborted
                lease.then(self._tools.finish(client, order.name, tokens))
            self._tools.loaded(time.monotonic() - began)
            return (end - order.start) // self._blocks.block_tokens
        return 0

    async def store(self, order: StorePages, begun: Moment) -> None:
        async with self._lease(order.request, order.name) as lease:
            client, tokens = lease.client, order.prompt.tokens
            admitted = await self._tools.admit_stored(client, order)
            pool, matched = pool_of(client), admitted.matched_tokens
            own = order.blocks[matched // self._blocks.block_tokens :]
            await self._to_pages(pool, self._blocks.places(pool, admitted.pages, own, matched, tokens), begun)
            lease.then(self._tools.finish(client, order.name, tokens))
            self._tools.moved.stored += 1

    # -- prefill ---------------------------------------------------------------------------------------------------

    def push(self, push: Push) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._push(push))

    async def _push(self, push: Push) -> bool:
        order, name = push.order, push.order.name
        async with self._lease(order.request, name) as lease:
            client = lease.client
            self._tools.begin(client, push)
            begun = await self._tools.begun(client, push)
            if not push.received:
                await self._load_first(client, push, begun.matched_tokens, begun.pages)
            await self._push_chunks(client, push, begun.matched_tokens, begun.pages)
            client.aux(name, await push.aux())
            lease.then(self._hand_over(client, name))
            self._tools.moved.pushed += 1
            return True
        return False

    async def _load_first(self, client: DaemonClient, push: Push, matched: int, pages: Sequence[int]) -> None:
        load = push.load
        end = min(matched, load.end)
        good = 0
        if end > load.start:
            pool = pool_of(client)
            places = self._blocks.places(pool, pages, load.blocks, load.start, end)
            await self._to_blocks(pool, places, push.begun)
            client.check(push.order.name)
            good = (end - load.start) // self._blocks.block_tokens
        push.received = True
        self._tools.reports.add_received(load.request, load.blocks[good:])

    async def _push_chunks(self, client: DaemonClient, push: Push, matched: int, pages: Sequence[int]) -> None:
        total, saved = push.order.prompt.tokens, matched
        while saved < total:
            save, computed, end = await push.next(saved, self._blocks.page_size)
            own = save.blocks[saved // self._blocks.block_tokens :]
            pool = pool_of(client)
            places = self._blocks.places(pool, pages, own, saved, end)
            push.copying = True
            try:
                await self._to_pages(pool, places, computed, self._blocks.tail(pages, end) if end == total else None)
            finally:
                push.copying = False
                push.changed()
            client.progress(push.order.name, end)
            saved = end

    async def _hand_over(self, client: DaemonClient, name: RequestName) -> None:
        try:
            await client.ended(name, self._tools.end_seconds)
        except RequestFailed as error:
            _log.info("request %s ended unfinished: %s", name, error)
            await client.abort(name, error.message)
        except DaemonGone:
            pass

    async def take_away(self, push: Push, work: asyncio.Future[Any] | None) -> None:
        push.save = None
        await push.until(lambda: not push.copying)

    async def quiet(self, works: Sequence[asyncio.Future[Any]]) -> None:
        await end_all(works)

    def _lease(self, request: str, name: RequestName) -> DaemonRequest:
        return DaemonRequest(self._tools, request, name, self._give_up)

    async def _give_up(self, client: DaemonClient, name: RequestName) -> None:
        """The engine need not wait for that: nothing of its own is touched by the daemon."""
        self._tools.later(client.abort(name, UNWANTED))
