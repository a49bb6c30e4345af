"""Streaming requests to an OpenAI-compatible server, with the times at which their parts came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from kvferry.loadgen.dialogue import Reply

CONNECT_DEADLINE_S = 10.0
MAX_ERROR_CHARS = 300
MAX_EVENT_BYTES = 64 << 20  # one event of a stream; a first one may bring the prompt's token ids back
MAX_BODY_BYTES = 16 << 20  # of an answer that is no stream
DONE = b"[DONE]"


class ServerError(Exception):
    """The server cannot be used, or a request failed."""


class ModelInfo(NamedTuple):
    name: str
    vocabulary: int | None  # extension of kvferry's front end


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds since its sending."""

    opened_s: float | None = None  # to the first choice, with content or without
    first_s: float | None = None  # to the first content
    last_s: float = 0.0  # to the last content
    gaps_s: list[float] = field(default_factory=list)  # from one content to the next
    latency_s: float = 0.0

    def content(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s


@dataclass(slots=True)
class Outcome:
    """The result of one request that was sent."""

    timing: Timing = field(default_factory=Timing)
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def reply(self) -> Reply:
        return Reply("".join(self.text), self.tokens)


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Delta(_Lenient):
    content: str | None = None
    # Tokens too, though of no next turn. Servers name it one way or the other (vLLM: `reasoning`).
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(_Lenient):
    delta: _Delta = _Delta()
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(_Lenient):
    cached_tokens: int | None = None


class _Usage(_Lenient):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(_Lenient):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None  # whatever a server puts there is shown


class _Card(_Lenient):
    id: str
    vocab_size: int | None = None


class _Cards(_Lenient):
    data: list[_Card]


class Client:
    """Connections to one server. `timeout_s` bounds the wait for each part of a reply."""

    def __init__(
        self, url: str, *, connections: int, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._connections = connections
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S, sock_read=timeout_s)
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._open: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=self._connections, ttl_dns_cache=None)
        self._open = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, headers=self._headers, read_bufsize=1 << 18
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._open is not None, "the client is used outside its context"
        return self._open

    async def model(self) -> ModelInfo:
        """The server's first model. Raises ServerError."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await _body(response)
                if response.status >= 400:
                    raise ServerError(f"HTTP {response.status}: {_message(body)}")
            card = _Cards.model_validate_json(body).data[0]
            return ModelInfo(card.id, card.vocab_size)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"/v1/models: {_describe(error)}") from error
        except ServerError as error:
            raise ServerError(f"/v1/models: {error}") from None
        except (ValueError, LookupError) as error:
            raise ServerError(f"/v1/models: not a list of models: {error!r}") from error

    async def send(self, path: str, body: bytes) -> Outcome:
        """Never raises for a request that failed: Outcome.error says so."""
        outcome = Outcome()
        start = time.perf_counter()
        try:
            async with self._session.post(self._url + path, data=body) as response:
                if response.status >= 400:
                    raise ServerError(f"HTTP {response.status}: {_message(await _body(response))}")
                async for chunk in _events(response.content):
                    _take(outcome, chunk, time.perf_counter() - start)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = _describe(error)
        except ServerError as error:
            outcome.error = str(error)
        timing = outcome.timing
        timing.latency_s = time.perf_counter() - start
        if outcome.error is None and timing.first_s is None:
            if outcome.output_tokens and timing.opened_s is not None:  # tokens that read as no text
                timing.first_s = timing.opened_s
            else:
                outcome.error = "the reply has no content"
        return outcome


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Reads the body to its end: one read gives only what has come by then. Raises ServerError where it is beyond
    MAX_BODY_BYTES."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ServerError(f"HTTP {response.status}: the answer has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[_Chunk]:
    """The server-sent events up to [DONE]. Raises ServerError."""
    rest = b""
    async for part in stream.iter_any():
        lines = (rest + part).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_EVENT_BYTES:
            raise ServerError(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == DONE:
                return
            try:
                yield _Chunk.model_validate_json(data)
            except ValidationError:
                raise ServerError(f"not a chunk: {data[:MAX_ERROR_CHARS].decode('utf-8', 'replace')}") from None
    raise ServerError("the reply ended without [DONE]")


def _take(outcome: Outcome, chunk: _Chunk, now_s: float) -> None:
    if chunk.error is not None:
        raise ServerError(_message(json.dumps({"error": chunk.error}).encode()))
    for choice in chunk.choices[:1]:
        if outcome.timing.opened_s is None:
            outcome.timing.opened_s = now_s
        text = choice.text or choice.delta.content or ""
        tokens = choice.token_ids or []
        if text or tokens or choice.delta.reasoning or choice.delta.reasoning_content:
            outcome.timing.content(now_s)
            outcome.text.append(text)
            outcome.tokens += tokens
            outcome.output_tokens += max(1, len(tokens))  # until the usage says it exactly
    if chunk.usage is not None:
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        outcome.cached_tokens = (details.cached_tokens or 0) if details is not None else 0


def _message(body: bytes) -> str:
    """The message of an error body, in OpenAI's form or not."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return text[:MAX_ERROR_CHARS]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
