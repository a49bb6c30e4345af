"""A connector's requests over the engine's own blocks: the daemon copies straight into them and from them.

A block that was named is the daemon's until it says that the request has ended, or its own end is proven: no request is
over before that, and so the engine gives no block to anybody else. The daemon is told of blocks once what the engine
had begun before, which may still use them, is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvferry.client.client import DaemonClient
from kvferry.client.requests import Ready, RequestFailed, RequestName
from kvferry.connectors import first_token
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.connectors.movers import Moment
from kvferry.connectors.orders import Load, Restore, StorePages
from kvferry.connectors.worker_state import UNWANTED, EngineStep, Push, hear_nothing, run_whole
from kvferry.proto import common_pb2
from kvferry.waiting import complete

_log = logging.getLogger(__name__)


class BlockRequests:
    """See `daemon_requests.DaemonRequests`. The mover knows what is computed."""

    awaits_computed = True

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._blocks = tools.blocks

    # -- decode ----------------------------------------------------------------------------------------------------

    async def load(self, order: Load, step: EngineStep) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            await self._computed(step.begun)
            client = lease.client
            held = order.held_blocks if client.welcome.way_back else ()
            await self._tools.admit(
                client,
                order,
                prefill=order.prefill,
                held_tokens=self._whole(order.start),
                blocks=order.blocks,
                blocks_from=order.start,
                held_blocks=held,
            )
            ready = await self._ready(client, order, step if held else None)
            client.check(order.name)
            lease.then(self._tools.finish(client, order.name, order.prompt.tokens))
            self._tools.moved.loaded_bytes += ready.delta_bytes
            self._tools.loaded(time.monotonic() - began)
            self._tools.first(order.request, ready.aux)
            return len(order.blocks)
        return 0

    async def _ready(self, client: DaemonClient, order: Load, step: EngineStep | None) -> Ready:
        """Waits for the prompt. Meanwhile the daemon is told when what the engine holds of it may be read, whose
        blocks it names: some may be of another request, which this very `step` computes."""
        if step is None:
            return await client.ready(order.name)
        telling = asyncio.ensure_future(self._tell_held(client, order, step))
        try:
            return await client.ready(order.name)
        finally:
            telling.cancel()  # from Ready on the daemon reads nothing, nor does it want to hear of it
            (told,) = await asyncio.gather(telling, return_exceptions=True)
            if isinstance(told, Exception):  # then nothing of it went back
                _log.warning("request %s: what it holds was not told: %r", order.request, told)

    async def _tell_held(self, client: DaemonClient, order: Load, step: EngineStep) -> None:
        await step.over()
        await self._computed(step.done)
        client.progress(order.name, self._whole(order.start))

    async def restore(self, order: Restore, begun: Moment) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            await self._computed(begun)
            client, tokens = lease.client, order.prompt.tokens
            admitted = await self._tools.admit(
                client,
                order,
                held_tokens=self._whole(order.start),
                blocks=order.blocks,
                blocks_from=order.start,
            )
            await client.ready(order.name)
            client.check(order.name)
            lease.then(self._tools.finish(client, order.name, tokens))
            good = max(0, min(admitted.local_tokens, tokens - 1) - order.start) // self._blocks.block_tokens
            self._tools.moved.loaded_bytes += good * self._blocks.row_bytes
            self._tools.loaded(time.monotonic() - began)
            return good
        return 0

    async def store(self, order: StorePages, begun: Moment) -> None:
        async with self._lease(order.request, order.name) as lease:
            await self._computed(begun)
            client, tokens = lease.client, order.prompt.tokens
            await self._tools.admit_stored(client, order, order.blocks)
            await client.finish(order.name, tokens=tokens, digests=b"")  # its copies have ended
            lease.ended()
            self._tools.moved.saved_bytes += len(order.blocks) * self._blocks.row_bytes
            self._tools.moved.stored += 1

    # -- prefill ---------------------------------------------------------------------------------------------------

    async def push(self, push: Push) -> bool:
        order, name = push.order, push.order.name
        if not push.received:  # it was found where the daemon had pages of its own
            push.received = True
            self._tools.reports.add_received(order.request, order.blocks)
        async with self._lease(order.request, name) as lease:
            client = lease.client
            sending = _Sending(self._tools, client, push, await self._begin(client, push))
            push.hear = sending.go_on
            try:
                sending.go_on()
                await client.ended(name, self._tools.end_seconds)
            finally:
                push.hear = hear_nothing
            lease.ended()
            self._tools.moved.pushed += 1
            return True
        return False

    async def _begin(self, client: DaemonClient, push: Push) -> int:
        """How many tokens are in the prompt's blocks without having been computed for it."""
        self._tools.begin(client, push)
        if not push.order.waits:
            return 0  # what the daemon has is loaded on the engine's word alone
        naming = asyncio.ensure_future(self._name_blocks(client, push))
        try:
            matched = (await self._tools.begun(client, push)).matched_tokens
        finally:
            naming.cancel()
            await asyncio.gather(naming, return_exceptions=True)
        if push.fill is not None:
            good = max(0, min(matched, push.fill.end) - push.fill.start) // self._blocks.block_tokens
            self._tools.moved.loaded_bytes += good * self._blocks.row_bytes
            push.received = True
            self._tools.reports.add_received(push.order.request, push.fill.blocks[good:])
        return matched

    async def _name_blocks(self, client: DaemonClient, push: Push) -> None:
        """Answers what the daemon offers to fetch, once the engine has blocks for it or computes it after all."""
        await self._tools.placed(client, push)
        if push.offered:
            fill = push.fill
            await self._computed(push.begun)
            if fill is None:
                client.fetch(push.order.name, (), 0)
            else:
                if fill.held_blocks and push.filling is not None:  # another's, maybe, that this very step computes
                    await push.filling.over()
                    await self._computed(push.filling.done)
                client.fetch(push.order.name, fill.held_blocks + fill.blocks, fill.start)

    async def take_away(self, push: Push, task: asyncio.Task[Any] | None) -> None:
        """The daemon forgets the prompt: what its engine computes of it later lies elsewhere."""
        if task is not None and not push.over:
            task.cancel()
            await asyncio.wait([task])

    async def quiet(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """They use nothing of the session's; what the daemon may still do they wait for themselves."""
        for task in tasks:
            task.cancel()

    # -- both ------------------------------------------------------------------------------------------------------

    def _whole(self, start: int) -> int:
        """The tokens of whole pages before this one, which the engine has."""
        return start // self._blocks.page_size * self._blocks.page_size

    async def _computed(self, after: Moment) -> None:
        if after is not None and not self._tools.mover.is_computed(after):
            await run_whole(self._tools.copier, partial(self._tools.mover.computed, after))

    def _lease(self, request: str, name: RequestName) -> DaemonRequest:
        return DaemonRequest(self._tools, request, name, self._give_up)

    async def _give_up(self, client: DaemonClient, name: RequestName) -> None:
        """The blocks are the engine's again when this is over; however often it is cancelled."""
        await complete(client.release(name, UNWANTED))


class _Sending:
    """A prompt of which the daemon is told as it is computed, and then its reply's first token: each at once, where a
    task that waits takes another turn of the loop."""

    def __init__(self, tools: RequestTools, client: DaemonClient, push: Push, matched: int) -> None:
        self._tools = tools
        self._client = client
        self._push = push
        self._saved = matched
        fill = push.fill
        self._filled = () if fill is None or not matched else fill.held_blocks + fill.blocks
        self._named = len(self._filled)
        self._told = False  # its token

    def go_on(self) -> None:
        """Says what there is to be said. An error of it ends the wait for the request's end."""
        try:
            self._say_computed()
            self._say_token()
        except Exception as error:
            self._client.fail(self._push.order.name, error)

    def _say_computed(self) -> None:
        blocks, order = self._tools.blocks, self._push.order
        if (more := self._push.more(self._saved, blocks.page_size)) is None:
            return
        save, after, end = more
        if save.blocks[: len(self._filled)] != self._filled[: len(save.blocks)]:
            raise RequestFailed(common_pb2.ERROR_ABORTED, "the engine computes it in other blocks than were loaded")
        if after is not None and not self._tools.mover.is_computed(after):  # it has been waited for
            raise RequestFailed(common_pb2.ERROR_ABORTED, "the engine's device does not compute it")
        upto = max(self._named, -(-end // blocks.block_tokens))
        self._client.progress(order.name, end, save.blocks[self._named : upto])
        self._saved, self._named = end, upto

    def _say_token(self) -> None:
        push = self._push
        if self._told or self._saved < push.order.prompt.tokens:
            return
        push.handed = True
        if push.decided.is_set():
            self._client.aux(push.order.name, first_token.blob_of(push.token))
            self._told = True
