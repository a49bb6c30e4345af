"""The front end before unmodified vLLM servers: each request goes to a prefill and a decode server at once, and what
decode answers goes to the client as it comes. No conversation is remembered: pages are matched by content."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import httpx
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvferry import tracing
from kvferry.front.edge.metrics import CountedLeg, FrontMetrics
from kvferry.front.upstream.connections import Connections
from kvferry.front.upstream.names import NamedServers
from kvferry.front.vllm_body import Body, Refusal
from kvferry.front.vllm_places import Place
from kvferry.proto.limits import REQUEST_ID_BYTES
from kvferry.secret_files import BearerToken
from kvferry.waiting import within

DOWN_SECONDS = 2.0  # that a server is passed over after it could not be reached
CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 3.0
SPLIT_PATHS = ("/v1/chat/completions", "/v1/completions")
WHOLE_PATHS = ("/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")  # a decode server answers by itself
_PASSED_ON = ("content-type",)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    prefill: tuple[Place, ...]  # empty: decode servers do all
    decode: tuple[Place, ...]
    first_token_s: float = 60.0
    next_token_s: float = 30.0
    reply_s: float = 600.0  # a whole reply that is not streamed
    max_requests: int = 1024
    load_factor: float = 1.5  # a decode server is passed over when its load is above factor x mean + slack
    load_slack: float = 2.0
    engine_token: BearerToken | None = None  # sent in the place of the clients' authorization
    passes_authorization: bool = True  # the clients' own is the servers' to judge


@dataclass(slots=True, eq=False)
class Server:
    place: Place
    running: int = 0
    down_until: float = 0.0

    @property
    def url(self) -> str:
        return self.place.url


class Caller(NamedTuple):
    """A client's headers that are passed on, as they came."""

    traceparent: str = ""  # of its span, if it has one
    authorization: str = ""
    request_id: str = ""


class _Legs(NamedTuple):
    """The path, headers and time bound that both halves of a request share."""

    path: str
    traceparent: str
    authorization: str
    client_id: str  # x-request-id
    said_within_s: float  # decode's first byte

    def headers(self, server: Server) -> dict[str, str]:
        """Headers of the call. A reply is passed on as it comes: not compressed."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if server.place.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(server.place.dp_rank)
        headers |= dict(tracing.metadata_of(self.traceparent))
        if self.client_id:
            headers["x-request-id"] = self.client_id
        return {**headers, "authorization": self.authorization} if self.authorization else headers


@dataclass(slots=True)
class VllmCounts:
    requests: int = 0
    alone: int = 0  # went to decode only, since it cannot be split or no prefill server is up
    again: int = 0  # prefill failed before the first byte: decode was asked once more, alone
    moved: int = 0  # times that another decode server was asked, since one could not be reached
    refused: int = 0


class DecodeAnswer(NamedTuple):
    """A decode server's answer, begun."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]
    counted: CountedLeg | None = None


class _Away(Refusal):
    """A decode server that cannot be reached."""


class VllmPrefillFailed(Exception):
    """Prefill's half will not come."""


