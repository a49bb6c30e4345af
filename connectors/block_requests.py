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
from typing import Any, TypeGuard

from kvferry.client.client import ANSWER_DEADLINE_S, ANSWER_SLACK_S, DaemonClient
from kvferry.client.requests import Admitted, Ready, RequestFailed, RequestName
from kvferry.connectors import first_token
from kvferry.connectors.at_once import Followed, Lasting
from kvferry.connectors.daemon_requests import DaemonRequest, RequestTools, Work
from kvferry.connectors.movers import Moment
from kvferry.connectors.orders import Load, Restore, StorePages
from kvferry.connectors.worker_state import UNWANTED, EngineStep, Push, cancel_begun, hear_nothing, run_whole
from kvferry.proto import common_pb2
from kvferry.waiting import complete

_log = logging.getLogger(__name__)


class BlockRequests:
    """See `daemon_requests.DaemonRequests`. The mover knows what is computed."""

    awaits_computed = True

    def __init__(self, tools: RequestTools) -> None:
        self._tools = tools
        self._blocks = tools.blocks
        self._lasting = Lasting(tools)

    # -- decode ----------------------------------------------------------------------------------------------------

    def load(self, order: Load, step: EngineStep) -> Work[int]:
        client = self._tools.sessions.client
        if self._goes_alone(client, step.begun) and not (client.welcome.way_back and order.held_blocks):
            return self._loading(order, order.prefill)
        return self._load(order, step)

    def _goes_alone(self, client: DaemonClient | None, begun: Moment) -> TypeGuard[DaemonClient]:
        """Whether nothing is to be said of a request but what it is, and that at once."""
        if client is None or not client.takes_alone:
            return False
        try:
            return begun is None or self._tools.mover.is_computed(begun)
        except Exception:  # the request finds it, too
            return False

    def _loading(self, order: Load | Restore, prefill: str) -> asyncio.Future[int]:
        loading = _Loading(self._tools, order, self._lease(order.request, order.name), self._lasting)
        loading.begin(prefill, self._whole(order.start))
        return loading

    async def _load(self, order: Load, step: EngineStep) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            await self._computed(step.begun)
            client = lease.client
            held = order.held_blocks if client.welcome.way_back else ()
            words = self._tools.load_words(
                order,
                prefill=order.prefill,
                held_tokens=self._whole(order.start),
                blocks=order.blocks,
                blocks_from=order.start,
                held_blocks=held,
            )
            await client.admit(order.name, **words)
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

    def restore(self, order: Restore, begun: Moment) -> Work[int]:
        if self._goes_alone(self._tools.sessions.client, begun):
            return self._loading(order, "")
        return self._restore(order, begun)

    async def _restore(self, order: Restore, begun: Moment) -> int:
        began = time.monotonic()
        async with self._lease(order.request, order.name) as lease:
            await self._computed(begun)
            client, tokens = lease.client, order.prompt.tokens
            words = self._tools.load_words(
                order, held_tokens=self._whole(order.start), blocks=order.blocks, blocks_from=order.start
            )
            admitted = await client.admit(order.name, **words)
            await client.ready(order.name)
            client.check(order.name)
            lease.then(self._tools.finish(client, order.name, tokens))
            good = restored_blocks(order, admitted, self._blocks.block_tokens)
            self._tools.moved.loaded_bytes += good * self._blocks.row_bytes
            self._tools.loaded(time.monotonic() - began)
            return good
        return 0

    def store(self, order: StorePages, begun: Moment) -> Work[None]:
        if self._goes_alone(self._tools.sessions.client, begun):
            storing = _Storing(self._tools, order, self._lease(order.request, order.name), self._lasting)
            storing.begin()
            return storing
        return self._store(order, begun)

    async def _store(self, order: StorePages, begun: Moment) -> None:
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
        sending = _Sending(self._tools, push, self._lease(order.request, order.name), self._lasting)
        if order.waits:
            return asyncio.ensure_future(self._push_waiting(push, sending))
        sending.begin()
        return sending

    async def _push_waiting(self, push: Push, sending: _Sending) -> bool:
        async with sending.lease as lease:
            client = lease.client
            self._tools.begin(client, push)
            sending.start(await self._matched(client, push))
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


