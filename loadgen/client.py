"""Streaming requests to an OpenAI-compatible server, with the times at which their parts came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from kvferry.loadgen.dialogue import Reply, Value

CONNECT_DEADLINE_S = 10.0
MAX_ERROR_CHARS = 300


class ServerError(Exception):
    """The server cannot be used, or a request failed."""


class ModelInfo(NamedTuple):
    name: str
    vocabulary: int | None  # extension of kvferry's front end


@dataclass(slots=True)
class Timing:
    """Of one request, in seconds since its sending."""

    first_s: float | None = None  # to the first content
    gaps_s: list[float] = field(default_factory=list)  # from one content to the next
    latency_s: float = 0.0

    def content(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    _last_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Of one request that was sent."""

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
    error: Any = None  # whatever a server puts there is shown


class Client:
    """Connections to one server. `timeout_s` bounds the wait for each part of a reply."""

    def __init__(self, url: str, *, connections: int, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_DEADLINE_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> ModelInfo:
        """The server's first model. Raises ServerError."""
        try:
            response = await self._http.get("/v1/models")
            if response.is_error:
                raise ServerError(f"/v1/models: HTTP {response.status_code}: {_message(response.content)}")
            card = response.json()["data"][0]
            return ModelInfo(str(card["id"]), card.get("vocab_size"))
        except httpx.HTTPError as error:
            raise ServerError(f"/v1/models: {_describe(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"/v1/models: not a list of models: {error!r}") from error

    async def send(self, path: str, body: dict[str, Value]) -> Outcome:
        """Never raises for a request that failed: Outcome.error says so."""
        outcome = Outcome()
        start = time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    raise ServerError(f"HTTP {response.status_code}: {_message(await response.aread())}")
                async for chunk in _events(response):
                    _take(outcome, chunk, time.perf_counter() - start)
        except httpx.HTTPError as error:
            outcome.error = _describe(error)
        except ServerError as error:
            outcome.error = str(error)
        outcome.timing.latency_s = time.perf_counter() - start
        if outcome.error is None and outcome.timing.first_s is None:
            outcome.error = "the reply has no content"
        return outcome


async def _events(response: httpx.Response) -> AsyncIterator[_Chunk]:
    """The server-sent events up to [DONE]. Raises ServerError."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            yield _Chunk.model_validate_json(data)
        except ValidationError as error:
            raise ServerError(f"not a chunk: {data[:MAX_ERROR_CHARS]}") from error
    raise ServerError("the reply ended without [DONE]")


def _take(outcome: Outcome, chunk: _Chunk, now_s: float) -> None:
    if chunk.error is not None:
        raise ServerError(_message(json.dumps({"error": chunk.error}).encode()))
    for choice in chunk.choices[:1]:
        text = choice.text or choice.delta.content or ""
        tokens = choice.token_ids or []
        if text or tokens:
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
    """What an error body says, in OpenAI's form or not."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return text[:MAX_ERROR_CHARS]


def _describe(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
