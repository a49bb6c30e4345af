"""A reply of vLLM's on its way to the client, and how one begins with the prefill server's first token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import httpx
import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvferry.front.edge.metrics import CountedLeg, FirstTokenEnd
from kvferry.front.first_token.answer import SentToken
from kvferry.front.first_token.behind import Behind, GoneOn, Lost, SaidError, SaidReasoning, Unlike
from kvferry.front.vllm_body import Refusal
from kvferry.waiting import within

_log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """A reply that is not whole, as its last event says."""


class DecodeAnswer(NamedTuple):
    """A server's answer, begun."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]
    counted: CountedLeg | None = None
    at_once: AtOnce | None = None  # what follows `first`, where that is prefill's token; then `rest` is decode's


GoOn = Callable[[SentToken], Awaitable["DecodeAnswer | None"]]
_FAILED = (SaidError, Lost, Refusal, httpx.TransportError, asyncio.TimeoutError)


class AtOnce:
    """Decode's stream behind prefill's token, which the client has, until decode says that it has it, too.
    go_on: lets go of decode and asks for what is behind the token once more, where decode fails before, or has another
    one; None: there is no way."""

    def __init__(
        self,
        sent: SentToken,
        asking: asyncio.Task[DecodeAnswer],
        next_token_s: float,
        go_on: GoOn,
        ended: Callable[[FirstTokenEnd], None],
    ) -> None:
        self._sent = sent
        self._asking = asking
        self._next_token_s = next_token_s
        self._go_on = go_on
        self._ended = ended
        self.other: DecodeAnswer | None = None  # whose rest follows, in the place of decode's

    async def pieces(self, counted: CountedLeg | None) -> AsyncIterator[bytes]:
        """What goes to the client, until nothing of it is left to be looked at. Raises BrokenOff."""
        try:
            async for piece in self._met():
                yield piece
            self._ended("met")
        except Unlike as error:
            _log.error("%s; %s", error, error.check)
            if not isinstance(error, SaidReasoning) and await self._gone_on():
                return
            self._ended("unlike")
            yield _error_event(f"the decode server went another way: {error}")
            raise BrokenOff(str(error)) from error
        except _FAILED as error:
            if counted is not None:
                counted.failed()
            why = str(error) or f"it said nothing for {self._next_token_s:g} s"
            _log.warning("behind its first token a decode server failed: %s", why)
            if await self._gone_on():
                return
            self._ended("lost")
            yield error.event if isinstance(error, SaidError) else _error_event(f"the decode server failed: {why}")
            raise BrokenOff(why) from error

    async def _gone_on(self) -> bool:
        """Takes another server's reply behind the token, or the same's, as `other`; False: there is no way."""
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        reply = await self._go_on(self._sent)
        if reply is None:
            return False
        events = GoneOn(self._sent)
        try:
            told = await self._begun(events, reply)
        except (Unlike, *_FAILED) as error:
            _log.warning("no way on behind a first token: %s", str(error) or type(error).__name__)
            if reply.counted is not None and not isinstance(error, Unlike):
                reply.counted.failed()
            return False
        self._ended("gone_on")
        self.other = reply._replace(first=b"", rest=_filtered(told, events, reply.rest))
        return True

    async def _begun(self, events: GoneOn, reply: DecodeAnswer) -> bytes:
        """What goes on of the reply's bytes until its prompt is known."""
        told = events.feed(reply.first)
        while not events.begun:
            piece = await within(self._next_token_s, anext(reply.rest, None))
            if piece is None:
                raise Lost("its stream ended before it had begun")
            told += events.feed(piece)
        return told

    async def _met(self) -> AsyncIterator[bytes]:
        behind = Behind(self._sent)
        reply = await within(self._next_token_s, asyncio.shield(self._asking))
        piece: bytes | None = reply.first
        while piece is not None:
            if told := behind.feed(piece):
                yield told
            if behind.done:
                return
            piece = await within(self._next_token_s, anext(reply.rest, None))
        behind.end()


async def _filtered(first: bytes, events: GoneOn, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        if told := events.feed(piece):
            yield told


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "service_unavailable_error", "param": None, "code": 502}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


async def streamed(reply: DecodeAnswer, next_token_s: float) -> AsyncGenerator[bytes, None]:
    """The reply's bytes as they come."""
    if reply.first:
        yield reply.first
    if reply.at_once is not None:
        async for piece in reply.at_once.pieces(reply.counted):
            yield piece
        reply = reply.at_once.other or reply
    while True:
        try:
            chunk = await within(next_token_s, anext(reply.rest, None))
        except (asyncio.TimeoutError, httpx.TransportError) as error:
            _log.warning("a reply broke off: %s %s", type(error).__name__, error)
            if reply.counted is not None:
                reply.counted.failed()
            raise
        if chunk is None:
            if reply.counted is not None:
                reply.counted.answered(reply.response.status_code)
            return
        yield chunk


class StreamedReply(StreamingResponse):
    """Lets go of the servers however the response ends, even before its first byte."""

    def __init__(
        self, content: AsyncIterator[bytes], stack: contextlib.AsyncExitStack, status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(content, status_code=status, headers=headers)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.let_go()

    async def let_go(self) -> None:
        """Ends the call to the server; needed also where the reply is never sent."""
        await self._stack.aclose()
