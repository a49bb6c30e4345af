"""Calls of vLLM's servers for requests: a prefill server's half, and a reply that begins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import httpx

from kvferry import tracing
from kvferry.front.edge.metrics import CountedLeg, FrontMetrics, Role
from kvferry.front.first_token.answer import PrefillAnswer, parse_answer
from kvferry.front.upstream.connections import Connections
from kvferry.front.vllm_body import Refusal
from kvferry.front.vllm_places import Place
from kvferry.front.vllm_reply import DecodeAnswer

DOWN_SECONDS = 2.0  # that a server is passed over after it could not be reached
CONNECT_SECONDS = 5.0
EVENTS = "text/event-stream"


@dataclass(slots=True, eq=False)
class Server:
    place: Place
    running: int = 0
    down_until: float = 0.0
    unready: str = ""  # why hand-offs to it are of no use, by its daemon's word; empty: they are, or nobody has said

    @property
    def url(self) -> str:
        return self.place.url


class Legs(NamedTuple):
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


class PrefillHalf(NamedTuple):
    response: httpx.Response
    answer: PrefillAnswer


class Away(Refusal):
    """A server that cannot be reached."""


class VllmPrefillFailed(Exception):
    """Prefill's half will not come."""


@dataclass(frozen=True, slots=True)
class Calls:
    connections: Connections
    metrics: FrontMetrics
    clock: Callable[[], float]
    first_token_s: float

    async def prefilled(self, server: Server, legs: Legs, body: bytes) -> PrefillHalf:
        """A prefill server's answer, behind which its pages are sent. VllmPrefillFailed."""
        with tracing.span("prefill leg", legs.traceparent, "client", server=server.url) as span:
            return await self._prefilled_under(server, legs._replace(traceparent=span.traceparent), body)

    async def _prefilled_under(self, server: Server, leg: Legs, body: bytes) -> PrefillHalf:
        server.running += 1
        counted = self.metrics.leg("prefill", server.place.told)
        try:
            with counted:
                reply = await self._posted(counted, server, leg, body)
        finally:
            server.running -= 1
        if reply.status_code >= 400:  # the client's fault decode refuses, too, and the client hears it from there
            raise VllmPrefillFailed(f"answered {reply.status_code}: {reply.text[:200]}")
        answer = parse_answer(reply.content)
        if answer is None or answer.kv_transfer_params is None:
            raise VllmPrefillFailed("answered without kv_transfer_params: its pages are not sent")
        return PrefillHalf(reply, answer)

    async def _posted(self, counted: CountedLeg, server: Server, leg: Legs, body: bytes) -> httpx.Response:
        try:
            reply = await self._sent(server, leg, body, self.first_token_s)
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

    async def begun(
        self,
        stack: contextlib.AsyncExitStack,
        server: Server,
        legs: Legs,
        body: bytes,
        role: Role = "decode",
        headed: asyncio.Future[DecodeAnswer] | None = None,
    ) -> DecodeAnswer:
        """The reply once its first bytes are there: vLLM sends headers before it has anything to say. `headed` has it
        with no more than those, where it is a stream."""
        counted = stack.enter_context(self.metrics.leg(role, server.place.told))
        try:
            reply = (await self._ask(stack, server, legs, body, role))._replace(counted=counted)
            if headed is not None and reply.response.headers.get("content-type", "").startswith(EVENTS):
                headed.set_result(reply)
            return reply._replace(first=await anext(reply.rest, b""))
        except httpx.TimeoutException as error:
            counted.failed()
            raise Refusal(504, f"{role} server {server.url} said nothing for {legs.said_within_s:g} s") from error
        except httpx.TransportError as error:
            counted.failed()
            raise Refusal(502, f"{role} server {server.url}: {type(error).__name__} {error}") from error
        except Refusal:
            counted.failed()
            raise

    async def _ask(
        self, stack: contextlib.AsyncExitStack, server: Server, legs: Legs, body: bytes, role: Role
    ) -> DecodeAnswer:
        server.running += 1
        stack.callback(_leave, server)
        span = stack.enter_context(tracing.span(f"{role} leg", legs.traceparent, "client", server=server.url))
        leg = legs._replace(traceparent=span.traceparent)
        try:
            response = await self._sent(server, leg, body, leg.said_within_s)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            server.down_until = self.clock() + DOWN_SECONDS
            raise Away(503, f"{role} server {server.url} cannot be reached: {type(error).__name__} {error}") from error
        except httpx.TimeoutException as error:
            raise Refusal(504, f"{role} server {server.url} did not answer within {leg.said_within_s:g} s") from error
        except httpx.TransportError as error:
            raise Refusal(502, f"{role} server {server.url}: {type(error).__name__} {error}") from error
        stack.push_async_callback(response.aclose)
        return DecodeAnswer(response, b"", response.aiter_raw())

    async def _sent(self, server: Server, leg: Legs, body: bytes, within_s: float) -> httpx.Response:
        """The reply's head. No cookies, redirects or proxies, for which httpx's client looks at each request."""
        timeout = {"timeout": timeout_of(within_s).as_dict()}
        url = _url(server.url + leg.path)
        request = httpx.Request("POST", url, headers=leg.headers(server), content=body, extensions=timeout)
        return await self.connections.handle_async_request(request)


@lru_cache(1024)
def _url(text: str) -> httpx.URL:
    return httpx.URL(text)


@lru_cache(16)
def timeout_of(within_s: float) -> httpx.Timeout:
    return httpx.Timeout(within_s, connect=CONNECT_SECONDS)


def _leave(server: Server) -> None:
    server.running -= 1
