"""Ways of sampling a reply, and what was said: one request of each way and number, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from chat import CHAT, MODEL_NAME, events, new_client, user_text

Fields = Mapping[str, object]
STEER: Fields = {
    "type": "function",
    "function": {
        "name": "steer",
        "description": "Turns the ferry",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "enum": ["port", "starboard"]}},
            "required": ["to"],
        },
    },
}
CALL = '[a-z]{1,5}<tool_call>\\{"name": "steer", "arguments": \\{"to": "(port|starboard)"\\}\\}</tool_call>'
CALL_RULES = (
    'root ::= [a-z]{1,5} "<tool_call>{\\"name\\": \\"steer\\", \\"arguments\\": {\\"to\\": \\"" '
    '("port" | "starboard") "\\"}}</tool_call>"'
)
"""CALL as a grammar."""
ENDS: Fields = {"temperature": 0.9, "ignore_eos": False, "max_tokens": 40}
NUMBERS: Fields = {"return_tokens_as_token_ids": True}
LETTERS: Fields = {"regex": "[a-z]{3} [0-9]{2}"}
LETTER_RULES: Fields = {"grammar": 'root ::= [a-z]{3} " " [0-9]{2}'}
SCHEMA = {"type": "object", "properties": {"left": {"enum": [1, 2, 3]}}, "required": ["left"]}
THINKS: Fields = {"temperature": 0.9, "ignore_eos": False, "max_tokens": 16, "logit_bias": {"4": 4.0}}
"""Token 4 of `model_of_few_tokens` ends a thought."""

WAYS: dict[str, Callable[[int], Fields]] = {
    "greedy": lambda number: {"temperature": 0},
    "seeded": lambda number: {"temperature": 0.9, "seed": 1000 + number},
    "top p": lambda number: {"temperature": 0.9, "top_p": 0.9, "seed": number},
    "penalties": lambda number: {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": lambda number: {"temperature": 0.7, "seed": number, "repetition_penalty": 1.3},
    "bias": lambda number: {"temperature": 0, "logit_bias": {"28": 4.0, "30": 4.0, "339": -9.0}},
    "1 token": lambda number: {"temperature": 0, "max_tokens": 1},
    "2 tokens": lambda number: {"temperature": 0, "max_tokens": 2},
    "at least 6": lambda number: {"temperature": 0, "min_tokens": 6, "stop": [" ", "e"]},
    "stop at once": lambda number: {"temperature": 0, "stop": ["e", "a", "I", "T"]},
    "stop tokens": lambda number: {"temperature": 0, "stop_token_ids": [28, 30, 42, 314, 2]},
    "until its end": lambda number: {"temperature": 0, "ignore_eos": False, "max_tokens": 40},
    "may end": lambda number: {"temperature": 0.9, "seed": number, "ignore_eos": False, "logit_bias": {"2": 4.0}},
    "ends at once": lambda number: {"temperature": 0, "ignore_eos": False, "logit_bias": {"2": 100.0}},
    "logprobs": lambda number: {"temperature": 0, "logprobs": True, "top_logprobs": 2, **NUMBERS},
    "text alone": lambda number: {"temperature": 0, "return_token_ids": False},
    "prompt of ids": lambda number: {"temperature": 0},
    "prompt of text": lambda number: {"temperature": 0.9, "seed": 50 + number},
    "a choice": lambda number: {**ENDS, "seed": number, "structured_outputs": {"choice": ["river", "north"]}},
    "a pattern": lambda number: {**ENDS, "seed": number, "structured_outputs": LETTERS},
    "a schema": lambda number: {**ENDS, "seed": number, "structured_outputs": {"json": SCHEMA}},
    "may call": lambda number: {**ENDS, "seed": number, "tools": [STEER], "structured_outputs": {"regex": CALL}},
    "a grammar": lambda number: {**ENDS, "seed": number, "structured_outputs": LETTER_RULES},
    "calls by grammar": lambda number: {
        **ENDS,
        "seed": number,
        "tools": [STEER],
        "structured_outputs": {"grammar": CALL_RULES},
    },
    "must call": lambda number: {**ENDS, "max_tokens": 80, "seed": number, "tools": [STEER], "tool_choice": "required"},
}
THOUGHTS: dict[str, Callable[[int], Fields]] = {
    "thoughts": lambda number: {**THINKS, "seed": number},
    "then a pattern": lambda number: {**THINKS, "seed": number, "structured_outputs": LETTERS},
}
"""Ways behind a reasoning parser."""
OWN = ("id", "created", "system_fingerprint")  # of a stream's chunks: a server's own
GREEDY = ", greedy"  # behind a seeded way's name: the same at temperature 0


@dataclass(slots=True)
class Said:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    stopped_by: object = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)  # of tools: names and arguments
    listed: list[list[str]] = field(default_factory=list)  # by log probabilities: each token, and the best in its place
    chunks: list[dict[str, Any]] = field(default_factory=list, compare=False)  # of a stream, but for OWN

    def add(self, message: Mapping[str, Any]) -> None:
        """A chat's message, or what a chunk adds to it."""
        self.text += message.get("content") or ""
        self.thought += message.get("reasoning") or ""
        for call in message.get("tool_calls") or []:
            place = call.get("index", len(self.calls))
            self.calls += [["", ""]] * (place + 1 - len(self.calls))
            name, arguments = self.calls[place]
            told = call["function"]
            self.calls[place] = [name + (told.get("name") or ""), arguments + (told.get("arguments") or "")]

    def end(self, choice: Mapping[str, Any], told: Sequence[int]) -> None:
        """The rest of a choice, or of a chunk's."""
        self.tokens += told
        self.reason = choice.get("finish_reason") or self.reason
        self.stopped_by = choice.get("stop_reason") or self.stopped_by
        for token in (choice.get("logprobs") or {}).get("content") or []:
            self.listed.append([token["token"], *(best["token"] for best in token["top_logprobs"])])


