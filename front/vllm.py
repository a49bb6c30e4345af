"""The front end before unmodified vLLM servers: each request goes to a prefill and a decode server at once, and what
decode answers goes to the client as it comes. No conversation is remembered: pages are matched by content."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import httpx

from kvferry import tracing
from kvferry.channels import ClientTls
from kvferry.front.edge.metrics import FrontMetrics, Role
from kvferry.front.first_token.answer import SentToken, as_whole_reply, first_token_of
from kvferry.front.upstream.connections import Connections
from kvferry.front.upstream.daemons import DecodeDaemons
from kvferry.front.upstream.legs import Away, Calls, Legs, PrefillHalf, Server, VllmPrefillFailed, timeout_of
from kvferry.front.upstream.names import NamedServers
from kvferry.front.vllm_body import Body, Refusal
from kvferry.front.vllm_places import Place
from kvferry.front.vllm_reply import AtOnce, DecodeAnswer, GoOn, StreamedReply, streamed
from kvferry.proto.limits import REQUEST_ID_BYTES
from kvferry.secret_files import BearerToken

HEALTH_SECONDS = 3.0
GOES_ON = 2  # servers that are asked for what is behind a first token
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
    first_token: Literal["prefill", "decode"] = "decode"  # whose goes to the client
    daemon_tls: ClientTls | None = None  # of health checks


class Caller(NamedTuple):
    """A client's headers that are passed on, as they came."""

    traceparent: str = ""  # of its span, if it has one
    authorization: str = ""
    request_id: str = ""