class _Loading(Followed[int]):
    """A prompt that is loaded from token `order.start` on: the number of its blocks that are as they should be."""

    def __init__(self, tools: RequestTools, order: Load | Restore, lease: DaemonRequest, lasting: Lasting) -> None:
        super().__init__(tools, order.name, lease, 0, lasting)
        self._order = order
        self._began = time.monotonic()

    def begin(self, prefill: str, held_tokens: int) -> None:
        """Asks for it. `prefill`: empty for what the daemon holds itself."""
        order = self._order
        try:
            words = self._tools.load_words(
                order, prefill=prefill, held_tokens=held_tokens, blocks=order.blocks, blocks_from=order.start
            )
            self.lease.client.admit_alone(order.name, **words)
            self.follow(words["deadline_s"] + ANSWER_SLACK_S)
        except Exception as error:
            self.fail(error)

    def ended_well(self) -> int:
        tools, order = self._tools, self._order
        admitted, ready = self.lease.client.arrived(order.name)
        assert ready is not None, "a load has no other end"
        if isinstance(order, Load):
            good, nbytes = len(order.blocks), ready.delta_bytes
            tools.first(order.request, ready.aux)
        else:
            good = restored_blocks(order, admitted, tools.blocks.block_tokens)
            nbytes = good * tools.blocks.row_bytes
        tools.moved.loaded_bytes += nbytes
        tools.loaded(time.monotonic() - self._began)
        return good


def restored_blocks(order: Restore, admitted: Admitted | None, block_tokens: int) -> int:
    """The blocks of it that are whole, of what the daemon has said."""
    found = 0 if admitted is None else admitted.local_tokens
    return max(0, min(found, order.prompt.tokens - 1) - order.start) // block_tokens


class _Storing(Followed[None]):
    """A prompt that is handed in."""

    def __init__(self, tools: RequestTools, order: StorePages, lease: DaemonRequest, lasting: Lasting) -> None:
        super().__init__(tools, order.name, lease, None, lasting)
        self._order = order

    def begin(self) -> None:
        order = self._order
        try:
            words = self._tools.store_words(order, order.blocks)
            self.lease.client.admit_alone(order.name, **words)
            self.follow(words["deadline_s"] + ANSWER_SLACK_S + ANSWER_DEADLINE_S)  # the last for its copies
        except Exception as error:
            self.fail(error)

    def ended_well(self) -> None:
        self._tools.moved.saved_bytes += len(self._order.blocks) * self._tools.blocks.row_bytes
        self._tools.moved.stored += 1


class _Sending(Followed[bool]):
    """A prompt of which the daemon is told as it is computed, and then its reply's first token. It is done when nothing
    reads the prompt's blocks any more: whether all of it is in the daemon's hands."""

    def __init__(self, tools: RequestTools, push: Push, lease: DaemonRequest, lasting: Lasting) -> None:
        super().__init__(tools, push.order.name, lease, False, lasting)
        self._push = push
        self._saved = 0
        self._filled: tuple[int, ...] = ()
        self._named = 0  # blocks
        self._told = False  # its token

    def begin(self) -> None:
        """Begins it where the engine waits for nothing: what the daemon has is loaded on its word alone."""
        try:
            self._tools.begin(self.lease.client, self._push)
            self.start(0)
        except Exception as error:
            self.fail(error)

    def start(self, matched: int) -> None:
        """Has the daemon, which knows the prompt, told of it from now on. `matched`: tokens that are in its blocks
        without having been computed for it."""
        push, fill = self._push, self._push.fill
        self._saved = matched
        if fill is not None and matched:
            self._filled = fill.held_blocks + fill.blocks
            self._named = len(self._filled)
        push.hear = self.go_on
        self.follow(self._tools.end_seconds)

    def go_on(self) -> None:
        """Says what there is to be said. With an error of it the prompt is given up."""
        try:
            self._say_computed()
            self._say_token()
        except Exception as error:
            self.fail(error)

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

    def ended_well(self) -> bool:
        self._tools.moved.pushed += 1
        return True

    def _hear_no_more(self) -> None:
        super()._hear_no_more()
        self._push.hear = hear_nothing