Replies = dict[tuple[str, int], Said]
"""What is said, by way and number. Even numbers are streamed. One that failed has no tokens; its `reason` says why."""


def greedy_ways(ways: Sequence[str]) -> list[str]:
    """The same, those that a seed leads at temperature 0, but for those that would then be plain."""
    return [way + GREEDY if "seed" in way_of(way, 0) else way for way in ways if way not in ("seeded", "top p")]


def way_of(way: str, number: int) -> Fields:
    name = way.removesuffix(GREEDY)
    fields = (WAYS.get(name) or THOUGHTS[name])(number)
    return fields if name == way else {**fields, "temperature": 0, "seed": None}


def request_of(way: str, number: int) -> dict[str, object]:
    text = user_text(number, len(way), 40 + number % 50)
    prompts: dict[str, dict[str, object]] = {
        "prompt of ids": {"prompt": [100 + ord(letter) for letter in text]},
        "prompt of text": {"prompt": text},
    }
    asked: dict[str, object] = {"model": MODEL_NAME}
    asked |= prompts.get(way.removesuffix(GREEDY)) or {"messages": [{"role": "user", "content": text}]}
    asked |= {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True, **way_of(way, number)}
    return asked


def path_of(asked: Mapping[str, object]) -> str:
    return CHAT if "messages" in asked else "/v1/completions"


async def whole(client: httpx.AsyncClient, url: str, asked: dict[str, object]) -> Said:
    answer = await client.post(url + path_of(asked), json=asked)
    if answer.status_code != 200:
        raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    reply = answer.json()
    choice, usage, said = reply["choices"][0], reply["usage"], Said()
    said.add(choice.get("message") or {"content": choice["text"]})
    said.end(choice, choice["token_ids"] or list(said.text.encode()))  # the text where the tokens are not told
    said.prompt_tokens, said.reply_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return said


async def streamed(client: httpx.AsyncClient, url: str, asked: dict[str, object]) -> Said:
    said = Said()
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async for event in events(client, url + path_of(asked), json.dumps(body).encode()):
        said.chunks.append({name: value for name, value in event.items() if name not in OWN})
        if usage := event.get("usage"):
            said.prompt_tokens, said.reply_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            said.add(choice["delta"] if "delta" in choice else {"content": choice["text"]})
            said.end(choice, choice.get("token_ids") or [])
    said.tokens = said.tokens or list(said.text.encode())
    return said


async def ask_all(url: str, keys: Sequence[tuple[str, int]], many: int) -> Replies:
    """So many at a time."""
    turn = asyncio.Semaphore(many)
    got: Replies = {}

    async def one(client: httpx.AsyncClient, way: str, number: int) -> None:
        async with turn:
            ask = whole if number % 2 else streamed
            try:
                got[way, number] = await ask(client, url, request_of(way, number))
            except (RuntimeError, httpx.HTTPError) as error:
                got[way, number] = Said(reason=f"{type(error).__name__} {error}")

    async with new_client() as client:
        await asyncio.gather(*(one(client, *key) for key in keys))
    return got


def keys_of(ways: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Requests of all ways beside each other, not one way after another."""
    return [(way, number) for number in range(count) for way in ways]