@dataclass(slots=True)
class VllmCounts:
    requests: int = 0
    alone: int = 0  # went to decode only: it cannot be split, no prefill server is up, or no decode daemon is ready
    again: int = 0  # prefill failed before the first byte: decode was asked once more, alone
    moved: int = 0  # times that another decode server was asked, since one could not be reached
    refused: int = 0


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
    calls: Calls = field(init=False)
    names: NamedServers = field(init=False)
    daemons: DecodeDaemons = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = [Server(place) for place in self.config.prefill if not place.is_name]
        self.decode = [Server(place) for place in self.config.decode if not place.is_name]
        told = [place for place in (*self.config.prefill, *self.config.decode) if place.is_name]
        self.names = NamedServers(told, self.healthy, self._found)
        self.daemons = DecodeDaemons(lambda: self.decode, self.config.daemon_tls)
        timeout = timeout_of(self.config.first_token_s)
        self.calls = Calls(self.connections, self.metrics, self.clock, self.config.first_token_s)
        self.client = httpx.AsyncClient(timeout=timeout, transport=self.connections, trust_env=False)

    def start(self) -> None:
        """Looks for servers behind names, and at their daemons, until `close`."""
        self.names.start()
        self.daemons.start()

    async def close(self) -> None:
        await self.names.close()
        await self.daemons.close()
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
            legs = Legs(path, span.traceparent, authorization, caller.request_id, within_s)
            reply = await self._anywhere(stack, legs, body)
        except BaseException:
            await stack.aclose()
            raise
        told = reply.response.headers
        headers = {name: told[name] for name in _PASSED_ON if name in told}
        return StreamedReply(streamed(reply, self.config.next_token_s), stack, reply.response.status_code, headers)

    async def _anywhere(self, stack: contextlib.AsyncExitStack, legs: Legs, body: Body) -> DecodeAnswer:
        """An answer begun. A decode server that cannot be reached has been sent nothing: another one is asked."""
        gone: list[Server] = []
        while True:
            decode = self.choose_decode(body.head, gone)
            inner = contextlib.AsyncExitStack()
            try:
                reply = await self._at(inner, decode, legs, body)
                stack.push_async_exit(inner)
                return reply
            except Away as error:
                await inner.aclose()
                gone.append(decode)
                if all(server in gone for server in self.decode):
                    raise
                self.counts.moved += 1
                _log.warning("%s; another one is asked", error)
            except BaseException:
                await inner.aclose()
                raise

    async def _at(self, stack: contextlib.AsyncExitStack, decode: Server, legs: Legs, body: Body) -> DecodeAnswer:
        splits = legs.path in SPLIT_PATHS and body.can_be_split
        unready = decode.unready
        prefill = self.choose_prefill() if splits and not unready else None
        if prefill is not None and body.asks_one_token and self._hurries:
            return await self._one_token(stack, prefill, decode, legs, body)
        if prefill is not None:
            return await self._both(stack, prefill, decode, legs, body)
        reply = await self.calls.begun(stack, decode, legs, body.alone())
        self.counts.alone += 1  # not before: one that cannot be reached computes nothing
        if legs.path in SPLIT_PATHS:
            self.metrics.alone("whole" if not splits else "no_daemon" if unready else "no_prefill")
        return reply

    async def _both(
        self, stack: contextlib.AsyncExitStack, prefill: Server, decode: Server, legs: Legs, body: Body
    ) -> DecodeAnswer:
        """Decode's answer begun. Where prefill fails before, decode is asked once more, to do it alone."""
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        half = asyncio.create_task(
            self.calls.prefilled(prefill, legs, body.for_prefill(request_id)), name="prefill half"
        )
        stack.push_async_callback(_cancelled, half)
        inner = contextlib.AsyncExitStack()
        headed: asyncio.Future[DecodeAnswer] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(
            self.calls.begun(inner, decode, legs, body.for_decode(request_id, prefill.place.daemon), headed=headed),
            name="decode half",
        )
        try:
            await asyncio.wait({half, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and half.exception() is not None:
                raise VllmPrefillFailed(str(half.exception()))
            hurries = self._hurries and not asking.done()
            go_on = partial(self._gone_on, stack, inner, decode, legs, body)
            reply = await (self._soonest(half.result(), asking, headed, body, go_on) if hurries else asking)
        except VllmPrefillFailed as error:
            _log.warning("prefill server %s: %s; decode goes on alone", prefill.url, error)
            await _cancelled(asking)
            await inner.aclose()
            return await self._alone_again(stack, decode, legs, body)
        except BaseException:
            await _cancelled(asking)
            await inner.aclose()
            raise
        stack.push_async_exit(inner)
        if not asking.done():
            stack.push_async_callback(_cancelled, asking)
        return reply

    async def _alone_again(
        self, stack: contextlib.AsyncExitStack, decode: Server, legs: Legs, body: Body
    ) -> DecodeAnswer:
        """Decode's answer where prefill has failed."""
        alone = await self.calls.begun(stack, decode, legs, body.alone())
        self.counts.again += 1
        self.metrics.alone("prefill_failed")
        return alone

    # -- the first token is prefill's ------------------------------------------------------------------------------

    @property
    def _hurries(self) -> bool:
        return self.config.first_token == "prefill"

    async def _soonest(
        self,
        prefilled: PrefillHalf,
        asking: asyncio.Task[DecodeAnswer],
        headed: asyncio.Future[DecodeAnswer],
        body: Body,
        go_on: GoOn,
    ) -> DecodeAnswer:
        """Prefill's token and what decode says behind it, as soon as decode has accepted the request; else decode's
        own answer, or prefill's, where the reply ends with it."""
        response, answer = prefilled
        if answer.ends and body.may_end_at_once:
            await _cancelled(asking)
            self.metrics.first_token_ended("whole")
            return DecodeAnswer(response, as_whole_reply(response.content), _nothing())
        shows, ids = body.shows_ids, body.prompt_ids
        sent = first_token_of(answer, shows_ids=shows, prompt_ids=ids) if body.begins_alike else None
        if sent is None:
            return await asking
        await asyncio.wait({asking, headed}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return await asking
        head = headed.result()
        at_once = AtOnce(sent, asking, self.config.next_token_s, go_on, self.metrics.first_token_ended)
        return head._replace(first=sent.events, at_once=at_once)

    async def _one_token(
        self, stack: contextlib.AsyncExitStack, prefill: Server, decode: Server, legs: Legs, body: Body
    ) -> DecodeAnswer:
        """The reply of no more than one token, all of it prefill's; decode's where prefill fails."""
        soon = legs._replace(said_within_s=self.config.first_token_s)
        reply = await self._well(stack, prefill, soon, body.alone(), "prefill")
        if reply is None:
            return await self._alone_again(stack, decode, legs, body)
        self.metrics.first_token_ended("whole")
        return reply

    async def _gone_on(
        self,
        stack: contextlib.AsyncExitStack,
        failed: contextlib.AsyncExitStack,
        decode: Server,
        legs: Legs,
        body: Body,
        sent: SentToken,
    ) -> DecodeAnswer | None:
        """What is behind the token, from another decode server, or the same; None: nobody has a way. Decode's `failed`
        call is let go."""
        await failed.aclose()
        asked = body.behind(sent.text, sent.token) if sent.prompt_tokens else None
        gone, reply = [decode], None
        for _ in range(GOES_ON if asked is not None else 0):
            if not self.decode:  # DNS names none that is well
                break
            others = any(server not in gone for server in self.decode)
            server = self.choose_decode(body.head, gone if others else ())
            reply = await self._well(stack, server, legs, asked or b"", "decode")
            if reply is not None:
                break
            gone.append(server)
        return reply

    async def _well(
        self, stack: contextlib.AsyncExitStack, server: Server, legs: Legs, body: bytes, role: Role
    ) -> DecodeAnswer | None:
        """A reply begun; None: the server fails, or refuses."""
        inner = contextlib.AsyncExitStack()
        try:
            reply = await self.calls.begun(inner, server, legs, body, role)
            if reply.response.status_code < 400:
                stack.push_async_exit(inner)
                return reply
            why = f"answered {reply.response.status_code}: {reply.first[:200]!r}"
        except Refusal as error:
            why = str(error)
        except BaseException:
            await inner.aclose()
            raise
        await inner.aclose()
        _log.warning("%s server %s: %s", role, server.url, why)
        return None

    # -- choices ---------------------------------------------------------------------------------------------------

    def choose_prefill(self) -> Server | None:
        """The least loaded that is up."""
        now = self.clock()
        up = [server for server in self.prefill if server.down_until <= now]
        return min(up, key=lambda server: server.running, default=None)

    def choose_decode(self, head: bytes, without: Sequence[Server] = ()) -> Server:
        """The server where this conversation's beginning belongs, unless it has much more to do than the others. Those
        whose daemons are not ready are passed over while others have not much more to do."""
        now = self.clock()
        known = [server for server in self.decode if server not in without]
        up = [server for server in known if server.down_until <= now] or known
        if not up:
            raise Refusal(503, "no decode server is known: none of those that DNS names is well")
        bound = self.config.load_factor * sum(server.running for server in up) / len(up) + self.config.load_slack
        free = [server for server in up if server.running <= bound]
        ready = [server for server in free if not server.unready]
        return max(ready or free or up, key=lambda server: hashlib.sha256(server.place.label.encode() + head).digest())


def _merged(servers: list[Server], places: list[Place]) -> list[Server]:
    """The servers that have an address of their own, and one for each of these places: the one that was there, with its
    load, where it was."""
    known = {server.place: server for server in servers if server.place.name}
    fixed = [server for server in servers if not server.place.name]
    return fixed + [known.get(place) or Server(place) for place in places]


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield
