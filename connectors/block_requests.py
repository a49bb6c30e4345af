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
from kvferry.client.requests import DaemonGone, Ready, RequestFailed, RequestName
from kvferry.connectors import first_token
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools
from kvferry.connectors.movers import Moment
from kvferry.connectors.orders import Load, Restore, StorePages
from kvferry.connectors.worker_state import UNWANTED, EngineStep, Push, cancel_begun, hear_nothing, run_whole
from kvferry.proto import common_pb2
from kvferry.waiting import SLICES, complete

_log = logging.getLogger(__name__)


class BlockRequests:
    """See `daemon_requests.DaemonRequests`. The mover knows what is computed."""

    awaits_computed = True

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._blocks = tools.blocks
        self._begun: set[_Sending] = set()  # since the last look; few live until the next, and each has no timer
        self._looking: asyncio.TimerHandle | None = None

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

    def push(self, push: Push) -> asyncio.Future[bool]:
        order = push.order
        if not push.received:  # it was found where the daemon had pages of its own
            push.received = True
            self._tools.reports.add_received(order.request, order.blocks)
        sending = _Sending(self._tools, push, self._lease(order.request, order.name), self._begun)
        if order.waits:
            return asyncio.ensure_future(self._push_waiting(push, sending))
        sending.begin()
        self._look_later()
        return sending

    async def _push_waiting(self, push: Push, sending: _Sending) -> bool:
        async with sending.lease as lease:
            client = lease.client
            self._tools.begin(client, push)
            sending.start(await self._matched(client, push))
            self._look_later()
            sending.go_on()  # more may be computed by now
            return await sending
        return False

    async def _matched(self, client: DaemonClient, push: Push) -> int:
        """How many tokens are in the prompt's blocks without having been computed for it."""
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
        await push.until(lambda: push.told)  # another rank may have been told before, and the engine have heard of it
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

    def _look_later(self) -> None:
        """Has a look come for what was begun just now."""
        if self._looking is None:
            seconds = self._tools.end_seconds / SLICES
            self._looking = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Has those end in time that were begun since the last look, or up to an eighth of that time later."""
        lasting = [*self._begun]
        self._begun.clear()
        self._looking = None
        for sending in lasting:
            sending.last()

    async def take_away(self, push: Push, work: asyncio.Future[Any] | None) -> None:
        """The daemon forgets the prompt: what its engine computes of it later lies elsewhere."""
        if work is not None and not push.over:
            work.cancel()
            await asyncio.wait([work])

    async def quiet(self, works: Sequence[asyncio.Future[Any]]) -> None:
        """They use nothing of the session's; what the daemon may still do they wait for themselves."""
        for work in works:
            cancel_begun(work)

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


class _Sending(asyncio.Future[bool]):
    """A prompt of which the daemon is told as it is computed, and then its reply's first token: each at once, where a
    task takes another turn of the loop. It is done when nothing reads the prompt's blocks any more: whether all of it
    is in the daemon's hands. It has a task of its own only where it lasts, or to be given up, as where it is
    cancelled."""

    def __init__(self, tools: RequestTools, push: Push, lease: DaemonRequest, begun: set[_Sending]) -> None:
        """`begun`: those that were begun of late."""
        super().__init__(loop=asyncio.get_running_loop())
        self.lease = lease
        self._tools = tools
        self._push = push
        self._begun = begun
        self._task: asyncio.Task[None] | None = None  # most end before they need one
        self._saved = 0
        self._filled: tuple[int, ...] = ()
        self._named = 0  # blocks
        self._told = False  # its token
        self._over = False  # it has ended, or is given up

    def begin(self) -> None:
        """Begins it where the engine waits for nothing: what the daemon has is loaded on its word alone."""
        try:
            self._tools.begin(self.lease.client, self._push)
            self.start(0)
        except Exception as error:
            self._fail(error)

    def start(self, matched: int) -> None:
        """Has the daemon, which knows the prompt, told of it from now on. `matched`: tokens that are in its blocks
        without having been computed for it."""
        push, fill = self._push, self._push.fill
        self._saved = matched
        if fill is not None and matched:
            self._filled = fill.held_blocks + fill.blocks
            self._named = len(self._filled)
        self._begun.add(self)
        push.hear = self.go_on
        self.lease.client.when_ended(push.order.name, self._ended)

    def go_on(self) -> None:
        """Says what there is to be said. With an error of it the prompt is given up."""
        try:
            self._say_computed()
            self._say_token()
        except Exception as error:
            self._fail(error)

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
        self.lease.client.progress(order.name, end, save.blocks[self._named : upto])
        self._saved, self._named = end, upto

    def _say_token(self) -> None:
        push = self._push
        if self._told or self._saved < push.order.prompt.tokens:
            return
        push.handed = True
        if push.decided:
            self.lease.client.aux(push.order.name, first_token.blob_of(push.token))
            self._told = True

    def last(self) -> None:
        """It lasts: now its end is awaited, for `end_seconds`."""
        self._task = self.get_loop().create_task(self._awaited())

    async def _awaited(self) -> None:
        try:
            await self.lease.client.ended(self._push.order.name, self._tools.end_seconds)
        except (RequestFailed, DaemonGone) as error:
            self._fail(error)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        elif not self._over:
            self._hear_no_more()
            self.lease.client.forget(self._push.order.name)
            self.lease.ended()
            self._tools.moved.pushed += 1
            self.set_result(True)

    def cancel(self, msg: Any = None) -> bool:
        """Has it given up; it is cancelled then."""
        if self.done():
            return False
        self._fail(asyncio.CancelledError())
        return True

    def _fail(self, error: BaseException) -> None:
        if not self._over:
            self._hear_no_more()
            self._task = self.get_loop().create_task(self._give_up(error))

    def _hear_no_more(self) -> None:
        self._over = True
        if self._task is not None:  # it would forget a new request of that name, too
            self._task.cancel()
        self._push.hear = hear_nothing
        self._begun.discard(self)

    async def _give_up(self, error: BaseException) -> None:
        try:
            async with self.lease:
                raise error
        except asyncio.CancelledError:
            super().cancel()
        except Exception as unforeseen:
            self.set_exception(unforeseen)
        else:
            self.set_result(False)
