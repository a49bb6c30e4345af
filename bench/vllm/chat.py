"""Multi-turn chats against OpenAI servers: several conversations at a time, turn by turn, streamed and timed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL_NAME = "smol"
CHAT = "/v1/chat/completions"
TIE = float(os.environ.get("VLLM_TIE", "1e-3"))
WORDS = [
    "ferry",
    "river",
    "harbour",
    "engine",
    "water",
    "captain",
    "bridge",
    "cargo",
    "morning",
    "signal",
    "anchor",
    "north",
    "island",
    "letter",
    "copper",
    "window",
    "garden",
    "market",
    "station",
    "summer",
    "winter",
    "number",
    "silver",
    "paper",
    "story",
    "music",
    "colour",
    "mountain",
    "valley",
    "forest",
]


@dataclass(frozen=True, slots=True)
class Token:
    text: str  # as it is listed: by its id, since many ids of a small tokenizer have no text
    logprob: float
    second: float  # the second best token's log probability

    @property
    def gap(self) -> float:
        return self.logprob - self.second


@dataclass(slots=True)
class Reply:
    text: str = ""
    ttft_s: float = 0.0
    seconds: float = 0.0
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: int = 0


Messages = list[dict[str, str]]
Ask = Callable[[Messages, int], Awaitable[Reply]]


def user_text(conversation: int, turn: int, words: int) -> str:
    chosen = random.Random(f"{conversation} {turn}")
    return f"Chat {conversation}, part {turn}: " + " ".join(chosen.choice(WORDS) for _ in range(words)) + ". Go on."


def body(messages: Messages, max_tokens: int, *, logprobs: bool = True) -> dict[str, object]:
    asked: dict[str, object] = {
        "model": MODEL_NAME,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    listed = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    return {**asked, **listed} if logprobs else asked


async def events(client: httpx.AsyncClient, url: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """What a server streams, event by event. httpx.HTTPError or RuntimeError where it fails."""
    async with client.stream("POST", url, content=body, headers={"Content-Type": "application/json"}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            yield event


async def streamed(client: httpx.AsyncClient, url: str, asked: dict[str, object], began: float) -> Reply:
    """httpx.HTTPError or RuntimeError where the server fails, or ends the reply as it goes itself."""
    reply, reason = Reply(), ""
    async for event in events(client, url + CHAT, json.dumps(asked).encode()):
        if event.get("usage"):
            reply.prompt_tokens = event["usage"]["prompt_tokens"]
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            text = choice["delta"].get("content")
            if text and not reply.ttft_s:
                reply.ttft_s = time.monotonic() - began
            reply.text += text or ""
            for item in (choice.get("logprobs") or {}).get("content") or []:
                others = [top["logprob"] for top in item["top_logprobs"] if top["token"] != item["token"]]
                reply.tokens.append(Token(item["token"], item["logprob"], max(others, default=-1e9)))
    if reason in ("", "abort"):  # as an engine whose sister rank was killed; of nothing it says no reason
        raise RuntimeError(f"{url} ended it behind {len(reply.tokens)} tokens by itself")
    reply.seconds = time.monotonic() - began
    reply.ttft_s = reply.ttft_s or reply.seconds
    return reply


def one_server(client: httpx.AsyncClient, url: str) -> Ask:
    """A server alone, or a front end."""

    async def ask(messages: Messages, max_tokens: int) -> Reply:
        return await streamed(client, url, body(messages, max_tokens), time.monotonic())

    return ask


def params_of_nixl() -> dict[str, object]:
    """What vLLM's own proxies give a prefill half."""
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"do_remote_decode": True, "do_remote_prefill": False, **nothing}