@dataclass(slots=True)
class VllmFront:
    config: VllmConfig
    clock: Callable[[], float] = time.monotonic
    counts: VllmCounts = field(default_factory=VllmCounts)
    metrics: FrontMetrics = field(default_factory=FrontMetrics)
    running: int = 0
    prefill: list[Server] = field(init=False)
    decode: list[Server] = field(init=False)
    connections: Connections = field(default_factory=Connections)
    client: httpx.AsyncClient = field(init=False)  # for what is no request's leg
    names: NamedServers = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = [Server(place) for place in self.config.prefill if not place.is_name]
        self.decode = [Server(place) for place in self.config.decode if not place.is_name]
        told = [place for place in (*self.config.prefill, *self.config.decode) if place.is_name]
        self.names = NamedServers(told, self.healthy, self._found)
        timeout = _timeout(self.config.first_token_s)
        self.client = httpx.AsyncClient(timeout=timeout, transport=self.connections, trust_env=False)

    async def close(self) -> None:
        await self.names.close()
        await self.client.aclose()

    async def healthy(self, url: str) -> bool:
        """Whether the server at a URL says that it is well."""
        try:
            return (await self.client.get(url + "/health", timeout=HEALTH_SECONDS)).status_code == 200
        except httpx.TransportError:
            return False

    def authorization(self, given: str) -> str:
        """The header for the servers: the token for them, else the client's own where nobody here has read it.
        Refusal of what no header may have."""
        if self.config.engine_token is not None:
            return self.config.engine_token.header
        if not given.isascii():
            raise Refusal(400, "authorization: the header has a character that is not ASCII")
        return given if self.config.passes_authorization else ""

    def _found(self, places: list[Place]) -> None:
        """Takes what names of DNS have now in the place of what they had."""
        self.prefill = _merged(self.prefill, [place for place in places if place.daemon])
        self.decode = _merged(self.decode, [place for place in places if not place.daemon])

    # -- one request -----------------------------------------------------------------------------------------------

    async def answer(self, path: str, body: Body, left: Callable[[], None], caller: Caller) -> StreamedReply:
        """Answers a request. `left` is called once, when it is over."""
        self.counts.requests += 1
        stack = contextlib.AsyncExitStack()
        stack.callback(left)
        try:
            span = stack.enter_context(tracing.span("request", tracing.checked(caller.traceparent), "server"))
            within_s = self.config.first_token_s if body.streamed else self.config.reply_s
            authorization = self.authorization(caller.authorization)
            legs = _Legs(path, span.traceparent, authorization, caller.request_id, within_s)
            reply = await self._anywhere(stack, legs, body)
        except BaseException:
            await stack.aclose()
            raise
        told = reply.response.headers
        headers = {name: told[name] for name in _PASSED_ON if name in told}
        return StreamedReply(self._stream(reply), stack, reply.response.status_code, headers)

    async def _anywhere(self, stack: contextlib.AsyncExitStack, legs: _Legs, body: Body) -> DecodeAnswer:
        """An answer begun. A decode server that cannot be reached has been sent nothing: another one is asked."""
        gone: list[Server] = []
        while True:
            decode = self.choose_decode(body.head, gone)
            inner = contextlib.AsyncExitStack()
            try:
                reply = await self._at(inner, decode, legs, body)
                stack.push_async_exit(inner)
                return reply
            except _Away as error:
                await inner.aclose()
                gone.append(decode)
                if all(server in gone for server in self.decode):
                    raise
                self.counts.moved += 1
                _log.warning("%s; another one is asked", error)
            except BaseException:
                await inner.aclose()
                raise

    async def _at(self, stack: contextlib.AsyncExitStack, decode: Server, legs: _Legs, body: Body) -> DecodeAnswer:
        splits = legs.path in SPLIT_PATHS and body.can_be_split
        prefill = self.choose_prefill() if splits else None
        if prefill is not None:
            return await self._both(stack, prefill, decode, legs, body)
        reply = await self._begun(stack, decode, legs, body.alone())
        self.counts.alone += 1  # not before: one that cannot be reached computes nothing
        if legs.path in SPLIT_PATHS:
            self.metrics.alone("no_prefill" if splits else "whole")
        return reply

    async def _both(
        self, stack: contextlib.AsyncExitStack, prefill: Server, decode: Server, legs: _Legs, body: Body
    ) -> DecodeAnswer:
        """Decode's answer begun. Where prefill fails before, decode is asked once more, to do it alone."""
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        half = asyncio.create_task(self._prefill(prefill, legs, body.for_prefill(request_id)), name="prefill half")
        stack.push_async_callback(_cancelled, half)
        inner = contextlib.AsyncExitStack()
        asking = asyncio.create_task(
            self._begun(inner, decode, legs, body.for_decode(request_id, prefill.place.daemon)), name="decode half"
        )
        try:
            await asyncio.wait({half, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and half.exception() is not None:
                raise VllmPrefillFailed(str(half.exception()))
            reply = await asking
        except VllmPrefillFailed as error:
            _log.warning("prefill server %s: %s; decode goes on alone", prefill.url, error)
            await _cancelled(asking)
            await inner.aclose()
            alone = await self._begun(stack, decode, legs, body.alone())
            self.counts.again += 1
            self.metrics.alone("prefill_failed")
            return alone
        except BaseException:
            await _cancelled(asking)
            await inner.aclose()
            raise
        stack.push_async_exit(inner)
        return reply

    async def _prefill(self, server: Server, legs: _Legs, body: bytes) -> None:
        with tracing.span("prefill leg", legs.traceparent, "client", server=server.url) as span:
            await self._prefill_under(server, legs._replace(traceparent=span.traceparent), body)

    async def _prefill_under(self, server: Server, leg: _Legs, body: bytes) -> None:
        server.running += 1
        counted = self.metrics.leg("prefill", server.place.told)
        try:
            with counted:
                reply = await self._posted(counted, server, leg, body)
        finally:
            server.running -= 1
        if (
            reply.status_code >= 400
        ):  # what is the client's fault decode refuses, too, and the client hears it from there
            raise VllmPrefillFailed(f"answered {reply.status_code}: {reply.text[:200]}")
        if not _was_sent(reply):
            raise VllmPrefillFailed("answered without kv_transfer_params: its pages are not sent")

    async def _posted(self, counted: CountedLeg, server: Server, leg: _Legs, body: bytes) -> httpx.Response:
        try:
            reply = await self._sent(server, leg, body, self.config.first_token_s)
            try:
                await reply.aread()
            finally:
                await reply.aclose()
        except httpx.TransportError as error:
            counted.failed()
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                server.down_until = self.clock() + DOWN_SECONDS
            raise VllmPrefillFailed(f"{type(error).__name__} {error}") from error
        counted.answered(reply.status_code)
        return reply

    async def _begun(self, stack: contextlib.AsyncExitStack, server: Server, legs: _Legs, body: bytes) -> DecodeAnswer:
        """The reply once its first bytes are there: vLLM sends headers before it has anything to say."""
        counted = stack.enter_context(self.metrics.leg("decode", server.place.told))
        try:
            reply = await self._ask(stack, server, legs, body)
            return reply._replace(first=await anext(reply.rest, b""), counted=counted)
        except httpx.TimeoutException as error:
            counted.failed()
            raise Refusal(504, f"decode server {server.url} said nothing for {legs.said_within_s:g} s") from error
        except httpx.TransportError as error:
            counted.failed()
            raise Refusal(502, f"decode server {server.url}: {type(error).__name__} {error}") from error
        except Refusal:
            counted.failed()
            raise

    async def _ask(self, stack: contextlib.AsyncExitStack, server: Server, legs: _Legs, body: bytes) -> DecodeAnswer:
        server.running += 1
        stack.callback(_leave, server)
        span = stack.enter_context(tracing.span("decode leg", legs.traceparent, "client", server=server.url))
        leg = legs._replace(traceparent=span.traceparent)
        try:
            response = await self._sent(server, leg, body, leg.said_within_s)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            server.down_until = self.clock() + DOWN_SECONDS
            raise _Away(503, f"decode server {server.url} cannot be reached: {type(error).__name__} {error}") from error
        except httpx.TimeoutException as error:
            raise Refusal(504, f"decode server {server.url} did not answer within {leg.said_within_s:g} s") from error
        except httpx.TransportError as error:
            raise Refusal(502, f"decode server {server.url}: {type(error).__name__} {error}") from error
        stack.push_async_callback(response.aclose)
        return DecodeAnswer(response, b"", response.aiter_raw())

    async def _sent(self, server: Server, leg: _Legs, body: bytes, within_s: float) -> httpx.Response:
        """The reply's head. No cookies, redirects or proxies, for which httpx's client looks at each request."""
        timeout = {"timeout": _timeout(within_s).as_dict()}
        url = _url(server.url + leg.path)
        request = httpx.Request("POST", url, headers=leg.headers(server), content=body, extensions=timeout)
        return await self.connections.handle_async_request(request)

    async def _stream(self, reply: DecodeAnswer) -> AsyncGenerator[bytes, None]:
        if reply.first:
            yield reply.first
        while True:
            try:
                chunk = await within(self.config.next_token_s, anext(reply.rest, None))
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

    # -- choices ---------------------------------------------------------------------------------------------------

    def choose_prefill(self) -> Server | None:
        """The least loaded that is up."""
        now = self.clock()
        up = [server for server in self.prefill if server.down_until <= now]
        return min(up, key=lambda server: server.running, default=None)

    def choose_decode(self, head: bytes, without: Sequence[Server] = ()) -> Server:
        """The server where this conversation's beginning belongs, unless it has much more to do than the others."""
        now = self.clock()
        known = [server for server in self.decode if server not in without]
        up = [server for server in known if server.down_until <= now] or known
        if not up:
            raise Refusal(503, "no decode server is known: none of those that DNS names is well")
        bound = self.config.load_factor * sum(server.running for server in up) / len(up) + self.config.load_slack
        free = [server for server in up if server.running <= bound]
        return max(free or up, key=lambda server: hashlib.sha256(server.place.label.encode() + head).digest())


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


@lru_cache(1024)
def _url(text: str) -> httpx.URL:
    return httpx.URL(text)


@lru_cache(16)
def _timeout(within_s: float) -> httpx.Timeout:
    return httpx.Timeout(within_s, connect=CONNECT_SECONDS)


def _was_sent(reply: httpx.Response) -> bool:
    """The connector names what it sends in its answer."""
    try:
        answer = reply.json()
    except ValueError:
        return False
    return isinstance(answer, dict) and bool(answer.get("kv_transfer_params"))


def _merged(servers: list[Server], places: list[Place]) -> list[Server]:
    """The servers that have an address of their own, and one for each of these places: the one that was there, with its
    load, where it was."""
    known = {server.place: server for server in servers if server.place.name}
    fixed = [server for server in servers if not server.place.name]
    return fixed + [known.get(place) or Server(place) for place in places]


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _leave(server: Server) -> None:
    server.running -= 1
