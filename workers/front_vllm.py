"""The front end before unmodified vLLM servers: each request goes to a prefill and a decode server at once, and what
decode answers goes to the client as it comes. No conversation is remembered: pages are matched by content.

POST /v1/chat/completions, /v1/completions    GET /v1/models, /health, /stats
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry import tracing
from kvferry.proto.limits import MAX_NAME_CHARS, REQUEST_ID_BYTES

MAX_BODY_BYTES = 16 * 1024 * 1024
DOWN_SECONDS = 2.0  # that a server is passed over after it could not be reached
HEAD_BYTES = 4096  # of a prompt, by which conversations keep to a decode server
_PASSED_ON = ("content-type", "x-request-id")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    prefill: tuple[tuple[str, str], ...]  # (name of its daemon, URL); empty: decode servers do all
    decode: tuple[str, ...]  # URLs
    first_token_s: float = 60.0
    next_token_s: float = 30.0
    max_requests: int = 1024
    load_factor: float = 1.5  # a decode server is passed over when its load is above factor x mean + slack
    load_slack: float = 2.0


@dataclass(slots=True, eq=False)
class Server:
    url: str
    daemon: str = ""  # of a prefill server
    running: int = 0
    down_until: float = 0.0


class _Legs(NamedTuple):
    """What both halves of a request are asked under."""

    path: str
    traceparent: str

    @property
    def headers(self) -> dict[str, str]:
        return dict(tracing.metadata_of(self.traceparent))


@dataclass(slots=True)
class Counts:
    requests: int = 0
    alone: int = 0  # went to decode only, since it cannot be split or no prefill server is up
    again: int = 0  # prefill failed before the first byte: decode was asked once more, alone
    refused: int = 0


class Body(NamedTuple):
    """A client's request, as parsed from JSON; what it says is vLLM's to judge."""

    fields: dict[str, object]

    @property
    def can_be_split(self) -> bool:
        """One prompt, one reply, and nothing that needs the whole prompt computed where the reply is."""
        prompt = self.fields.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return (
            not several
            and self.fields.get("n", 1) in (None, 1)
            and self.fields.get("best_of", 1) in (None, 1)
            and not self.fields.get("echo")
            and self.fields.get("prompt_logprobs") is None
            and not self.fields.get("use_beam_search")
        )

    @property
    def head(self) -> bytes:
        """What all turns of a conversation begin with, more or less."""
        messages = self.fields.get("messages")
        shown = messages[:2] if isinstance(messages, list) else self.fields.get("prompt")
        return json.dumps(shown).encode()[:HEAD_BYTES]

    def for_prefill(self, request_id: bytes) -> dict[str, object]:
        fields = {name: value for name, value in self.fields.items() if name not in ("stream_options", "min_tokens")}
        fields |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        fields["kv_transfer_params"] = {"do_remote_decode": True, "kvferry_request": request_id.hex()}
        return fields

    def for_decode(self, request_id: bytes, daemon: str) -> dict[str, object]:
        params = {"do_remote_prefill": True, "kvferry_request": request_id.hex(), "kvferry_prefill": daemon}
        return {**self.fields, "kv_transfer_params": params}

    def alone(self) -> dict[str, object]:
        return {name: value for name, value in self.fields.items() if name != "kv_transfer_params"}


class Reply(NamedTuple):
    """A decode server's answer, begun."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PrefillFailed(Exception):
    """Its half will not come."""