def prefill_first(
    client: httpx.AsyncClient,
    prefill: str,
    decode: str,
    params: Callable[[], dict[str, object]] = params_of_nixl,
) -> Ask:
    """As vLLM's own proxies do: prefill's answer says where decode finds the KV."""

    async def ask(messages: Messages, max_tokens: int) -> Reply:
        began = time.monotonic()
        asked = body(messages, max_tokens)
        first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": params()}
        del first["stream_options"]
        request_id = {"X-Request-Id": secrets.token_hex(8)}
        answer = await client.post(prefill + CHAT, json=first, headers=request_id)
        answer.raise_for_status()
        asked["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        return await streamed(client, decode, asked, began)

    return ask


@dataclass(frozen=True, slots=True)
class Load:
    conversations: int = 4
    turns: int = 4
    user_words: int = 120
    max_tokens: int = 32
    concurrency: int = 0  # requests at a time; 0: as many as there are conversations
    first: int = 0  # number of the first conversation: no two have a text in common


async def chats(ask: Ask, load: Load, replies: Sequence[Sequence[str]] | None = None) -> list[list[Reply]]:
    """All conversations at once, each turn after the one before. `replies`: what the assistant is said to have
    answered (so that two runs have the same prompts); without, what it did answer."""

    turn_of = asyncio.Semaphore(load.concurrency or load.conversations)

    async def one(conversation: int) -> list[Reply]:
        messages: Messages = []
        got: list[Reply] = []
        for turn in range(load.turns):
            messages.append({"role": "user", "content": user_text(load.first + conversation, turn, load.user_words)})
            async with turn_of:
                reply = await ask(list(messages), load.max_tokens)
            got.append(reply)
            said = replies[conversation][turn] if replies is not None else reply.text
            messages.append({"role": "assistant", "content": said})
        return got

    return list(await asyncio.gather(*(one(conversation) for conversation in range(load.conversations))))


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=httpx.Timeout(300.0), trust_env=False)


async def run_chats(url: str, load: Load, replies: Sequence[Sequence[str]] | None = None) -> list[list[Reply]]:
    """`chats` with a server alone, or a front end, and a client of their own."""
    async with new_client() as client:
        return await chats(one_server(client, url), load, replies)


def texts(replies: Sequence[Sequence[Reply]]) -> list[list[str]]:
    """What `chats` takes as the assistant's answers."""
    return [[reply.text for reply in turns] for turns in replies]


@dataclass(slots=True)
class Comparison:
    tokens: int = 0
    ties: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # differences that the opinion without kvferry has, too
    wrong: list[str] = field(default_factory=list)

    def add(self, where: str, reference: Reply, got: Reply, opinions: Sequence[Reply] = (), tie: float = TIE) -> None:
        """Token for token; behind a difference nothing can be compared. A reply of no tokens is wrong. `opinions`: what
        systems without kvferry that compute the prompt in steps like those of `got` answer."""
        if not reference.tokens:
            self.wrong.append(f"{where}: the reference has no token to compare with")
        for position, (want, have) in enumerate(zip(reference.tokens, got.tokens, strict=False)):
            self.tokens += 1
            if want.text == have.text:
                continue
            told = f"{where}, token {position}: {want.text!r} became {have.text!r}; the reference's gap is "
            told += f"{want.gap:.2e}, its own {have.gap:.2e}"
            if want.gap < tie:
                self.ties.append(told)
            elif any(said(each, position + 1) == said(got, position + 1) for each in opinions):
                self.shared.append(told)
            else:
                self.wrong.append(told)
            return
        if len(reference.tokens) != len(got.tokens):
            self.wrong.append(f"{where}: {len(reference.tokens)} tokens became {len(got.tokens)}")

    @property
    def told(self) -> list[str]:
        return [
            *(f"  WRONG: {each}" for each in self.wrong),
            *(f"  as without kvferry: {each}" for each in self.shared),
            *(f"  allowed: {each}" for each in self.ties),
        ]

    def __str__(self) -> str:
        counts = f"{self.tokens} tokens compared, {len(self.wrong)} wrong, {len(self.ties)} at ties"
        return f"{counts}, {len(self.shared)} as without kvferry" if self.shared else counts


def said(reply: Reply, tokens: int) -> list[str]:
    return [token.text for token in reply.tokens[:tokens]]


def compared(
    reference: list[list[Reply]], got: list[list[Reply]], opinion: list[list[Reply]] | None = None
) -> Comparison:
    """The same conversations, asked of two systems, or of three: see `Comparison.add`."""
    comparison = Comparison()
    for conversation, (wants, haves) in enumerate(zip(reference, got, strict=True)):
        others = [()] * len(wants) if opinion is None else [(each,) for each in opinion[conversation]]
        for turn, (want, have, other) in enumerate(zip(wants, haves, others, strict=True)):
            comparison.add(f"conversation {conversation}, turn {turn}", want, have, other)
    return comparison
