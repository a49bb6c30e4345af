"""A worker's session with its daemon: messages on the daemon's Unix socket (proto/worker.proto) and the pool's memory.

decode:  admit -> progress? -> ready -> grow* -> finish; a retracted one finishes early and is admitted again
prefill: begin -> begun? -> progress* -> aux -> ended
Any of them: abort. A request that failed is answered with abort too, once nothing of the worker touches its pages.

All methods belong to the event loop that called `connect`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvferry.client.attachment import Attachment, check_further
from kvferry.client.daemon_end import LATE_SECONDS, DaemonEnd
from kvferry.client.engine_pools import EnginePools
from kvferry.client.one_rank import OneRank
from kvferry.client.open_request import OpenRequest
from kvferry.client.requests import (
    FOR_PAGES,
    MAX_FINISH_DIGEST_BYTES,
    Admitted,
    AdmitWords,
    Begun,
    DaemonGone,
    HandshakeFailed,
    PageTokens,
    Patience,
    Ready,
    RequestFailed,
    RequestName,
    Retracted,
    Stowed,
    admit_message,
    check_output_digests,
    check_size,
    milliseconds,
    name_in_use,
    with_page_tokens,
)
from kvferry.client.stream import MAX_UNSENT_BYTES, Stream, new_hello, open_stream
from kvferry.proto import common_pb2, worker_pb2
from kvferry.proto.limits import MAX_AUX_BYTES, MAX_REASON_CHARS
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.waiting import complete, is_done

if TYPE_CHECKING:
    from typing_extensions import Unpack

ANSWER_SLACK_S = 5.0  # the daemon keeps a request's deadline itself; the client waits this much longer for its word
ANSWER_DEADLINE_S = 30.0  # for answers that wait for nothing but the daemon
UNMAP_DEADLINE_S = 30.0  # its copies end, its sessions are torn down
GROW_DEADLINE_S = 120.0  # it may wait for pages of a request that is retracted; the daemon has a deadline of its own

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class DaemonClient:
    """One worker's session. `DaemonClient.connect` makes it; `close` ends it."""

    def __init__(
        self,
        stream: Stream,
        welcome: worker_pb2.Welcome,
        attachment: Attachment,
        geometry: KVGeometry,
        rank: OneRank | None = None,
    ) -> None:
        self.welcome = welcome
        self.geometry = geometry
        self.pools = attachment.pools
        """The daemon's. Only pages of this worker's living requests may be touched."""
        self.gone: asyncio.Future[DaemonGone] = asyncio.get_running_loop().create_future()
        """Done when the session is broken; not when it was closed from here."""
        self.end = DaemonEnd(welcome) if attachment.pools.in_blocks else None
        """The proof that nothing touches blocks that were registered; None where none were."""
        self._stream = stream
        self._attachment = attachment
        self._rank = rank
        self._requests: dict[RequestName, OpenRequest] = {}
        self._broken: DaemonGone | None = None
        self._closing = False
        stream.listen(self._take)
        stream.over.add_done_callback(lambda over: self._break(over.result().reason))

    @classmethod
    async def connect(
        cls,
        socket: str,
        role: common_pb2.Role,
        facts: common_pb2.NamespaceFacts,
        worker: str,
        *,
        deadline_s: float = 30.0,
        late_ms: int = 0,
        own: EnginePools | None = None,
        rank: OneRank | None = None,
    ) -> DaemonClient:
        """Opens the session on the Unix socket `socket`, waiting up to `deadline_s` for the daemon to be there.

        facts.geometry.page_size may be 0 and its layout unspecified: the daemon's are taken (`.geometry` has them).
        own: the worker's own memory is to be the pool (`kvferry serve --pool engine`): it has the page size, and ends
        with the session, or where none comes about; see `close`. rank: of an engine whose ranks are processes: the
        daemon takes all in together, which is waited for TOGETHER_SECONDS longer; `own` and `pools` are this one's.
        late_ms: for which the daemon may hold back what this worker does not wait for (proto/worker.proto).
        Raises HandshakeFailed when the daemon refuses or its memory cannot be mapped, DaemonAbsent if there is none.
        """
        hello = new_hello(role, facts, worker, late_ms, own, rank)
        stream: Stream | None = None
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        try:
            stream = await open_stream(socket, deadline_s)
            stream.send(worker_pb2.WorkerMessage(hello=hello))
            welcome = await stream.welcome(max(0.0, until - loop.time()), rank)
            geometry = KVGeometry.from_proto(welcome.geometry)
            check_further(geometry, facts.geometry)
            if own is not None:
                own.mapped()
            mine = (welcome, geometry) if rank is None or own is not None else rank.part_of(welcome, geometry)
            attachment = Attachment(welcome.session_file, *mine, own)
        except BaseException as error:
            if stream is not None:
                stream.frames.abort()
            if own is not None:
                await complete(asyncio.to_thread(own.let_go))
            if isinstance(error, (OSError, ValueError)):
                raise HandshakeFailed(f"cannot attach to the pool of daemon {welcome.daemon!r}: {error}") from error
            raise
        try:
            client = cls(stream, welcome, attachment, geometry, rank)
        except OSError as error:
            stream.frames.abort()
            await asyncio.to_thread(attachment.close if own is None else attachment.close_mapped)
            raise HandshakeFailed(f"the lock of daemon {welcome.daemon!r}: {error}") from error
        client._send(worker_pb2.WorkerMessage(attached=worker_pb2.Attached()))
        return client

    # -- decode ----------------------------------------------------------------------------------------------------

    async def admit(self, name: RequestName, **words: Unpack[AdmitWords]) -> Admitted:
        """Asks the daemon to hold this prompt until Ready, within `deadline_s`. `held_tokens`: with KV in memory of the
        worker's own, a multiple of the page size; it fills their pages behind the matched ones and says `progress`.
        `blocks`: of an engine that has registered blocks, where the bytes go from token `blocks_from` on, or with all
        tokens held where they are; they are the daemon's until `finish` or `abort` returns. `held_blocks`: those of the
        held tokens, where Welcome.way_back: to be read from `progress` until `ready`, or `abort`, returns.
        Raises RequestFailed, DaemonGone; NotOpened when the name is in use or the digests of the prompt or of the
        output do not fit in a message."""
        request = self._open_admit(admit_message(name, words), name, words)
        return await self._wait(name, request.admitted, request.deadline_s + ANSWER_SLACK_S, "Admitted")

    def admit_alone(self, name: RequestName, **words: Unpack[AdmitWords]) -> None:
        """Asks as `admit` does, for a request that is over when its prompt is there: `finish` is not said. `when_ended`
        tells of that, then `arrived` has what came. Where `takes_alone`, with blocks, without `held_blocks`."""
        message = admit_message(name, words)
        message.admit.ends_itself = True
        loads = words["prefill"] != "" or words.get("held_tokens", 0) < words["tokens"]
        self._open_admit(message, name, words).ends_when_ready = loads

    def _open_admit(self, message: worker_pb2.WorkerMessage, name: RequestName, words: AdmitWords) -> OpenRequest:
        check_output_digests(words["tokens"], words["max_new_tokens"], self.geometry.page_size)
        return self._open(name, message, words["tokens"], words["deadline_s"])

    @property
    def takes_alone(self) -> bool:
        """Whether the daemon takes `admit_alone`. Ranks end their requests together."""
        return self.welcome.ends_itself and self._rank is None

    def arrived(self, name: RequestName) -> tuple[Admitted | None, Ready | None]:
        """The daemon's answers to `admit_alone`, once it has ended; None: not given, as of what is handed in."""
        return self._requests[name].answers

    async def ready(self, name: RequestName) -> Ready:
        """Waits until every prompt page is readable, at most for the deadline given to `admit`."""
        request = self._of(name)
        return await self._wait(name, request.ready, request.deadline_s + ANSWER_SLACK_S, "Ready")

    def page_tokens(self, name: RequestName, first_token: int, tokens: Sequence[int]) -> None:
        """Tells the daemon `tokens` of the prompt's full pages from `Ready.page_tokens_from` on, where that is
        given."""
        self.check(name)
        told = worker_pb2.PageTokens(name=name.to_proto(), first_token=first_token, tokens=tokens)
        if told.ByteSize() <= MAX_FINISH_DIGEST_BYTES:  # for others only: a message that is too long is left out
            self._send(worker_pb2.WorkerMessage(page_tokens=told))

    async def grow(self, name: RequestName, tokens: int) -> tuple[int, ...]:
        """Asks for room for `tokens` tokens in all, inside the promise of max_new_tokens. Returns the ids of the added
        pages, in order; they follow those the request has. One call at a time for a request. Raises Retracted, too."""
        request = self._of(name)
        assert request.grown is None, f"request {name} is already growing"
        if request.retracted:
            raise Retracted
        request.grown = asyncio.get_running_loop().create_future()
        self._send(worker_pb2.WorkerMessage(grow=worker_pb2.Grow(name=name.to_proto(), tokens=tokens)))
        try:
            return await self._wait(name, request.grown, GROW_DEADLINE_S, "Grown")
        finally:
            request.grown = None

    async def finish(
        self,
        name: RequestName,
        *,
        tokens: int,
        digests: bytes,
        continues: bool = False,
        page_tokens: PageTokens | None = None,
    ) -> None:
        """The worker touches the request's pages no more. `tokens`: with KV in the pool; `digests`: of the full pages
        behind the prompt's full pages; `continues`: it was retracted, and when this returns its name may be admitted
        again; `page_tokens`: where Ready asked for them, those of all full pages that were not sent yet."""
        request = self._of(name)
        finish = worker_pb2.Finish(name=name.to_proto(), tokens=tokens, digests=digests, continues=continues)
        self._send(worker_pb2.WorkerMessage(finish=with_page_tokens(finish, page_tokens)))
        await self._wait(name, request.ended, ANSWER_DEADLINE_S, "Ended")
        self._requests.pop(name, None)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        name: RequestName,
        *,
        digests: bytes,
        tokens: int,
        tail_digest: bytes,
        deadline_s: float,
        priority: int = 0,
        warmup: bool = False,
        traceparent: str = "",
        blocks: Sequence[int] = (),
        patience: Patience = FOR_PAGES,
    ) -> None:
        """Asks the daemon for pages for this prompt; `begun` has them. `blocks`: the first of them, of an engine that
        has registered blocks, and need not wait for `begun`; they are read until `ended` or `abort` returns. Raises
        DaemonGone; NotOpened when the name is in use or the prompt's digests do not fit in a message."""
        message = worker_pb2.WorkerMessage()
        begin = message.begin
        begin.name.request_id, begin.name.attempt = name
        begin.digests, begin.tokens, begin.tail_digest = digests, tokens, tail_digest
        begin.deadline_ms, begin.priority, begin.warmup = milliseconds(deadline_s), priority, warmup
        begin.traceparent = traceparent
        begin.blocks.extend(blocks)
        begin.patience, begin.held_tokens = patience.kind, patience.held_tokens
        self._open(name, message, tokens, deadline_s).proceed = patience.proceed

    async def begun(self, name: RequestName) -> Begun:
        """Waits for the answer to `begin`, at most for the deadline given to it. Raises RequestFailed, DaemonGone."""
        request = self._of(name)
        return await self._wait(name, request.begun, request.deadline_s + ANSWER_SLACK_S, "Begun")

    def fetch(self, name: RequestName, blocks: Sequence[int], held_tokens: int) -> None:
        """Has what Proceed offered fetched into the prompt's first blocks, but those of the first `held_tokens`; no
        blocks: nothing. Raises RequestFailed if the request failed."""
        self.check(name)
        told = worker_pb2.Fetch(name=name.to_proto(), blocks=blocks, held_tokens=held_tokens)
        self._send(worker_pb2.WorkerMessage(fetch=told))

    def progress(self, name: RequestName, tokens: int, blocks: Sequence[int] = ()) -> None:
        """The KV of the prompt's first `tokens` tokens is in the pool; `blocks`: those that follow what was named.
        Raises RequestFailed if the request failed."""
        self.check(name)
        message = worker_pb2.WorkerMessage()
        progress = message.progress
        progress.name.request_id, progress.name.attempt = name
        progress.tokens = tokens
        if self._rank is None or self._rank.rank == 0:  # they are the same on all ranks
            progress.blocks.extend(blocks)
        self._send(message)

    def aux(self, name: RequestName, blob: bytes) -> None:
        """The worker's last word: it touches the request's pages no more."""
        assert len(blob) <= MAX_AUX_BYTES
        self.check(name)
        message = worker_pb2.WorkerMessage()
        message.aux.name.request_id, message.aux.name.attempt = name
        message.aux.blob = blob
        self._send(message)

    def stow(self, name: RequestName, told: Callable[[Stowed], None]) -> None:
        """Asks for the blocks of a request back, behind `aux`, where Welcome.stows. `told` hears the answer, or nothing
        where the request ends before. One that is not open is over."""
        request = self._requests.get(name)
        if request is not None and request.failure is None and self._broken is None:
            request.stowed = told
            self._send(worker_pb2.WorkerMessage(stow=worker_pb2.Stow(name=name.to_proto())))

    async def ended(self, name: RequestName, deadline_s: float) -> None:
        """Waits until the daemon needs nothing more of the request and forgets it. Raises RequestFailed, DaemonGone."""
        await self._wait(name, self._of(name).ended, deadline_s, "Ended")
        self._requests.pop(name, None)

    def when_ended(self, name: RequestName, hear: Callable[[BaseException | None], None]) -> None:
        """Has `hear` called, once, when `ended` would return, with None, or raise, with the error."""
        self._requests[name].when_ended(hear)

    def forget(self, name: RequestName) -> None:
        """Forgets a request of which `when_ended` was told that it has ended."""
        del self._requests[name]

    # -- both ------------------------------------------------------------------------------------------------------

    def check(self, name: RequestName) -> None:
        """Raises RequestFailed or DaemonGone when the request's pages must not be touched any more."""
        request = self._of(name)
        if request.failure is not None:
            raise request.failure

    def check_kept(self, name: RequestName) -> None:
        """Checks as `check` does; raises Retracted, too, when the daemon wants the pages back: the request is to
        finish."""
        self.check(name)
        if self._of(name).retracted:
            raise Retracted

    async def abort(self, name: RequestName, reason: str) -> None:
        """Ends the request, or answers its failure; nothing of the worker touches its pages any more. Never raises
        RequestFailed; does nothing for a name that is over, or when the daemon is gone."""
        request = self._requests.get(name)
        if request is None or self._broken is not None:
            return
        message = worker_pb2.Abort(name=name.to_proto(), reason=reason[:MAX_REASON_CHARS])
        try:
            self._send(worker_pb2.WorkerMessage(abort=message))
            if request.failure is None:
                await self._wait(name, request.ended, ANSWER_DEADLINE_S, "Ended")
        except (RequestFailed, DaemonGone) as error:
            _log.info("request %s: abort was not acknowledged: %s", name, error)
        finally:
            self._requests.pop(name, None)

    def decline(self, name: RequestName, reason: str) -> None:
        """Tells the other ranks of the engine, where it has several, that this one will not open the request that they
        open."""
        if self._rank is not None and self._broken is None:
            for message in self._rank.refusal(name.to_proto(), reason[:MAX_REASON_CHARS]):
                self._stream.send(message)

    async def release(self, name: RequestName, reason: str) -> None:
        """Aborts a request that named blocks, and returns when the daemon touches none of them any more: it has said
        so, or its end is proven. However long that takes."""
        assert self.end is not None, "the worker has registered no blocks"
        request = self._requests.get(name)
        if request is None:
            return
        abort = worker_pb2.Abort(name=name.to_proto(), reason=reason[:MAX_REASON_CHARS])
        request.ends_when_ready = False  # an Ended answers the Abort in any case
        try:
            self._send(worker_pb2.WorkerMessage(abort=abort))
            while not await is_done(request.released, LATE_SECONDS):
                _log.error("daemon %r does not let go of the blocks of request %s", self.welcome.daemon, name)
            request.released.result()
        except DaemonGone:
            await self.end.wait()
        finally:
            self._requests.pop(name, None)

    @property
    def open_requests(self) -> int:
        """Requests that neither ended nor were aborted."""
        return len(self._requests)

    async def close(self, deadline_s: float = 5.0) -> None:
        """Says that the worker writes no more, and lets the stream, the memory and the lock go. Where the pool is the
        worker's own memory, the daemon unmaps it before it ends the stream: that, and what is queued on the devices, is
        waited for longer. Without that word what of it is on GPUs stays allocated to the end of this process."""
        if self._closing:
            return
        self._closing = True
        owns = self._attachment.owns
        heard = await self._quiesced(max(deadline_s, UNMAP_DEADLINE_S) if owns else deadline_s)
        self._stream.frames.abort()
        self._break(DaemonGone("the session was closed"))
        if heard and self.end is not None:
            self.end.prove()
        close = self._attachment.close_mapped if owns and not heard else self._attachment.close
        await asyncio.to_thread(close)  # it waits for the devices, however long

    async def _quiesced(self, deadline_s: float) -> bool:
        """Says so behind the devices; whether the daemon has heard it, and has unmapped memory of the worker's own.
        `deadline_s`: for each of the two."""
        if self._broken is not None or not await self._attachment.settled(deadline_s):
            return False
        try:
            self._send(worker_pb2.WorkerMessage(quiesced=worker_pb2.Quiesced()))
        except DaemonGone:
            return False
        self._stream.frames.end()
        ended = await is_done(self._stream.over, deadline_s) and self._stream.over.result().code == 0
        if self._attachment.owns and not ended:
            _log.warning("the daemon has not said that it has unmapped the pool")
        return ended

    # -- the stream ------------------------------------------------------------------------------------------------

    def _open(
        self, name: RequestName, message: worker_pb2.WorkerMessage, tokens: int, deadline_s: float
    ) -> OpenRequest:
        self._raise_if_broken()
        if name in self._requests:
            raise name_in_use(name)
        data = message.SerializeToString()  # once: to be measured it is made, too
        check_size(len(data), tokens, self.geometry.page_size)
        shape = self.geometry.page_size, self.welcome.pages, self.pools.in_blocks
        request = self._requests[name] = OpenRequest(tokens, deadline_s, *shape)
        self._send(data if self._rank is None else self._rank.opening(message))
        return request

    def _of(self, name: RequestName) -> OpenRequest:
        self._raise_if_broken()
        request = self._requests.get(name)
        assert request is not None, f"request {name} is not open"
        return request

    def _send(self, message: worker_pb2.WorkerMessage | bytes) -> None:
        self._raise_if_broken()
        if not self._stream.send(message):
            self._break(DaemonGone(f"the daemon takes no messages: more than {MAX_UNSENT_BYTES} bytes wait"))
            self._raise_if_broken()

    async def _wait(self, name: RequestName, future: asyncio.Future[_T], deadline_s: float, what: str) -> _T:
        if not await is_done(future, deadline_s):
            why = f"the daemon did not say {what} of {name} within {deadline_s:g} s"
            raise RequestFailed(common_pb2.ERROR_DEADLINE_EXCEEDED, why)
        return future.result()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _break(self, broken: DaemonGone) -> None:
        if self._broken is not None:
            return
        self._broken = broken
        for request in self._requests.values():
            request.lose(self._broken)
        if not self._closing and not self.gone.done():
            self.gone.set_result(self._broken)

    def _take(self, kind: str | None, event: worker_pb2.WorkerEvent) -> None:
        if kind == "welcome":
            raise ValueError("a second Welcome")
        if kind is not None:
            name = RequestName.from_proto(getattr(event, kind).name)
            if (request := self._requests.get(name)) is not None:  # else its Abort and this event crossed
                request.take(kind, event)