@dataclass(slots=True)
class VllmFront:
    config: VllmConfig
    clock: Callable[[], float] = time.monotonic
    counts: Counts = field(default_factory=Counts)
    running: int = 0
    prefill: list[Server] = field(init=False)
    decode: list[Server] = field(init=False)
    client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.prefill = [Server(url.rstrip("/"), daemon) for daemon, url in self.config.prefill]
        self.decode = [Server(url.rstrip("/")) for url in self.config.decode]
        timeout = httpx.Timeout(self.config.first_token_s, connect=5.0)
        limits = httpx.Limits(max_connections=2 * self.config.max_requests + 16)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self.client.aclose()

    # -- one request -----------------------------------------------------------------------------------------------

    async def answer(self, path: str, body: Body, left: Callable[[], None], traceparent: str = "") -> Response:
        """`left` is called once, when the request is over. `traceparent`: of the client's span, if it has one."""
        self.counts.requests += 1
        decode = self.choose_decode(body.head)
        prefill = self.choose_prefill() if body.can_be_split else None
        stack = contextlib.AsyncExitStack()
        stack.callback(left)
        span = stack.enter_context(tracing.span("request", tracing.checked(traceparent), "server"))
        legs = _Legs(path, span.traceparent)
        try:
            if prefill is None:
                self.counts.alone += 1
                reply = await self._ask(stack, decode, legs, body.alone())
            else:
                reply = await self._both(stack, prefill, decode, legs, body)
        except BaseException:
            await stack.aclose()
            raise
        told = reply.response.headers
        headers = {name: told[name] for name in _PASSED_ON if name in told}
        return _Streamed(self._stream(reply), stack, reply.response.status_code, headers)

    async def _both(
        self, stack: contextlib.AsyncExitStack, prefill: Server, decode: Server, legs: _Legs, body: Body
    ) -> Reply:
        """Decode's answer begun. Where prefill fails before, decode is asked once more, to do it alone."""
        request_id = secrets.token_bytes(REQUEST_ID_BYTES)
        half = asyncio.create_task(self._prefill(prefill, legs, body.for_prefill(request_id)), name="prefill half")
        stack.push_async_callback(_cancelled, half)
        inner = contextlib.AsyncExitStack()
        asking = asyncio.create_task(
            self._begun(inner, decode, legs, body.for_decode(request_id, prefill.daemon)), name="decode half"
        )
        try:
            await asyncio.wait({half, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and half.exception() is not None:
                raise PrefillFailed(str(half.exception()))
            reply = await asking
        except PrefillFailed as error:
            _log.warning("prefill server %s: %s; decode goes on alone", prefill.url, error)
            await _cancelled(asking)
            await inner.aclose()
            self.counts.again += 1
            return await self._ask(stack, decode, legs, body.alone())
        except BaseException:
            await _cancelled(asking)
            await inner.aclose()
            raise
        stack.push_async_exit(inner)
        return reply

    async def _prefill(self, server: Server, legs: _Legs, fields: dict[str, object]) -> None:
        with tracing.span("prefill leg", legs.traceparent, "client", server=server.url) as span:
            await self._prefill_under(server, legs._replace(traceparent=span.traceparent), fields)

    async def _prefill_under(self, server: Server, leg: _Legs, fields: dict[str, object]) -> None:
        server.running += 1
        try:
            reply = await self.client.post(server.url + leg.path, json=fields, headers=leg.headers)
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                server.down_until = self.clock() + DOWN_SECONDS
            raise PrefillFailed(f"{type(error).__name__} {error}") from error
        finally:
            server.running -= 1
        if reply.status_code >= 500:
            raise PrefillFailed(f"answered {reply.status_code}: {reply.text[:200]}")
        # what it refuses as the client's fault, decode refuses too, and the client hears it from there

    async def _begun(
        self, stack: contextlib.AsyncExitStack, server: Server, legs: _Legs, fields: dict[str, object]
    ) -> Reply:
        """With its first bytes: vLLM sends headers before it has anything to say."""
        reply = await self._ask(stack, server, legs, fields)
        try:
            return reply._replace(first=await anext(reply.rest, b""))
        except httpx.TimeoutException as error:
            raise Refusal(
                504, f"decode server {server.url} said nothing for {self.config.first_token_s:g} s"
            ) from error
        except httpx.TransportError as error:
            raise Refusal(502, f"decode server {server.url}: {type(error).__name__} {error}") from error

    async def _ask(
        self, stack: contextlib.AsyncExitStack, server: Server, legs: _Legs, fields: dict[str, object]
    ) -> Reply:
        server.running += 1
        stack.callback(_leave, server)
        span = stack.enter_context(tracing.span("decode leg", legs.traceparent, "client", server=server.url))
        leg = legs._replace(traceparent=span.traceparent)
        request = self.client.build_request("POST", server.url + leg.path, json=fields, headers=leg.headers)
        try:
            response = await self.client.send(request, stream=True)
        except httpx.ConnectError as error:
            server.down_until = self.clock() + DOWN_SECONDS
            raise Refusal(503, f"decode server {server.url} cannot be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise Refusal(504, f"decode server {server.url} did not answer in time") from error
        except httpx.TransportError as error:
            raise Refusal(502, f"decode server {server.url}: {type(error).__name__} {error}") from error
        stack.push_async_callback(response.aclose)
        return Reply(response, b"", response.aiter_raw())

    async def _stream(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        if reply.first:
            yield reply.first
        while True:
            try:
                chunk = await asyncio.wait_for(anext(reply.rest, None), self.config.next_token_s)
            except (asyncio.TimeoutError, httpx.TransportError) as error:
                _log.warning("a reply broke off: %s %s", type(error).__name__, error)
                raise
            if chunk is None:
                return
            yield chunk

    # -- choices ---------------------------------------------------------------------------------------------------

    def choose_prefill(self) -> Server | None:
        """The least loaded that is up."""
        now = self.clock()
        up = [server for server in self.prefill if server.down_until <= now]
        return min(up, key=lambda server: server.running, default=None)

    def choose_decode(self, head: bytes) -> Server:
        """Where this conversation's beginning belongs, unless that server has much more to do than the others."""
        now = self.clock()
        up = [server for server in self.decode if server.down_until <= now] or self.decode
        bound = self.config.load_factor * sum(server.running for server in up) / len(up) + self.config.load_slack
        free = [server for server in up if server.running <= bound]
        return max(free, key=lambda server: hashlib.sha256(server.url.encode() + head).digest())


class _Streamed(StreamingResponse):
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
            await self._stack.aclose()


def create_app(front: VllmFront) -> Starlette:
    async def completions(request: Request) -> Response:
        try:
            body = await read_body(request)
        except Refusal as error:
            return _error(error)
        if front.running >= front.config.max_requests:
            front.counts.refused += 1
            return _error(Refusal(429, f"{front.running} requests run; the bound is {front.config.max_requests}"))
        front.running += 1

        def left() -> None:
            front.running -= 1

        try:
            return await front.answer(request.url.path, body, left, request.headers.get(tracing.HEADER, ""))
        except Refusal as error:
            return _error(error)

    async def models(request: Request) -> Response:
        try:
            reply = await front.client.get(front.choose_decode(b"").url + "/v1/models")
        except httpx.TransportError as error:
            return _error(Refusal(503, f"no decode server can be reached: {error}"))
        return Response(reply.content, reply.status_code, media_type="application/json")

    async def health(request: Request) -> Response:
        try:
            replies = [await front.client.get(server.url + "/health") for server in front.decode]
        except httpx.TransportError as error:
            return _error(Refusal(503, f"a decode server cannot be reached: {type(error).__name__}"))
        return Response(status_code=max(reply.status_code for reply in replies))

    async def stats(request: Request) -> Response:
        servers = [
            {"role": role, "url": server.url, "running": server.running}
            for role, group in (("prefill", front.prefill), ("decode", front.decode))
            for server in group
        ]
        return JSONResponse({**asdict(front.counts), "running": front.running, "servers": servers})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/stats", stats),
        ]
    )


async def read_body(request: Request) -> Body:
    """Refusal 400 or 413 names what is wrong."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        fields = json.loads(bytes(data))
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, f"the body is a {type(fields).__name__}; it must be an object")
    return Body(fields)


def parse_prefill(text: str) -> tuple[str, str]:
    """NAME=URL. ValueError says what is wrong."""
    name, _, url = text.partition("=")
    if not 1 <= len(name) <= MAX_NAME_CHARS or "/" in name:
        raise ValueError(f"must be NAME=URL with the name of the prefill daemon, got {text!r}")
    return name, parse_url(url)


def parse_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL, http://HOST:PORT, got {text!r}")
    return text


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _leave(server: Server) -> None:
    server.running -= 1


def _error(refusal: Refusal) -> Response:
    kind = "invalid_request_error" if refusal.status < 429 else "service_unavailable_error"
    return JSONResponse({"error": {"message": str(refusal), "type": kind, "code": refusal.status}}, refusal.status)
